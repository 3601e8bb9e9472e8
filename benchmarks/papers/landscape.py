"""Pairs of models, and what any weights between them are worth: what figures 2, 4 and 5 ask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from apparatus import Given
from digits import SAMPLES
from merges import FULL, LEARNED, PAPER
from merging import command
from shipped import images

import rotation_merge as rm
from rotation_merge import AlignConfig
from rotation_merge.model.view import View
from rotation_merge.run.evaluate import Curve

VITS, LLAMAS = "ViTs", "Llamas"
DATA = {VITS: "demo:digits", LLAMAS: "demo:python"}
LLAMA_PAIRS = [(0, 1), (2, 3), (1, 2)]
"""Of seeds; there are four."""
WINDOWS = 64
"""Held-out texts of 128 bytes that Llamas are measured on; ViTs on all 540 test digits."""
MATCHINGS = {
    "none": AlignConfig(attention="none", ffn="none", scaling=False),
    "FFN only": AlignConfig(attention="none", scaling=False),
    "attention only": AlignConfig(ffn="none", scaling=False),
    "both": PAPER,
    "Git Re-Basin": AlignConfig(attention="permutation", heads="permutation", scaling=False, residual="permutation"),
    "residual": AlignConfig(heads="permutation", residual="largest"),
    LEARNED: FULL,
}
"""What the tables call the matchings: the paper's words where it has some. `both` is the paper's own."""


@dataclass(frozen=True)
class Two:
    """Two checkpoints of one kind, by their names."""

    given: Given
    kind: str
    anchor: str
    donor: str

    @property
    def names(self) -> str:
        return f"{self.anchor} {self.donor}"

    @property
    def reading(self) -> dict[str, Any]:
        limit = 8 if self.given.quick else 540 if self.kind == VITS else WINDOWS
        return {"limit": limit, "batch_size": 64, "length": 128}

    def kept(self, key: str, compute: Callable[[], Any]) -> Any:
        return self.given.kept(f"landscape, {self.names}, {key}", compute)

    @cached_property
    def ends(self) -> list[str]:
        """Where they lie."""
        return [str(self.given.model(name)) for name in (self.anchor, self.donor)]

    def learned(self) -> Path:
        """The transforms that `align --learn` learns on training images without labels, as table 2 has them."""
        batches, file = images(SAMPLES, False, 32), self.given.scratch / f"{self.names}.safetensors"
        data = file.with_suffix(".npz")
        np.savez(data, pixel_values=np.concatenate([batch["pixel_values"] for batch in batches]))
        asked = ["--heads", "permutation", "--residual", "rotation", "--steps", "300", "--batch-size", "32"]
        command("align", *self.ends, "--learn", "--data", data, "--alignment", file, *asked)
        return file

    def paths(self, names: Sequence[str], points: int) -> list[Curve]:
        """The curve of each matching."""

        def compute() -> list[dict[str, Any]]:
            config = rm.BarrierConfig(points=points, **self.reading)
            alignments = [
                rm.Alignment.load(self.learned()) if name == LEARNED else rm.align(*self.ends, MATCHINGS[name])
                for name in names
            ]
            ends = ((each.apply_anchor(self.ends[0]), each.apply(self.ends[1])) for each in alignments)
            return [asdict(rm.barrier(*pair, DATA[self.kind], config)) for pair in ends]

        return [Curve(**curve) for curve in self.kept(f"paths by {points}, {', '.join(names)}", compute)]


def moved(anchor: Path, donor: Path, options: AlignConfig) -> tuple[View, View, View]:
    """Anchor, donor, and donor as `align` writes it, all with norms folded where matching folds them."""
    alignment = rm.align(anchor, donor, options)
    folded = replace(alignment, transforms={})
    exact = torch.float32
    return alignment.apply_anchor(anchor, exact), folded.apply(donor, exact), alignment.apply(donor, exact)


def distance(a: View, b: View) -> float:
    return float(sum((a[name].double() - b[name].double()).square().sum() for name in a)) ** 0.5


def pairs(given: Given, kind: str) -> list[Two]:
    """Pairs of models of one kind, of different seeds."""
    stem, seeds = ("vit", given.pairs()) if kind == VITS else ("llama", LLAMA_PAIRS[: given.seeds])
    return [Two(given, kind, f"{stem}-{a}", f"{stem}-{b}") for a, b in seeds]
