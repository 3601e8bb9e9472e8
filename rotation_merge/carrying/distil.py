r"""Distillation of a carried change: a few training steps from the refit towards the fine-tune's outputs.

Every sample is answered twice. The *shift* is the new base's own logits and the old pair's change of them, ``new +
tuned - old``; the other answer is the fine-tune's own. Which is better differs from task to task: both are tried, and
the loss on samples held out decides. Text of the new base, if given, is learned as well with the unchanged base's
outputs, so that it forgets less. All weights are trained, or the factors of an adapter alone.

Source: this project's study (benchmarks/carry.py); distillation after Hinton, Vinyals and Dean (2015).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from rotation_merge.averaging.polish import PolishOptions, PolishReport, polish
from rotation_merge.errors import RotationMergeError
from rotation_merge.files.durable import replacing
from rotation_merge.files.ledger import Unfinished
from rotation_merge.files.scratch import Scratch
from rotation_merge.matching.objective import is_distribution, main_output
from rotation_merge.matching.teachers import AnsweredSamples, write_answers
from rotation_merge.model.lora import AdapterWeights
from rotation_merge.run.functions import Batch

KINDS = {
    "shift": "the new base's answers and the old pair's change of them",
    "answers": "the fine-tune's answers",
}
"""Targets."""

Watch = Callable[[str, int, int], None]


@dataclass(frozen=True)
class DistillationSamples:
    """Samples like the fine-tune's and, if it counts, text of the new base; the held-out ones come last.

    Attributes:
        samples, base_texts: batches without labels or padding.
        last: number of batches of each that are held out.
    """

    samples: Sequence[Batch]
    base_texts: Sequence[Batch]
    last: tuple[int, ...]


@dataclass(frozen=True)
class DistillationResult:
    """The losses of both targets on held-out samples, and the report of the better one."""

    losses: dict[str, float]
    best: str
    report: PolishReport

    def words(self, steps: int) -> list[str]:
        tried = ", ".join(f"{loss:.3f} towards {KINDS[kind]}" for kind, loss in self.losses.items())
        return [
            f"Distilled for {steps} steps from the refit (step {self.report.best_step} at learning rate "
            f"{self.report.rate:g} is kept): loss on samples held out {tried}."
        ]


def distil(
    models: Mapping[str, Callable[[], Any]],
    student: Callable[[], Any],
    lessons: DistillationSamples,
    options: PolishOptions,
    loss: Callable[[Any], float],
    work: Unfinished,
    watch: Watch | None = None,
) -> tuple[dict[str, Tensor], DistillationResult]:
    """Train the student towards both kinds of targets, and keep the better one.

    Args:
        models: `new`, `old` and `tuned`, made when they are needed.
        student: made anew for each kind, its trainable parameters those that require gradients.
        loss: of a student, on samples held out.
        work: folder of answers, states and progress, from which an interrupted run continues.

    Returns:
        The trained parameters by their names in the student.
    """
    answered_texts = [_answered(work, "own", [models["new"]], lessons.base_texts)] if lessons.base_texts else []
    done: dict[str, tuple[dict[str, Tensor], float, PolishReport]] = {}
    for kind in KINDS:
        place = work.file(f"{kind}.safetensors")
        if not place.exists():
            teachers = [models["tuned"], *((models["new"], models["old"]) if kind == "shift" else ())]
            answered = [_answered(work, kind, teachers, lessons.samples), *answered_texts]
            model = student()
            state = replace(options, last=lessons.last[: len(answered)], state=work.file(f"{kind}.pt"))
            report = polish(model, answered, state, watch)
            _keep(place, model, loss(model), report)
            del model
        done[kind] = _kept(place)
    losses = {kind: reached for kind, (_, reached, _) in done.items()}
    best = min(losses, key=lambda kind: losses[kind])
    return done[best][0], DistillationResult(losses, best, done[best][2])


def _keep(place: Path, model: Any, loss: float, report: PolishReport) -> None:
    """Write a trained student atomically."""
    trained = {name: p.detach().cpu().contiguous() for name, p in model.named_parameters() if p.requires_grad}
    with replacing(place) as temporary:
        save_file(trained, temporary, {"loss": repr(loss), "report": json.dumps(asdict(report))})


def _kept(place: Path) -> tuple[dict[str, Tensor], float, PolishReport]:
    with safe_open(place, "pt") as file:
        metadata = file.metadata()
    return load_file(place), float(metadata["loss"]), PolishReport(**json.loads(metadata["report"]))


def _answered(
    work: Unfinished, name: str, teachers: Sequence[Callable[[], Any]], batches: Sequence[Batch]
) -> AnsweredSamples:
    """Targets of batches: the first teacher's outputs; with three, the second's plus the change from the third."""
    path = work.file(f"answers-{name}.safetensors")
    if not path.exists():
        models = [make() for make in teachers]
        device = next(models[0].parameters()).device

        def answer(**batch: Tensor) -> Any:
            outputs = [model(**{k: v.to(device) for k, v in batch.items()}) for model in models]
            logits = [main_output(output).float() for output in outputs]
            total = logits[0] if len(logits) == 1 else logits[1] + logits[0] - logits[2]
            return SimpleNamespace(**{"logits" if is_distribution(outputs[0]) else "last_hidden_state": total})

        write_answers(answer, batches, path, name)
    return AnsweredSamples(path)


def adapter_in_training(model: Any, written: AdapterWeights) -> Any:
    """A model with an adapter, of which only the factors are trained.

    The rows of each A are made orthogonal and as long as those of a fresh LoRA, and the scale is the rank-stabilised
    one, so that every direction learns equally fast, whatever the change has in it already.

    Raises:
        RotationMergeError: peft is not installed.
    """
    try:
        from peft import PeftModel
    except ImportError as error:
        raise RotationMergeError("distilling an adapter needs peft", remedy="pip install peft") from error
    tensors = dict(written.tensors)
    for name, a in written.tensors.items():
        if not name.endswith((".lora_A.weight", ".lora_embedding_A")):
            continue
        b_name = name.replace("lora_A", "lora_B").replace("lora_embedding_A", "lora_embedding_B")
        b, rank = tensors[b_name], a.shape[0]
        if a.ndim == 2 and name.endswith("weight") and rank <= a.shape[1]:
            tensors[name], b = _balanced_factors(a, b)
        tensors[b_name] = b / rank**0.5
        if (bias := f"{b_name.removesuffix('weight')}bias") in tensors:
            tensors[bias] = tensors[bias] / rank**0.5
    with Scratch() as folder:
        AdapterWeights({**written.config, "use_rslora": True}, tensors).save_pretrained(folder)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft's, on what transformers calls by another name now
            return PeftModel.from_pretrained(model, folder, is_trainable=True).eval()


def _balanced_factors(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Factors of the same product with orthogonal rows of `a`, as long as a new LoRA's (uniform, 1/sqrt(in))."""
    q, r = torch.linalg.qr(a.double().mT)
    return (q.mT * 3**-0.5).to(a.dtype), (b.double() @ r.mT * 3**0.5).to(b.dtype)
