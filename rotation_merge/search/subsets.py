"""Merges of random subsets of the models: how often the chosen method beats the best single model."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rotation_merge.search.judge import Figures


@dataclass(frozen=True)
class Subset:
    """A subset of the models, with the scores of its merge and of its best model on their own samples.

    Attributes:
        merge, parent: scores, less is better.
    """

    models: tuple[str, ...]
    merge: float
    parent: float

    @classmethod
    def of(cls, chosen: Sequence[int], models: Sequence[str], merge: Figures, parents: Sequence[Figures]) -> Subset:
        """Score the merge of a subset and its best parent.

        Args:
            chosen: which of all models are merged.
            parents: score of every model.
        """
        sets = chosen if len(merge.each) == len(models) else range(len(merge.each))

        def score(figures: Figures) -> float:
            return sum(figures.each[i] for i in sets) / len(sets)

        return cls(tuple(models[i] for i in chosen), score(merge), min(score(parents[i]) for i in chosen))

    @property
    def better(self) -> bool:
        """Whether the merge beats the best of its models."""
        return self.merge < self.parent


def drawn(models: int, count: int, seed: int) -> list[tuple[int, ...]]:
    """At most `count` subsets of two or more models, without the full set; random if there are more."""
    every = [s for size in range(2, models) for s in itertools.combinations(range(models), size)]
    order = torch.randperm(len(every), generator=torch.Generator().manual_seed(seed)).tolist()
    return [every[i] for i in sorted(order[:count])]


def words(subsets: Sequence[Subset]) -> str:
    """One sentence on the result."""
    better = sum(subset.better for subset in subsets)
    return (
        f"The same merge of a subset of the models beats the subset's best model in {better} of {len(subsets)} subsets."
    )
