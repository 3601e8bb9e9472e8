r"""Changes that samples solve for, scale and judge: a method's, plain addition, an average with the new base's own.

Distillation takes a few training steps from the refit towards the fine-tune's outputs. Its target adds a share of what
the new base knows beyond the old one to the fine-tune's own logits, ``tuned + share * (new - old)``: the whole, or the
half, the mean of that and the fine-tune's own. The target with the lower loss on samples held out is taken; on text
that the fine-tune wrote itself that is the half. Text of the new base, if given, is learned as well with the unchanged
base's outputs, so that it forgets less. All weights are trained, or the factors of an adapter alone.

Source: this project's study (benchmarks/carry_bases.py); distillation after Hinton, Vinyals and Dean (2015).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rotation_merge.averaging.average import averaged
from rotation_merge.averaging.config import PolishConfig
from rotation_merge.averaging.methods import MergedModels
from rotation_merge.averaging.polish import OF_FACTORS, OF_WEIGHTS, Polish
from rotation_merge.averaging.wudi import BESIDE_RIDGE, WudiBeside
from rotation_merge.carrying.bases import Transfer
from rotation_merge.carrying.config import MERGED, NONE, PLAIN
from rotation_merge.carrying.delta import Delta
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
from rotation_merge.errors import RotationMergeError
from rotation_merge.files import Store, TemporaryFolder
from rotation_merge.matching.alignment import Alignment
from rotation_merge.matching.objective import Answered, is_distribution, main_output, write_answers
from rotation_merge.model.adapters import Adapter
from rotation_merge.model.checkpoint import mark_of
from rotation_merge.model.forms import named_as
from rotation_merge.model.tensors import Tensors
from rotation_merge.model.view import View
from rotation_merge.run.batches import Batch, data_hash, inputs_for, unpadded
from rotation_merge.run.data import Data, read_samples
from rotation_merge.run.evaluate import Scores, margin, score
from rotation_merge.run.functions import architecture_of, in_memory
from rotation_merge.run.sample_kinds import SELF
from rotation_merge.workers import Progress

CROSS_ENTROPY = ("next token", "masked token", "class")
"""Tasks whose loss is the cross entropy of the softmax of the logits."""

HEAD_RIDGE = 3e-3
"""Of a head that is fitted to probabilities, per position and mean square of its inputs."""

SHARES = (1.0, 0.5)
"""Shares of the new base's logits beyond the old base's that a target may have."""

AT_A_STEP = 4
"""Batches of a step of distillation."""

OF_BASE = "answers of the new base"
"""Name under which these are kept."""


@dataclass(frozen=True)
class ChangeCandidate:
    """A change that samples judge.

    Attributes:
        method: a `Method`, `PLAIN`, `MERGED` or `NONE`.
        delta: of the new base, as it is written: of an adapter cut to its rank.
        scale: that was chosen for it, or given.
        loss: sum of its losses on the samples that chose the scale.
        share, lost: of the whole change's squared norm, what the adapter keeps, and by tensor what it has no place for.
    """

    method: str
    delta: Delta
    scale: float = 0.0
    loss: float = 0.0
    share: float = 1.0
    lost: Mapping[str, float] = field(default_factory=dict)


def sampled_change(
    transfer: Transfer, place: str | None, progress: Progress | None = None
) -> tuple[ChangeCandidate, RecoveredLift, list[str]]:
    """The change that samples held out prefer, with its recovered lift, and lines on how it was solved and judged.

    It is the method's, another one, or none.

    Args:
        place: that interrupted work waits beside; None: it is lost.

    Raises:
        RotationMergeError: the samples cannot be read, or are of no use to the models.
    """

    def load(view: View) -> Any:
        """A model in memory, on a device, with parameters of its own."""
        return in_memory(view, trained=True).to(transfer.bases.device)

    assert transfer.tuned is not None
    parts = read_parts(transfer.tuned, transfer.base, transfer.config, transfer.samples, load)
    sampling = _Sampling(transfer, parts, load, place, progress or (lambda *_: None))
    lines = [f"{' and '.join(transfer.bases.names)} share their coordinates ({transfer.bases.nearness.words})."]
    best, lift = sampling.judged(sampling.candidates())
    return best, lift, [*(lines if transfer.bases.nearness.shared else []), *sampling.lines, *lift.words()]


@dataclass(frozen=True)
class _Sampling:
    """One transfer with its samples.

    Attributes:
        load: makes the module of a model.
        lines: on how the change was solved.
    """

    transfer: Transfer
    parts: TransferSamples
    load: Callable[[View], Any]
    place: str | None
    progress: Progress
    lines: list[str] = field(default_factory=list)

    @cached_property
    def views(self) -> dict[str, View]:
        tuned = self.transfer.tuned
        assert tuned is not None
        return {"new": self.transfer.base, "old": self.transfer.bases.old_as_new, "tuned": tuned}

    def scores(self, samples: HeldOutSamples, candidate: ChangeCandidate) -> tuple[Scores, Scores]:
        """Scores of the new base with a change, rounded as a model is stored, or with the factors of an adapter."""
        return samples.scores(self.load(self.transfer.applied(candidate.delta.scaled(candidate.scale))))

    def loss(self, candidate: ChangeCandidate) -> float:
        """The sum of a change's losses on the samples that choose."""
        return sum(scores.loss for scores in self.scores(self.parts.choice, candidate))

    def candidates(self) -> list[ChangeCandidate]:
        """The method's change, plain addition, and of near bases the merge by `wudi`, as they would be written."""
        transfer, method = self.transfer, self.transfer.config.method
        unmoved = replace(transfer.delta, alignment=Alignment({}))
        changes = {method: transfer.delta if method == "weights" else self.solved(), PLAIN: unmoved}
        if transfer.bases.nearness.shared:
            changes[MERGED] = self._merged()
        factors = (method,) if method == "weights" and transfer.adapter is not None else ()  # which it keeps
        cuts = {name: transfer.as_adapter(changes[name]) for name in changes if transfer.rank and name not in factors}
        whole = [ChangeCandidate(name, delta) for name, delta in changes.items() if name not in cuts]
        return whole + [ChangeCandidate(name, cut.delta, share=cut.share, lost=cut.lost) for name, cut in cuts.items()]

    def _between(self, tuned: Tensors) -> Delta:
        """The change from the new base to another model in its storage form."""
        base = self.transfer.base
        return Delta(base, base.tensors, tuned, precision=torch.float64)

    def _merged(self) -> Delta:
        """The change that `wudi` makes of the new base and the fine-tune as two fine-tunes of the old base.

        Tensors that are no linear maps get the sum of both; an embedding that is the head, too, is one.
        """
        base, views = self.transfer.base, [self.views[name].to(torch.float64) for name in ("old", "new", "tuned")]
        models = MergedModels.of(views, tied_head=None if self.transfer.config.untie else base.tied_head)
        values = {"ridge": BESIDE_RIDGE, "others": "sum", "lengths": "keep"}
        merged = averaged(views, WudiBeside().on(models), values)
        return self._between(base.tensors.replaced(merged.only(base.tensors)))

    def scaled(self, candidate: ChangeCandidate, unchanged: ChangeCandidate) -> ChangeCandidate:
        """A change at the best scale on held-out samples; 0 if the new base alone is better."""
        tried = list[ChangeCandidate]()
        for scale in SCALES:
            self.progress(f"scales of {candidate.method}", len(tried), len(SCALES))
            scaled = replace(candidate, scale=scale)
            loss = self.loss(scaled) if scale else unchanged.loss
            tried.append(replace(scaled, loss=loss))
        return min(tried, key=lambda each: each.loss)

    def judged(self, candidates: Sequence[ChangeCandidate]) -> tuple[ChangeCandidate, RecoveredLift]:
        """The best of the changes and of none, by samples held out; the first one, if the user gave its scale."""
        none, judge, factor = ChangeCandidate(NONE, candidates[0].delta), self.parts.judge, self.transfer.config.factor
        if factor is None:
            none = replace(none, loss=self.loss(none))
            tried = [self.scaled(each, none) for each in candidates]
        else:
            tried = [replace(each, scale=factor) for each in candidates]
        scores = {NONE: self.scores(judge, none)}
        scores |= {each.method: self.scores(judge, each) if each.scale else scores[NONE] for each in tried}
        losses = {method: (of_tuned.loss, of_own.loss) for method, (of_tuned, of_own) in scores.items()}
        best = tried[0] if factor is not None else best_of([*(each for each in tried if each.scale), none], losses)
        old, tuned = (score(self.load(self.views[name]), judge.tuned) for name in ("old", "tuned"))
        others = {method: pair for method, pair in losses.items() if method not in (best.method, NONE)}
        scale = "" if best.method == NONE else f" at scale {best.scale:g}"
        pairs = (scores[NONE][0], scores[best.method][0]), (old, tuned)
        return best, RecoveredLift(
            old.loss,
            tuned.loss,
            losses[NONE],
            losses[best.method],
            best.method,
            scale,
            others,
            judge.own is not None,
            *(margin([before.losses], [after.losses]) for before, after in pairs),
        )

    # --- refit and distil

    def solved(self) -> Delta:
        """The change, solved on samples and perhaps trained further."""
        transfer, config, parts = self.transfer, self.transfer.config, self.parts
        new, base_texts = self.views["new"], list[Batch]()
        if parts.choice.own is not None and config.factor is None:  # text that preserves what the new base knows
            reading = replace(config, seed=config.seed + 2).reading(AT_ONCE // 2)
            base_texts = read_samples(new, SELF, **reading, module=self.load(new)).batches
        self.lines.append(f"Refitted on {parts.solved.examples} samples ({config.data}).")
        batches = unpadded(parts.solved.batches, config.data)
        tensors = refit_change(
            replace(transfer.delta, base=replace(transfer.base, architecture=transfer.bases.architecture)),
            batches,
            base_texts,
            softmax=HEAD_RIDGE if parts.solved.task in CROSS_ENTROPY else None,
            rank=transfer.rank,
            untie=config.untie,
            device=transfer.bases.device,
            progress=self.progress,
        )
        delta = self._between(transfer.base.tensors.replaced(tensors))
        return delta if config.method == "refit" else self._distilled(delta, tensors, batches, base_texts)

    def _distilled(
        self, delta: Delta, solved: Mapping[str, Tensor], batches: Sequence[Batch], base_texts: Sequence[Batch]
    ) -> Delta:
        """The refitted change, trained for some steps: all weights, or only the factors of an adapter.

        Args:
            solved: tensors that the refit changed, by name.
        """
        transfer, config, choice = self.transfer, self.transfer.config, self.parts.choice.tuned
        if transfer.rank:
            student = adapter_in_training(self.load(transfer.base), transfer.as_adapter(delta, solved).weights)
        else:
            student = self.load(delta.applied().to(torch.float32)).requires_grad_(True)
        held_out = unpadded(choice.batches, config.data)
        samples = [*batches, *held_out]
        options = f"{config} {transfer.bases.device} {transfer.dtype} {transfer.rank}"
        files = [config.alignment] if isinstance(config.alignment, str) else []
        with TemporaryFolder() as scratch, Store(self.place or f"{scratch}/out") as work:
            work.begin(mark_of(self.views.values(), files, options=options, samples=data_hash([*samples, *base_texts])))
            loaders = {name: partial(self.load, view) for name, view in self.views.items()}
            share, answered = answered_by_target(loaders, choice, samples, base_texts, work)
            last = (len(held_out), max(1, round(HELD_OUT * len(base_texts))))
            parts = [(part[:-size], part[-size:]) for part, size in zip(answered, last, strict=False)]
            training = PolishConfig(steps=config.steps, lora=transfer.rank, seed=config.seed)
            students, rate = [student] * len(parts), OF_FACTORS if transfer.rank else OF_WEIGHTS
            report = Polish(students, parts, training, rate, AT_A_STEP, work.path / "state", self.progress).run()
        towards = f"towards the logits tuned + {share:g} (new - old)"
        self.lines.append(f"Distilled for {config.steps} steps from the refit {towards}: {report.verdict()}.")
        base, model = transfer.base, student.merge_and_unload() if transfer.rank else student
        named = named_as(base.architecture, model.state_dict(), architecture_of(model, base.untie))
        return self._between(base.tensors.replaced(named.only(base.tensors)))


def best_of(usable: Sequence[ChangeCandidate], judged: Mapping[str, LossPair]) -> ChangeCandidate:
    """The change with the lowest loss where samples chose, but none that others beat where samples judge.

    Args:
        usable: the method's change first, if its scale is not zero; then those that a choice never falls below.
        judged: losses by method on the samples held out of the choice.
    """
    best = min(usable, key=lambda each: each.loss)
    safe = [each for each in usable if each.method in (PLAIN, MERGED, NONE)]
    return min([best, *safe], key=lambda each: sum(judged[each.method]))


# --- distillation


@dataclass(frozen=True)
class TransferTarget:
    """A model whose outputs are the fine-tune's plus a share of the difference of the bases."""

    tuned: Any
    new: Any
    old: Any
    share: float

    @property
    def config(self) -> Any:
        return self.new.config

    def __call__(self, **batch: Tensor) -> Any:
        outputs = [model(**inputs_for(model, batch)) for model in (self.tuned, self.new, self.old)]
        tuned, new, old = (main_output(output).float() for output in outputs)
        total = tuned + self.share * (new - old)
        return SimpleNamespace(**{"logits" if is_distribution(outputs[0]) else "last_hidden_state": total})


def answered_by_target(
    models: Mapping[str, Callable[[], Any]],
    choice: Data,
    samples: Sequence[Batch],
    base_texts: Sequence[Batch],
    work: Store,
) -> tuple[float, list[Answered]]:
    """The better target's answers to samples, and the new base's own to its texts.

    Args:
        models: give `new`, `old` and `tuned` when they are needed.
        choice: samples with labels, that choose the target.
        work: folder of answers, which an interrupted run continues from.

    Returns:
        The target's share of the new base's logits, and the answers; those to the texts only where there are any.
    """
    share, answers, of_base = work.get("share"), work.get("answers", mapped=True), work.get(OF_BASE, mapped=True)
    if share is None or answers is None:
        loaded = {name: give() for name, give in models.items()}
        targets = [TransferTarget(**loaded, share=share) for share in SHARES]
        target = min(targets, key=lambda target: score(target, choice).loss)
        share, answers = target.share, write_answers(target, samples, work, "answers")
        work.put("share", share)
        del target, targets, loaded
    if base_texts and of_base is None:
        of_base = write_answers(models["new"](), base_texts, work, OF_BASE)
    return share, [answers, *([of_base] if base_texts else [])]


def adapter_in_training(model: Any, written: Adapter) -> Any:
    """A model with an adapter; only its factors are trained, at the rank-stabilised scale.

    Raises:
        RotationMergeError: peft is not installed.
    """
    try:
        from peft import PeftModel
    except ImportError as error:
        raise RotationMergeError("distilling an adapter needs peft", remedy="pip install peft") from error
    tensors = dict(written.tensors)
    for change in (change for change in written.changes.values() if change.b):
        for name in tensors.keys() & {change.b, change.bias}:
            tensors[name] = tensors[name] / written.shapes[change.a][0] ** 0.5
    with TemporaryFolder() as folder:
        Adapter({**written.config, "use_rslora": True}, tensors).write(folder)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft's, on what transformers calls by another name now
            student = PeftModel.from_pretrained(model, folder, is_trainable=True).eval()
    return student
