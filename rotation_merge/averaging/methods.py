"""Delegates that average by statistics, and refit, which solves on samples: parameters, required inputs, formulas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from mergekit.merge_methods.base import (
    BasePolicy,
    BatchOptions,
    InputContract,
    MergeMethod,
    MergeMethodSpec,
    ParameterScope,
    ParameterSpec,
    TensorGroup,
)
from torch import Tensor

from rotation_merge.architecture.model import TensorInfo
from rotation_merge.averaging.closed_forms import fisher, mean, regmean, shrunk
from rotation_merge.averaging.config import RefitConfig
from rotation_merge.config import NotNegative, Option, Share
from rotation_merge.errors import RecipeError, StatisticsError, short

STOCK, TENSOR, BLOCK, MODEL = "stock", "tensor", "block", "model"
"""The unit that a delegate works on. STOCK: single tensors, by a task of mergekit's own."""


@dataclass(frozen=True)
class Plan:
    """The inputs that a delegate needs, from which the planner makes tasks.

    Attributes:
        unit: tensor; tensor with results on its whole block; or whole models.
        statistics: the kind that every model brings, which are carried along with it; empty for none.
        maps_only: whether its rule is for linear maps alone, each by itself as (outputs, inputs).
        base: whether it takes the base's tensor, whatever the base's weight.
        tied: whether an embedding that is the head, too, counts as a linear map.
        negative: whether weights may be negative.
        no_changes: why it takes no donor that stands for a change carried to the anchor; empty where it does.
    """

    unit: str
    statistics: str = ""
    maps_only: bool = True
    base: bool = False
    negative: bool = False
    no_changes: str = ""
    tied: bool = False


def numbers_for(weights: Any, count: int, of: str) -> list[float]:
    """Weights that a caller gave, one for each of `count` models.

    Args:
        of: what they are weights of, in the singular.

    Raises:
        RecipeError: they are no numbers, or too many or too few.
    """
    try:
        values = [float(weight) for weight in weights]
    except (TypeError, ValueError) as error:
        raise RecipeError(f"'weights' are {short(repr(weights))}", remedy=f"give one number for each {of}") from error
    if len(values) != count:
        raise RecipeError(f"{len(values)} weights for {count} {of}s", remedy=f"give one weight for each {of}")
    return values


def plan_of(method: MergeMethod) -> Plan:
    """The plan of a delegate; for mergekit's methods, the tensors alone."""
    plan: Plan = method.plan() if hasattr(method, "plan") else Plan(STOCK)
    return plan


@dataclass(frozen=True)
class Source:
    """One model's part in the average of a tensor.

    Attributes:
        weight: the tensor, in the anchor's coordinates.
        share: its weight among the models.
        held: further inputs of the model: its statistics for this tensor, carried (`gram` or `fisher`), or transport
            plans by space.
        made: the head of its statistics file.
    """

    weight: Tensor
    share: float
    held: Mapping[str, Any] = field(default_factory=dict)
    made: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class MergeLog:
    """Statistics of a delegate's work over all tensors of a merge.

    Attributes:
        base: the anchor's name.
        with_statistics: names of the tensors that statistics weighed.
        facts: notes of the delegate, by name.
    """

    base: str = ""
    with_statistics: set[str] = field(default_factory=set)
    facts: dict[str, list[Any]] = field(default_factory=dict)

    def note(self, name: str, value: Any) -> None:
        self.facts.setdefault(name, []).append(value)


@dataclass(frozen=True)
class Target:
    """The output tensor that a delegate merges.

    Attributes:
        linear: whether it is a linear map.
        piece: which of several stacked pieces it is; None where it is not one of several.
    """

    info: TensorInfo
    linear: bool = False
    piece: int | None = None
    log: MergeLog = field(default_factory=MergeLog, repr=False)


WEIGHT = ParameterSpec("weight", float, ParameterScope.INPUT, description="share of the model")


@dataclass(frozen=True)
class DelegateParameter(ParameterSpec):
    """A parameter of a delegate of our own.

    Attributes:
        option: which values it may have.
    """

    option: Option | None = None


def parameter(name: str, default: Any, help: str, kind: Any = None) -> DelegateParameter:
    """A parameter of a delegate, one value for all models.

    Args:
        kind: type of its values, if not the default's.
    """
    return described_parameter(name, default, Option(kind or type(default), help))


def described_parameter(name: str, default: Any, described: Option) -> DelegateParameter:
    """A parameter of a delegate that a config describes."""
    kind: Any = described.base | None if described.optional else described.base
    return DelegateParameter(name, kind, ParameterScope.SHARED, default, described.text, option=described)


class DelegateMethod(MergeMethod):
    """A delegate of our own: it runs inside a merge and looks at more than single tensors.

    A new one is a class like this in a file of this folder, with a line in `mergekit_plugin/delegates.py`.
    """

    def plan(self) -> Plan:
        """The inputs that the method needs."""
        raise NotImplementedError

    def check(self, parameters: Mapping[str, Any]) -> None:
        """Refuse values that mean nothing.

        Raises:
            RecipeError: names the parameter, its range and the nearest value.
        """
        for spec in self.spec.parameters:
            if isinstance(spec, DelegateParameter) and spec.option is not None:
                spec.option.check(spec.name, parameters[spec.name], "parameter")

    def merge(self, sources: Sequence[Source], target: Target, parameters: Mapping[str, Any]) -> Tensor:
        """The merged tensor, in any floating dtype; of units smaller than the whole model.

        Args:
            sources: of the models that count, the anchor's first; at least one.
        """
        raise NotImplementedError

    def words(self, log: MergeLog) -> list[str]:
        """Lines for the report, once all is merged."""
        return []

    def _execute(
        self,
        groups: Sequence[TensorGroup],
        parameters: list[dict[str, Any]],
        options: BatchOptions,
        *,
        input_dtypes: Sequence[torch.dtype | None],
        out_dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, ...]:
        raise RecipeError(
            f"delegate {self.spec.name} needs more than weights and cannot merge single tensors",
            remedy="use it in a recipe with 'merge_method: rotation_merge'",
        )


class StatisticsMethod(DelegateMethod):
    """A delegate that averages each tensor by statistics, which are carried along with the donors.

    Attributes:
        kind: of statistics that it needs.
        maps_only: whether tensors that are no linear maps get the weighted mean, and need no statistics.
    """

    kind: str
    maps_only = True

    def average(self, sources: Sequence[Source], parameters: Mapping[str, Any]) -> Tensor:
        """The average, float64; the anchor's source first."""
        raise NotImplementedError

    def plan(self) -> Plan:
        return Plan(TENSOR, self.kind, self.maps_only)

    def merge(self, sources: Sequence[Source], target: Target, parameters: Mapping[str, Any]) -> Tensor:
        return self.average(sources, parameters) if sources[0].held else averaged(sources)

    def words(self, log: MergeLog) -> list[str]:
        kind = "linear maps" if self.maps_only else "tensors"
        how = "by statistics on samples"
        return [f"Delegate {self.spec.name} averaged {len(log.with_statistics)} {kind} {how}."]


def averaged(sources: Sequence[Source]) -> Tensor:
    """The weighted mean."""
    return mean([s.weight for s in sources], [s.share for s in sources])


class RegMean(StatisticsMethod):
    """Linear maps by the Grams of their inputs, everything else by the mean."""

    kind = "gram"
    spec = MergeMethodSpec(
        name="regmean",
        pretty_name="RegMean",
        reference_url="https://arxiv.org/abs/2212.09849",
        parameters=(
            WEIGHT,
            parameter("shrink", 0.9, "factor of the off-diagonals of Grams", Share),
            parameter("ridge", 1e-3, "ridge added to Grams, relative to their mean diagonal", NotNegative),
        ),
        contract=InputContract(base=BasePolicy.OPTIONAL),
    )

    def average(self, sources: Sequence[Source], parameters: Mapping[str, Any]) -> Tensor:
        grams = [shrunk(s.held["gram"], parameters["shrink"], parameters["ridge"]) for s in sources]
        return regmean([s.weight for s in sources], grams, [s.share for s in sources])


class Fisher(StatisticsMethod):
    """Every tensor by Fisher diagonals."""

    kind = "fisher"
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

    def average(self, sources: Sequence[Source], parameters: Mapping[str, Any]) -> Tensor:
        norms = [float(s.made.get("fisher_norm") or 0.0) if parameters["normalize"] else 1.0 for s in sources]
        if not all(norms):
            raise StatisticsError("a model's Fisher vanishes everywhere", remedy="measure on other samples")
        shares = [s.share / norm for s, norm in zip(sources, norms, strict=True)]
        return fisher([s.weight for s in sources], [s.held["fisher"] for s in sources], shares, parameters["floor"])


SOLVING = ("ridge", "lambda_")
"""Fields that are parameters of the delegate; the others name its inputs and are parameters of the recipe."""


def _parameter(field: str) -> DelegateParameter:
    described = RefitConfig.options()[field]
    return described_parameter(described.key or field, getattr(RefitConfig, field), described)


class RefitMethod(DelegateMethod):
    """Runs the models on samples and solves the merge's linear maps for the same outputs (`averaging.refit`).

    The merge runs it ahead of its plan.
    """

    spec = MergeMethodSpec(
        name="refit",
        pretty_name="Refit",
        parameters=(WEIGHT, *map(_parameter, SOLVING)),
        contract=InputContract(base=BasePolicy.OPTIONAL),
    )

    def plan(self) -> Plan:
        return Plan(MODEL, no_changes="needs whole models, but 'finetuned_from' gives a task vector")


METHODS: tuple[StatisticsMethod, ...] = (RegMean(), Fisher())
