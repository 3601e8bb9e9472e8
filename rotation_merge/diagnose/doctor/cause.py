"""One cause of a bad merge."""

from __future__ import annotations

from dataclasses import dataclass

CERTAIN, LIKELY = 0.9, 0.5
"""Likelihoods from which on a cause is called so; what is below is possible."""


@dataclass(frozen=True)
class Cause:
    """A possible cause of a bad merge.

    Attributes:
        name: what it is called, one or two words.
        likelihood: from 0 to 1: that it spoils a merge where it is found, by how much of it is there.
        what: what was found, with figures.
        where: the model, or the layer, it was found in.
        remedy: how to mend it.
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
