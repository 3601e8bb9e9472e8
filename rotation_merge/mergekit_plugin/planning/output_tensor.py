"""One output tensor that our own delegate averages, with the facts for planning it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from mergekit.common import ModelReference
from mergekit.config import ConfigReader
from mergekit.graph import Task

from rotation_merge.architecture.model import TensorInfo
from rotation_merge.errors import RecipeError, StatisticsError
from rotation_merge.mergekit_plugin.planning.block_moves import BlockMoves


@dataclass(frozen=True)
class OutputTensor:
    """
    Attributes:
        info: the anchor's tensor; of experts `piece` says which.
        gather: gives each model's tensor, vocabularies brought together.
        label: its name in the output.
        shares: weights of the models.
        parameters: the delegate's.
        dtype: of the output; None: that of the anchor's tensor.
    """

    info: TensorInfo
    piece: int
    gather: Task
    label: str
    moves: BlockMoves
    reader: ConfigReader
    shares: Mapping[ModelReference, float]
    parameters: Mapping[str, Any]
    dtype: torch.dtype | None = None

    @property
    def key(self) -> str:
        return f"{self.moves.out.number}:{self.label}"

    def models(self, base: ModelReference) -> list[ModelReference]:
        """Models with a nonzero weight, the base first.

        Raises:
            StatisticsError: none does.
        """
        counting = [model for model, share in self.shares.items() if share != 0]
        if not counting:
            raise StatisticsError(f"all weights of tensor '{self.label}' are zero", remedy="give one model a weight")
        return sorted(counting, key=lambda model: model != base)

    def check_shares(self, delegate: str) -> None:
        """Refuse negative weights, because sums of statistics have to stay positive.

        Raises:
            RecipeError: a weight is negative.
        """
        for model, share in self.shares.items():
            if share < 0:
                problem = f"its weight is {share:g} (tensor '{self.label}')"
                remedy = f"delegate {delegate} takes none below 0; 'delegate: linear' does"
                raise RecipeError(problem, where=str(model), remedy=remedy)
