"""Changes carried with samples: solved for, trained on from there, or scaled, and judged on samples held out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from mergekit.common import dtype_from_name
from torch import Tensor

from rotation_merge.averaging.polish import PolishOptions
from rotation_merge.averaging.wudi import added_by_wudi
from rotation_merge.carrying.config import MERGED, NONE, PLAIN, TransferConfig
from rotation_merge.carrying.delta import Delta
from rotation_merge.carrying.distil import DistillationResult, DistillationSamples, adapter_in_training, distil
from rotation_merge.carrying.judge import (
    AT_ONCE,
    HELD_OUT,
    SCALES,
    RecoveredLift,
    TransferSamples,
    read_parts,
)
from rotation_merge.carrying.lora import adapter_changes, adapter_of, dense_changes
from rotation_merge.carrying.refit import HEAD_RIDGE, ChangeOptions, refit_change
from rotation_merge.carrying.session import TransferSession
from rotation_merge.files import Store
from rotation_merge.matching.alignment import Alignment
from rotation_merge.model.blocks import read_tensor, unstack
from rotation_merge.model.forms import translated
from rotation_merge.model.low_rank import dense
from rotation_merge.model.open import open_model, parse_reference
from rotation_merge.model.run_keys import mark_of
from rotation_merge.model.tensors import TensorSource, as_tensors
from rotation_merge.model.view import View
from rotation_merge.run.data import Data, data_hash, read_batches, unpadded
from rotation_merge.run.evaluate import evaluate
from rotation_merge.run.functions import Batch, architecture_of, copy_parameters, load, local_path
from rotation_merge.run.generated_samples import SELF
from rotation_merge.run.maps import linear_map
from rotation_merge.run.runner import Runner
from rotation_merge.workers import Progress

REFITTED = "The new base's linear maps were solved layer by layer to reproduce the change on samples."
HOW = {
    "refit": REFITTED,
    "distil": f"{REFITTED} From there on it was **trained** for a few steps.",
    MERGED: "The new base and the fine-tune were merged by `wudi` as two fine-tunes of the old base: this had the "
    "lowest loss on samples.",
    PLAIN: "The change was added to the new base without alignment: this had the lowest loss on samples.",
    NONE: "Nothing was carried: the new base alone had the lowest loss on samples.",
}
"""The method in words, for a card."""

CROSS_ENTROPY = ("next token", "masked token", "class")
"""Tasks whose loss is the cross entropy of the softmax of the logits."""


@dataclass(frozen=True)
class JudgedChange:
    """A change that samples judge.

    Attributes:
        method: one of `METHODS`, `PLAIN`, `MERGED` or `NONE`.
        scale: in words.
        model: makes the new base with it.
    """

    method: str
    delta: Delta
    scale: str
    model: Callable[[], Any]

    @property
    def changes(self) -> bool:
        """Whether its scale is not zero."""
        return self.delta.scale != 0


@dataclass(frozen=True)
class ChosenChange:
    """A carried change that samples chose, with its judgement.

    Attributes:
        method: one of `METHODS`, `PLAIN`, `MERGED` or `NONE`.
        lines: notes for the user; the last one is the recovered lift.
    """

    method: str
    delta: Delta
    lines: list[str]
    lift: RecoveredLift

    @property
    def how(self) -> str:
        """The method in words, for a card."""
        return HOW[self.method]


@dataclass
class SampledTransfer:
    """One fine-tune that is carried with samples.

    Attributes:
        name: of the fine-tune, as it is loaded: a path, or `base+adapter`.
        tuned: its tensors.
        rank: of the adapter that is to be written; 0: a model is.
    """

    session: TransferSession
    name: str
    tuned: TensorSource
    rank: int
    progress: Progress | None = None

    def _watch(self, activity: str, done: float, total: float) -> None:
        if self.progress is not None:
            self.progress(activity, done, total)

    @property
    def config(self) -> TransferConfig:
        return self.session.config

    @property
    def is_cut(self) -> bool:
        """Whether the moved change is written as a new adapter, cut to its rank; an adapter keeps its factors."""
        adapter = parse_reference(self.name).lora is not None
        return bool(self.rank) and not adapter

    def carried(self, out: str) -> ChosenChange:
        """The carried change at its scale: by the method, by plain addition, or none, by their losses on samples.

        Args:
            out: the output that interrupted work waits beside.
        """
        parts = read_parts(self.name, self._new, self.config, self._on)
        lines, delta = self._shared_coordinates(), self._moved()
        if self.config.method != "weights":
            tensors, notes = self._solved(parts, out)
            lines += notes
            delta = Delta.from_solved(self.session.carrier, tensors)
        candidate = self._at_best_scale(self.config.method, delta, parts)
        others = [self._at_best_scale(name, make(), parts) for name, make in self._alternatives().items()]
        chosen, lift = self._judged(candidate, others, parts)
        return ChosenChange(chosen.method, chosen.delta, [*lines, *lift.words()], lift)

    def _solved(self, parts: TransferSamples, out: str) -> tuple[dict[str, Tensor], list[str]]:
        """The new base's tensors with the change chosen on samples, and the method."""
        samples = f"{parts.solved.examples} samples ({self.config.data})"
        base_texts = self._own_text() if parts.choice.writes and self.config.factor is None else []
        tensors, lines = self._refitted(parts.solved, base_texts), [f"Refitted on {samples}."]
        if self.config.method == "distil":
            with Store(out) as work:
                tensors, distilled = self._distilled(work, tensors, parts, base_texts)
            lines += distilled.words(self.config.steps)
        return tensors, lines

    def _alternatives(self) -> dict[str, Callable[[], Delta]]:
        """Changes that are tried beside the method's, by name."""
        plain = {PLAIN: self._plain}
        return {**plain, MERGED: self._merged} if self.session.bases.nearness.shared else plain

    def _plain(self) -> Delta:
        """The new base plus the fine-tune's unmoved change."""
        new = self.session.carrier.new
        blocks = self._unmoved().changes_by_block(self._tied)
        tensors = {name: new[name].to(change.dtype) + change for part in blocks for name, change in part.items()}
        return Delta.from_solved(self.session.carrier, tensors)

    def _unmoved(self) -> Delta:
        return Delta(replace(self.session.carrier, alignment=Alignment({})), self.tuned)

    def _merged(self) -> Delta:
        """The new base plus what the fine-tune adds to it where `wudi` merges both as fine-tunes of the old base.

        Tensors that are no linear maps get the whole change; an embedding that is the head, too, is one.
        """
        carrier, unmoved, tensors = self.session.carrier, self._unmoved(), dict[str, Tensor]()
        for block in carrier.architecture.blocks:
            for key, part in unmoved.factors(block, None)[0].items():
                info = block.tensor(key)
                assert info is not None
                new, old = read_tensor(info, carrier.new), read_tensor(info, carrier.old)
                if info.name == self._tied or new is None or old is None:
                    continue
                change, linear = dense(part, info), linear_map(block, info, self._tied is not None)
                if linear is not None:
                    base_change = linear.as_matrices(new.to(change) - old.to(change))
                    change = linear.as_stored(added_by_wudi(base_change, linear.as_matrices(change)))
                tensors |= unstack(info, new.to(change) + change)
        return Delta.from_solved(carrier, tensors)

    def _cut_models(self, delta: Delta) -> Callable[[float], Any]:
        """The new base with an adapter of a change, at any scale."""
        new, parts = self.session.carrier.new, adapter_changes(delta, self.rank, self.session.bases.new)

        def model(scale: float) -> Any:
            return self._model(
                {
                    name: (new[name].double() + scale * change).float()
                    for changes in parts.values()
                    for name, change in dense_changes(changes).items()
                }
            )

        return model

    def _at_best_scale(self, method: str, delta: Delta, parts: TransferSamples) -> JudgedChange:
        """A change at the given scale, or at the best one on held-out samples."""
        is_cut = self.is_cut if delta.solved is None else bool(self.rank)
        model = self._cut_models(delta) if is_cut else partial(self._scaled_model, delta)
        scale = self.config.factor
        if scale is None:
            losses = dict[float, float]()
            for factor in SCALES:
                self._watch(f"scales of {method}", len(losses), len(SCALES))
                losses[factor] = sum(parts.choice.losses(model(factor)))
            scale = min(losses, key=lambda factor: losses[factor])
        return JudgedChange(method, delta.scaled(scale), f" at scale {scale:g}", partial(model, scale))

    def _unchanged(self) -> Delta:
        """The new base as it is; of an adapter, with factors of zero for what the fine-tune changed."""
        tensors = self._with(self._moved()) if self.rank else {}
        return Delta.from_solved(self.session.carrier, tensors).scaled(0.0)

    def _scaled_model(self, delta: Delta, scale: float) -> Any:
        """The new base with a change at a scale, folded as it is written; an adapter's base has a head of its own."""
        tensors = dict(delta.scaled(scale).named(torch.float32))
        return self._model(tensors, not self.rank, bool(self.rank))

    def _judged(
        self, candidate: JudgedChange, others: Sequence[JudgedChange], parts: TransferSamples
    ) -> tuple[JudgedChange, RecoveredLift]:
        """The best of the method, its alternatives and the new base on held-out samples, or the user's scale."""
        solved = candidate.delta.solved is not None
        zero = candidate.delta.scaled(0.0) if solved else self._unchanged()
        nothing = JudgedChange(NONE, zero, "", lambda: self._stored_model({}))
        tried = [candidate, *others, nothing]
        judged = {each.method: parts.judge.losses(each.model()) for each in tried}
        chosen = candidate
        if self.config.factor is None:
            usable = [*(each for each in tried if each.changes), nothing]
            choices = {each.method: parts.choice.losses(each.model()) for each in usable}
            best = min(usable, key=lambda each: sum(choices[each.method]))
            safe = [each for each in usable if each is not candidate]
            chosen = min([best, *safe], key=lambda each: sum(judged[each.method]))
        old, tuned = (evaluate(self._on(name), parts.judge.tuned)[0] for name in (self._old, self.name))
        other_losses = {name: losses for name, losses in judged.items() if name not in (chosen.method, NONE)}
        carried = judged[chosen.method]
        measured = (old, tuned, judged[NONE], carried, chosen.method, chosen.scale)
        return chosen, RecoveredLift(*measured, other_losses, parts.judge.writes)

    def _shared_coordinates(self) -> list[str]:
        """A line that the bases share their coordinates, if they do."""
        near = self.session.bases.nearness
        return [f"{self._old} and {self._new} share their coordinates ({near.words})."] if near.shared else []

    @property
    def _new(self) -> str:
        return str(self.session.bases.new.reference)

    @property
    def _old(self) -> str:
        return str(self.session.bases.old.reference)

    @property
    def _model_config(self) -> Any:
        return self._config(self.session.bases.new, 0)

    def _on(self, name: str) -> Any:
        return self._loaded(name).to(self.session.execution.device)

    def _config(self, base: View, which: int) -> Any:
        """A base's config, with the vocabulary size including added tokens."""
        tokens, config = self.session.tokens, base.transformers_config
        if tokens is None or not tokens.rows:
            return config
        config = copy.deepcopy(config)
        config.get_text_config().vocab_size = tokens.lengths[which]
        return config

    def _loaded(self, name: str) -> Any:
        """A base or the fine-tune, its vocabulary as long as the carrier has it."""
        tokens, carrier = self.session.tokens, self.session.carrier
        if tokens is None or (not tokens.rows and tokens.length in (0, tokens.old_length)):
            return load(name, like=self._new)
        if name == self._new:
            return self._model({})
        if not tokens.rows:
            model = load(name, like=self._new)
            model.resize_token_embeddings(tokens.old_length)
            return model
        source = carrier.old if name == self._old else self.tuned
        config = self._config(self.session.bases.old, 1)
        return Runner(config, source, carrier.architecture, [], untie=True).fill_all()

    def _refitted(self, data: Data, base_texts: Sequence[Batch]) -> dict[str, Tensor]:
        device = self.session.execution.device
        softmax = HEAD_RIDGE if data.task in CROSS_ENTROPY else None
        options = ChangeOptions(softmax=softmax, rank=self.rank, untie=self._untie, device=device)
        batches = unpadded(data.batches, self.config.data)
        carrier, config = self.session.carrier, self._model_config
        tensors, _ = refit_change(
            carrier, config, self.tuned, batches, options, progress=self.progress, base_texts=base_texts
        )
        return tensors

    def _moved(self, scale: float = 1.0) -> Delta:
        """The change moved by weights alone."""
        return Delta(self.session.carrier, self.tuned, scale)

    def _with(self, delta: Delta) -> dict[str, Tensor]:
        """The new base's tensors, as it stores them, with a change."""
        new = self.session.carrier.new
        return {name: new[name].to(change.dtype) + change for name, change in delta.changes(self._tied).items()}

    def by_weights(self, scale: float) -> dict[str, Tensor]:
        """The new base's tensors with the change moved by weights."""
        return self._with(self._moved(scale))

    @property
    def _untie(self) -> bool:
        return self.session.execution.storage.untie

    @property
    def _tied(self) -> str | None:
        """A head that stays the embedding's tensor."""
        return None if self._untie else self.session.bases.new.tied_head

    def _model(self, tensors: Mapping[str, Tensor], rounded: bool = False, own_head: bool = False) -> Any:
        """The new base with some tensors changed, by the names of the carrier's architecture.

        Args:
            rounded: as it would be stored.
            own_head: give a tied head a tensor of its own, although it is stored without one.
        """
        carrier, device = self.session.carrier, self.session.execution.device
        source: TensorSource = as_tensors(carrier.new).replaced(tensors)
        source = self._rounded(source) if rounded else source
        untie = self._untie or own_head
        model = Runner(self._model_config, source, carrier.architecture, [], untie=untie, device=device).fill_all()
        copy_parameters(model)
        return model

    def _stored_model(self, tensors: Mapping[str, Tensor]) -> Any:
        """The new base with some tensors changed, rounded as it would be stored; beside an adapter it is not."""
        return self._model(tensors, not self.rank)

    def _rounded(self, source: TensorSource) -> TensorSource:
        """The tensors as they would be stored, in their own dtypes."""
        stored, dtype = self.session.carrier.new, dtype_from_name(self.session.execution.storage.dtype)

        def rounded(name: str, tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point() or (dtype is None and name not in stored):
                return tensor
            return tensor.to(dtype or stored[name].dtype).to(tensor.dtype)

        return as_tensors(source).map(rounded)

    def _student(self, tensors: Mapping[str, Tensor]) -> Any:
        """The model to train: all of it, or only the factors of an adapter."""
        if not self.rank:
            return self._model(tensors).requires_grad_(True)
        written, _ = adapter_of(Delta.from_solved(self.session.carrier, tensors), self.rank, self.session.bases.new)
        return adapter_in_training(self._model({}), written)

    def _distilled(
        self, work: Store, tensors: dict[str, Tensor], parts: TransferSamples, base_texts: Sequence[Batch]
    ) -> tuple[dict[str, Tensor], DistillationResult]:
        config = self.config
        solved, held_out = (unpadded(data.batches, config.data) for data in (parts.solved, parts.choice.tuned))
        options = f"{config} {self.session.execution} {self.rank}"
        models = [open_model(name, any_base=True) for name in (self.name, self._old, self._new)]
        alignment = [config.alignment] if isinstance(config.alignment, str) else []
        work.begin(mark_of(models, alignment, options=options, samples=data_hash([*solved, *held_out, *base_texts])))
        last = len(held_out), max(1, round(HELD_OUT * len(base_texts)))
        lessons = DistillationSamples([*solved, *held_out], base_texts, last, parts.choice.tuned)
        names = {"new": self._new, "old": self._old, "tuned": self.name}
        loaders = {which: partial(self._on, name) for which, name in names.items()}
        student, training = self._student(tensors), PolishOptions(config.steps, lora=self.rank, seed=config.seed)
        report = distil(loaders, student, lessons, training, work, self.progress)
        return self._trained(student), report

    def _own_text(self) -> list[Batch]:
        """Text of the new base that preserves its knowledge, in batches of half the size."""
        config = replace(self.config, data=SELF, seed=self.config.seed + 2)
        return read_batches(SELF, local_path(self._new), self._on(self._new), **config.reading(AT_ONCE // 2)).batches

    def _trained(self, student: Any) -> dict[str, Tensor]:
        """The change from training, by the names of the carrier's architecture."""
        carrier = self.session.carrier
        model = student.merge_and_unload() if self.rank else student
        named = translated(model.state_dict(), architecture_of(model, self._untie), carrier.architecture)
        tensors: dict[str, Tensor] = {}
        for info in carrier.architecture.tensors():
            before, after = read_tensor(info, carrier.new), read_tensor(info, named)
            if info.name == self._tied or before is None or after is None:
                continue
            if not torch.equal(before.to(after), after):
                tensors |= unstack(info, after.detach())
        return tensors
