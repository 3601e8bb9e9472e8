"""Changes that samples solve for, scale and judge: a method's, plain addition, an average with the new base's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from rotation_merge.architecture.model import Block, TensorInfo
from rotation_merge.averaging.polish import Polish, PolishConfig
from rotation_merge.averaging.wudi import added_by_wudi
from rotation_merge.carrying.bases import Transfer
from rotation_merge.carrying.config import MERGED, NONE, PLAIN
from rotation_merge.carrying.delta import Delta
from rotation_merge.carrying.distil import AT_A_STEP, adapter_in_training, answered_by_target
from rotation_merge.carrying.judge import (
    AT_ONCE,
    HELD_OUT,
    SCALES,
    HeldOutSamples,
    LossPair,
    RecoveredLift,
    TransferSamples,
    read_parts,
)
from rotation_merge.carrying.refit import refit_change
from rotation_merge.files import Store, TemporaryFolder
from rotation_merge.matching.alignment import Alignment
from rotation_merge.model.apply import read_tensor
from rotation_merge.model.forms import named_as
from rotation_merge.model.low_rank import dense
from rotation_merge.model.run_keys import mark_of
from rotation_merge.model.tensors import Tensors
from rotation_merge.model.view import View
from rotation_merge.run.data import Samples, data_hash, read_samples, unpadded
from rotation_merge.run.evaluate import score
from rotation_merge.run.functions import Batch, architecture_of, copy_parameters
from rotation_merge.run.maps import linear_map
from rotation_merge.run.runner import Runner
from rotation_merge.run.sample_kinds import SELF
from rotation_merge.workers import Progress

CROSS_ENTROPY = ("next token", "masked token", "class")
"""Tasks whose loss is the cross entropy of the softmax of the logits."""

HEAD_RIDGE = 3e-3
"""Of a head that is fitted to probabilities, per position and mean square of its inputs."""

Judgement = Mapping[str, LossPair]
"""Losses by method, see `HeldOutSamples.losses`."""


@dataclass(frozen=True)
class ChangeCandidate:
    """A change that samples judge.

    Attributes:
        method: a `Method`, `PLAIN`, `MERGED` or `NONE`.
        delta: of the new base, as it is written: of an adapter cut to its rank.
        scale: that was chosen for it, or given.
    """

    method: str
    delta: Delta
    scale: float = 0.0


def sampled_change(
    transfer: Transfer, place: str | None, samples: Samples = None, progress: Progress | None = None
) -> tuple[ChangeCandidate, RecoveredLift, list[str]]:
    """The change that samples held out prefer, with its recovered lift, and lines on how it was solved and judged.

    It is the method's, another one, or none.

    Args:
        place: that interrupted work waits beside; None: it is lost.
        samples: batches, or the name of a source; None: the config's `data`.

    Raises:
        RotationMergeError: the samples cannot be read, or are of no use to the models.
    """
    bases, tuned = transfer.bases, transfer.tuned
    assert tuned is not None
    views = {"new": transfer.base, "old": bases.old_as_new, "tuned": tuned}
    load = partial(module, device=bases.device)
    parts = read_parts(tuned, transfer.base, transfer.config, samples, load)
    return _Sampling(transfer, views, parts, load, place, progress or (lambda *_: None)).chosen()


def module(view: View, device: str) -> Any:
    """A model in memory, on a device, with parameters of its own."""
    model = Runner(view, [], device=device).fill_all()
    copy_parameters(model)
    return model


@dataclass(frozen=True)
class _Sampling:
    """One transfer with its models and samples.

    Attributes:
        load: gives the module of a model.
        known: losses by samples, method and scale; without a change there is one model.
    """

    transfer: Transfer
    views: Mapping[str, View]
    parts: TransferSamples
    load: Callable[[View], Any]
    place: str | None
    progress: Progress
    known: dict[tuple[str, str, float], LossPair] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        return self.transfer.rank

    def losses(self, part: Literal["choice", "judge"], candidate: ChangeCandidate) -> LossPair:
        """Losses of the new base with a change, rounded as a model is stored, or with the factors of an adapter."""
        key = part, candidate.method if candidate.scale else NONE, candidate.scale
        if key not in self.known:
            changed = self.transfer.applied(candidate.delta.scaled(candidate.scale))
            samples: HeldOutSamples = getattr(self.parts, part)
            self.known[key] = samples.losses(self.load(changed))
        return self.known[key]

    def chosen(self) -> tuple[ChangeCandidate, RecoveredLift, list[str]]:
        """The best change by its losses on samples held out."""
        transfer, method = self.transfer, self.transfer.config.method
        lines = [self._near_words()] if transfer.bases.nearness.shared else []
        delta = transfer.delta
        if method != "weights":
            delta, notes = self._solved()
            lines += notes
        unmoved = replace(transfer.delta, alignment=Alignment({}))
        changes = {method: delta, PLAIN: unmoved}
        if transfer.bases.nearness.shared:
            merged = transfer.base.blockwise(lambda block, info, _: self._merged(unmoved, block, info))
            changes[MERGED] = self._between(merged.tensors)
        keeps = method == "weights" and transfer.adapter is not None  # its factors
        tried = [
            self._scaled(ChangeCandidate(name, change if keeps and name == method else self._as_written(change)))
            for name, change in changes.items()
        ]
        best, lift = self._judged(tried)
        return best, lift, [*lines, *lift.words()]

    def _near_words(self) -> str:
        """A line on bases that share their coordinates."""
        bases, (new, old) = self.transfer.bases, self.transfer.bases.names
        return f"{old} and {new} share their coordinates ({bases.nearness.words})."

    def _between(self, tuned: Tensors) -> Delta:
        """The change from the new base to another model in its storage form."""
        base = self.transfer.base
        return Delta(base, base.tensors, tuned, precision=torch.float64)

    def _as_written(self, delta: Delta) -> Delta:
        return self.transfer.as_adapter(delta).delta if self.rank else delta

    def _merged(self, unmoved: Delta, block: Block, info: TensorInfo) -> Tensor | None:
        """A tensor of the new base with what the fine-tune adds where `wudi` merges both as fine-tunes of the old base.

        Tensors that are no linear maps get the whole change; an embedding that is the head, too, is one.
        """
        new, old = read_tensor(info, self.transfer.base.tensors), read_tensor(info, unmoved.old)
        if new is None or old is None or not new.is_floating_point():
            return new
        change = dense(replace(unmoved, precision=torch.float64).change(block, info), info)
        tied = not self.transfer.config.untie and self.transfer.base.tied_head is not None
        linear = linear_map(block, info, tied)
        if linear is not None:
            base_change = linear.as_matrices(new.to(change) - old.to(change))
            change = linear.as_stored(added_by_wudi(base_change, linear.as_matrices(change)))
        return new.to(change) + change

    def _scaled(self, candidate: ChangeCandidate) -> ChangeCandidate:
        """A change at the given scale, or at the best one on held-out samples."""
        if (scale := self.transfer.config.factor) is None:
            sums = dict[float, float]()
            for factor in SCALES:
                self.progress(f"scales of {candidate.method}", len(sums), len(SCALES))
                sums[factor] = sum(self.losses("choice", replace(candidate, scale=factor)))
            scale = min(sums, key=lambda factor: sums[factor])
        return replace(candidate, scale=scale)

    def _judged(self, tried: Sequence[ChangeCandidate]) -> tuple[ChangeCandidate, RecoveredLift]:
        """The best of the changes and of none, by samples held out; the first one, if the user gave its scale."""
        candidates = [*tried, ChangeCandidate(NONE, tried[0].delta)]
        judged = {each.method: self.losses("judge", each) for each in candidates}
        best = candidates[0]
        if self.transfer.config.factor is None:
            usable = [each for each in candidates if each.scale != 0 or each.method == NONE]
            choices = {each.method: self.losses("choice", each) for each in usable}
            best = best_of(usable, choices, judged)
        old, tuned = (score(self.load(self.views[name]), self.parts.judge.tuned).loss for name in ("old", "tuned"))
        alternatives = {method: losses for method, losses in judged.items() if method not in (best.method, NONE)}
        scale = "" if best.method == NONE else f" at scale {best.scale:g}"
        writes = self.parts.judge.own is not None
        return best, RecoveredLift(
            old, tuned, judged[NONE], judged[best.method], best.method, scale, alternatives, writes
        )

    # --- refit and distil

    def _solved(self) -> tuple[Delta, list[str]]:
        """The change, solved on samples and perhaps trained further, and lines on it."""
        transfer, config, parts = self.transfer, self.transfer.config, self.parts
        base_samples = self._own_text() if parts.choice.own is not None and config.factor is None else []
        lines = [f"Refitted on {parts.solved.examples} samples ({config.data})."]
        batches = unpadded(parts.solved.batches, config.data)
        moved = replace(transfer.delta, base=replace(transfer.base, architecture=transfer.bases.architecture))
        tensors = refit_change(
            moved,
            batches,
            base_samples,
            softmax=HEAD_RIDGE if parts.solved.task in CROSS_ENTROPY else None,
            rank=self.rank,
            untie=config.untie,
            device=transfer.bases.device,
            progress=self.progress,
        )
        delta = self._between(transfer.base.tensors.replaced(tensors))
        if config.method == "distil":
            if self.rank:
                adapter = self.transfer.as_adapter(delta, tensors).weights
                student = adapter_in_training(self.load(transfer.base), adapter)
            else:
                student = self.load(delta.applied().to(torch.float32)).requires_grad_(True)
            lines.append(self._distilled(student, batches, base_samples))
            delta = self._trained(student)
        return delta, lines

    def _own_text(self) -> list[Batch]:
        """Text of the new base that preserves its knowledge, in batches of half the size."""
        config, new = self.transfer.config, self.views["new"]
        config = replace(config, seed=config.seed + 2)
        return read_samples(new, SELF, **config.reading(AT_ONCE // 2), module=self.load(new)).batches

    def _distilled(self, student: Any, solved: Sequence[Batch], base_samples: Sequence[Batch]) -> str:
        """Train a model for some steps, in place; returns a line on it.

        Args:
            student: all of it is trained, or only the factors of an adapter.
        """
        transfer, config, choice = self.transfer, self.transfer.config, self.parts.choice.tuned
        held_out = unpadded(choice.batches, config.data)
        samples = [*solved, *held_out]
        options = f"{config} {transfer.bases.device} {transfer.dtype} {self.rank}"
        files = [config.alignment] if isinstance(config.alignment, str) else []
        with TemporaryFolder() as scratch, Store(self.place or f"{scratch}/out") as work:
            key = mark_of(self.views.values(), files, options=options, samples=data_hash([*samples, *base_samples]))
            work.begin(key)
            loaders = {name: partial(self.load, view) for name, view in self.views.items()}
            share, answered = answered_by_target(loaders, choice, samples, base_samples, work)
            last = (len(held_out), max(1, round(HELD_OUT * len(base_samples))))[: len(answered)]
            training = PolishConfig(steps=config.steps, lora=self.rank, seed=config.seed)
            state = work.file("state")
            report = Polish(student, answered, training, False, last, AT_A_STEP, state, self.progress).run()
        target = "tuned + new - old" if share == 1 else f"tuned + {share:g} (new - old)"
        return f"Distilled for {config.steps} steps from the refit towards the logits {target}: {report.verdict()}."

    def _trained(self, student: Any) -> Delta:
        """What training changed, by the names of the new base's architecture."""
        base, model = self.transfer.base, student.merge_and_unload() if self.rank else student
        named = named_as(base.architecture, model.state_dict(), architecture_of(model, base.untie))
        return self._between(base.tensors.replaced(named.only(base.tensors)))


def best_of(usable: Sequence[ChangeCandidate], choices: Judgement, judged: Judgement) -> ChangeCandidate:
    """The change with the lowest sum of losses where samples chose, but none that others beat where samples judge.

    Args:
        usable: the method's change first, if its scale is not zero; then those that a choice never falls below.
        choices, judged: losses by method on the samples of the choice, and on those held out of it.
    """
    best = min(usable, key=lambda each: sum(choices[each.method]))
    safe = [each for each in usable if each.method in (PLAIN, MERGED, NONE)]
    return min([best, *safe], key=lambda each: sum(judged[each.method]))
