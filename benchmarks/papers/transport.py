"""Table 1 and the figures of scales of "Update Your Transformer to the Latest Release": fine-tunes carried elsewhere.

Gain on the task and loss of what the new base knows by itself, by method and scale: mean and spread over new bases. Not
aligned, the change is added as it stands; Git Re-Basin permutes neurons, the coordinates inside heads, and the
residual stream; OT moves the change by soft plans from weights; TransFusion pairs heads by their singular values and
permutes inside them, too; ours orders heads and turns them and the residual stream. No data is used.

Llamas: fine-tunes of Llama 0 for English and C go to Llamas of other seeds; what these know by themselves is Python.
ViTs: ViT 0 is tuned here, for 100 steps, on digits drawn faintly, in thick strokes, or mirrored; what the other ViTs
know by themselves are the digits as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from apparatus import Given, run, spread
from record import Row
from shipped import Batches, digits, load, next_token, windows
from torch import Tensor
from train_checkpoints import fit, image_batches, save, warm_cosine

import rotation_merge as rm
from rotation_merge import AlignConfig
from rotation_merge.averaging.ot_fusion import REGULARISATION, plans_of, stream_ends, weight_points
from rotation_merge.model.apply import read_block, read_tensor, transform_tensor
from rotation_merge.model.open import open_model
from rotation_merge.model.view import View

STEPS = 100
"""Of tuning a ViT."""
NOT_ALIGNED, OT, TRANSFUSION = "none", "OT", "TransFusion"
METHODS: dict[str, AlignConfig | None] = {
    NOT_ALIGNED: None,
    "Git Re-Basin": AlignConfig(attention="permutation", residual="permutation", scaling=False),
    OT: None,
    TRANSFUSION: AlignConfig(attention="permutation", heads="spectral", residual="permutation", scaling=False),
    "ours": AlignConfig(heads="permutation", residual="rotation"),
}
SCALES = (0.5, 1.0, 1.5, 2.0)
QUICK = (1.0,)
FAST = (NOT_ALIGNED, TRANSFUSION)
"""What is matched in a second."""
TABLE, SWEEP = "papers-transport", "papers-transport-scales"
AT = ("gain", "points", "own skill lost", "points lost")
TABLES = {
    TABLE: ("models", "task", "method", *AT, "best scale", "gain there", "own skill lost there"),
    SWEEP: ("models", "method", "scale", "share of the gain at home", "own skill lost"),
}


IMAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "faint": lambda pixels: (pixels + 0.5) / 2 - 0.5,
    "thick": lambda pixels: torch.nn.functional.max_pool2d(pixels, 2, 1, 1)[..., 1:, 1:],
    "mirrored": lambda pixels: pixels.flip(3),
}
"""Tasks of the ViTs: what becomes of the digits."""

Found = dict[str, list[float]]
"""By scale: gain on the task in nats and in points of accuracy, and what is lost of the own skill in both."""


@dataclass(frozen=True)
class Work:
    """One fine-tune of the old base, and what to measure it on.

    Attributes:
        test: samples of its task.
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

    @property
    def bases(self) -> list[str]:
        return [f"{self.old.name.rpartition('-')[0]}-{seed}" for seed in range(1, 1 + self.given.seeds)]

    @property
    def methods(self) -> tuple[str, ...]:
        return FAST if self.given.quick and self.name == "Llamas" else tuple(METHODS)

    @property
    def scales(self) -> list[str]:
        return [f"{scale:g}" for scale in (QUICK if self.given.quick else SCALES)]

    def carried(self, base: str, method: str) -> dict[str, rm.Delta]:
        """The change of every fine-tune for a new base, by task."""
        new, old = open_model(self.given.model(base)), open_model(self.old)
        if method == OT:
            return moved_by_plans(new, old, {work.task: open_model(work.tuned) for work in self.works})
        options = METHODS[method]
        alignment = rm.align(new, old, options) if options else rm.Alignment({})
        return {work.task: rm.Delta.between(old, work.tuned).moved(alignment, new) for work in self.works}

    def alone(self, base: str, work: Work) -> list[list[float]]:
        """Losses and accuracies of a new base by itself: on the task, and on what it knows."""

        def compute() -> list[list[float]]:
            return [scored(open_model(self.given.model(base)), data) for data in (work.test, work.own)]

        return list(self.given.kept(f"carried, {self.name}, {base} alone, {work.task}", compute))

    @cached_property
    def home(self) -> dict[str, list[float]]:
        """What fine-tuning gained at home, by task: nats, points."""

        def compute() -> dict[str, list[float]]:
            old = open_model(self.old)
            return {work.task: gained(scored(old, work.test), open_model(work.tuned), work.test) for work in self.works}

        return dict(self.given.kept(f"carried, {self.name}, at home", compute))

    def share(self, found: dict[str, Found], scale: str) -> float:
        """Mean over tasks of the gain in nats, in percent of what fine-tuning gained at home."""
        return fmean(100 * at[scale][0] / self.home[task][0] for task, at in found.items())


def rows(given: Given) -> Iterator[tuple[str, Row]]:
    for family in (images(given), texts(given)):
        found = {m: [measured(family, base, m) for base in family.bases] for m in family.methods}
        for work in family.works:
            nats, points = family.home[work.task]
            yield TABLE, _row(family, work.task, "fine-tuned at home", [f"{nats:.3f}", f"{points:.1f}"])
            for method, bases in found.items():
                yield TABLE, _best(family, work.task, method, [base[work.task] for base in bases])
        for method, bases in found.items():
            for scale in family.scales:
                shares = [family.share(base, scale) for base in bases]
                lost = [fmean(at[scale][2] for at in base.values()) for base in bases]
                cells = (family.name, method, scale, spread(shares), spread(lost, "{:.3f}"))
                yield SWEEP, dict(zip(TABLES[SWEEP], cells, strict=True))


def measured(family: Family, base: str, method: str) -> dict[str, Found]:
    """By task and scale, what is gained and what is lost."""

    def compute() -> dict[str, Found]:
        found: dict[str, Found] = {}
        carried = family.carried(base, method)
        for work in family.works:
            test, own = family.alone(base, work)
            found[work.task] = at = {}
            for scale in family.scales:
                model = carried[work.task].scaled(float(scale)).applied().to(torch.float32)
                lost = [-value for value in gained(own, model, work.own)]
                at[scale] = [*gained(test, model, work.test), *lost]
        return found

    return dict(family.given.kept(f"transport, {family.name}, {base}, {method}", compute))


def scored(model: View, data: Batches) -> list[float]:
    """A model's loss and accuracy."""
    figures = rm.evaluate(model, data)
    return [figures["loss"], figures["accuracy"]]


def gained(before: Sequence[float], model: View, data: Batches) -> list[float]:
    """How much lower a model's loss is than before, in nats, and how much higher its accuracy, in points."""
    loss, right = scored(model, data)
    return [before[0] - loss, 100 * (right - before[1])]


def moved_by_plans(new: View, old: View, tuned: dict[str, View]) -> dict[str, rm.Delta]:
    """Changes moved by soft plans from the old base's coordinates to the new one's, from weights, as delegate
    `ot_fusion` makes them."""
    strength, architecture = REGULARISATION["weights"], new.architecture
    streams = plans_of(architecture.streams.values(), stream_ends(architecture, new.tensors, old.tensors), strength)
    plans = dict(streams)
    for block in architecture.blocks:
        points = weight_points(block, read_block(block, new.tensors), read_block(block, old.tensors), streams)
        plans |= plans_of(block.spaces.values(), points, strength)

    def moved(tuned: View) -> rm.Delta:
        def tensor(block: Any, info: Any, _: Any) -> Tensor | None:
            before, after, base = (read_tensor(info, view.tensors) for view in (old, tuned, new))
            return None if base is None else base.float() + transform_tensor(after - before, info, moves).float()

        return rm.Delta.between(new, new.blockwise(tensor, torch.float32))

    return {task: moved(view) for task, view in tuned.items()}


# --- tasks -----------------------------------------------------------------------------------------------------


def texts(given: Given) -> Family:
    count, titles = (4, {"english": "English"}) if given.quick else (48, {"english": "English", "c": "C"})
    own = next_token(windows("python")[:count])
    works = [
        Work(title, given.model(f"llama-0-{name}"), next_token(windows(name)[:count]), own)
        for name, title in titles.items()
    ]
    return Family("Llamas", given, given.model("llama-0"), works)


def images(given: Given) -> Family:
    _, _, unseen, answers = digits()
    own, works = [{"pixel_values": unseen, "labels": answers}], []
    for task in list(IMAGES)[: 1 if given.quick else None]:
        test = [{"pixel_values": IMAGES[task](unseen), "labels": answers}]
        works.append(Work(task, tuned(given, task, 10 if given.quick else STEPS), test, own))
    return Family("ViTs", given, given.model("vit-0"), works)


def tuned(given: Given, task: str, steps: int) -> Path:
    """ViT 0 tuned on a task."""
    model, path = load(given.model("vit-0")), given.scratch / f"vit-0-{task}"
    plain = image_batches(torch.Generator().manual_seed(0))
    batches = ({**batch, "pixel_values": IMAGES[task](batch["pixel_values"])} for batch in plain)
    fit(model, batches, steps, warm_cosine(steps, 10, 0.05), lr=5e-4, weight_decay=0.05, betas=(0.9, 0.99))
    save(model, path)
    return path


# --- rows ------------------------------------------------------------------------------------------------------


def _best(family: Family, task: str, method: str, bases: Sequence[Found]) -> Row:
    best = max(family.scales, key=lambda scale: fmean(at[scale][0] for at in bases))
    forms = ("{:.3f}", "{:.1f}", "{:.3f}", "{:.1f}")
    here = [spread([at["1"][which] for at in bases], form) for which, form in enumerate(forms)]
    there = [spread([at[best][which] for at in bases], "{:.3f}") for which in (0, 2)]
    return _row(family, task, method, [*here, best, *there])


def _row(family: Family, task: str, method: str, cells: Sequence[str]) -> Row:
    columns = TABLES[TABLE]
    values = [family.name, task, method, *cells]
    return dict(zip(columns, [*values, *[""] * (len(columns) - len(values))], strict=True))


run(__name__)
