"""Delegate `refit` as recipes see it: its name and parameters. The merge runs it ahead of its plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mergekit.merge_methods.base import BasePolicy, InputContract, MergeMethodSpec, ParameterScope, ParameterSpec

from rotation_merge.averaging.config import RefitConfig
from rotation_merge.averaging.methods import MODEL, WEIGHT, OwnMethod, Plan

SOLVING = ("ridge", "alpha", "lambda_", "gram_norm", "norms")
"""Fields that are parameters of the delegate; the others say what it reads, and are parameters of the recipe."""


def _key(field: str) -> str:
    """What recipes call a field."""
    return RefitConfig.options()[field].key or field


def _parameter(field: str) -> ParameterSpec:
    described = RefitConfig.options()[field]
    return ParameterSpec(
        _key(field), described.kind, ParameterScope.SHARED, getattr(RefitConfig, field), described.help
    )


class RefitMethod(OwnMethod):
    """Runs the models on samples and solves the merge's linear maps to give what they give (`averaging.refit`)."""

    spec = MergeMethodSpec(
        name="refit",
        pretty_name="Refit",
        parameters=(WEIGHT, *map(_parameter, SOLVING)),
        contract=InputContract(base=BasePolicy.OPTIONAL),
    )

    def plan(self) -> Plan:
        return Plan(MODEL, no_changes="needs models that answer, and a task vector ('finetuned_from') does not")

    def check(self, parameters: Mapping[str, Any]) -> None:
        for described, name in ((RefitConfig.options()[field], _key(field)) for field in SOLVING):
            described.check(name, parameters[name], "parameter")
