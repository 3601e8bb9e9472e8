"""Teachers' answers on disk: the likeliest outputs of each prediction and the remaining mass.

So only one model at a time is in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rotation_merge.errors import CheckpointError, RotationMergeError, short
from rotation_merge.files import read_part, write_part
from rotation_merge.matching.objective import is_distribution, main_output
from rotation_merge.run.functions import Batch, check_answers, inputs_for

MOST = 64
"""Outputs of a prediction that are kept; with so many classes at most, all are."""


Answered = list[tuple[Batch, dict[str, Tensor]]]
"""Batches, each with a teacher's answer (see `answer`)."""


@torch.no_grad()
def write_answers(model: Any, batches: Sequence[Batch], path: Path, label: str | None = None) -> None:
    """Run a teacher over its samples and write these with its answers to a file, atomically; `read_answers` reads it.

    Args:
        label: what the model is called.

    Raises:
        RotationMergeError: it answers with NaN, or there is no space.
    """
    samples: Answered = []
    for batch in batches:
        answers = answer(model(**inputs_for(model, batch)))
        check_answers(model, answers.values(), label)
        samples.append(({name: tensor.clone() for name, tensor in batch.items()}, answers))
    try:
        write_part(path, samples)
    except OSError as error:
        problem, remedy = f"answers cannot be written ({short(error)})", "free some space, or give fewer samples"
        raise RotationMergeError(problem, where=str(path.parent), remedy=remedy) from error


def read_answers(path: Path) -> Answered:
    """A teacher's samples and answers, which stay in their file."""
    samples: Answered = read_part(path, mapped=True)
    return samples


def answer(outputs: Any) -> dict[str, Tensor]:
    """The stored part of a model's outputs.

    Returns:
        Of logits: `index` (..., k), int32; `log` (..., k), their log-probabilities; `rest` (...), the log of the mass
        that is left; `size`, how many outputs there are; of hidden states: `hidden`.
    """
    main = main_output(outputs).float()
    if not is_distribution(outputs) or main.shape[-1] == 1:
        return {"hidden": main.clone()}
    logs = main.log_softmax(-1)
    top = logs.topk(min(MOST, logs.shape[-1]), dim=-1)
    remainder = (1.0 - top.values.exp().sum(-1)).clamp_min(0.0)
    remainder = remainder.log() if logs.shape[-1] > MOST else remainder * 0
    return {"index": top.indices.int(), "log": top.values, "rest": remainder, "size": torch.tensor(logs.shape[-1])}


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
