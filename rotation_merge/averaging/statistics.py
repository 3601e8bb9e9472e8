"""Merge methods that average each tensor by statistics of the models, moved with them to the anchor's coordinates."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from rotation_merge.averaging.methods import Inputs, OwnMethod, Source, Target, weighted_mean
from rotation_merge.averaging.models import MergedModels
from rotation_merge.errors import RotationMergeError, StatisticsError


class StatisticsMethod(OwnMethod):
    """A method that averages each tensor by statistics of the models."""

    def measured(self, name: str, model: Hashable, device: torch.device) -> Inputs:
        """What one model's statistics hold for an output tensor.

        Raises:
            StatisticsError: they lack it.
        """
        raise NotImplementedError

    def average(self, sources: Sequence[Source], parameters: Mapping[str, Any]) -> Tensor:
        """The average, float64; the anchor's source first."""
        raise NotImplementedError

    def on(self, models: MergedModels) -> Self:
        if self.maps_only:
            tied = ", and the head, which is tied to the embedding ('untie: true' gives it its own tensor),"
            others = "embeddings, biases, norms and other tensors that are not linear maps"
            head = "" if models.tied_head is None else tied
            models.log.line(f"Delegate {self.spec.name}: {others}{head} keep the average.")
        return super().on(models)

    def merge(self, sources: Sequence[Source], target: Target, parameters: Mapping[str, Any]) -> Tensor:
        return self.average(sources, parameters) if sources[0].inputs else weighted_mean(sources)

    def words(self) -> list[str]:
        kind, count = "linear maps" if self.maps_only else "tensors", len(set(self.models.log.facts.get("weighed", ())))
        return [f"Delegate {self.spec.name} averaged {count} {kind} by statistics on samples."]

    def participants(
        self, name: str, weights: Mapping[Hashable, float], parameters: Mapping[str, Any]
    ) -> list[Hashable]:
        models = super().participants(name, weights, parameters)
        weighed = [model for model in models if self._weighs(name, model)]
        if weighed:
            self.models.log.note("weighed", name)
        return weighed or models

    def brings(self, name: str, model: Hashable, parameters: Mapping[str, Any], device: torch.device) -> Inputs:
        if not self._weighs(name, model):
            return {}
        try:
            return self.measured(name, model, device)
        except RotationMergeError as error:
            place = error.where or self.models.name(model)
            raise StatisticsError(error.what, where=place, remedy=error.remedy) from error

    def _weighs(self, name: str, model: Hashable) -> bool:
        """Whether a model's statistics weigh a tensor: a map that it has run; else the tensor gets the mean."""
        if name not in self.models.places or (self.maps_only and self.linear(name) is None):
            return False
        names, statistics = self.models.places[name][1].names, self.models.statistics
        if self.maps_only:
            return names[0] not in statistics[model].uncalled
        if all(set(names) <= set(each.metadata.get("buffers", ())) for each in statistics.values()):
            self.models.log.line(f"Delegate {self.spec.name}: buffers, which no gradient reaches, keep the average.")
            return False
        return True
