"""Forgetting of the base: the loss of merges on text that the base has written."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rotation_merge.run.data import Data
from rotation_merge.run.evaluate import score
from rotation_merge.search.judge import Figures

TOLERATED = 0.1
"""Tolerated loss on the base's own text, as a share of the gain over the base."""


@dataclass(frozen=True)
class Forgetting:
    """The base's text, and the base's figures.

    Attributes:
        texts: a set of samples each.
        base: the base on the samples that decide, `on_base` on its own text.
    """

    texts: Sequence[Data]
    base: Figures

    @classmethod
    def of(cls, base: Any, figures: Figures, ids: Any) -> Forgetting:
        """From the base, its figures on the samples that decide, and the texts (texts, tokens) that it wrote."""
        texts = [Data([{"input_ids": row, "labels": row}], "next token", 1) for row in ids.split(1)]
        return cls(texts, cls(texts, figures).measured(base, figures))

    def measured(self, model: Any, figures: Figures) -> Figures:
        """Figures of a model, with its loss on the base's text."""
        losses = [score(model, text).loss for text in self.texts]
        return replace(figures, on_base=statistics.fmean(losses), base_texts=losses)

    def excess(self, figures: Figures, plain: Figures | None) -> float:
        """Nats that a merge loses more than the plain average does, beyond what is `allowed`; at least 0."""
        if figures.on_base is None:
            return 0.0
        return max(self._more(figures, plain) - self.allowed(figures, plain), 0.0)

    def allowed(self, figures: Figures, plain: Figures | None) -> float:
        """`TOLERATED` of a merge's gain, plus the standard error of what it loses more: the texts are few."""
        texts = zip(figures.base_texts, self._reference(plain).base_texts, strict=False)
        return TOLERATED * (self.base.score - figures.score) + _standard_error([x - y for x, y in texts])

    def _more(self, figures: Figures, plain: Figures | None) -> float:
        """Nats that a merge loses more than the plain average does."""
        return (figures.on_base or 0.0) - (self._reference(plain).on_base or 0.0)

    def _reference(self, plain: Figures | None) -> Figures:
        """The plain average; the base where there is none, or where it loses less than the base."""
        return plain if plain is not None and (plain.on_base or 0.0) > (self.base.on_base or 0.0) else self.base

    def why(self, name: str, figures: Figures, plain: Figures | None) -> str:
        """The reason for rejecting a merge with a better score."""
        return (
            f"Not chosen: '{name}' ({figures.score:.4f} on the selection samples) forgets too much. On the base's own "
            f"text it loses {self._more(figures, plain):.4f} nats more than the plain average; "
            f"{self.allowed(figures, plain):.4f} is allowed: a tenth of its gain over the base, and the standard error."
        )


def _standard_error(values: Sequence[float]) -> float:
    """Of the mean; 0 of fewer than two values."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
