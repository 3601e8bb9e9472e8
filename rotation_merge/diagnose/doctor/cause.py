"""One cause of a bad merge."""

from __future__ import annotations

from dataclasses import dataclass

CERTAIN, LIKELY = 0.9, 0.5
"""Lower limits of the words for likelihoods; below all of them a cause is possible."""


@dataclass(frozen=True)
class Cause:
    """A possible cause of a bad merge.

    Attributes:
        name: one or two words.
        likelihood: from 0 to 1: probability that it spoils the merge, by its extent.
        what: the finding, with figures.
        where: the model, or the layer, it was found in.
        remedy: the next step.
    """

    name: str
    likelihood: float
    what: str
    where: str
    remedy: str

    @property
    def word(self) -> str:
        """The likelihood in a word."""
        return "certain" if self.likelihood >= CERTAIN else "likely" if self.likelihood >= LIKELY else "possible"
