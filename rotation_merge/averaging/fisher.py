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
            parameter("floor", 1e-6, "least Fisher of base_model, whose weights stay where all are 0", NotNegative),
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
        r"""``sum_k a_k F_k W_k / sum_k a_k F_k``, coordinate by coordinate, float64.

        The first model's Fishers have a least value: where all vanish its weight is kept.

        Source: Matena and Raffel 2022, equation 6; floor and normalisation as in their code.
        """
        norms = [source.inputs["norm"] if parameters["normalize"] else 1.0 for source in sources]
        if not all(norms):
            raise StatisticsError("a model's Fisher vanishes everywhere", remedy="measure on other samples")
        first = sources[0].weight.double()
        total, change = torch.zeros_like(first), torch.zeros_like(first)
        for source, norm in zip(sources, norms, strict=True):
            least = parameters["floor"] if source is sources[0] else 0.0
            fisher = (source.share / norm) * source.inputs["fisher"].double().clamp(min=least)
            total += fisher
            change += fisher * (source.weight.double() - first)
        return first + torch.where(total == 0, torch.zeros_like(first), change / total)
