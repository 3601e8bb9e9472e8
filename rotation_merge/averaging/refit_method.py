"""Delegate `refit` as recipes see it: its name and parameters. The merge runs it ahead of its plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mergekit.merge_methods.base import BasePolicy, InputContract, MergeMethodSpec, ParameterScope, ParameterSpec

from rotation_merge.averaging.methods import MODEL, WEIGHT, OwnMethod, Plan
from rotation_merge.config import Config, option
from rotation_merge.errors import RecipeError


@dataclass(frozen=True)
class RefitConfig(Config):
    """How to refit a merge."""

    ridge: float = option(0.01, "strength of the pull of each map towards its start", low=0)
    targets: str | None = option(
        None,
        "own: each sample's target is its own model's output; mean: the mean of all outputs",
        str,
        choices=("own", "mean"),
    )
    start: str = option("average", "start of the maps before they are solved", choices=("average", "anchor"))
    spill: str | None = option(None, "folder for hidden states; None: in memory", str)
    samples: int = option(64, "number of samples of each model, if a source is named", low=1)
    seed: int = option(0, "seed of written samples")


class RefitMethod(OwnMethod):
    """Runs the models on samples and solves the merge's linear maps to give what they give (`averaging.refit`)."""

    spec = MergeMethodSpec(
        name="refit",
        pretty_name="Refit",
        parameters=(
            WEIGHT,
            ParameterSpec(
                "ridge", float, ParameterScope.SHARED, 0.01, "strength of the pull of each map towards its start"
            ),
            ParameterSpec(
                "alpha",
                float,
                ParameterScope.SHARED,
                1.0,
                "share of targets from the models' own inputs, not the merge's",
            ),
            ParameterSpec(
                "lambda",
                float,
                ParameterScope.SHARED,
                1.0,
                "factor of the start's difference to base_model",
            ),
        ),
        contract=InputContract(base=BasePolicy.OPTIONAL),
    )

    def plan(self) -> Plan:
        return Plan(MODEL, no_changes="needs models that answer, and a task vector ('finetuned_from') does not")

    def check(self, parameters: Mapping[str, Any]) -> None:
        ridge, alpha = parameters["ridge"], parameters["alpha"]
        if ridge < 0:
            raise RecipeError(f"parameter 'ridge' is {ridge:g}", where="parameters", remedy="it must not be negative")
        if not 0 <= alpha <= 1:
            raise RecipeError(f"parameter 'alpha' is {alpha:g}", where="parameters", remedy="it must be from 0 to 1")
