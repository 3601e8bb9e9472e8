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
from merging import load
from record import Row
from torch import Tensor
from train_checkpoints import fit, image_batches, save, warm_cosine

import rotation_merge as rm
from rotation_merge import AlignConfig
from rotation_merge.averaging.ot_fusion import REGULARISATION, plans_of, stream_ends, weight_points
from rotation_merge.model.apply import read_block, read_tensor, transform_tensor
from rotation_merge.model.open import open_model
from rotation_merge.model.view import View
from rotation_merge.run.demo import digits

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
        test: samples of its task, or their source.
        own: of what the new bases know by themselves.
        limit: on the number of samples.
    """

    task: str
    tuned: Path
    test: Any
    own: str
    limit: int | None = None

    def scores(self, model: View) -> list[float]:
        """Loss and accuracy on the task, and on what the new bases know."""
        config = rm.EvaluateConfig(limit=self.limit)
        figures = [rm.evaluate(model, data, config) for data in (self.test, self.own)]
        return [of_data[key] for of_data in figures for key in ("loss", "accuracy")]


def gained(before: Sequence[float], after: Sequence[float]) -> list[float]:
    """Gain on the task in nats and in points of accuracy, and what is lost of the own skill in both."""
    loss, right, own_loss, own_right = (b - a for b, a in zip(before, after, strict=True))
    return [loss, -100 * right, -own_loss, 100 * own_right]


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

    def alone(self, base: str, work: Work) -> list[float]:
        """The scores of a new base by itself."""
        key = f"carried, {self.name}, {base} alone, {work.task}"
        return list(self.given.kept(key, lambda: work.scores(open_model(self.given.model(base)))))

    @cached_property
    def home(self) -> dict[str, list[float]]:
        """What fine-tuning gained at home, by task."""
        old = open_model(self.old)

        def compute() -> dict[str, list[float]]:
            return {x.task: gained(x.scores(old), x.scores(open_model(x.tuned))) for x in self.works}

        return dict(self.given.kept(f"carried, {self.name}, at home", compute))

    def share(self, found: dict[str, Found], scale: str) -> float:
        """Mean over tasks of the gain in nats, in percent of what fine-tuning gained at home."""
        return fmean(100 * at[scale][0] / self.home[task][0] for task, at in found.items())


def rows(given: Given) -> Iterator[tuple[str, Row]]:
    for family in (images(given), texts(given)):
        found = {m: [measured(family, base, m) for base in family.bases] for m in family.methods}
        for work in family.works:
            nats, points, *_ = family.home[work.task]
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
        carried, found = family.carried(base, method), dict[str, Found]()
        for work in family.works:
            before, change = family.alone(base, work), carried[work.task]
            views = {scale: change.scaled(float(scale)).applied().to(torch.float32) for scale in family.scales}
            found[work.task] = {scale: gained(before, work.scores(view)) for scale, view in views.items()}
        return found

    return dict(family.given.kept(f"transport, {family.name}, {base}, {method}", compute))


def moved_by_plans(new: View, old: View, tuned: dict[str, View]) -> dict[str, rm.Delta]:
    """Changes moved by soft plans from the old base to the new one, from weights, as `ot_fusion` makes them."""
    strength, architecture = REGULARISATION["weights"], new.architecture
    streams = plans_of(architecture.streams.values(), stream_ends(architecture, new.tensors, old.tensors), strength)
    plans: dict[str, Any] = dict(streams)
    for block in architecture.blocks:
        points = weight_points(block, read_block(block, new.tensors), read_block(block, old.tensors), streams)
        plans |= plans_of(block.spaces.values(), points, strength)

    def moved(tuned: View) -> rm.Delta:
        def tensor(block: Any, info: Any, _: Any) -> Tensor | None:
            before, after, base = (read_tensor(info, view.tensors) for view in (old, tuned, new))
            return None if base is None else base.float() + transform_tensor(after - before, info, plans).float()

        return rm.Delta.between(new, new.blockwise(tensor, torch.float32))

    return {task: moved(view) for task, view in tuned.items()}


# --- tasks -----------------------------------------------------------------------------------------------------


def texts(given: Given) -> Family:
    limit, titles = (4, {"english": "English"}) if given.quick else (48, {"english": "English", "c": "C"})
    tunes = {name: given.model(f"llama-0-{name}") for name in titles}
    works = [Work(titles[name], tuned, f"demo:{name}", "demo:python", limit) for name, tuned in tunes.items()]
    return Family("Llamas", given, given.model("llama-0"), works)


def images(given: Given) -> Family:
    (_, _, pixels, labels), works = digits(), list[Work]()
    for task in list(IMAGES)[: 1 if given.quick else None]:
        test = [{"pixel_values": IMAGES[task](pixels), "labels": labels}]
        works.append(Work(task, tuned(given, task, 10 if given.quick else STEPS), test, "demo:digits"))
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
