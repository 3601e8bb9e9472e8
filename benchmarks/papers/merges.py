"""Two models half and half: every way to average them after every way to match them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from apparatus import Given
from merging import STILL, halves, merge
from shipped import load

import rotation_merge as rm
from rotation_merge import AlignConfig

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


@dataclass
class Pair:
    """Two checkpoints.

    Attributes:
        data: file of samples, without labels.
        batches: the same as batches, for learned matching; `steps` of it from `start`.
        parameters: of every recipe.
        matchings: options by name.
    """

    anchor: Path
    donor: Path
    scratch: Path
    data: Path
    batches: list[dict[str, Any]] = field(default_factory=list)
    steps: int = 300
    start: str = "auto"
    parameters: dict[str, Any] = field(default_factory=dict)
    matchings: dict[str, AlignConfig | None] = field(default_factory=lambda: MATCHINGS)

    def ends(self, matching: str) -> tuple[Any, Any]:
        """Anchor and donor as they are matched: modules for learning, else checkpoints."""
        return (load(self.anchor), load(self.donor)) if matching == LEARNED else (self.anchor, self.donor)

    def alignment(self, matching: str) -> rm.Alignment | None:
        """How the donor is moved; None: not at all."""
        chosen, ends = self.matchings[matching], self.ends(matching)
        if chosen is None:
            return None
        if matching == LEARNED:
            return rm.fit(*ends, self.batches, chosen, rm.FitConfig(steps=self.steps, start=self.start)).alignments[0]
        return rm.align(*ends, chosen)

    def aligned(self, matching: str) -> tuple[Path, Path]:
        """Both as checkpoints in float32 in the same coordinates, neither with another function."""
        if (options := self.matchings[matching]) is None:
            return self.anchor, self.donor
        folded = "-folded" if options.residual == "rotation" else ""
        paths = self.scratch / f"anchor{folded}", self.scratch / f"donor-{matching.replace(' ', '-')}"
        if not paths[1].exists():
            alignment, (anchor, donor) = self.alignment(matching), self.ends(matching)
            assert alignment is not None
            alignment.apply(donor, torch.float32).save_pretrained(paths[1])
            if not paths[0].exists():
                alignment.apply_anchor(anchor, torch.float32).save_pretrained(paths[0])
        return paths

    def merged(self, average: str, matching: str) -> Path:
        """The merge of the two."""
        parameters = {**AVERAGES[average], **STILL, **self.parameters}
        paths = self.aligned(matching)
        kind = MEASURED.get(parameters["delegate"])
        if parameters.pop("data", None):
            parameters["data"] = str(self.data)
        if parameters["delegate"] == "ot_fusion" and parameters.get("heads_of") == "each":
            parameters["stream"] = "identity"  # which heads that stay would not follow
        if parameters["delegate"] == "refit":
            parameters["samples"] = sum(len(next(iter(batch.values()))) for batch in self.batches)
        out = self.scratch / "merged"
        models = halves(*paths)
        if kind:
            models = {path: {**models[path], "statistics": str(self.measure(path, kind))} for path in paths}
        return merge(paths[0], models, out, parameters)

    def measure(self, path: Path, kind: str) -> Path:
        """The statistics of one model on the samples, once."""
        file = self.scratch / f"{path.name}-{kind}.safetensors"
        if not file.exists():
            few = 64 if kind == "fisher" else None
            rm.measure(path, str(self.data), rm.MeasureConfig((kind,), samples=few)).save(file)
        return file


Judged = dict[tuple[str, str], list[Any]]
"""What a judge says of the merges of several pairs, by average and matching."""


def judged(
    given: Given,
    key: str,
    pairs: Mapping[str, Callable[[], Pair]],
    judge: Callable[[Path, Pair], Any],
    matchings: Iterable[str] = MATCHINGS,
    averages: Iterable[str] = AVERAGES,
) -> Judged:
    """The judge's word on every merge of every pair, kept from run to run under the pair's name."""
    opened = cache(lambda name: pairs[name]())
    found: Judged = {}
    for name, matching, average in itertools.product(pairs, matchings, QUICK if given.quick else averages):

        def one(name: str = name, average: str = average, matching: str = matching) -> Any:
            return judge(opened(name).merged(average, matching), opened(name))

        said = given.kept(f"{key}, {name}, {average}, {matching}", one)
        found.setdefault((average, matching), []).append(said)
    return found
