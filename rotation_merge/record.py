"""The report of one merge, as data: the content of `rotation_merge.json`, with the outcome of a search."""

from __future__ import annotations

import functools
import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any, TypeVar

from rotation_merge import __version__

T = TypeVar("T")

FORMAT = 1
REPORT_FILE, DISTANCES = "rotation_merge.json", "distances.png"
"""The report beside a merge, and the picture of its distances by layer."""
SMALL_GAIN = 0.01
"""A fall of the relative distance by less than this fraction counts as nothing gained."""

RELATED = 0.7
"""Relative distance from which on models are not said to share coordinates: half of that of unrelated models. At 1 the
donor may as well have vanished."""


@dataclass(frozen=True)
class SpaceRow:
    """One space of one donor."""

    donor: str
    block: str
    layer: int | None
    space: str
    kind: str
    group: str
    distance_before: float
    distance_after: float
    anchor_norm: float
    from_identity: dict[str, int | float]
    seconds: float
    head_order: list[int] | None
    notes: list[str]


def read_as(kind: type[T], content: Any) -> T:
    """A value of a type out of JSON's content; a ValueError says in one line what is wrong with it."""
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(kind).validate_python(content)
    except ValidationError as error:
        fault = error.errors()[0]
        place = ".".join(map(str, fault["loc"]))
        raise ValueError(f"it lacks '{place}'" if fault["type"] == "missing" else f"{place}: {fault['msg']}") from error


def with_margin(difference: str, margin: float | None) -> str:
    """A difference in words, with half of its 95% interval; None: too few samples."""
    return f"{difference} ± {'an unknown error' if margin is None else f'{margin:.2g}'}"


def relative_distance(rows: Sequence[SpaceRow]) -> tuple[float, float]:
    """Relative distance of a donor before and after alignment.

    Over the whole model if its stream was matched (the stream's row has it), else over the matched spaces.
    """
    rows = [row for row in rows if row.kind == "stream"][:1] or rows
    norm = math.sqrt(sum(row.anchor_norm**2 for row in rows)) or 1.0
    before = math.sqrt(sum(row.distance_before**2 for row in rows))
    after = math.sqrt(sum(row.distance_after**2 for row in rows))
    return before / norm, after / norm


def gained(before: float, after: float, own_method: bool = False) -> str:
    """One sentence on the effect of alignment, from the relative distances.

    Args:
        own_method: see `MergeReport`.
    """
    if before == 0:
        return "the donor equals the anchor in every matched tensor: alignment has nothing to do"
    distances, gain = f"relative distance {before:.4g} before, {after:.4g} after", 1 - after / before
    if gain >= SMALL_GAIN:
        return f"{distances} alignment ({gain:.0%} less)"
    if gain < -SMALL_GAIN:
        why = "they were chosen by something other than distance, such as a loss"
        return f"the transforms increase the distance ({distances}): {why}"
    why = "the models share their coordinates" if before < RELATED else "no map brings the models nearer"
    plain = "" if own_method else "; the merge is practically the plain one"
    return f"alignment changes next to nothing ({distances}): {why}{plain}"


@dataclass(frozen=True)
class Score:
    """The score of one model (lower is better), and with labels its accuracy (or a correlation).

    Attributes:
        on_base: the loss on text that the models' base wrote (nats a token), a measure of forgetting.
        seconds: wall time of trying it, if it is a merge that was tried.
    """

    name: str
    score: float
    accuracy: float | None = None
    on_base: float | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """The parents, their ensemble, the plain merge and the best merge on held-out samples.

    Attributes:
        unit, figure: unit of the scores, and name of the figure beside them.
        samples: which they are, in words.
        ensemble, plain: None where there is none; `notes` may say why.
        tried: merges, the best first, on the selection samples.
        left_out: by merges, why they were not tried.
        base: the base's loss on its own text.
        margin: half of the 95% interval of the best merge's difference from the best parent; None: too few samples.
        remedy: what makes a difference clear.
    """

    unit: str
    figure: str
    samples: str
    parents: list[Score]
    best: Score
    plain: Score | None = None
    ensemble: Score | None = None
    tried: list[Score] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    base: float | None = None
    margin: float | None = 0.0
    remedy: str = ""

    @property
    def best_parent(self) -> Score:
        return min(self.parents, key=lambda parent: parent.score)

    @property
    def worth_it(self) -> bool:
        """Whether the best merge beats every parent alone, if not clearly."""
        return self.best.score < self.best_parent.score

    @property
    def clear(self) -> bool:
        """Whether the samples tell the best merge from the best parent."""
        return self.margin is not None and abs(self.best.score - self.best_parent.score) > self.margin


@dataclass(frozen=True)
class MergeReport:
    """The report of one merge.

    Distances are Frobenius norms of donor - anchor over the tensors that have an axis in the space. `files` are the
    alignment files by which donors were moved, nothing being matched. Fingerprints, by model, are those of alignment
    files; if not all tensors were read, words after it give their number.

    Attributes:
        models: where each model came from, by its name here: `hub`, `revision`, `license`, and `adapter` with the same;
            `carried` for a fine-tune that was carried onto the base.
        relation: of the result to its models, in the hub's words: `merge`, `finetune` or `adapter`.
        base: of a fine-tune or an adapter, the one among the models that it is one of.
        data: the samples that were used, each with `of` (its purpose), `source` and `samples`; `file` of statistics
            that lay beside a model.
        own_method: whether the delegate is a method of this plugin. These solve or weigh by more than positions: that
            alignment has nothing to do does not make their merge the plain one.
        lift: recovered lift of a carried change (`carrying/judge.py`); of a merge, by donor.
        search: outcome of the search that chose this merge, if any.
    """

    anchor: str
    delegate: str
    recipe: str
    rows: list[SpaceRow] = field(repr=False)
    whole: dict[str, dict[str, object]] = field(repr=False)
    notes: list[str]
    seconds: float
    versions: dict[str, str] = field(default_factory=dict, repr=False)
    fingerprints: dict[str, str] = field(default_factory=dict, repr=False)
    files: dict[str, str] = field(default_factory=dict)
    models: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)
    relation: str = "merge"
    base: str | None = None
    data: list[dict[str, Any]] = field(default_factory=list)
    own_method: bool = False
    lift: dict[str, Any] | None = None
    search: Verdict | None = None

    def __str__(self) -> str:
        """A few lines to read; `text` gives all of it."""
        moved = [f"{donor}: {self.verdict(donor)}" for donor in self.donors()] or [self.unmoved()]
        return "\n".join([f"anchor: {self.anchor}", *moved, *(f"note: {note}" for note in self.notes)])

    def unmoved(self) -> str:
        """A sentence on a merge that moved no model."""
        if self.own_method:
            return f"No model was moved; `{self.delegate}` merged the models as they are"
        return f"No model was moved: this is the plain merge by `{self.delegate}`"

    def donors(self) -> list[str]:
        return list(dict.fromkeys([*(row.donor for row in self.rows), *self.whole, *self.files]))

    def relative_distances(self, donor: str) -> tuple[float, float]:
        """See `relative_distance`."""
        return relative_distance([row for row in self.rows if row.donor == donor])

    def verdict(self, donor: str) -> str:
        """One sentence on the effect of alignment for a donor."""
        words = gained(*self.relative_distances(donor), self.own_method)
        if not any(row.donor == donor for row in self.rows):
            words = "nothing was matched"
        return f"moved by the transforms in {self.files[donor]}: {words}" if donor in self.files else words

    def to_dict(self) -> dict[str, Any]:
        summary = {}
        for donor in self.donors():
            before, after = self.relative_distances(donor)
            summary[donor] = {"relative_before": before, "relative_after": after, "verdict": self.verdict(donor)}
        return {"format": FORMAT, "summary": summary, **asdict(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> MergeReport:
        """Reads a report; entries of other versions are ignored.

        Raises:
            ValueError: an entry is missing, or is none.
        """
        return read_as(cls, {name: data[name] for name in cls.__dataclass_fields__ if name in data})

    def text(self) -> str:
        """The full report as JSON text."""
        return json.dumps(self.to_dict(), indent=1) + "\n"

    def write(self, path: str) -> None:
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.text())


@functools.cache
def versions() -> dict[str, str]:
    """Versions of the software that computed the result."""
    used = {name: version(name) for name in ("mergekit", "torch", "transformers")}
    return {"python": platform.python_version(), "rotation-merge": __version__, **used}
