"""Pairs of models: every way to match them, to move one to the other, and to average them half and half."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from apparatus import Given
from merging import STILL, halves, load, merge
from torch import Tensor

import rotation_merge as rm
from rotation_merge import AlignConfig
from rotation_merge.model.view import View
from rotation_merge.run.demo import digits

NONE, RESIDUAL, LEARNED = "no matching", "residual", "learned"
PAPER = AlignConfig(scaling="sequential")
FULL = AlignConfig(heads="permutation", residual="rotation")
MATCHINGS: dict[str, AlignConfig | None] = {
    NONE: None,
    "no rescaling": AlignConfig(scaling=False),
    "FFN only": AlignConfig(attention="none", scaling=False),
    "attention only": AlignConfig(ffn="none", scaling="sequential"),
    "both": PAPER,
    RESIDUAL: FULL,
    LEARNED: FULL,
}
"""The paper's own (heads in their order, scales after rotations) and its parts, then two of ours that turn the residual
stream."""
AVERAGES: dict[str, dict[str, Any]] = {
    "Simple": {"delegate": "linear"},
    "Fisher": {"delegate": "fisher"},
    "RegMean": {"delegate": "regmean"},
    "OT-ACTS-EMD": {"delegate": "ot_fusion", "plan": "hard", "data": True},
    "OT-ACTS": {"delegate": "ot_fusion", "data": True},
    "OT-WTS": {"delegate": "ot_fusion"},
    "refit": {"delegate": "refit", "ridge": 0.001, "data": True},
}
"""Parameters of a recipe by name; `data` stands for the pair's samples. The last is not in the paper."""
QUICK = ("Simple",)
"""Those of a quick run."""
MEASURED = {"regmean": "gram", "fisher": "fisher"}
SAMPLES = 200
"""Training images without labels, for statistics, plans, learned matching and refit."""


@dataclass
class Pair:
    """Two checkpoints.

    Attributes:
        samples: inputs of the models, without labels.
        parameters: of every recipe.
        matchings: options by name; None: the donor stays as it is.
    """

    given: Given
    anchor: Path
    donor: Path
    samples: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Any] = field(default_factory=dict)
    matchings: Mapping[str, Any] = field(default_factory=lambda: MATCHINGS)

    @property
    def name(self) -> str:
        return f"{self.anchor.name}_{self.donor.name}"

    @cached_property
    def scratch(self) -> Path:
        """A folder of their own."""
        folder = self.given.scratch / self.name
        folder.mkdir(exist_ok=True)
        return folder

    @cached_property
    def data(self) -> str:
        """The file of the samples."""
        file = self.scratch / "samples.npz"
        np.savez(file, **{name: tensor.numpy() for name, tensor in self.samples.items()})
        return str(file)

    @property
    def count(self) -> int:
        return len(next(iter(self.samples.values())))

    def ends(self, matching: str) -> tuple[Any, Any]:
        """Anchor and donor as they are matched: modules for learning, else checkpoints."""
        return (load(self.anchor), load(self.donor)) if matching == LEARNED else (self.anchor, self.donor)

    def alignment(self, matching: str) -> rm.Alignment:
        """How the donor is moved."""
        options, ends = self.matchings[matching], self.ends(matching)
        if matching != LEARNED:
            return rm.align(*ends, options)
        steps, start, size = (2, "identity", 16) if self.given.quick else (300, "auto", 32)
        starts = range(0, self.count, size)
        batches = [{name: tensor[i : i + size] for name, tensor in self.samples.items()} for i in starts]
        config = rm.FitConfig(steps=steps, start=start)
        return rm.fit(*ends, batches, options, config).alignments[0]

    def moved(self, matching: str) -> tuple[View, View, View]:
        """Anchor, donor, and donor as it is matched, in float32, all with norms folded where matching folds them."""
        alignment, (anchor, donor), exact = self.alignment(matching), self.ends(matching), torch.float32
        folded = replace(alignment, transforms={})
        return alignment.apply_anchor(anchor, exact), folded.apply(donor, exact), alignment.apply(donor, exact)

    def aligned(self, matching: str) -> tuple[Path, Path]:
        """Both as checkpoints in float32 in the same coordinates, neither with another function."""
        if (options := self.matchings[matching]) is None:
            return self.anchor, self.donor
        folded = "-folded" if options.residual == "rotation" else ""
        paths = self.scratch / f"anchor{folded}", self.scratch / f"donor-{matching.replace(' ', '-')}"
        if not paths[1].exists():
            anchor, _, donor = self.moved(matching)
            donor.save_pretrained(paths[1])
            if not paths[0].exists():
                anchor.save_pretrained(paths[0])
        return paths

    def merged(self, average: str, matching: str) -> Path:
        """The merge of the two."""
        parameters = {**AVERAGES[average], **STILL, **self.parameters}
        paths, kind = self.aligned(matching), MEASURED.get(parameters["delegate"])
        if parameters.pop("data", None):
            parameters["data"] = self.data
        if parameters["delegate"] == "ot_fusion" and parameters.get("heads_of") == "each":
            parameters["stream"] = "identity"  # which heads that stay would not follow
        if parameters["delegate"] == "refit":
            parameters["samples"] = self.count
        models = halves(*paths)
        if kind:
            models = {path: {**models[path], "statistics": str(self.measure(path, kind))} for path in paths}
        return merge(paths[0], models, self.scratch / "merged", parameters)

    def measure(self, path: Path, kind: str) -> Path:
        """The statistics of one model on the samples, once."""
        file = self.scratch / f"{path.name}-{kind}.safetensors"
        if not file.exists():
            few = 64 if kind == "fisher" else None
            rm.measure(path, self.data, rm.MeasureConfig((kind,), samples=few)).save(file)
        return file


def vits(given: Given, matchings: Mapping[str, Any] = MATCHINGS) -> list[Pair]:
    """Pairs of ViTs on scikit-learn's digits, trained from different seeds."""
    images = {"pixel_values": digits()[0][: 32 if given.quick else SAMPLES]}
    names = [(f"vit-{a}", f"vit-{b}") for a, b in given.pairs()]
    return [Pair(given, given.model(a), given.model(b), images, matchings=matchings) for a, b in names]


def distance(a: View, b: View) -> float:
    return float(sum((a[name].double() - b[name].double()).square().sum() for name in a)) ** 0.5


Judged = dict[tuple[str, str], list[Any]]
"""What a judge says of the merges of several pairs, by average and matching."""


def judged(
    given: Given,
    key: str,
    pairs: Iterable[Pair],
    judge: Callable[[Path, Pair], Any],
    matchings: Iterable[str],
    averages: Iterable[str] = AVERAGES,
) -> Judged:
    """The judge's word on every merge of every pair, kept from run to run under the pair's name."""
    found: Judged = {}
    for pair, matching, average in itertools.product(pairs, matchings, QUICK if given.quick else averages):

        def one(pair: Pair = pair, average: str = average, matching: str = matching) -> Any:
            return judge(pair.merged(average, matching), pair)

        said = given.kept(f"{key}, {pair.name}, {average}, {matching}", one)
        found.setdefault((average, matching), []).append(said)
    return found
