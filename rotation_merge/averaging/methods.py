"""Merge methods of our own: mergekit's `MergeMethod`s that are told about the models, beside single tensors."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from mergekit.merge_methods.base import BatchOptions, MergeMethod, TensorGroup
from torch import Tensor

from rotation_merge.architecture.model import Block, TensorInfo
from rotation_merge.errors import RecipeError, RotationMergeError, StatisticsError
from rotation_merge.model.view import View
from rotation_merge.run.batches import Batch
from rotation_merge.run.maps import LinearMap, linear_map
from rotation_merge.run.statistics import Statistics

Place = tuple[Block, TensorInfo, int]
"""A tensor's block, its description, and which piece of a stacked tensor it is."""

Inputs = Mapping[str, Any]
"""What a method takes of one model beside its tensor, by name."""


@dataclass(frozen=True)
class MergedModels:
    """The models of one merge, all in the anchor's coordinates.

    Models go by the ids that the entries of a `TensorGroup` have.

    Attributes:
        base: id of the anchor.
        places: by name of an output tensor, its place in every model; all other tensors get the weighted mean.
        tied_head: name of a head that stays the embedding's tensor.
        views: the models, by id.
        statistics: of each model, by id, moved with it; empty where the method needs none.
        storage: dtype that a tensor of the result is rounded to; None: that of the first model's tensor.
        samples: gives the batches that activations are compared on; None: weights are compared.
        log: takes what a method notes while it merges, by name: numbers and words.
        tell: takes lines for the report.
    """

    base: Hashable
    places: Mapping[str, Place]
    tied_head: str | None = None
    views: Mapping[Hashable, View] = field(default_factory=dict)
    statistics: Mapping[Hashable, Statistics] = field(default_factory=dict)
    storage: Callable[[str], torch.dtype | None] = lambda _: None
    samples: Callable[[], Sequence[Batch]] | None = None
    log: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    tell: Callable[[str], None] = lambda _: None

    @classmethod
    def of(cls, views: Sequence[View], **facts: Any) -> MergedModels:
        """Models by their numbers, the anchor first; `facts` are further attributes."""
        first = views[0]
        facts = {"tied_head": first.tied_head, **facts}
        return cls(0, first.architecture.places(), views=dict(enumerate(views)), **facts)


@dataclass(frozen=True)
class Source:
    """One model's part in the average of a tensor.

    Attributes:
        weight: the tensor, in the anchor's coordinates; of a linear map (outputs, inputs).
        share: its weight among the models.
        inputs: what else the method takes of the model (`OwnMethod.brings`).
    """

    weight: Tensor
    share: float
    inputs: Inputs = field(default_factory=dict)

    def row(self, number: int) -> Source:
        """The part of one expert, where the first dimension counts them."""
        return Source(self.weight[number], self.share, {name: value[number] for name, value in self.inputs.items()})


class OwnMethod(MergeMethod):
    """A merge method that knows the architecture, and more of the models than the tensors of one group.

    A new one is a class in a file of its own, with a line in `averaging/registry.py`. `on` tells it about the models.

    Attributes:
        maps_only: whether its rule is for linear maps alone, each by itself as (outputs, inputs).
        needs_base: whether it takes the base's tensor, whatever the base's weight.
        tied: whether an embedding that is the head, too, counts as a linear map.
        negative: whether weights may be negative.
        statistics: the kind that every model brings; empty for none.
        on_samples: whether it takes samples.
        whole_models: whether it works on whole models, not tensor by tensor.
        no_changes: why it takes no donor that stands for a change carried to the anchor; empty where it does.
        bound: the models that it was told about.
    """

    maps_only = True
    needs_base = False
    tied = False
    negative = False
    statistics = ""
    on_samples = False
    whole_models = False
    no_changes = ""
    bound: MergedModels | None = None

    def on(self, models: MergedModels) -> Self:
        """The same method, told about the models."""
        method = copy.copy(self)
        method.bound = models
        return method

    def check_known(self, base: View) -> None:
        """Refuse a base of whose architecture nothing is known.

        Raises:
            RecipeError: names it.
        """
        if base.architecture.family == "unknown":
            problem = f"delegate {self.spec.name} does not know this architecture"
            remedy = "use another delegate, or add an architecture file (docs/add-architecture.md)"
            raise RecipeError(problem, where=base.name, remedy=remedy)

    @property
    def models(self) -> MergedModels:
        """The models that it was told about.

        Raises:
            RecipeError: none.
        """
        if self.bound is None:
            problem = f"delegate {self.spec.name} needs more than weights and cannot merge single tensors"
            raise RecipeError(problem, remedy="use it in a recipe with 'merge_method: rotation_merge'")
        return self.bound

    def note(self, name: str, value: Any) -> None:
        """Note a fact; of a method without models nobody reads it."""
        if self.bound is not None:
            self.bound.log[name].append(value)

    def merge(self, sources: Sequence[Source], info: TensorInfo, parameters: Mapping[str, Any], linear: bool) -> Tensor:
        """The merged tensor, in any floating dtype.

        Args:
            sources: of the models that count, the anchor's first; at least one.
            linear: whether it is a linear map (outputs, inputs), of a rule for these alone; all others are not.
        """
        return weighted_mean(sources)

    def words(self) -> list[str]:
        """Lines for the report, once all is merged."""
        return []

    def brings(self, name: str, model: Hashable, parameters: Mapping[str, Any], device: torch.device) -> Inputs:
        """What an output tensor takes of a model that counts, beside its tensor."""
        return {}

    def participants(
        self, name: str, weights: Mapping[Hashable, float], parameters: Mapping[str, Any]
    ) -> list[Hashable]:
        """The models that count for an output tensor, the base first.

        Called for each tensor ahead, it finds all that is wrong before anything is merged.

        Raises:
            RecipeError: a weight is negative, where sums have to stay positive.
            StatisticsError: all weights are zero.
        """
        base = self.models.base
        for model, weight in {} if self.negative else weights.items():
            if weight < 0:
                problem = f"its weight is {weight:g} (tensor '{name}')"
                remedy = f"delegate {self.spec.name} takes none below 0; 'delegate: linear' does"
                raise RecipeError(problem, where=self.models.views[model].name, remedy=remedy)
        weighted = [model for model, weight in weights.items() if weight != 0]
        if not weighted:
            raise StatisticsError(f"all weights of tensor '{name}' are zero", remedy="give one model a weight")
        donors = [model for model in weighted if model != base]
        return [base, *donors] if self.needs_base or base in weighted else donors

    def linear(self, name: str) -> LinearMap | None:
        """The linear map that an output tensor is, where the rule is for maps alone."""
        if not self.maps_only or name not in self.models.places:
            return None
        block, info, _ = self.models.places[name]
        return linear_map(block, info, self.tied and self.models.tied_head is not None)

    def _execute(
        self,
        groups: Sequence[TensorGroup],
        parameters: list[dict[str, Any]],
        options: BatchOptions,
        *,
        input_dtypes: Sequence[torch.dtype | None],
        out_dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, ...]:
        """Each group merged by the name of its output tensor, in float64, and rounded once.

        Tensors are taken as they are given, whatever `input_dtypes` says: changes are small beside roundings.
        """
        return tuple(self._merged(group, values, out_dtype) for group, values in zip(groups, parameters, strict=True))

    def _merged(self, group: TensorGroup, parameters: dict[str, Any], out_dtype: torch.dtype | None) -> Tensor:
        name, shared = str(group.metadata.name), {key: x for key, x in parameters.items() if key != "weight"}
        weights = {model: float(weight) for model, weight in parameters["weight"].items()}
        tensors = {entry.id: entry.tensor for entry in group.entries}
        models = self.participants(name, weights, shared)
        first = tensors[models[0]]
        if not first.is_floating_point():
            return first
        linear = self.linear(name)
        turned = linear.as_matrices if linear is not None else lambda tensor: tensor
        try:
            brought = [self.brings(name, model, shared, first.device) for model in models]
            sources = [Source(turned(tensors[m]), weights[m], x) for m, x in zip(models, brought, strict=True)]
            merged = self._average(name, sources, linear is not None, shared)
        except RotationMergeError as error:
            raise StatisticsError(error.what, where=error.where or name, remedy=error.remedy) from error
        return self.rounded(turned(merged), name, first, out_dtype)

    def rounded(self, merged: Tensor, name: str, first: Tensor, out_dtype: torch.dtype | None) -> Tensor:
        """A merged tensor in the dtype that it is stored in: of the result, or of the first model's tensor."""
        return merged.to(first.device, out_dtype or self.models.storage(name) or first.dtype)

    def _average(self, name: str, sources: list[Source], linear: bool, parameters: Mapping[str, Any]) -> Tensor:
        if name not in self.models.places:
            return weighted_mean(sources)
        info = self.models.places[name][1]
        if not linear or sources[0].weight.ndim != 3:
            return self.merge(sources, info, parameters, linear)
        rows = range(len(sources[0].weight))
        return torch.stack([self.merge([s.row(i) for s in sources], info, parameters, linear) for i in rows])


class StatisticsMethod(OwnMethod):
    """A method that averages each tensor by statistics of the models, moved with them to the anchor's coordinates."""

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
            unmapped = "embeddings, biases, norms and other tensors that are not linear maps"
            head = "" if models.tied_head is None else tied
            models.tell(f"Delegate {self.spec.name}: {unmapped}{head} keep the average.")
        return super().on(models)

    def merge(self, sources: Sequence[Source], info: TensorInfo, parameters: Mapping[str, Any], linear: bool) -> Tensor:
        return self.average(sources, parameters) if sources[0].inputs else weighted_mean(sources)

    def words(self) -> list[str]:
        kind, count = "linear maps" if self.maps_only else "tensors", len(set(self.models.log["weighed"]))
        return [f"Delegate {self.spec.name} averaged {count} {kind} by statistics on samples."]

    def participants(
        self, name: str, weights: Mapping[Hashable, float], parameters: Mapping[str, Any]
    ) -> list[Hashable]:
        models = super().participants(name, weights, parameters)
        weighed = [model for model in models if self._weighs(name, model)]
        if weighed:
            self.note("weighed", name)
        return weighed or models

    def brings(self, name: str, model: Hashable, parameters: Mapping[str, Any], device: torch.device) -> Inputs:
        return self.measured(name, model, device) if self._weighs(name, model) else {}

    def _weighs(self, name: str, model: Hashable) -> bool:
        """Whether a model's statistics weigh a tensor: a map that it has run; else the tensor gets the mean."""
        if name not in self.models.places or (self.maps_only and self.linear(name) is None):
            return False
        names, statistics = self.models.places[name][1].names, self.models.statistics
        if self.maps_only:
            return names[0] not in statistics[model].uncalled
        if all(set(names) <= set(each.metadata.get("buffers", ())) for each in statistics.values()):
            self.models.tell(f"Delegate {self.spec.name}: buffers, which no gradient reaches, keep the average.")
            return False
        return True


def weighted_mean(sources: Sequence[Source]) -> Tensor:
    """The weighted mean of the models' tensors, float64."""
    return mean([source.weight for source in sources], [source.share for source in sources])


def mean(weights: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """The weighted mean, float64.

    Raises:
        StatisticsError: the shares sum to zero.
    """
    total = sum(shares)
    if total == 0:
        raise StatisticsError("the weights of the models sum to zero", remedy="give positive weights")
    return weighted_sum(weights, [share / total for share in shares])


def weighted_sum(weights: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """The sum of tensors, each times its share, float64."""
    return sum(share * w.double() for share, w in zip(shares, weights, strict=True))  # type: ignore[return-value]
