"""The delegates that average by statistics: their parameters, what they need, and the sum that they do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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

from rotation_merge.averaging.closed_forms import Metric, fisher, kfac, mean, regmean
from rotation_merge.errors import RecipeError, StatisticsError


@dataclass(frozen=True)
class Source:
    """One model's part in the average of a tensor.

    Attributes:
        weight: the tensor, in the anchor's coordinates.
        share: its weight among the models.
        held: its statistics for this tensor, carried: `dense` or `diagonal` and `factor`, `gradient`, `fisher`.
        made: the head of its statistics file.
    """

    weight: Tensor
    share: float
    held: Mapping[str, Tensor]
    made: Mapping[str, Any]


WEIGHT = ParameterSpec("weight", float, ParameterScope.INPUT, description="share of each model")
RIDGE = ParameterSpec("ridge", float, ParameterScope.SHARED, 1e-3, "added to Grams, relative to their mean diagonal")


class OwnMethod(MergeMethod):
    """A delegate of our own: it runs inside a merge and looks at more than single tensors."""

    def check(self, parameters: Mapping[str, Any]) -> None:
        """Refuse values that mean nothing.

        Raises:
            RecipeError: names the parameter.
        """
        raise NotImplementedError

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


class Averaging(OwnMethod):
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

    def check(self, parameters: Mapping[str, Any]) -> None:
        for name, (low, high) in _RANGES.items():
            value = parameters.get(name)
            if value is not None and not low <= value <= high:
                bounds = f"at least {low:g}" if math.isinf(high) else f"from {low:g} to {high:g}"
                raise RecipeError(f"parameter '{name}' is {value}", where="parameters", remedy=f"it must be {bounds}")


_RANGES = {"shrink": (0.0, 1.0), "ridge": (0.0, math.inf), "floor": (0.0, math.inf)}


def averaged(sources: Sequence[Source]) -> Tensor:
    """The weighted mean."""
    return mean([s.weight for s in sources], [s.share for s in sources])


class RegMean(Averaging):
    """Linear maps by the Grams of their inputs, everything else by the mean."""

    kind = "gram"
    spec = MergeMethodSpec(
        name="regmean",
        pretty_name="RegMean",
        reference_url="https://arxiv.org/abs/2212.09849",
        parameters=(
            WEIGHT,
            ParameterSpec("shrink", float, ParameterScope.SHARED, 0.9, "what off-diagonals of Grams are multiplied by"),
            RIDGE,
        ),
        contract=InputContract(base=BasePolicy.OPTIONAL),
    )

    def average(self, sources: Sequence[Source], parameters: Mapping[str, Any]) -> Tensor:
        grams = [metric(s.held).shrunk(parameters["shrink"], parameters["ridge"]) for s in sources]
        return regmean([s.weight for s in sources], grams, [s.share for s in sources])


class Fisher(Averaging):
    """Every tensor by Fisher diagonals."""

    kind = "fisher"
    maps_only = False
    spec = MergeMethodSpec(
        name="fisher",
        pretty_name="Fisher",
        reference_url="https://arxiv.org/abs/2111.09832",
        parameters=(
            WEIGHT,
            ParameterSpec("normalize", bool, ParameterScope.SHARED, True, "divide by the norm of each whole Fisher"),
            ParameterSpec(
                "floor", float, ParameterScope.SHARED, 1e-6, "least Fisher of base_model, kept where all are 0"
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


HALF = (
    "Delegate kfac: maps whose gradients were not kept (into vocabularies, very wide ones), or whose inputs were kept "
    "at low rank, are averaged as by regmean."
)


class Kfac(Averaging):
    """Linear maps by Grams of their inputs and of the gradients of their outputs, everything else by the mean."""

    kind = "kfac"
    spec = MergeMethodSpec(
        name="kfac",
        pretty_name="K-FAC",
        parameters=(
            WEIGHT,
            ParameterSpec("shrink", float, ParameterScope.SHARED, 1.0, "what off-diagonals of both are multiplied by"),
            replace(RIDGE, default=0.1),
        ),
        contract=InputContract(base=BasePolicy.OPTIONAL),
    )

    def average(self, sources: Sequence[Source], parameters: Mapping[str, Any]) -> Tensor:
        weights, shares = [s.weight for s in sources], [s.share for s in sources]
        inputs = [metric(s.held).shrunk(parameters["shrink"], parameters["ridge"]) for s in sources]
        dense = [g.dense for g in inputs if g.dense is not None]
        if any("gradient" not in s.held for s in sources) or len(dense) < len(sources):
            return regmean(weights, inputs, shares)
        outputs = [Metric(s.held["gradient"]).shrunk(parameters["shrink"], parameters["ridge"]) for s in sources]
        if any(float(m.trace) == 0 for m in (*inputs, *outputs)):
            return regmean(weights, inputs, shares)
        scales = [share / float(s.made["loss_scale"]) for share, s in zip(shares, sources, strict=True)]
        return kfac(weights, dense, [m.dense for m in outputs if m.dense is not None], scales)


def metric(held: Mapping[str, Tensor]) -> Metric:
    """The Gram among carried statistics."""
    return Metric(held.get("dense"), held.get("diagonal"), held.get("factor"))


METHODS: tuple[Averaging, ...] = (RegMean(), Fisher(), Kfac())
