"""Pairs of models, and what any weights between them are worth: what figures 2, 4 and 5 ask."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from apparatus import Given
from digits import SAMPLES
from merges import LEARNED
from merging import command
from shipped import images, load
from torch import Tensor

import rotation_merge as rm
from rotation_merge import AlignConfig
from rotation_merge.run.curves import Barrier, Curve
from rotation_merge.run.data import Data, read_samples
from rotation_merge.run.evaluate import score

State = dict[str, Tensor]
VITS, LLAMAS = "ViTs", "Llamas"
DATA = {VITS: "demo:digits", LLAMAS: "demo:python"}
LLAMA_PAIRS = [(0, 1), (2, 3), (1, 2)]
"""Of seeds; there are four."""
WINDOWS = 64
"""Held-out texts of 128 bytes that Llamas are measured on; ViTs on all 540 test digits."""
CALLED = {
    "plain": "none",
    "neurons": "FFN only",
    "rotation": "attention only",
    "paper": "both",
    "permutation": "Git Re-Basin",
    "residual": "residual",
    LEARNED: LEARNED,
}
"""What the tables call our named matchings: the paper's words where it has some. `both` is the paper's own."""


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

    @cached_property
    def models(self) -> tuple[Any, Any]:
        """Anchor and donor."""
        return load(self.ends[0]), load(self.ends[1])

    @cached_property
    def network(self) -> Any:
        return load(self.ends[0])

    @property
    def reading(self) -> dict[str, Any]:
        limit = 8 if self.given.quick else 540 if self.kind == VITS else WINDOWS
        return {"limit": limit, "batch_size": 64, "length": 128}

    @cached_property
    def data(self) -> Data:
        return read_samples(str(self.given.model(self.anchor)), DATA[self.kind], module=self.network, **self.reading)

    def kept(self, key: str, compute: Callable[[], Any]) -> Any:
        return self.given.kept(f"landscape, {self.names}, {key}", compute)

    def loss_and_accuracy(self, state: State) -> tuple[float, float]:
        """Loss and accuracy of weights."""
        self.network.load_state_dict(state)
        scores = score(self.network, self.data)
        return scores.loss, scores.main

    def accuracies(self) -> list[float]:
        return [self.loss_and_accuracy(model.state_dict())[1] for model in self.models]

    def moved(self, options: AlignConfig | None) -> tuple[State, State, State]:
        """Anchor, donor and donor as `align` writes it, all with norms folded where matching folds them."""
        if options is None:
            first, second = (model.state_dict() for model in self.models)
            return first, second, second
        return moved(*self.models, options)

    def halfway(self, options: AlignConfig | None) -> tuple[float, float]:
        """Loss and accuracy of the average."""
        anchor, _, donor = self.moved(options)
        return self.loss_and_accuracy(mixed({"anchor": anchor, "donor": donor}, [0.5, 0.5]))

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

    def paths(self, names: Sequence[str], points: int) -> Barrier:
        """The curves of named matchings, `plain` among them."""

        def compute() -> dict[str, Any]:
            words = [f"{LEARNED}={self.learned()}" if name == LEARNED else name for name in names]
            asked = [word for name, value in self.reading.items() for word in (f"--{name.replace('_', '-')}", value)]
            asked += ["--compare", ",".join(words), "--data", DATA[self.kind], "--points", points]
            return dict(json.loads(command("barrier", *self.ends, *asked, "--json"))[0])

        found = self.kept(f"paths by {points}, {', '.join(names)}", compute)
        facts = {name: found[name] for name in ("anchor", "donor", "data", "task", "examples", "options", "head")}
        return Barrier(**facts, curves=[Curve(**curve) for curve in found["curves"]])


def moved(anchor: Any, donor: Any, options: AlignConfig) -> tuple[State, State, State]:
    """Weights of two modules as `Two.moved` has them."""
    alignment = rm.align(anchor, donor, options)
    folded = replace(alignment, transforms={})
    views = alignment.apply_anchor(anchor), folded.apply(donor), alignment.apply(donor)
    return tuple(view.state_dict() for view in views)  # type: ignore[return-value]


def mixed(states: dict[str, State], shares: Sequence[float]) -> State:
    """Their sum with these shares."""
    return {
        name: sum(share * state[name] for share, state in zip(shares, states.values(), strict=True))
        for name in next(iter(states.values()))
    }


def distance(a: State, b: State) -> float:
    return float(sum((a[name].double() - b[name].double()).square().sum() for name in a)) ** 0.5


def pairs(given: Given, kind: str) -> list[Two]:
    """Pairs of models of one kind, of different seeds."""
    stem, seeds = ("vit", given.pairs()) if kind == VITS else ("llama", LLAMA_PAIRS[: given.seeds])
    return [Two(given, kind, f"{stem}-{a}", f"{stem}-{b}") for a, b in seeds]
