r"""Refit: a merge whose linear maps are solved, one layer after the other, to do what the donors do on samples.

Every map W of the merge reads its **own** inputs X, with all the errors made so far, and is moved to give what is
wanted: W = W0 + (T - X W0^T)^T X (X^T X + ridge mean(diag X^T X))^-1. What reads the stream (or an inner space) aims at
what the donors' maps give in their own run, in the anchor's coordinates. What writes the stream aims at the stream
itself, so that errors are fed back: at the place where the donors' stream can first be seen after it. A bias is one
more column, hardly penalised. Sources: RegMean++ (Nguyen and others, 2025), PLeaS (Nasery and others, 2024).

What is wanted is pluggable (`Answers`): the donors' own answers here, a carried change elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from rotation_merge.architectures.model import Architecture, Block
from rotation_merge.averaging.maps import linear_map, same_map
from rotation_merge.averaging.stages import Seen, Stage, Taps, rows, stages
from rotation_merge.errors import DataError
from rotation_merge.linalg.ridge import ridge_factor, solved_with
from rotation_merge.samples.runner import Runner
from rotation_merge.samples.store import Kept, Store
from rotation_merge.spread.memory import give_back

BIAS = 1e-6
"""The penalty of a bias, over the number of rows."""

ROUNDED = 1e-3
"""The least ridge that products may be rounded under: from here on they are computed in the inputs' own precision."""

STRIPE = 256
"""Of products of inputs with themselves, those of so many with all that come after them are computed at once."""

AT_ONCE = 2048
"""Positions whose products are computed at once, at least: several small batches, or one large one."""

Answer = dict[str, Tensor]
"""What is wanted of one batch, by key of a map (its output) or name of a place (the stream there)."""


class Answers(Protocol):
    """What is wanted of the maps of a model, block by block."""

    def learn(self, block: Block, wanted: frozenset[str]) -> bool:
        """Find the answers to every batch for one block (of the merge's names); False: there are none."""

    def __call__(self, batch: int) -> Answer:
        """The answers to one batch."""

    def keep(self, wanted: frozenset[str]) -> None:
        """Let all other answers go."""


class Teachers:
    """The donors' own answers: to each batch those of one donor, or the weighted mean of several.

    Args:
        runners: one a donor, in the anchor's coordinates.
        who: for each batch of the merge, the donors that answer: (donor, its batch, its share; shares sum to one).
    """

    def __init__(
        self, runners: Sequence[Runner], who: Sequence[Sequence[tuple[int, int, float]]], store: Store
    ) -> None:
        self.runners, self.who, self.kept = runners, who, Kept(store, "answer")

    def learn(self, block: Block, wanted: frozenset[str]) -> bool:
        opened = [runner.advance() for runner in self.runners]
        there = [one for one in opened if one is not None and same_place(one, block)]
        if len(there) < len(opened):
            return False
        taps = [Taps(runner, own) for runner, own in zip(self.runners, there, strict=True)]
        for batch, teachers in enumerate(self.who if wanted or block.index is not None else ()):
            total: Answer = {}
            for donor, number, share in teachers:
                seen = taps[donor].pass_on(number, wanted)
                for key, value in {**seen.outputs, **seen.stream}.items():
                    if key in total:
                        total[key].add_(value, alpha=share)
                    else:
                        total[key] = value if share == 1.0 else share * value
            self.kept.put(batch, {key: total[key] for key in sorted(wanted) if key in total})
        return True

    def __call__(self, batch: int) -> Answer:
        return self.kept.get(batch, self.runners[0].device)

    def keep(self, wanted: frozenset[str]) -> None:
        self.kept.keep(wanted)


def same_place(one: Block, other: Block) -> bool:
    """Whether two blocks of models of a family stand at the same place, whatever the checkpoints call them."""
    if (one.module, one.place, one.index) != (other.module, other.place, other.index):
        return False
    keys = {info.key for info in one.tensors}
    return one.index is not None or any(info.key in keys for info in other.tensors)


@dataclass(frozen=True)
class Fitted:
    """What became of one map: how far it was from what is wanted, relative, before and after."""

    name: str
    before: float
    after: float


@dataclass
class Refitted:
    """What a refit did.

    Attributes:
        maps: the maps that were solved.
        kept: by reason, names of weights of linear maps that keep what they were.
        whole: whether the models were held whole.
    """

    maps: list[Fitted] = field(default_factory=list)
    kept: dict[str, list[str]] = field(default_factory=dict)
    whole: bool = False


TIED, EXPERTS, UNSEEN = "tied to an embedding", "experts and routers", "not run as one linear map"
"""Why maps are kept."""


@dataclass(frozen=True)
class _Written:
    """Where a map goes in the checkpoint: the name of its weight there.

    Attributes:
        rows: which of the map's outputs that weight holds.
        part: which of the weight's own outputs they are, where it holds those of other maps beside them.
    """

    name: str
    rows: slice
    part: slice | None = None


@dataclass
class Refit:
    """One refit.

    Attributes:
        merge: what is refitted, with the weights to start from.
        own: the architecture of the checkpoint that is written.
        answers: what is wanted.
        weights: how much each batch counts.
        ridge: see above.
        write: given each solved tensor by its name in the checkpoint; gives back what it has become in storage.
        skip: says which tensors keep what they are.
        watch: told about every block: what, how many are done, of how many.
        shape: what a solved change (out, in [+ 1 for a bias]) is brought to, given the Gram of the inputs and a one.
    """

    merge: Runner
    own: Architecture
    answers: Answers
    weights: Sequence[float]
    ridge: float
    write: Callable[[str, Tensor], Tensor]
    skip: Callable[[str], bool] = lambda _: False
    watch: Callable[[str, int, int], None] = lambda *_: None
    shape: Callable[[Tensor, Tensor], Tensor] | None = None
    _fused: dict[str, Tensor] = field(default_factory=dict, init=False)

    def run(self) -> Refitted:
        """Solve every map, in the order of the forward."""
        result = Refitted(whole=self.merge.whole)
        total = len(self.merge.architecture.blocks)
        while (block := self.merge.advance()) is not None:
            self.watch("refitting", len(self.merge.opened) - 1, total)
            taps = Taps(self.merge, block)
            self._block(block, taps, result)
            self._fused.clear()
            for batch in range(len(self.merge.batches)) if block.index is not None else ():
                taps.pass_on(batch)
            taps.forget()
            give_back(taps.layer)
        self.watch("refitting", total, total)
        return result

    def _block(self, block: Block, taps: Taps, result: Refitted) -> None:
        places = self._places(block, taps, result)
        chosen = stages(taps, set(places))
        solved = {key for stage in chosen for key in stage.keys}
        _keep(result, UNSEEN, [one.name for key, some in places.items() if key not in solved for one in some])
        wanted: frozenset[str] = frozenset().union(*(stage.wanted for stage in chosen))
        taps.settled.pending.update(key for stage in chosen for key in stage.keys)
        if self.answers.learn(block, wanted):
            for number, stage in enumerate(chosen, 1):
                result.maps += self._solve(taps, stage, places)
                taps.settled.settle(stage.keys)
                self.answers.keep(frozenset().union(*(later.wanted for later in chosen[number:])))

    def _places(self, block: Block, taps: Taps, result: Refitted) -> dict[str, list[_Written]]:
        """By key of a map that can be solved: where it goes."""
        found: dict[str, list[_Written]] = {}
        stored = next((other for other in self.own.blocks if same_place(other, block)), None)
        for info in () if stored is None else stored.tensors:
            one = None if stored is None else linear_map(stored, info)
            if one is None or self.skip(info.name):
                continue
            module = same_map(one, list(taps.maps.values()))
            if one.stacked or any(space.kind == "experts" for space in info.spaces()):
                _keep(result, EXPERTS, [info.name])
            elif module is None:
                parts = [(key, same_map(m, [one])) for key, m in taps.maps.items()]
                within = [(key, place[1]) for key, place in parts if place is not None]
                _keep(result, UNSEEN, [] if within else [info.name])
                for key, rows_of_it in within:
                    found.setdefault(key, []).append(_Written(info.name, slice(None), rows_of_it))
            elif self.merge.is_shared(module[0].info.name):
                _keep(result, TIED, [info.name])
            else:
                found.setdefault(module[0].info.key, []).append(_Written(info.name, module[1]))
        return found

    def _solve(self, taps: Taps, stage: Stage, places: Mapping[str, list[_Written]]) -> list[Fitted]:
        sums: _Sums | None = None
        for batch, weight in enumerate(self.weights):
            if weight == 0:
                continue
            seen, wanted = taps.see(batch, stage.until), self.answers(batch)
            keys = [key for key in stage.keys if stage.aims(key) <= wanted.keys()]
            if not keys:
                return []
            inputs = seen.inputs[keys[0]]
            sums = sums or _Sums(inputs, torch.float64 if self.ridge < ROUNDED else inputs.dtype)
            sums.add(inputs, {key: (lacking(key, stage, seen, wanted), seen.outputs[key]) for key in keys}, weight)
        if sums is None:
            return []
        sums.flush()
        return [self._set(key, taps, sums, places[key]) for key in sums.cross]

    def _set(self, key: str, taps: Taps, sums: _Sums, places: Sequence[_Written]) -> Fitted:
        module, name = cast(Any, taps.modules[key]), taps.maps[key].info.name
        turned = isinstance(module, Conv1D)
        biased = getattr(module, "bias", None) is not None
        best = sums.change(key, self.ridge, biased, places[0].name)
        change = best if self.shape is None else self.shape(best, sums.gram)
        fitted = Fitted(places[0].name, *sums.errors(key, change, self.ridge if change is best else None))
        weight, bias = module.weight.double(), module.bias.double() if biased else None
        width = sums.width
        moved = (weight.mT if turned else weight) + change[:, :width]
        stored = [self._store(one, moved[one.rows], turned) for one in places]
        self.merge.set(name, torch.cat(stored).mT if turned else torch.cat(stored))
        if bias is not None:
            added = bias + change[:, width]
            names = [replace(one, name=one.name.removesuffix("weight") + "bias") for one in places]
            parts = [self._written(one, added[one.rows]) for one in names]
            self.merge.set(name.removesuffix("weight") + "bias", torch.cat(parts))
        return fitted

    def _store(self, one: _Written, weight: Tensor, turned: bool) -> Tensor:
        """A weight (out, in) as it is written, and what it has become, (out, in) again."""
        kept = self._written(one, weight.mT if turned else weight)
        return kept.mT if turned else kept

    def _written(self, one: _Written, tensor: Tensor) -> Tensor:
        """A tensor, or its part of one that several maps are written into, as it is stored."""
        if one.part is None:
            return self.write(one.name, tensor)
        if one.name not in self._fused:
            self._fused[one.name] = self.merge.stored[one.name].to(tensor, copy=True)
        whole = self._fused[one.name]
        whole[one.part] = tensor
        return self.write(one.name, whole)[one.part]


def _keep(result: Refitted, why: str, names: Sequence[str]) -> None:
    if names:
        result.kept.setdefault(why, []).extend(names)


def lacking(key: str, stage: Stage, seen: Seen, wanted: Answer) -> Tensor:
    """What the output of a map of the merge lacks, (positions, out).

    Of a map that writes the stream it is what the stream lacks, over how much the output counts there.
    """
    branch = stage.branches.get(key)
    if branch is None:
        return rows(wanted[key]) - rows(seen.outputs[key])
    apart = rows(wanted[branch.place]) - rows(seen.stream[branch.place])
    for other, gain in branch.others:
        apart = apart - gain * (rows(wanted[other]) - rows(seen.outputs[other]))
    counts = branch.gain != 0
    return torch.where(counts, apart / torch.where(counts, branch.gain, torch.ones_like(branch.gain)), 0.0)


class _Sums:
    """Products of inputs with themselves and with what outputs lack, over all samples; the last input is the bias.

    Args:
        like: inputs of the maps.
        dtype: what products of a few batches are computed in; they are added up in float64.
    """

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self.width, self.rows, self.dtype = like.shape[-1], 0.0, dtype
        self.cross: dict[str, Tensor] = {}
        self.squares: dict[str, list[float]] = {}
        self._factors: dict[int, Tensor | None] = {}
        self._upper = torch.zeros(self.width + 1, self.width + 1, dtype=torch.float64, device=like.device)
        self._inputs: list[Tensor] = []
        self._lacks: dict[str, list[Tensor]] = {}
        self._weight = 1.0

    @cached_property
    def gram(self) -> Tensor:
        """Products of inputs (and a one) with themselves, once all are there."""
        return self._upper.triu() + self._upper.triu(1).mT

    def add(self, inputs: Tensor, lacks: Mapping[str, tuple[Tensor, Tensor]], weight: float) -> None:
        """One batch: the inputs, and by key of a map what its output lacks, (positions, out), and the output."""
        if weight != self._weight or sum(map(len, self._inputs)) >= AT_ONCE:
            self.flush()
        self._weight = weight
        self._inputs.append(rows(inputs).to(self.dtype))
        for key, (lack, output) in lacks.items():
            self._lacks.setdefault(key, []).append(lack.to(self.dtype))
            squares = self.squares.setdefault(key, [0.0, 0.0])
            squares[0] += weight * _square(lack)
            squares[1] += weight * _square(rows(output) + lack)

    def flush(self) -> None:
        """Add up the products of what waits."""
        if not self._inputs:
            return
        x, lacks, weight = torch.cat(self._inputs), self._lacks, self._weight
        self._inputs, self._lacks = [], {}
        x = torch.cat([x, x.new_ones(len(x), 1)], 1)
        self.rows += weight * len(x)
        for i in range(0, self.width + 1, STRIPE):
            self._upper[i : i + STRIPE, i:].add_(x[:, i : i + STRIPE].mT @ x[:, i:], alpha=weight)
        for key, parts in lacks.items():
            part = x.mT @ torch.cat(parts)
            if key not in self.cross:
                self.cross[key] = torch.zeros_like(part, dtype=torch.float64)
            self.cross[key].add_(part, alpha=weight)

    def change(self, key: str, ridge: float, biased: bool, name: str) -> Tensor:
        """The map's change, (out, in), with a bias (out, in + 1).

        Raises:
            DataError: the inputs do not determine it.
        """
        size = self.width + int(biased)
        if size not in self._factors:
            self._factors[size] = ridge_factor(self._upper[:size, :size], self._penalty(ridge)[:size])
        factor = self._factors[size]
        if factor is None:
            raise DataError(
                f"{self.rows:.0f} positions of the samples do not determine '{name}' ({self.width} inputs)",
                remedy="give more samples, or a ridge above 0 ('ridge: 0.01')",
            )
        return solved_with(factor, self.cross[key][:size])

    def _penalty(self, ridge: float) -> Tensor:
        """Of each input and of the bias, (in + 1,)."""
        penalty = torch.full_like(self._upper[0], ridge * float(self._upper.diagonal()[: self.width].mean()))
        penalty[self.width] = BIAS * self.rows
        return penalty

    def errors(self, key: str, change: Tensor, ridge: float | None) -> tuple[float, float]:
        """Root of the squared error over the square of what is wanted: before and after.

        Args:
            ridge: under which the change is the best one, whose product with the Gram is known; None: under none.
        """
        size = change.shape[1]
        before, whole = self.squares[key]
        reached = (change.mT * self.cross[key][:size]).sum()
        if ridge is None:
            spent = (change @ self.gram[:size, :size] * change).sum()
        else:
            spent = reached - (change.square() @ self._penalty(ridge)[:size]).sum()
        after = max(before - float(2 * reached - spent), 0.0)
        return (before / whole) ** 0.5 if whole else 0.0, (after / whole) ** 0.5 if whole else 0.0


def _square(x: Tensor) -> float:
    """The sum of squares: of each row in its own precision, in all in float64."""
    return float(torch.linalg.vector_norm(x, dim=-1).double().square().sum())
