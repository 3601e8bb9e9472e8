"""The inputs that a delegate needs, from which the planner makes tasks."""

from __future__ import annotations

from dataclasses import dataclass

from mergekit.merge_methods.base import MergeMethod

from rotation_merge.averaging.methods import OwnMethod

STOCK, TENSOR, BLOCK, MODEL = "stock", "tensor", "block", "model"
"""The unit that a delegate works on. STOCK: single tensors, by a task of mergekit's own."""


@dataclass(frozen=True)
class Plan:
    """
    Attributes:
        unit: tensor; tensor with results on its whole block; or whole models.
        statistics, maps_only, base, tied, negative, no_changes: as `OwnMethod` has them.
    """

    unit: str
    statistics: str = ""
    maps_only: bool = True
    base: bool = False
    negative: bool = False
    no_changes: str = ""
    tied: bool = False


def plan_of(method: MergeMethod) -> Plan:
    """The plan of a delegate; for mergekit's methods, the tensors alone."""
    if not isinstance(method, OwnMethod):
        return Plan(STOCK)
    return Plan(
        MODEL if method.whole_models else BLOCK if method.on_samples else TENSOR,
        method.statistics,
        method.maps_only,
        method.needs_base,
        method.negative,
        method.no_changes,
        method.tied,
    )
