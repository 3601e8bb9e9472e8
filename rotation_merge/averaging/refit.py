r"""Refit: solves a model's linear maps, layer by layer, to reproduce target outputs on samples.

Every map W of the merge reads the merge's **own** inputs X, with all earlier errors, and is moved towards its target T:
W = W0 + (T - X W0^T)^T X (X^T X + ridge mean(diag X^T X))^-1. Readers of the stream (or of an inner space) aim at the
outputs of the same map in the target models, in the anchor's coordinates. Writers aim at the stream itself, at the
first place after them where the target models read it, so that errors are fed back. A bias is one more column, hardly
penalised. Sources: RegMean++ (Nguyen and others, 2025), PLeaS (Nasery and others, 2024).

Donors give one kind of targets (`teacher_answers`), a carried change another (`carrying.refit`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from rotation_merge.architecture.model import Architecture, Block
from rotation_merge.averaging.ridge import RidgeSums, softmax_change
from rotation_merge.errors import DataError
from rotation_merge.model.forms import restructured
from rotation_merge.model.tensors import Tensors, by_name
from rotation_merge.run.maps import LinearMap, maps_of, same_map
from rotation_merge.run.runner import Runner, StateStore, StoredValue
from rotation_merge.run.stages import BlockActivations, BlockHooks, Stage, stages
from rotation_merge.workers import Progress

ROUNDED = 1e-3
"""The least ridge that products may be rounded under: from here on they are computed in the inputs' own precision."""

TIED, EXPERTS, UNSEEN = "tied to an embedding", "experts and routers", "not run as one linear map"
"""Why maps are not solved."""

Answer = dict[str, Tensor]
"""Targets of one batch, by key of a map (its output) or name of a place (the stream there)."""

Answers = Callable[[Sequence[BlockHooks], frozenset[str]], Iterable[Answer]]
"""Runs the target models through their present blocks, and gives the answers to every batch of the merge, in order;
takes the blocks, one a model, and the keys and places that are needed."""


def teacher_answers(shares: Sequence[float] | None = None) -> Answers:
    """The donors' outputs as targets, each donor's on its own batches one after the other.

    Args:
        shares: of each donor, where all have the same batches, and the weighted mean of their outputs is the target;
            they sum to one.
    """

    def answers(donors: Sequence[BlockHooks], keys: frozenset[str]) -> Iterator[Answer]:
        if shares is None:
            for donor in donors:
                yield from (donor.pass_on(batch, keys) for batch in range(len(donor.runner.batches)))
            return
        for batch in range(len(donors[0].runner.batches)):
            total: Answer = {}
            for donor, share in zip(donors, shares, strict=True):
                for key, value in donor.pass_on(batch, keys).items():
                    total[key] = total[key].add_(value, alpha=share) if key in total else share * value
            yield total

    return answers


def on_device(answer: Answer, device: torch.device | str) -> Answer:
    """Targets of one batch on a device."""
    return {key: value.to(device) for key, value in answer.items()}


def same_place(first: Block, second: Block) -> bool:
    """Whether two blocks of one family correspond, whatever their names in the checkpoints."""
    if (first.module, first.place, first.index) != (second.module, second.place, second.index):
        return False
    keys = {info.key for info in first.tensors}
    return first.index is not None or any(info.key in keys for info in second.tensors)


@dataclass
class Refit:
    """One refit.

    Attributes:
        merge: the model to refit, with its initial weights.
        stored_architecture: of the checkpoint that is written.
        targets: the models that the answers come from.
        answers: the targets of every batch.
        weights: weight of each batch.
        ridge: see above.
        store: where solved tensors wait; the answers to each batch wait on the CPU.
        rounded: a solved tensor as it is stored, by its checkpoint name.
        skip: whether a tensor stays unchanged, by its checkpoint name.
        watch: called for every block with a label, the count done and the total.
        shape: function applied to a solved change (out, in [+ 1 for a bias]), given the Gram of the inputs and a one.
        softmax: ridge of a map that gives the model's logits, which is then fitted to the answers' probabilities from
            the least-squares change on (`softmax_change`); None: its logits are solved like other outputs.
        held_out: by batch, 1 where maps which read one input have their ridge chosen on it (`RidgeSums.best_ridge`),
            before they are solved on all; where there are none, their ridge is `ridge`.
        errors: relative errors of the solved maps' outputs before and after, by checkpoint name.
        ridges: of the solved maps, by checkpoint name.
        unsolved: by reason, names of linear maps that stay.
    """

    merge: Runner
    stored_architecture: Architecture
    targets: Sequence[Runner]
    answers: Answers
    weights: Sequence[float]
    ridge: float
    store: StateStore
    rounded: Callable[[str, Tensor], Tensor] = lambda _, tensor: tensor
    skip: Callable[[str], bool] = lambda _: False
    watch: Progress = lambda *_: None
    shape: Callable[[Tensor, Tensor], Tensor] | None = None
    softmax: float | None = None
    held_out: Sequence[int] = ()
    errors: dict[str, tuple[float, float]] = field(default_factory=dict, init=False)
    ridges: dict[str, float] = field(default_factory=dict, init=False)
    unsolved: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list), init=False)
    _solved: dict[str, StoredValue] = field(default_factory=dict, init=False)
    _names: list[str] = field(default_factory=list, init=False)

    def run(self) -> Refit:
        """Solve every map, in the order of the forward."""
        total = len(self.merge.architecture.blocks)
        while (block := self.merge.advance()) is not None:
            self.watch("refitting", len(self.merge.opened) - 1, total)
            hooks = BlockHooks(self.merge, block)
            self._block(block, hooks)
            for batch in range(len(self.merge.batches)) if block.index is not None else ():
                hooks.pass_on(batch)
        self.watch("refitting", total, total)
        return self

    def solved(self) -> Tensors:
        """The solved tensors by their checkpoint names, read when they are asked for."""
        source, parts = self.merge.source, self._solved
        known = Tensors(
            {name: source.shapes[name] for name in parts},
            {name: source.dtypes[name] for name in parts},
            by_name(lambda name: cast(Tensor, parts[name].get())),
        )
        return restructured(source.replaced(known), self.merge.architecture, self.stored_architecture).only(self._names)

    def _block(self, block: Block, hooks: BlockHooks) -> None:
        names = self._solvable(block, hooks)
        block_stages = stages(hooks, set(names))
        keys = {key for stage in block_stages for key in stage.keys}
        for name in (name for key, of_key in names.items() if key not in keys for name in of_key):
            self.unsolved[UNSEEN].append(name)
        present = [(runner, runner.advance()) for runner in self.targets]
        target_hooks = [BlockHooks(r, its) for r, its in present if its is not None and same_place(its, block)]
        needed: frozenset[str] = frozenset().union(*(stage.wanted for stage in block_stages))
        if len(target_hooks) < len(present) or not (needed or block.index is not None):
            return
        answers = [on_device(answer, "cpu") for answer in self.answers(target_hooks, needed)]
        for number, stage in enumerate(block_stages, 1):
            self._solve(hooks, stage, names, answers)
            later = frozenset[str]().union(*(following.wanted for following in block_stages[number:]))
            answers = [{key: value for key, value in answer.items() if key in later} for answer in answers]

    def _solvable(self, block: Block, hooks: BlockHooks) -> dict[str, list[str]]:
        """By key of each map that can be solved, the checkpoint tensors that hold it, or parts of it."""
        names: dict[str, list[str]] = {}
        stored = next((each for each in self.stored_architecture.blocks if same_place(each, block)), None)
        for linear in () if stored is None else maps_of(stored):
            info, keys = linear.info, _keys_of(linear, hooks.maps)
            if self.skip(info.name):
                continue
            if linear.stacked or any(space.kind == "experts" for space in info.spaces()):
                self.unsolved[EXPERTS].append(info.name)
            elif not keys:
                self.unsolved[UNSEEN].append(info.name)
            elif any(self.merge.is_shared(hooks.maps[key].info.name) for key in keys):
                self.unsolved[TIED].append(info.name)
            else:
                for key in keys:
                    names.setdefault(key, []).append(info.name)
        return names

    def _solve(
        self, hooks: BlockHooks, stage: Stage, names: Mapping[str, Sequence[str]], answers: Sequence[Answer]
    ) -> None:
        """Solve the maps of a stage from sums over all batches."""
        parts, held_out = dict[int, RidgeSums](), self.held_out or [0] * len(self.weights)
        is_head, head_inputs = self._gives_logits(hooks, stage), list[Tensor]()
        for batch, weight in enumerate(self.weights):
            wanted = {key: value for key, value in answers[batch].items() if key in stage.wanted}
            answer = on_device(wanted, self.merge.device)
            activations = hooks.see(batch, stage.wanted.union(stage.keys))
            keys = [key for key in stage.keys if stage.aims(key) <= answer.keys()]
            if not keys:
                return
            inputs = activations.rows(keys[0], inputs=True)
            if is_head:
                head_inputs.append(inputs)
            if held_out[batch] not in parts:
                parts[held_out[batch]] = RidgeSums(inputs, torch.float64 if self.ridge < ROUNDED else inputs.dtype)
            lacks = {key: (lacking(key, stage, activations, answer), activations.rows(key)) for key in keys}
            parts[held_out[batch]].add(inputs, lacks, weight)
        if not parts:
            return
        sums, biased = parts[0], {key: getattr(hooks.modules[key], "bias", None) is not None for key in keys}
        for part in parts.values():
            part.flush()
        ridge = sums.best_ridge(parts[1], biased) if 1 in parts else self.ridge
        for key in sums.cross:
            name = names[key][0]
            best = sums.change(key, ridge, biased[key])
            if best is None:
                problem = f"{sums.rows:.0f} positions of the samples do not determine '{name}' ({sums.width} inputs)"
                raise DataError(problem, remedy="give more samples, or a ridge above 0 ('ridge: 0.01')")
            change = self._head_change(hooks, key, best, head_inputs, answers) if is_head else best
            if self.shape is not None:
                change = self.shape(change, sums.gram)
            self.errors[name], self.ridges[name] = sums.errors(key, change, ridge if change is best else None), ridge
            self._set(hooks, key, change, names[key])

    def _gives_logits(self, hooks: BlockHooks, stage: Stage) -> bool:
        """Whether the only map of a stage outputs the model's logits, so that it is fitted by softmax."""
        if self.softmax is None or len(stage.keys) > 1 or hooks.maps[stage.keys[0]].outputs.parts:
            return False
        results: list[Any] = []
        with self.merge.model.register_forward_hook(lambda *arguments: results.append(arguments[-1])):
            output = hooks.see(self.merge.least).values.get(stage.keys[0])
        logits = getattr(results[-1], "logits", None) if results else None
        return isinstance(logits, Tensor) and output is not None and torch.equal(logits.flatten(), output.flatten())

    def _head_change(
        self, hooks: BlockHooks, key: str, start: Tensor, inputs: Sequence[Tensor], answers: Sequence[Answer]
    ) -> Tensor:
        """The change of a head that brings its softmax nearest to the targets' probabilities."""
        module = cast(Any, hooks.modules[key])
        weight = module.weight.mT if isinstance(module, Conv1D) else module.weight
        if module.bias is not None:
            weight = torch.cat([weight, module.bias[:, None]], 1)
        ridge, device = cast(float, self.softmax), self.merge.device
        return softmax_change(weight, start, inputs, lambda i: answers[i][key].to(device), self.weights, ridge)

    def _set(self, hooks: BlockHooks, key: str, change: Tensor, names: Sequence[str]) -> None:
        """Give the merge a map with its change, (out, in [+ 1 for a bias]), rounded as it is stored."""
        module, name = cast(Any, hooks.modules[key]), hooks.maps[key].info.name
        turned = isinstance(module, Conv1D)
        weight = module.weight.mT if turned else module.weight
        width = weight.shape[1]
        solved = weight + change[:, :width]
        self._put(name, solved.mT if turned else solved, names)
        if change.shape[1] > width:
            biases = [f"{stored.removesuffix('weight')}bias" for stored in names]
            self._put(f"{name.removesuffix('weight')}bias", module.bias + change[:, width], biases)

    def _put(self, name: str, tensor: Tensor, names: Sequence[str]) -> None:
        """Keep a solved tensor, and run the merge with it from here on."""
        stored = self.rounded(names[0], tensor)
        self._solved[name] = self.store.put(stored)
        self._names += [each for each in names if each not in self._names]
        self.merge.set(name, stored.to(tensor))


def _keys_of(stored: LinearMap, maps: Mapping[str, LinearMap]) -> list[str]:
    """Keys of the maps of a module that a checkpoint's tensor is, is a part of, or holds side by side."""
    whole = same_map(stored, list(maps.values()))
    return [key for key, m in maps.items() if same_map(m, [stored])] if whole is None else [whole[0].info.key]


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
