"""Fine-tunes carried to other bases: the models and tasks that `transport` measures.

Llamas: fine-tunes of Llama 0 for English and C go to Llamas of other seeds; what these know by themselves is Python.
ViTs: ViT 0 is tuned here, for 100 steps, on digits drawn faintly, in thick strokes, or mirrored; what the other ViTs
know by themselves are the digits as they are.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from apparatus import Given
from shipped import Batches, digits, next_token, windows
from torch import Tensor
from train_checkpoints import fit, image_batches, save, warm_cosine
from transformers import ViTForImageClassification

import rotation_merge as rm
from rotation_merge import AlignConfig
from rotation_merge.averaging.ot_fusion import REGULARISATION, Plans, plans_of, stream_ends, weight_points
from rotation_merge.model.apply import read_block, transform_tensor, unstack
from rotation_merge.model.open import open_model
from rotation_merge.model.tensors import as_tensors
from rotation_merge.model.view import View

STEPS = 100
"""Of tuning a ViT."""
NOT_ALIGNED, GIT_RE_BASIN, OT, TRANSFUSION, OURS = "none", "Git Re-Basin", "OT", "TransFusion", "ours"
METHODS: dict[str, AlignConfig | str | None] = {
    NOT_ALIGNED: None,
    GIT_RE_BASIN: AlignConfig(attention="permutation", residual="permutation", scaling=False),
    OT: OT,
    TRANSFUSION: AlignConfig(attention="permutation", heads="spectral", residual="permutation", scaling=False),
    OURS: AlignConfig(heads="permutation", residual="rotation"),
}

IMAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "faint": lambda pixels: (pixels + 0.5) / 2 - 0.5,
    "thick": lambda pixels: torch.nn.functional.max_pool2d(pixels, 2, 1, 1)[..., 1:, 1:],
    "mirrored": lambda pixels: pixels.flip(3),
}
"""Tasks of the ViTs: what becomes of the digits."""

Found = dict[str, list[float]]
"""By scale: gain on the task in nats and in points of accuracy, and what is lost of the own skill in both."""


Change = Callable[[float], View]
"""A new base with a moved change at any scale."""


@dataclass(frozen=True)
class Work:
    """One fine-tune of the old base, and what to measure it on.

    Attributes:
        tuned: the fine-tune's folder.
        test: of its task.
        own: of what the new bases know by themselves.
    """

    task: str
    tuned: Path
    test: Batches
    own: Batches


@dataclass
class Family:
    """Models of one kind: the old base, its fine-tunes, and the new bases by name."""

    name: str
    given: Given
    old: Path
    works: list[Work]
    seeds: tuple[int, ...]

    @property
    def bases(self) -> list[str]:
        kind = self.old.name.rpartition("-")[0]
        return [f"{kind}-{seed}" for seed in self.seeds]

    def carried(self, base: str, method: AlignConfig | str | None) -> dict[str, Change]:
        """The new base with the change of every fine-tune, by task, whatever the scale."""
        new, old = open_model(self.given.model(base)), open_model(self.old)
        if isinstance(method, str):
            plans = _plans(new, old)
            return {work.task: _transported(new, old, open_model(work.tuned), plans) for work in self.works}
        alignment = rm.align(new, old, method) if method else rm.Alignment({})
        changes = {work.task: rm.Delta.between(old, work.tuned).moved(alignment, new) for work in self.works}
        return {
            task: lambda scale, c=change: c.scaled(scale).applied().to(torch.float32)
            for task, change in changes.items()
        }

    def alone(self, base: str, work: Work) -> list[tuple[float, float]]:
        """Losses and accuracies of a new base by itself: on the task, and on what it knows."""

        def compute() -> list[tuple[float, float]]:
            return [scored(open_model(self.given.model(base)), data) for data in (work.test, work.own)]

        first, second = self.given.kept(f"carried, {self.name}, {base} alone, {work.task}", compute)
        return [(first[0], first[1]), (second[0], second[1])]

    @cached_property
    def home(self) -> dict[str, list[float]]:
        """What fine-tuning gained at home, by task: nats, points."""

        def compute() -> dict[str, list[float]]:
            old = open_model(self.old)
            return {work.task: gained(scored(old, work.test), open_model(work.tuned), work.test) for work in self.works}

        return dict(self.given.kept(f"carried, {self.name}, at home", compute))

    def share(self, gains: Mapping[str, float]) -> float:
        """Mean over tasks of the gain in nats, in percent of what fine-tuning gained at home."""
        return sum(100 * gain / self.home[task][0] for task, gain in gains.items()) / len(gains)


def families(given: Given, llamas: bool = False) -> Iterator[Family]:
    """ViTs, and Llamas: in quick runs only where `llamas` says so."""
    seeds = tuple(range(1, 1 + given.seeds))
    yield Family("ViTs", given, given.model("vit-0"), _images(given), seeds)
    if llamas or not given.quick:
        yield Family("Llamas", given, given.model("llama-0"), _texts(given), seeds)


def scored(model: View, data: Batches) -> tuple[float, float]:
    """A model's loss and accuracy."""
    figures = rm.evaluate(model, data)
    return figures["loss"], figures["accuracy"]


def gained(before: tuple[float, float], model: View, data: Batches) -> list[float]:
    """How much lower a model's loss is than before, in nats, and how much higher its accuracy, in points."""
    loss, right = scored(model, data)
    return [before[0] - loss, 100 * (right - before[1])]


# --- tasks -----------------------------------------------------------------------------------------------------


def _texts(given: Given) -> list[Work]:
    count, domains = (4, ["english"]) if given.quick else (48, ["english", "c"])
    own = next_token(windows("python")[:count])
    tests = {domain: next_token(windows(domain)[:count]) for domain in domains}
    titles = {"english": "English", "c": "C"}
    return [Work(titles[name], given.model(f"llama-0-{name}"), test, own) for name, test in tests.items()]


def _images(given: Given) -> list[Work]:
    _, _, unseen, answers = digits()
    own, works = [{"pixel_values": unseen, "labels": answers}], []
    for task in list(IMAGES)[: 1 if given.quick else None]:
        tuned = _tuned(given, task, 10 if given.quick else STEPS)
        works.append(Work(task, tuned, [{"pixel_values": IMAGES[task](unseen), "labels": answers}], own))
    return works


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="papers-")


def _tuned(given: Given, task: str, steps: int) -> Path:
    """ViT 0 tuned on a task, once."""
    path = Path(_scratch().name) / f"vit-0-{task}-{steps}"
    if not path.exists():
        model = ViTForImageClassification.from_pretrained(given.model("vit-0"), dtype=torch.float32)
        plain = image_batches(torch.Generator().manual_seed(0))
        batches = ({**batch, "pixel_values": IMAGES[task](batch["pixel_values"])} for batch in plain)
        fit(model, batches, steps, warm_cosine(steps, 10, 0.05), lr=5e-4, weight_decay=0.05, betas=(0.9, 0.99))
        save(model, path)
    return path


# --- optimal transport of a change -----------------------------------------------------------------------------


def _plans(new: View, old: View) -> Plans:
    """Soft plans from the old base's coordinates to the new one's, from weights, as delegate `ot_fusion` makes them."""
    strength, architecture = REGULARISATION["weights"], new.architecture
    ends = stream_ends(architecture, new.tensors, old.tensors)
    streams = plans_of(architecture.streams.values(), ends, strength)
    plans = dict(streams)
    for block in architecture.blocks:
        points = weight_points(block, read_block(block, new.tensors), read_block(block, old.tensors), streams)
        plans |= plans_of(block.spaces.values(), points, strength)
    return plans


def _transported(new: View, old: View, tuned: View, plans: Plans) -> Change:
    """The new base with a fine-tune's change moved by plans."""
    starts, changes = dict[str, Tensor](), dict[str, Tensor]()
    for block in new.architecture.blocks:
        before, after, base = (read_block(block, view.tensors) for view in (old, tuned, new))
        for info in (info for info in block.tensors if info.key in base):
            change = transform_tensor(after[info.key] - before[info.key], info, cast(Any, plans)).float()
            starts |= unstack(info, base[info.key].float())
            changes |= unstack(info, change)

    def at(scale: float) -> View:
        return replace(new, tensors=as_tensors({name: starts[name] + scale * changes[name] for name in starts}))

    return at
