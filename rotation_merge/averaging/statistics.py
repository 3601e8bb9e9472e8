"""Merge methods that average each tensor by statistics of the models, moved with them to the anchor's coordinates."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from rotation_merge.averaging.methods import Inputs, OwnMethod, Source, Target, weighted_mean
from rotation_merge.averaging.models import MergedModels, MergeLog
from rotation_merge.errors import RotationMergeError, StatisticsError
from rotation_merge.model.blocks import read_tensor
from rotation_merge.run.maps import linear_map


class StatisticsMethod(OwnMethod):
    """A method that averages each tensor by statistics of the models."""

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

    def words(self, log: MergeLog) -> list[str]:
        kind = "linear maps" if self.maps_only else "tensors"
        how = "by statistics on samples"
        return [f"Delegate {self.spec.name} averaged {len(log.with_statistics)} {kind} {how}."]

    def participants(
        self, name: str, weights: Mapping[Hashable, float], parameters: Mapping[str, Any]
    ) -> list[Hashable]:
        models = super().participants(name, weights, parameters)
        with_statistics = self._with_statistics(name, models)
        if with_statistics:
            self.models.log.with_statistics.update(self.models.places[name][1].names)
        return with_statistics or models

    def inputs(
        self, name: str, models: Sequence[Hashable], parameters: Mapping[str, Any], device: torch.device
    ) -> Mapping[Hashable, Inputs]:
        with_statistics = self._with_statistics(name, models)
        return {model: {self.statistics: self._measured(name, model, device)} for model in with_statistics}

    def _measured(self, name: str, model: Hashable, device: torch.device) -> Tensor:
        try:
            return MEASURED[self.statistics](self.models, name, model, device)
        except RotationMergeError as error:
            place = error.where or self.models.name(model)
            raise StatisticsError(error.what, where=place, remedy=error.remedy) from error

    def _with_statistics(self, name: str, models: Sequence[Hashable]) -> list[Hashable]:
        """The models whose statistics weigh a tensor: for a map those that have run it; none where it gets the mean."""
        if name not in self.models.places or (self.maps_only and self.linear(name) is None):
            return []
        names = {model: self.models.place(model, name)[1].names for model in models}
        statistics = self.models.statistics
        if self.maps_only:
            return [model for model in models if names[model][0] not in statistics[model].uncalled]
        if all(set(names[model]) <= set(statistics[model].metadata.get("buffers", ())) for model in models):
            text = f"Delegate {self.spec.name}: buffers, which no gradient reaches, keep the average."
            self.models.log.line(text)
            return []
        return list(models)


def input_gram(models: MergedModels, name: str, model: Hashable, device: torch.device) -> Tensor:
    """The Gram of a map's inputs, (inputs, inputs), float64; (experts, inputs, inputs) where one tensor holds experts.

    Where a norm feeds the map, what was measured is the Gram of its normalised inputs (x_hat, 1); the map reads
    ``x = D x_hat + c`` with the norm's gain D and shift c.

    Args:
        name: of the output tensor.

    Raises:
        StatisticsError: the model's statistics lack it.
    """
    block, info, piece = models.place(model, name)
    statistics, linear = models.statistics[model], linear_map(block, info)
    gram = statistics.gram(info.name)
    if gram is None or linear is None:
        problem, remedy = f"hold nothing of tensor '{info.name}'", "if transformers runs it in parts, use 'refit'"
        raise StatisticsError(problem, where=statistics.path, remedy=f"measure again; {remedy}")
    norm, view = linear.norm, models.views[model]

    def stored(key: str | None) -> Tensor | None:
        part = None if key is None else block.tensor(key)
        tensor = None if part is None or not gram.split else read_tensor(part, view.tensors)
        return None if tensor is None else tensor.to(device).double()

    gain, shift = (None, None) if norm is None else (stored(norm.gain), stored(norm.shift))
    if norm is not None and gain is not None:
        gain = gain + norm.offset
    inputs = gram.to(str(device)).behind_norm(linear, gain, shift).matrix[..., :-1, :-1]
    return inputs[piece] if info.stacked else inputs


def fisher_diagonal(models: MergedModels, name: str, model: Hashable, device: torch.device) -> Tensor:
    """The Fisher diagonal of a tensor, of its shape.

    Args:
        name: of the output tensor.

    Raises:
        StatisticsError: the model's statistics lack it.
    """
    _, info, piece = models.place(model, name)
    statistics, key = models.statistics[model], f"{info.names[piece]}.fisher"
    if key not in statistics:
        raise StatisticsError(f"hold nothing of tensor '{info.name}'", where=statistics.path)
    return statistics[key].to(device)


MEASURED: dict[str, Callable[[MergedModels, str, Hashable, torch.device], Tensor]] = {
    "gram": input_gram,
    "fisher": fisher_diagonal,
}
"""What each kind of statistics holds for an output tensor of one model."""
