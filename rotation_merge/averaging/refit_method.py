"""Delegate `refit` as recipes see it: its name and parameters. The merge runs it ahead of its plan."""

from __future__ import annotations

from mergekit.merge_methods.base import BasePolicy, InputContract, MergeMethodSpec

from rotation_merge.averaging.config import RefitConfig
from rotation_merge.averaging.methods import MODEL, WEIGHT, OwnMethod, OwnParameter, Plan, described_parameter

SOLVING = ("ridge", "alpha", "lambda_", "gram_norm", "norms")
"""Fields that are parameters of the delegate; the others name its inputs and are parameters of the recipe."""


def _parameter(field: str) -> OwnParameter:
    described = RefitConfig.options()[field]
    return described_parameter(described.key or field, getattr(RefitConfig, field), described)


class RefitMethod(OwnMethod):
    """Runs the models on samples and solves the merge's linear maps for the same outputs (`averaging.refit`)."""

    spec = MergeMethodSpec(
        name="refit",
        pretty_name="Refit",
        parameters=(WEIGHT, *map(_parameter, SOLVING)),
        contract=InputContract(base=BasePolicy.OPTIONAL),
    )

    def plan(self) -> Plan:
        return Plan(MODEL, no_changes="needs models that answer, and a task vector ('finetuned_from') does not")
