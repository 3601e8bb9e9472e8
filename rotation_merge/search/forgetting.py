"""Forgetting of the base: the loss of merges on text that the base has written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rotation_merge.run.data import Data
from rotation_merge.run.generated_samples import self_written
from rotation_merge.search.judge import Figures, Judge, standard_error

TOLERATED = 0.1
"""Tolerated loss on the base's own text, as a share of the gain over the base."""


@dataclass(frozen=True)
class Forgetting:
    """The base's text, and the base's figures.

    Attributes:
        judge: measures models on the text.
        base: the base on the samples that decide, `on_base` on its own text.
    """

    judge: Judge
    base: Figures

    @classmethod
    def of(
        cls, model: Any, name: str, deciding: Judge, texts: int, length: int, batch_size: int, seed: int
    ) -> Forgetting:
        """Let the base write text; None if it is no language model.

        Args:
            model: the base, loaded.
            texts, length: number and tokens of the texts that it writes.
        """
        ids = self_written(model, name, texts, length, seed)
        batches = [{"input_ids": part, "labels": part} for part in ids.split(batch_size)]
        judge = Judge([Data(batches, "next token", len(ids))], labelled=True)
        forgetting = cls(judge, deciding.measure(model))
        return cls(judge, forgetting.measured(model, forgetting.base))

    def measured(self, model: Any, figures: Figures) -> Figures:
        """Figures of a model, with its loss on the base's text."""
        on_text = self.judge.measure(model)
        return replace(figures, on_base=on_text.score, base_texts=on_text.examples[0])

    def lost(self, figures: Figures) -> float:
        """Loss of a model on the base's text above the base's, in nats."""
        return (figures.on_base or 0.0) - (self.base.on_base or 0.0)

    def gained(self, figures: Figures) -> float:
        """Gain of a model over the base on the selection samples."""
        return self.base.score - figures.score

    def excess(self, figures: Figures, plain: Figures | None) -> float:
        """Nats that a merge loses more than the plain average does, beyond what is `allowed`; at least 0."""
        if figures.on_base is None:
            return 0.0
        return max(self._more(figures, plain) - self.allowed(figures, plain), 0.0)

    def allowed(self, figures: Figures, plain: Figures | None) -> float:
        """`TOLERATED` of a merge's gain, plus the standard error of what it loses more: the texts are few."""
        texts = zip(figures.base_texts, self._reference(plain).base_texts, strict=False)
        return TOLERATED * self.gained(figures) + standard_error([x - y for x, y in texts])

    def _more(self, figures: Figures, plain: Figures | None) -> float:
        """Nats that a merge loses more than the plain average does."""
        return self.lost(figures) - self.lost(self._reference(plain))

    def _reference(self, plain: Figures | None) -> Figures:
        """The plain average; the base where there is none, or where it loses less than the base."""
        return plain if plain is not None and self.lost(plain) > 0.0 else self.base

    def why(self, name: str, figures: Figures, plain: Figures | None) -> str:
        """The reason for rejecting a merge with a better score."""
        return (
            f"Not chosen: '{name}' ({figures.score:.4f} on the selection samples) forgets too much. On the base's own "
            f"text it loses {self._more(figures, plain):.4f} nats more than the plain average; "
            f"{self.allowed(figures, plain):.4f} is allowed: a tenth of its gain over the base, and the standard error."
        )


def sentences(forgetting: Forgetting | None, tried: Sequence[tuple[str, Figures]], best: Figures) -> list[str]:
    """Reasons why merges with better scores were rejected for forgetting."""
    if forgetting is None:
        return []
    plain = next((figures for name, figures in tried if name == "plain"), None)
    return [
        forgetting.why(name, figures, plain)
        for name, figures in tried
        if not figures.unfinished and figures.score < best.score and forgetting.excess(figures, plain)
    ]
