r"""Refit: solves a merge's linear maps, layer by layer, to reproduce the donors' outputs on samples.

Every map W of the merge reads the merge's **own** inputs X, with all earlier errors, and is moved towards its target T:
W = W0 + (T - X W0^T)^T X (X^T X + ridge mean(diag X^T X))^-1. Readers of the stream (or of an inner space) aim at the
outputs of the donors' maps in their own run, in the anchor's coordinates. Writers aim at the stream itself, at the
first place after them where the donors' stream is read, so that errors are fed back. A bias is one more column, hardly
penalised. Sources: RegMean++ (Nguyen and others, 2025), PLeaS (Nasery and others, 2024).

The donors' answers are one kind of `Targets`; a carried change (`carrying.refit`) is another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from rotation_merge.architecture.model import Architecture, Block
from rotation_merge.averaging.ridge import RidgeSums
from rotation_merge.averaging.softmax import softmax_change
from rotation_merge.run.maps import linear_map, same_map
from rotation_merge.run.runner import Runner
from rotation_merge.run.stages import BlockActivations, BlockHooks, Stage, stages
from rotation_merge.run.store import StateStore, StoredValue, hooked
from rotation_merge.workers import Progress

ROUNDED = 1e-3
"""The least ridge that products may be rounded under: from here on they are computed in the inputs' own precision."""

Answer = dict[str, Tensor]
"""Targets of one batch, by key of a map (its output) or name of a place (the stream there)."""


class Targets:
    """The target outputs of a model's maps, block by block, from other models that run beside it.

    Args:
        runners: the other models, in the refitted one's coordinates.
        store: where the answers to each batch wait.
    """

    def __init__(self, runners: Sequence[Runner], store: StateStore) -> None:
        self.runners, self.store = runners, store
        self.kept: dict[int, dict[str, StoredValue]] = {}

    def answer(self, taps: Sequence[BlockHooks], answer_keys: frozenset[str]) -> None:
        """Run all models through their present blocks, and put the answers to every batch into `kept`."""
        raise NotImplementedError

    def compute_answers(self, block: Block, answer_keys: frozenset[str]) -> bool:
        """Compute the targets of one block (by the merge's names) for every batch; False if there are none."""
        opened = [(runner, runner.advance()) for runner in self.runners]
        taps = [BlockHooks(r, partner) for r, partner in opened if partner is not None and same_place(partner, block)]
        if len(taps) < len(opened):
            return False
        if answer_keys or block.index is not None:
            self.answer(taps, answer_keys)
        return True

    def keep(self, names: frozenset[str]) -> None:
        """Forget all answers but those of these names."""
        for batch, answer in self.kept.items():
            self.kept[batch] = {name: value for name, value in answer.items() if name in names}

    def __call__(self, batch: int) -> Answer:
        device = self.runners[0].device
        return {name: value.get(device) for name, value in self.kept.get(batch, {}).items()}


class Teachers(Targets):
    """The donors' outputs as targets: one donor's for each batch, or a weighted mean.

    Args:
        runners: one a donor.
        batch_teachers: for each batch of the merge, the donors that answer: (donor, its batch, its share; shares sum
            to one).
    """

    def __init__(
        self, runners: Sequence[Runner], batch_teachers: Sequence[Sequence[tuple[int, int, float]]], store: StateStore
    ) -> None:
        super().__init__(runners, store)
        self.batch_teachers = batch_teachers

    def answer(self, taps: Sequence[BlockHooks], answer_keys: frozenset[str]) -> None:
        for batch, teachers in enumerate(self.batch_teachers):
            total: Answer = {}
            for donor, number, share in teachers:
                for key, value in taps[donor].pass_on(number, answer_keys).items():
                    if key in total:
                        total[key].add_(value, alpha=share)
                    else:
                        total[key] = value if share == 1.0 else share * value
            self.kept[batch] = self.store.put_each(total)


def same_place(first: Block, second: Block) -> bool:
    """Whether two blocks of one family correspond, whatever their names in the checkpoints."""
    if (first.module, first.place, first.index) != (second.module, second.place, second.index):
        return False
    keys = {info.key for info in first.tensors}
    return first.index is not None or any(info.key in keys for info in second.tensors)


@dataclass(frozen=True)
class MapErrors:
    """The relative error of one map before and after the refit."""

    name: str
    before: float
    after: float


@dataclass
class RefitResult:
    """The result of a refit.

    Attributes:
        maps: the maps that were solved.
        kept: by reason, names of linear maps' weights that are unchanged.
        losses: on samples held out, before and after, where they judged.
    """

    maps: list[MapErrors] = field(default_factory=list)
    kept: dict[str, list[str]] = field(default_factory=dict)
    losses: tuple[float, float] | None = None


TIED, EXPERTS, UNSEEN = "tied to an embedding", "experts and routers", "not run as one linear map"
"""Why maps are kept."""


@dataclass(frozen=True)
class _SolvedTensor:
    """The checkpoint tensor that a solved map is written to.

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
        merge: the model to refit, with its initial weights.
        stored_architecture: the architecture of the checkpoint that is written.
        answers: the targets.
        weights: weight of each batch.
        ridge: see above.
        write: takes each solved tensor by its checkpoint name; returns it as rounded for storage.
        skip: whether a tensor stays unchanged, by name.
        watch: called for every block and its progress with a label, the count done and the total.
        shape: function applied to a solved change (out, in [+ 1 for a bias]), given the Gram of the inputs and a one.
        softmax: ridge of a map that gives the model's logits, which is then fitted to the answers' probabilities from
            the least-squares change on (`averaging.softmax`); None: its logits are solved like other outputs.
    """

    merge: Runner
    stored_architecture: Architecture
    answers: Targets
    weights: Sequence[float]
    ridge: float
    write: Callable[[str, Tensor], Tensor]
    skip: Callable[[str], bool] = lambda _: False
    watch: Progress = lambda *_: None
    shape: Callable[[Tensor, Tensor], Tensor] | None = None
    softmax: float | None = None
    _fused: dict[str, Tensor] = field(default_factory=dict, init=False)

    def run(self) -> RefitResult:
        """Solve every map, in the order of the forward."""
        result, total = RefitResult(), len(self.merge.architecture.blocks)
        while (block := self.merge.advance()) is not None:
            self.watch("refitting", len(self.merge.opened) - 1, total)
            taps = BlockHooks(self.merge, block)
            self._block(block, taps, result)
            self._fused.clear()
            for batch in range(len(self.merge.batches)) if block.index is not None else ():
                taps.pass_on(batch)
        self.watch("refitting", total, total)
        return result

    def _block(self, block: Block, taps: BlockHooks, result: RefitResult) -> None:
        places = self._places(block, taps, result)
        chosen = stages(taps, set(places))
        solved = {key for stage in chosen for key in stage.keys}
        _keep(result, UNSEEN, [slot.name for key, slots in places.items() if key not in solved for slot in slots])
        answer_keys: frozenset[str] = frozenset().union(*(stage.wanted for stage in chosen))
        if self.answers.compute_answers(block, answer_keys):
            done, total = len(self.merge.opened) - 1, len(self.merge.architecture.blocks)
            for number, stage in enumerate(chosen, 1):
                self.watch("refitting", round(done + number / (len(chosen) + 2), 2), total)
                result.maps += self._solve(taps, stage, places)
                self.answers.keep(frozenset().union(*(later.wanted for later in chosen[number:])))
            self.watch("refitting", round(done + 1 - 1 / (len(chosen) + 2), 2), total)

    def _places(self, block: Block, taps: BlockHooks, result: RefitResult) -> dict[str, list[_SolvedTensor]]:
        """Checkpoint tensors that each solvable map is written to, by the map's key."""
        slots: dict[str, list[_SolvedTensor]] = {}
        stored = next(
            (candidate for candidate in self.stored_architecture.blocks if same_place(candidate, block)), None
        )
        for info in () if stored is None else stored.tensors:
            linear = None if stored is None else linear_map(stored, info)
            if linear is None or self.skip(info.name):
                continue
            module = same_map(linear, list(taps.maps.values()))
            if linear.stacked or any(space.kind == "experts" for space in info.spaces()):
                _keep(result, EXPERTS, [info.name])
            elif module is None:
                parts = [(key, same_map(m, [linear])) for key, m in taps.maps.items()]
                within = [(key, place[1]) for key, place in parts if place is not None]
                _keep(result, UNSEEN, [] if within else [info.name])
                for key, rows_of_it in within:
                    slots.setdefault(key, []).append(_SolvedTensor(info.name, slice(None), rows_of_it))
            elif self.merge.is_shared(module[0].info.name):
                _keep(result, TIED, [info.name])
            else:
                slots.setdefault(module[0].info.key, []).append(_SolvedTensor(info.name, module[1]))
        return slots

    def _solve(self, taps: BlockHooks, stage: Stage, places: Mapping[str, list[_SolvedTensor]]) -> list[MapErrors]:
        sums: RidgeSums | None = None
        is_head = self._gives_logits(taps, stage)
        head_inputs: dict[int, Tensor] = {}
        for batch in (batch for batch, weight in enumerate(self.weights) if weight != 0):
            activations, answer = taps.see(batch, stage.until), self.answers(batch)
            keys = [key for key in stage.keys if stage.aims(key) <= answer.keys()]
            if not keys:
                return []
            inputs = activations.rows(keys[0], inputs=True)
            if is_head:
                head_inputs[batch] = inputs
            sums = sums or RidgeSums(inputs, torch.float64 if self.ridge < ROUNDED else inputs.dtype)
            lacks = {key: (lacking(key, stage, activations, answer), activations.rows(key)) for key in keys}
            sums.add(inputs, lacks, self.weights[batch])
        if sums is None:
            return []
        sums.flush()
        return [self._fit(key, taps, sums, places[key], head_inputs) for key in sums.cross]

    def _gives_logits(self, taps: BlockHooks, stage: Stage) -> bool:
        """Whether the only map of a stage outputs the model's logits, so that it is fitted by softmax."""
        if self.softmax is None or len(stage.keys) > 1 or taps.maps[stage.keys[0]].outputs.parts:
            return False
        results: list[Any] = []
        with hooked([self.merge.model.register_forward_hook(lambda *arguments: results.append(arguments[-1]))]):
            output = taps.first().values.get(stage.keys[0])
        logits = getattr(results[-1], "logits", None) if results else None
        return isinstance(logits, Tensor) and output is not None and torch.equal(logits.flatten(), output.flatten())

    def _fit(
        self,
        key: str,
        taps: BlockHooks,
        sums: RidgeSums,
        places: Sequence[_SolvedTensor],
        head_inputs: Mapping[int, Tensor],
    ) -> MapErrors:
        """Solve one map and write it.

        Args:
            head_inputs: of each batch, of a map whose outputs are logits that are fitted by softmax; else empty.
        """
        biased = getattr(taps.modules[key], "bias", None) is not None
        best = change = sums.change(key, self.ridge, biased, places[0].name)
        if head_inputs:
            change = self._head_change(key, taps, best, head_inputs)
        if self.shape is not None:
            change = self.shape(change, sums.gram)
        fitted = MapErrors(places[0].name, *sums.errors(key, change, self.ridge if change is best else None))
        self._set(key, taps, change, places)
        return fitted

    def _head_change(self, key: str, taps: BlockHooks, start: Tensor, head_inputs: Mapping[int, Tensor]) -> Tensor:
        """The change of a head that brings its softmax nearest to the targets' probabilities."""
        module, batches = cast(Any, taps.modules[key]), list(head_inputs)
        weight = module.weight.mT if isinstance(module, Conv1D) else module.weight
        if module.bias is not None:
            weight = torch.cat([weight, module.bias[:, None]], 1)

        def answer(number: int) -> Tensor:
            return self.answers(batches[number])[key]

        shares = [self.weights[batch] for batch in batches]
        return softmax_change(weight, start, list(head_inputs.values()), answer, shares, cast(float, self.softmax))

    def _set(self, key: str, taps: BlockHooks, change: Tensor, places: Sequence[_SolvedTensor]) -> None:
        """Write a map with its change, (out, in [+ 1 for a bias])."""
        module, name = cast(Any, taps.modules[key]), taps.maps[key].info.name
        turned = isinstance(module, Conv1D)
        weight = module.weight.mT if turned else module.weight
        width = weight.shape[1]
        stored = torch.cat([self._stored(slot, (weight + change[:, :width])[slot.rows], turned) for slot in places])
        self.merge.set(name, stored.mT if turned else stored)
        if change.shape[1] > width:
            stem, bias = name.removesuffix("weight"), module.bias + change[:, width]
            slots = [replace(slot, name=slot.name.removesuffix("weight") + "bias") for slot in places]
            self.merge.set(f"{stem}bias", torch.cat([self._stored(slot, bias[slot.rows]) for slot in slots]))

    def _stored(self, slot: _SolvedTensor, tensor: Tensor, turned: bool = False) -> Tensor:
        """Write a weight (out, in), or a bias; returns it as it is after rounding."""
        if slot.part is None:
            return self.write(slot.name, tensor.mT).mT if turned else self.write(slot.name, tensor)
        if slot.name not in self._fused:
            self._fused[slot.name] = self.merge.stored[slot.name].to(tensor, copy=True)
        whole = self._fused[slot.name]
        whole[slot.part] = tensor
        return self.write(slot.name, whole)[slot.part]


def _keep(result: RefitResult, why: str, names: Sequence[str]) -> None:
    if names:
        result.kept.setdefault(why, []).extend(names)


def lacking(key: str, stage: Stage, activations: BlockActivations, answer: Answer) -> Tensor:
    """Target minus output of a map of the merge, (positions, out).

    For a map that writes the stream: the residual of the stream, divided by the output's gain there.
    """
    branch = stage.branches.get(key)
    if branch is None:
        return answer[key] - activations.rows(key)
    apart = answer[branch.place] - activations.rows(branch.place)
    for added_key, gain in branch.added:
        apart = apart - gain * (answer[added_key] - activations.rows(added_key))
    counts = branch.gain != 0
    return torch.where(counts, apart / torch.where(counts, branch.gain, torch.ones_like(branch.gain)), 0.0)
