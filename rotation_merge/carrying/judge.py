"""Judging a carried change: held-out samples, losses, and the recovered lift.

Recovered lift = (new base - carried) / (what fine-tuning gained at home), on samples held out of every choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rotation_merge.carrying.config import TransferConfig
from rotation_merge.errors import DataError
from rotation_merge.model.view import View
from rotation_merge.record import with_margin
from rotation_merge.run.batches import examples_in
from rotation_merge.run.data import UNLABELLED, Data, Samples, read_samples, split_batches
from rotation_merge.run.evaluate import Scores, score
from rotation_merge.run.sample_kinds import SELF
from rotation_merge.run.sources import writes_text

AT_ONCE = 16
HELD_OUT = 0.25
"""Share of the samples that nothing is solved from, a whole batch at least where there are two."""

SCALES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25)
"""Of a carried change, among which held-out samples choose."""

LITTLE = 0.1
"""Recovered lift below which training again is the advice."""

MORE = "give more samples"

KNOWN = 0.01
"""Share of the gain at home from which the new base is better than the old one in words."""

LossPair = tuple[float, float]
"""Losses on samples of the fine-tune's kind, and on text that the new base writes."""


@dataclass(frozen=True)
class HeldOutSamples:
    """Samples that nothing is solved from: of the fine-tune's kind, and of text that the new base writes."""

    tuned: Data
    own: Data | None

    def scores(self, model: Any) -> tuple[Scores, Scores]:
        """A model's scores on either; those on the first twice, where there is no text."""
        scores = score(model, self.tuned)
        return scores, scores if self.own is None else score(model, self.own)


@dataclass(frozen=True)
class TransferSamples:
    """Samples of one transfer.

    Attributes:
        solved: samples to solve from.
        choice: says scales and methods.
        judge: held out of every choice.
    """

    solved: Data
    choice: HeldOutSamples
    judge: HeldOutSamples


def read_parts(
    tuned: View, new: View, config: TransferConfig, samples: Samples, load: Callable[[View], Any]
) -> TransferSamples:
    """The samples of a transfer, read or written by the models.

    Args:
        samples: batches, or the name of a source; None: the config's `data`.
        load: makes the module of a model.

    Raises:
        DataError: the model writes no text and no data are given, or too few, or without labels.
    """
    source, model = config.data if samples is None else samples, load(tuned)
    if source == SELF and not writes_text(model):
        raise DataError(f"{type(model).__name__} writes no text", where=tuned.name, remedy="give a file as 'data'")
    data = read_samples(tuned, source, **config.reading(AT_ONCE), module=model)
    if data.task in UNLABELLED:
        problem = f"holds no labels for the loss of {type(model).__name__}"
        raise DataError(problem, where=data.source, remedy="give data with labels, or carry by weights alone")
    if len(data.batches) <= 1:
        raise DataError(f"holds {data.examples} samples", where=data.source, remedy=f"give at least {2 * AT_ONCE}")
    solved, held_out = parted(data)
    choice, judge = halves(held_out)
    base, own_halves = load(new), list[Data | None]([None, None])
    if writes_text(base):
        few = replace(config, samples=AT_ONCE, seed=config.seed + 1)
        own_halves = [*halves(read_samples(new, SELF, **few.reading(AT_ONCE), module=base))]
    return TransferSamples(solved, *map(HeldOutSamples, (choice, judge), own_halves))


def parted(data: Data) -> tuple[Data, Data]:
    """Samples to solve from, and a quarter to choose and to judge by: a batch at least, but at most half of all."""
    return split_batches(data, data.examples - min(max(AT_ONCE, round(HELD_OUT * data.examples)), data.examples // 2))


def halves(data: Data) -> tuple[Data, Data]:
    """Every other row of each batch, or every other batch of one example, whose tensors may have several rows.

    Raises:
        DataError: there are fewer than two rows.
    """

    def half(start: int) -> Data:
        batches = data.batches[start::2]
        if len(data.batches) < data.examples:
            rows = ({name: tensor[start::2] for name, tensor in batch.items()} for batch in data.batches)
            batches = [batch for batch in rows if examples_in(batch)]
        return data.with_batches(batches)

    parts = half(0), half(1)
    if not all(part.batches for part in parts):
        raise DataError("holds one sample to judge by", where=data.source or None, remedy="give at least two")
    return parts


@dataclass(frozen=True)
class RecoveredLift:
    """Gain and cost of a carried change, in mean losses (nats) on the judging samples.

    Attributes:
        old, tuned: of the old pair, on samples of the fine-tune's kind.
        new, carried: of the new base without and with the change, on these and on text that the new base writes.
        method: whose change was taken: a `Method`, `PLAIN`, `MERGED` or `NONE`.
        scale: at which scale, in words.
        others: losses of the other methods on both, by method.
        writes: whether the new base writes text; where not, the second losses say nothing.
        margin, margin_at_home: half of the 95% interval of new - carried, and of old - tuned, on samples of the
            fine-tune's kind; None: too few samples.
    """

    old: float
    tuned: float
    new: LossPair
    carried: LossPair
    method: str
    scale: str = ""
    others: Mapping[str, LossPair] = field(default_factory=dict)
    writes: bool = True
    margin: float | None = 0.0
    margin_at_home: float | None = 0.0

    def shares(self) -> dict[str, float | None]:
        """Shares of losses, by name; None where what they are of is no gain.

        What arrives is (new base - carried), over the gain of fine-tuning on the old base, or over (new base -
        fine-tune at home); what the new base knows without the change is a share of the former.
        """
        home, way, arrived = self.old - self.tuned, self.new[0] - self.tuned, self.new[0] - self.carried[0]
        return {
            "recovered": arrived / home if home > 0 else None,
            "known to the new base": (self.old - self.new[0]) / home if home > 0 else None,
            "of the way to the fine-tune": arrived / way if way > 0 else None,
        }

    def facts(self) -> dict[str, Any]:
        """Everything, for a report."""
        return {**asdict(self), **self.shares()}

    def words(self) -> list[str]:
        """Lines on the losses; the last one has the decision and the recovered lift."""
        (before, own_before), (after, own_after) = self.new, self.carried
        lines = [
            f"Loss on the judging samples (nats): old base {self.old:.3f}, its fine-tune {self.tuned:.3f}, new base "
            f"{before:.3f}, carried {after:.3f} by {self.method}{self.scale}."
        ]
        if self.writes:
            lines.append(f"Loss on the new base's own text: {own_before:.3f} before, {own_after:.3f} after.")
        for name, losses in self.others.items():
            shown = " and ".join(f"{loss:.3f}" for loss in (losses if self.writes else losses[:1]))
            lines.append(f"Also tried: {name}, with losses {shown}.")
        return [*lines, self._verdict()]

    def _verdict(self) -> str:
        recovered, known, way = self.shares().values()
        home, arrived, length = self.old - self.tuned, self.new[0] - self.carried[0], self.new[0] - self.tuned
        if recovered is None or known is None:
            advice = "give samples of its task ('data')"
            return f"Recovered lift: unknown, on these samples the fine-tune is no better than its base; {advice}."
        gain = with_margin(f"{home:.3f}", self.margin_at_home)
        if self.margin_at_home is None or home <= self.margin_at_home:
            return f"Recovered lift: unknown, the fine-tune's gain on its base is not clear ({gain} nats); {MORE}."
        figures = [f"{with_margin(f'{arrived:.3f}', self.margin)} of {gain} nats"]
        if known >= KNOWN:
            figures += [] if way is None else [f"{way:.0%} of the way from the new base to the fine-tune"]
            figures.append(f"the new base alone already has {known:.0%}")
        line = f"Recovered lift: {recovered:.0%} of what fine-tuning gained on the old base ({'; '.join(figures)})."
        least = LITTLE * (min(home, length) if length > 0 else home)
        if self.margin is None or abs(arrived - least) < self.margin:
            return f"Not clear whether the change transfers; {MORE}. {line}"
        if arrived >= least:
            return line
        return f"Train on the new base instead: {'nothing' if recovered <= 0 else 'little'} transfers. {line}"
