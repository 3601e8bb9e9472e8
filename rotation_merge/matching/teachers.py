"""Teachers' answers on disk: the likeliest outputs of each prediction and the remaining mass.

So only one model at a time is in memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rotation_merge.errors import CheckpointError, RotationMergeError, short
from rotation_merge.files import replacing
from rotation_merge.matching.objective import is_distribution, main_output
from rotation_merge.run.functions import Batch, check_answers, inputs_for

MOST = 64
"""Outputs of a prediction that are kept; with so many classes at most, all are."""


@torch.no_grad()
def write_answers(model: Any, batches: Sequence[Batch], path: Path, mark: str, label: str | None = None) -> None:
    """Run a teacher over its samples and write its outputs to a file, atomically.

    Args:
        mark: what tells these answers from others in the same place.
        label: what the model is called.

    Raises:
        RotationMergeError: it answers with NaN, or there is no space.
    """
    tensors: dict[str, Tensor] = {}
    for number, batch in enumerate(batches):
        for name, tensor in batch.items():
            tensors[f"{number}.batch.{name}"] = tensor.clone(memory_format=torch.contiguous_format)
        answers = answer(model(**inputs_for(model, batch)))
        check_answers(model, answers.values(), label)
        for name, tensor in answers.items():
            tensors[f"{number}.answer.{name}"] = tensor.contiguous()
    try:
        with replacing(path) as temporary:
            save_file(tensors, temporary, metadata={"mark": mark, "batches": str(len(batches))})
    except (OSError, SafetensorError) as error:
        problem, remedy = f"answers cannot be written ({short(error)})", "free some space, or give fewer samples"
        raise RotationMergeError(problem, where=str(path.parent), remedy=remedy) from error


def answer(outputs: Any) -> dict[str, Tensor]:
    """The stored part of a model's outputs.

    Returns:
        Of logits: `index` (..., k), int32; `log` (..., k), their log-probabilities; `rest` (...), the log of the mass
        that is left; `size`, how many outputs there are; of hidden states: `hidden`.
    """
    main = main_output(outputs).float()
    if not is_distribution(outputs) or main.shape[-1] == 1:
        return {"hidden": main}
    logs = main.log_softmax(-1)
    top = logs.topk(min(MOST, logs.shape[-1]), dim=-1)
    remainder = (1.0 - top.values.exp().sum(-1)).clamp_min(0.0)
    remainder = remainder.log() if logs.shape[-1] > MOST else remainder * 0
    return {"index": top.indices.int(), "log": top.values, "rest": remainder, "size": torch.tensor(logs.shape[-1])}


class AnsweredSamples:
    """Samples and the answers to them, read batch by batch."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with safe_open(path, "pt") as file:
            self.mark = file.metadata()["mark"]
            self.count = int(file.metadata()["batches"])
            self.names = list(file.keys())

    @property
    def tokens(self) -> int:
        """Number of tokens of all texts; 0 for other samples."""
        with safe_open(self.path, "pt") as file:
            shapes = [file.get_slice(name).get_shape() for name in self.names if name.endswith(".batch.input_ids")]
        return sum(math.prod(shape) for shape in shapes)

    def read(self, number: int, device: torch.device) -> tuple[Batch, dict[str, Tensor]]:
        """One batch and its answers."""
        parts: dict[str, dict[str, Tensor]] = {"batch": {}, "answer": {}}
        with safe_open(self.path, "pt") as file:
            for name in self.names:
                place, kind, leaf = name.split(".", 2)
                if int(place) == number:
                    parts[kind][leaf] = file.get_tensor(name).to(device)
        return parts["batch"], parts["answer"]


def divergence(outputs: Any, answers: Mapping[str, Tensor]) -> Tensor:
    """KL(teacher || student) in nats, mean over predictions, with all that was not kept as one class.

    Of hidden states: mean squared difference over the teacher's mean square.
    """
    main = main_output(outputs).float()
    if "hidden" in answers:
        _same(main.shape, answers["hidden"].shape)
        return (main - answers["hidden"]).square().mean() / answers["hidden"].square().mean().clamp_min(1e-12)
    _same(main.shape, (*answers["index"].shape[:-1], int(answers["size"])))
    logs = main.log_softmax(-1).gather(-1, answers["index"].long())
    chances = answers["log"].exp()
    loss = (chances * (answers["log"] - logs)).sum(-1)
    if answers["index"].shape[-1] < main.shape[-1]:
        remainder = (1.0 - logs.exp().sum(-1)).clamp_min(1e-9)
        loss = loss + answers["rest"].exp() * (answers["rest"].clamp_min(-60.0) - remainder.log())
    return loss.mean()


def _same(shape: Sequence[int], its: Sequence[int]) -> None:
    if tuple(shape) != tuple(its):
        problem = f"answers have shape {list(its)}, the model's own {list(shape)}"
        raise CheckpointError(problem, remedy="give teachers of the same class and size")
