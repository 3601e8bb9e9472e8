"""Fine-tunes carried to other bases: the models and tasks that `transport` measures.

Llamas: fine-tunes of Llama 0 for English and C go to Llamas of other seeds; what these know by themselves is Python.
ViTs: ViT 0 is tuned here, for 100 steps, on digits drawn faintly, in thick strokes, or mirrored; what the other ViTs
know by themselves are the digits as they are.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from apparatus import Given
from shipped import digits, load, next_token, windows
from torch import Tensor
from train_checkpoints import fit, image_batches, save, warm_cosine
from transformers import AutoConfig, ViTForImageClassification

from rotation_merge import AlignConfig, Alignment
from rotation_merge.architecture import Architecture
from rotation_merge.averaging.ot_fusion import (
    REGULARISATION,
    Plans,
    Solver,
    plans_of,
    stream_ends,
    transported,
    weight_points,
)
from rotation_merge.carrying.delta import Delta
from rotation_merge.matching.match import match_model
from rotation_merge.model.apply import read_block, unstack
from rotation_merge.model.tensors import as_tensors
from rotation_merge.model.view import View
from rotation_merge.run.data import Data
from rotation_merge.run.evaluate import score
from rotation_merge.run.functions import architecture_of
from rotation_merge.run.runner import Runner

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


@dataclass
class Model:
    """A trained checkpoint."""

    name: str
    state: dict[str, Tensor]
    architecture: Architecture


@functools.cache
def _opened(folder: Path) -> Model:
    model = load(folder)
    return Model(folder.name, model.state_dict(), architecture_of(model))


@dataclass(frozen=True)
class Work:
    """One fine-tune of the old base, and what to measure it on.

    Attributes:
        test: of its task.
        own: of what the new bases know by themselves.
    """

    task: str
    tuned: Model
    test: Data
    own: Data


@dataclass
class ScaledChange:
    """A new base with a moved change at any scale.

    Attributes:
        ends: by tensor: its value in the base (folded, where the alignment folds), and its change.
    """

    architecture: Architecture
    config: Any
    ends: dict[str, tuple[Tensor, Tensor]]

    def model(self, scale: float) -> Any:
        tensors = {name: start + scale * change for name, (start, change) in self.ends.items()}
        view = View("scaled", self.config.to_dict(), self.architecture, as_tensors(tensors), untie=True)
        return Runner(view, []).fill_all()


@dataclass
class Family:
    """Models of one kind: the old base, its fine-tunes, and the new bases by name."""

    name: str
    given: Given
    old: Model
    works: list[Work]
    seeds: tuple[int, ...]

    @property
    def bases(self) -> list[str]:
        kind = self.old.name.rpartition("-")[0]
        return [f"{kind}-{seed}" for seed in self.seeds]

    def path(self, base: str) -> str:
        return str(self.given.model(base))

    def carried(self, base: str, method: AlignConfig | str | None) -> dict[str, ScaledChange]:
        """The new base with the change of every fine-tune, by task, whatever the scale."""
        new, config = _opened(self.given.model(base)), AutoConfig.from_pretrained(self.path(base))
        options = method if isinstance(method, AlignConfig) else None
        alignment = _alignment(self.given.model(base), self.given.model(self.old.name), options)
        base, old = View("new", {}, new.architecture, as_tensors(new.state)), as_tensors(self.old.state)
        plans = _plans(new, self.old) if isinstance(method, str) else None
        return {
            work.task: ScaledChange(
                new.architecture,
                config,
                _moved(change) if plans is None else dict(_transported(change, plans)),
            )
            for work in self.works
            for change in [Delta(base, old, as_tensors(work.tuned.state), alignment)]
        }

    def alone(self, base: str, work: Work, ends: ScaledChange) -> list[tuple[float, float]]:
        """Losses and accuracies of a new base by itself: on the task, and on what it knows."""

        def compute() -> list[tuple[float, float]]:
            return [scored(ends.model(0.0), data) for data in (work.test, work.own)]

        first, second = self.given.kept(f"carried, {self.name}, {base} alone, {work.task}", compute)
        return [(first[0], first[1]), (second[0], second[1])]

    @cached_property
    def home(self) -> dict[str, list[float]]:
        """What fine-tuning gained at home, by task: nats, points."""

        def compute() -> dict[str, list[float]]:
            old = as_tensors(self.old.state)
            base = View("old", {}, self.old.architecture, old)
            config = AutoConfig.from_pretrained(self.path(self.old.name))
            found = {}
            for work in self.works:
                change = Delta(base, old, as_tensors(work.tuned.state))
                ends = ScaledChange(self.old.architecture, config, _moved(change))
                found[work.task] = gained(scored(ends.model(0.0), work.test), ends.model(1.0), work.test)
            return found

        return dict(self.given.kept(f"carried, {self.name}, at home", compute))

    def share(self, gains: Mapping[str, float]) -> float:
        """Mean over tasks of the gain in nats, in percent of what fine-tuning gained at home."""
        return sum(100 * gain / self.home[task][0] for task, gain in gains.items()) / len(gains)


def families(given: Given, llamas: bool = False) -> Iterator[Family]:
    """ViTs, and Llamas: in quick runs only where `llamas` says so."""
    seeds = tuple(range(1, 1 + given.seeds))
    yield Family("ViTs", given, _opened(given.model("vit-0")), _images(given), seeds)
    if llamas or not given.quick:
        yield Family("Llamas", given, _opened(given.model("llama-0")), _texts(given), seeds)


def scored(model: Any, data: Data) -> tuple[float, float]:
    """A model's loss and accuracy."""
    scores = score(model, data)
    return scores.loss, scores.main


def gained(before: tuple[float, float], model: Any, data: Data) -> list[float]:
    """How much lower a model's loss is than before, in nats, and how much higher its accuracy, in points."""
    loss, right = scored(model, data)
    return [before[0] - loss, 100 * (right - before[1])]


# --- tasks -----------------------------------------------------------------------------------------------------


@functools.cache
def _alignment(new: Path, old: Path, options: AlignConfig | None) -> Alignment:
    if options is None:
        return Alignment({})
    anchor, donor = _opened(new), _opened(old)
    return match_model(anchor.architecture, anchor.state, donor.state, options)


def _texts(given: Given) -> list[Work]:
    count = 4 if given.quick else 48
    own = _next(windows("python")[:count])
    return [
        Work(
            task,
            _opened(given.model(f"llama-0-{short}")),
            _next(windows(short)[:count]),
            own,
        )
        for task, short in (("English", "english"), ("C", "c"))[: 1 if given.quick else None]
    ]


def _next(ids: Tensor) -> Data:
    return Data(next_token(ids), "next token", len(ids))


def _images(given: Given) -> list[Work]:
    _, _, unseen, answers = digits()
    own, works = _classes(unseen, answers), []
    for task in list(IMAGES)[: 1 if given.quick else None]:
        drawn = IMAGES[task]
        tuned = _tuned(given.model("vit-0"), task, 10 if given.quick else STEPS)
        works.append(Work(task, tuned, _classes(drawn(unseen), answers), own))
    return works


def _classes(pixels: Tensor, labels: Tensor) -> Data:
    return Data([{"pixel_values": pixels, "labels": labels}], "class", len(labels))


@functools.cache
def _tuned(base: Path, task: str, steps: int) -> Model:
    """A ViT tuned on a task."""
    model = ViTForImageClassification.from_pretrained(base, dtype=torch.float32)
    plain = image_batches(torch.Generator().manual_seed(0))
    batches = ({**batch, "pixel_values": IMAGES[task](batch["pixel_values"])} for batch in plain)
    fit(model, batches, steps, warm_cosine(steps, 10, 0.05), lr=5e-4, weight_decay=0.05, betas=(0.9, 0.99))
    with tempfile.TemporaryDirectory(prefix="papers-") as scratch:
        save(model, Path(scratch) / f"{base.name}-{task}")
        return _opened(Path(scratch) / f"{base.name}-{task}")


def _moved(change: Delta) -> dict[str, tuple[Tensor, Tensor]]:
    """A fine-tune's change moved by an alignment, as `ScaledChange` has it."""
    start, end = (dict(change.scaled(scale).applied().to(torch.float32).blocks()) for scale in (0.0, 1.0))
    return {name: (tensor, end[name] - tensor) for name, tensor in start.items()}


# --- optimal transport of a change -----------------------------------------------------------------------------


def _plans(new: Model, old: Model) -> Plans:
    """Soft plans from the old base's coordinates to the new one's, from weights, as delegate `ot_fusion` makes them."""
    solver, architecture = Solver(hard=False, regularisation=REGULARISATION["weights"]), new.architecture
    ends = stream_ends(architecture, new.state, old.state)
    streams = plans_of(architecture.streams.values(), ends, solver)
    plans = dict(streams)
    for block in architecture.blocks:
        points = weight_points(block, read_block(block, new.state), read_block(block, old.state), streams)
        plans |= plans_of(block.spaces.values(), points, solver)
    return plans


def _transported(delta: Delta, plans: Plans) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """A fine-tune's change moved by plans, as `ScaledChange` has it."""
    for block in delta.base.architecture.blocks:
        old, fine, new = (read_block(block, source) for source in (delta.old, delta.tuned, delta.base.tensors))
        for info in block.tensors:
            if info.key in new:
                moved = transported(fine[info.key] - old[info.key], info, plans)
                starts = unstack(info, new[info.key])
                for name, change in unstack(info, moved.float()).items():
                    yield name, (starts[name], change)
