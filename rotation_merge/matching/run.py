"""The log of one merge, collected while it runs."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from torch import Tensor

from rotation_merge.matching.alignment import Alignment, Transforms
from rotation_merge.record import MergeReport, SpaceRow, versions
from rotation_merge.run.ledger import NOWHERE, Ledger

LOG = logging.getLogger(__name__)

FAR = 0.2
"""Squared change over squared norm before it, above which a task vector hardly transfers."""


@dataclass(eq=False)
class Run:
    """Records of one merge; tasks add to it from any thread.

    Attributes:
        watched: whether somebody will read the report; if not, models' fingerprints are not taken.
        files: by donor, the alignment files that are applied instead of matching.
        heads: by donor, tensors of its own head that were solved.
        data: samples that were used, each with `of` (what for), `source` and `samples`.
        lifts: facts of the recovered lift of each donor that samples judged.
        later: give notes that are known only after all tensors are written.
        ledger: where what matching finds is kept, so that another run can go on.
    """

    matched: list[SpaceRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    whole: dict[str, dict[str, object]] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    transforms: dict[str, Transforms] = field(default_factory=dict)
    folded: tuple[str, ...] = ()
    carried: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    data: list[dict[str, Any]] = field(default_factory=list)
    heads: dict[str, dict[str, Tensor]] = field(default_factory=dict, repr=False)
    lifts: dict[str, dict[str, Any]] = field(default_factory=dict)
    watched: bool = True
    ledger: Ledger = NOWHERE
    began: float = field(default_factory=time.perf_counter)
    endings: list[Callable[[], None]] = field(default_factory=list, repr=False)
    later: list[Callable[[], list[str]]] = field(default_factory=list, repr=False)
    _lock: Any = field(default_factory=threading.Lock, repr=False)

    def record(self, donor: str, rows: Sequence[SpaceRow], silent: bool = False) -> None:
        """Record matches of a donor's spaces, and log them."""
        _log(donor, () if silent else rows)
        with self._lock:
            self.matched += [replace(row, donor=donor) for row in rows]

    def aligned(self, donor: str, alignment: Alignment, file: str | None = None) -> None:
        """Record the alignment of one donor as a whole, once.

        Args:
            file: that it was read from, nothing being matched.
        """
        if donor in self.transforms:
            return
        self.transforms[donor] = alignment.transforms
        if file is not None:
            self.files[donor] = file
        self.record(donor, alignment.rows, silent=file is not None)
        for note in alignment.notes:
            self.note(f"`{donor}`: {note}")
        if alignment.samples is not None:
            self.used(f"matching {donor}", *alignment.samples)
        if alignment.summary:
            LOG.info("%s: %s", donor, ", ".join(f"{name} {value}" for name, value in alignment.summary.items()))
            self.whole[donor] = dict(alignment.summary)

    def used(self, of: str, source: str, samples: int, file: str | None = None) -> None:
        """Record samples that a result was computed from, each once.

        Args:
            file: of statistics that the recipe does not name: where they were found.
        """
        with self._lock:
            facts = {"of": of, "source": source, "samples": samples, **({"file": file} if file else {})}
            if facts not in self.data:
                self.data.append(facts)

    def transport(self, donor: str, change: float, origin: float) -> None:
        """Add a tensor's squared change by fine-tuning and its squared norm before it."""
        with self._lock:
            self.carried.setdefault(donor, []).append((change, origin))

    def note(self, text: str) -> None:
        """Add a note for the report, each text once."""
        with self._lock:
            if text not in self.notes:
                self.notes.append(text)

    def report(self, anchor: object, delegate: str, recipe: str, **facts: Any) -> MergeReport:
        """The report on the merge so far; arguments as the fields of `MergeReport`."""
        changed = [change_note(f"The task vector of `{donor}`", norms) for donor, norms in sorted(self.carried.items())]
        notes = [*self.notes, *filter(None, changed), *(line for lines in self.later for line in lines())]
        return MergeReport(
            str(anchor),
            delegate,
            recipe,
            self.rows(),
            dict(self.whole),
            notes,
            time.perf_counter() - self.began,
            versions(),
            files=dict(self.files),
            data=list(self.data),
            lift=dict(self.lifts) or None,
            **facts,
        )

    def rows(self) -> list[SpaceRow]:
        """Report rows for each space of each donor."""
        return sorted(self.matched, key=lambda row: (row.donor, row.layer is None, row.layer or 0, row.block))

    def end(self) -> None:
        """End the run and remove its files."""
        for ending in self.endings:
            ending()


def change_note(subject: str, norms: Iterable[tuple[float, float]]) -> str | None:
    """A warning if a change is too large to transfer, by the squared norms of its tensors and of those of its base."""
    change, origin = map(sum, zip((0.0, 0.0), *norms, strict=True))
    share = change / origin if origin else 0.0
    if share <= FAR:
        return None
    return (
        f"{subject} is too large to transfer well. Use a scale or weight of at most 0.1 and compare with the new base "
        f"alone, or fine-tune the new base. Its squared norm is {share:.2g} of its base's; the limit is {FAR}."
    )


def _log(donor: str, rows: Sequence[SpaceRow]) -> None:
    """Log the decision for each block of a donor: one line, and one per space at debug level."""
    for block, of_block in groupby(rows if LOG.isEnabledFor(logging.INFO) else (), key=lambda row: row.block):
        words = []
        for row in of_block:
            norm = row.anchor_norm or math.inf
            before, after = row.distance_before / norm, row.distance_after / norm
            words.append(f"{row.space.split('.')[-1]} by {row.group}: {before:.3g} -> {after:.3g}")
            parts = [f"{name} {value:.3g} from the identity" for name, value in row.from_identity.items()]
            LOG.debug("%s, %s: %s", donor, row.space, ", ".join([*parts, f"{row.seconds:.2f} s", *row.notes]))
        LOG.info("%s, %s: %s", donor, block, "; ".join(words))
