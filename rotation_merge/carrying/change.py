r"""The refit of a change: a new base's maps are solved to give their own output and what fine-tuning changed elsewhere.

Layer after layer, from the carried model's own inputs, a linear map aims at ``new + scale * (tuned - old) M``: what the
new base gives by itself, and the change of the old pair's output on the same samples, mapped by the least-squares map M
from the old base's values to the new one's (which takes up what alignment leaves). Writers aim at the stream; the
outputs of the head, tokens, are not mapped. An old pair of other sizes or depth runs as it stands: M is rectangular
then, and starts at what alignment makes of the old base's values; layers that meet none are not solved.

Source: this project's study (benchmarks/carry.py); the layer-wise fit is that of RegMean++ (Nguyen and others, 2025),
maps between activations as in Theseus (2026).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rotation_merge.architecture.model import Block
from rotation_merge.averaging.refit import Answer, same_place
from rotation_merge.carrying.carry_frame import FrameMaps
from rotation_merge.linalg.ridge import ridge_change
from rotation_merge.run.runner import Runner
from rotation_merge.run.stages import Taps, rows
from rotation_merge.run.store import Kept, Store


@dataclass
class ChangedAnswers:
    """What the new base gives, plus the mapped change of the old pair.

    Attributes:
        new, old, tuned: the models on the same batches; the last two in the new one's coordinates, or as they stand.
        between: where they stand as they are, of other sizes or depth: what their values are in the new one.
        weights: how much each batch counts in finding the maps.
        scale: what the change is multiplied by.
        ridge: of the maps.
    """

    new: Runner
    old: Runner
    tuned: Runner
    store: Store
    weights: list[float]
    scale: float = 1.0
    ridge: float = 0.01
    between: FrameMaps | None = None
    _kept: Kept = field(init=False)

    def __post_init__(self) -> None:
        self._kept = Kept(self.store, "answer")

    @property
    def runners(self) -> tuple[Runner, ...]:
        """All three models."""
        return self.new, self.old, self.tuned

    def learn(self, block: Block, wanted: frozenset[str]) -> bool:
        """Run all three through the block, find the maps, and keep the answers to every batch."""
        runners = self.runners
        here = self.new.advance()
        if here is None:
            return False
        met = [self._meeting(runner, here) for runner in runners[1:]]
        there = [here, *(one for one in met if one is not None)]
        if len(there) < len(runners) or not same_place(here, block):
            _pass(self.new)
            return False
        taps = [Taps(runner, own) for runner, own in zip(runners, there, strict=True)]
        starts = {} if self.between is None else {key: self.between.of(here, key) for key in wanted}
        maps = _Maps(self.ridge, {key: start for key, start in starts.items() if start is not None})
        weights, keys = self.weights if wanted or block.index is not None else [], list[str]()
        for batch, weight in enumerate(weights):
            values = [_seen(tap, batch, wanted) for tap in taps]
            keys = [key for key in sorted(wanted) if all(key in found for found in values)]
            keys = [key for key in keys if maps.fits(key, values[1][key], values[0][key])]
            new, old, tuned = ([found[key] for key in keys] for found in values)
            if weight:
                maps.add(dict(zip(keys, zip(old, new, strict=True), strict=True)))
            self.store.put(f"own:{batch}", new)
            self.store.put(f"change:{batch}", [t - o for t, o in zip(tuned, old, strict=True)])
        found = maps.solve({key for key in keys if self._is_mapped(taps[0], key)})
        for batch in range(len(weights)):
            own, change = (self.store.get(f"{what}:{batch}", self.new.device) for what in ("own", "change"))
            moved = [c if key not in found else c @ found[key].to(c) for key, c in zip(keys, change, strict=True)]
            self._kept.put(batch, {k: o + self.scale * m for k, o, m in zip(keys, own, moved, strict=True)})
            self.store.drop(f"own:{batch}")
            self.store.drop(f"change:{batch}")
        return True

    def are_of(self, merge: Runner, names: Collection[str]) -> bool:
        """They are no model's own: a change is added to them."""
        return False

    def _meeting(self, runner: Runner, own: Block) -> Block | None:
        """The block of the old pair that meets one of the new base's; those before it are passed through."""
        if self.between is None or own.index is None:
            found = runner.advance()
            while self.between is not None and found is not None and found.index is not None:
                _pass(runner)  # layers that meet none
                found = runner.advance()
            return found if found is not None and same_place(found, own) else None
        if (index := self.between.partner(own)) is None:
            return None
        while (found := runner.advance()) is not None:
            if (found.module, found.place, found.index) == (own.module, own.place, index):
                return found
            _pass(runner)
        return None

    def __call__(self, batch: int) -> Answer:
        return self._kept.get(batch, self.new.device)

    def keep(self, wanted: frozenset[str]) -> None:
        self._kept.keep(wanted)

    @staticmethod
    def _is_mapped(taps: Taps, key: str) -> bool:
        """Tokens and classes mean the same in both models."""
        one = taps.maps.get(key)
        return one is None or bool(one.outputs.parts)


def _seen(taps: Taps, batch: int, wanted: frozenset[str]) -> dict[str, Tensor]:
    seen = taps.pass_on(batch, wanted)
    return {**seen.outputs, **seen.stream}


def _pass(runner: Runner) -> None:
    """Run every batch through the present block, for those after it."""
    with runner.recording():
        for batch in range(len(runner.batches)):
            runner.run(batch)


class _Maps:
    """Least-squares maps M, ``new ~ old M``, near where they start (the identity) where the samples say nothing."""

    def __init__(self, ridge: float, starts: Mapping[str, Tensor]) -> None:
        self.ridge, self.starts = ridge, starts
        self.grams: dict[str, Tensor] = {}
        self.crosses: dict[str, Tensor] = {}

    def add(self, values: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        for key, (old, new) in values.items():
            x, y = rows(old).double(), rows(new).double()
            gram, cross = x.mT @ x, x.mT @ (y - x @ self._start(key, x))
            self.grams[key] = self.grams[key] + gram if key in self.grams else gram
            self.crosses[key] = self.crosses[key] + cross if key in self.crosses else cross

    def solve(self, keys: set[str]) -> dict[str, Tensor]:
        found = {}
        for key in keys & self.grams.keys():
            gram = self.grams[key]
            penalty = torch.full((len(gram),), self.ridge * float(gram.diagonal().mean())).to(gram)
            change = ridge_change(gram, self.crosses[key], penalty)
            if change is not None:
                found[key] = self._start(key, gram) + change.mT
        return found

    def fits(self, key: str, old: Tensor, new: Tensor) -> bool:
        """Whether there is a map between values of these sizes."""
        start = self.starts.get(key)
        sizes = (old.shape[-1], new.shape[-1])
        return sizes[0] == sizes[1] if start is None else tuple(start.shape) == sizes

    def _start(self, key: str, like: Tensor) -> Tensor:
        return self.starts[key].to(like) if key in self.starts else torch.eye(like.shape[-1]).to(like)
