"""Fisher averaging: every tensor by the diagonals of the models' Fisher information."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from mergekit.merge_methods.base import BasePolicy, InputContract, MergeMethodSpec
from torch import Tensor

from rotation_merge.averaging.methods import Inputs, Source, StatisticsMethod
from rotation_merge.averaging.parameters import WEIGHT, parameter
from rotation_merge.config import NotNegative
from rotation_merge.errors import StatisticsError


class Fisher(StatisticsMethod):
    """Every tensor by Fisher diagonals."""

    statistics = "fisher"
    maps_only = False
    spec = MergeMethodSpec(
        name="fisher",
        pretty_name="Fisher",
        reference_url="https://arxiv.org/abs/2111.09832",
        parameters=(
            WEIGHT,
            parameter("normalize", True, "divide each Fisher by its norm"),
            parameter(
                "floor",
                1e-6,
                "least Fisher of base_model, which keeps its weights where all Fishers are 0",
                NotNegative,
            ),
        ),
        contract=InputContract(base=BasePolicy.OPTIONAL),
    )

    def measured(self, name: str, model: Hashable, device: torch.device) -> Inputs:
        """The Fisher diagonal of a tensor, of its shape, and the norm of the model's whole one."""
        _, info, piece = self.models.places[name]
        statistics, key = self.models.statistics[model], f"{info.names[piece]}.fisher"
        if key not in statistics:
            raise StatisticsError(f"hold nothing of tensor '{info.name}'", where=statistics.path)
        return {"fisher": statistics[key].to(device), "norm": float(statistics.metadata.get("fisher_norm") or 0.0)}

    def average(self, sources: Sequence[Source], parameters: Mapping[str, Any]) -> Tensor:
        norms = [s.inputs["norm"] if parameters["normalize"] else 1.0 for s in sources]
        if not all(norms):
            raise StatisticsError("a model's Fisher vanishes everywhere", remedy="measure on other samples")
        shares = [s.share / norm for s, norm in zip(sources, norms, strict=True)]
        fishers = [s.inputs["fisher"] for s in sources]
        return fisher([s.weight for s in sources], fishers, shares, parameters["floor"])


def fisher(weights: Sequence[Tensor], fishers: Sequence[Tensor], shares: Sequence[float], floor: float) -> Tensor:
    r"""``sum_k a_k F_k W_k / sum_k a_k F_k``, coordinate by coordinate, float64.

    Args:
        fishers: of the shape of the weights, not negative.
        shares: a_k, over the norm of each model's whole Fisher where that is wanted.
        floor: the least of the first model's: where all vanish its value is kept.

    Source: Matena and Raffel 2022, equation 6; floor and normalisation as in their code.
    """
    first = weights[0].double()
    floored = [f.double().clamp(min=floor) if i == 0 else f.double() for i, f in enumerate(fishers)]
    total = sum(a * f for a, f in zip(shares, floored, strict=True))
    change = sum(a * f * (w.double() - first) for a, f, w in zip(shares, floored, weights, strict=True))
    return first + torch.where(total == 0, torch.zeros_like(first), change / total)  # type: ignore[arg-type]
