"""Options of matching."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from annotated_types import Predicate
from pydantic.dataclasses import dataclass

from rotation_merge.config import (
    FOLDER,
    RECIPE,
    WHOLE,
    Config,
    Count,
    Kind,
    NotNegative,
    Numbers,
    Rate,
    option,
)
from rotation_merge.errors import RecipeError
from rotation_merge.symmetry.options import GroupOptions

if TYPE_CHECKING:
    from rotation_merge.architecture.model import Architecture, Block

MatchOn = Literal["weights", "activations", "both"]
WEIGHTS, ACTIVATIONS, BOTH = MATCH_ON = get_args(MatchOn)
"""What chooses the elements; both: weights and activations together, starting the streams from activations."""

Objective = Literal["auto", "distill", "labels"]
"""distill: the parents' outputs (no labels needed); labels: the model's own loss on the labels in the data."""

_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def _ranges(value: object) -> list[range]:
    """Ranges of layer numbers; an empty one for what is none."""
    pieces = [_RANGE.fullmatch(piece.strip()) for piece in str(value).split(",")]
    return [range(int(piece[1]), int(piece[2] or piece[1]) + 1) if piece else range(0) for piece in pieces]


Ranges = Annotated[
    Any,
    Predicate(lambda value: str(value).strip() == "all" or all(map(len, _ranges(value)))),
    Kind("all, or ranges such as 0-5,11"),
]


@dataclass(frozen=True)
class AlignConfig(GroupOptions):
    """The groups that matching may use, and the layers."""

    layers: Ranges = option("all", "layers to match, as `0-5,11`", scope=WHOLE)

    def layer_ranges(self) -> tuple[range, ...] | None:
        """Layers to match, as ranges of numbers; None for all."""
        return None if str(self.layers).strip() == "all" else tuple(_ranges(self.layers))

    def matches_layer(self, index: int | None) -> bool:
        """Whether the block of this layer number (None: outside the layers) is to be matched."""
        layers = self.layer_ranges()
        return layers is None or (index is not None and any(index in piece for piece in layers))

    def check_layers(self, architecture: Architecture) -> None:
        """Check that the model has the layers that are named.

        Raises:
            RecipeError: names the first range with a layer that the model lacks; says which there are.
        """
        known = sorted({block.index for block in architecture.blocks if block.index is not None})
        for piece in self.layer_ranges() or ():
            if not known or piece[-1] > known[-1]:
                lacking = max(piece[0], known[-1] + 1 if known else 0)
                problem = f"'layers' is '{self.layers}', but the model has no layer {lacking}"
                remedy = f"name layers from {known[0]} to {known[-1]}" if known else "leave it out"
                raise RecipeError(problem, remedy=remedy)

    def at(self, architecture: Architecture, block: Block) -> AlignConfig:
        """The options of one block."""
        if (of_block := vars(self).get("_of_block")) is None:
            return self
        last = len(architecture.layers(block.module)) - 1
        options: AlignConfig = of_block(block.name, 0.0 if block.index is None else block.index / last if last else 1.0)
        return options

    def varying(self, of_block: Callable[[str, float], AlignConfig]) -> AlignConfig:
        """The options with others for each block, by its module path and its place among the layers, from 0 to 1."""
        return self._with("_of_block", of_block)

    def with_residual(self, residual: str) -> AlignConfig:
        """The options with another residual group (or groups by stream)."""
        return self._with("residual", residual)

    def _with(self, name: str, value: Any) -> AlignConfig:
        options = copy.copy(self)
        object.__setattr__(options, name, value)
        return options


@dataclass(frozen=True)
class MatchConfig(Config):
    """Options for finding an alignment's maps and for opening its models."""

    match_on: MatchOn = option(
        WEIGHTS,
        "what chooses the maps: `weights`, `activations` of both models on samples, or `both`",
    )
    data: str = option("self", "samples for activations. `self`: text of which each of the two models writes half")
    samples: Count = option(64, "number of samples")
    seed: int = option(0, "seed of the samples that models write")
    untie: bool = option(
        False, "give a tied output head a tensor of its own, which a residual rotation needs", scope=RECIPE
    )


@dataclass(frozen=True)
class FitConfig(Config):
    """Options of learning an alignment."""

    objective: Objective = option(
        "auto",
        "`distill`: match the parents' outputs, without labels; `labels`: the models' own loss; `auto`: `labels` if "
        "the data has labels",
    )
    steps: Count = option(600, "optimiser steps")
    minutes: NotNegative = option(0.0, "stop after this many minutes; `0`: no limit")
    learning_rate: Rate = option(0.02, "peak learning rate of Adam, with cosine decay to 0")
    coefficients: Numbers | None = option(
        None,
        "fixed shares of the models, anchor first. Not given: drawn at random around the middle",
        command=False,
    )
    start: Literal["auto", "matched", "identity"] = option(
        "auto",
        "start of the search. `auto`: the better of the other two on held-out samples",
    )
    match_on: MatchOn = option("weights", "what chooses the start's maps, on the same samples", command=False)
    seed: int = option(0, "seed of all random numbers", command=False)
    half: bool = option(False, "mixed precision (bfloat16) on CUDA", command=False)
    checkpointing: bool = option(False, "gradient checkpointing: less memory, more time")
    state: Annotated[Path, FOLDER] | None = option(
        None,
        "folder for the state of an unfinished fit. The same fit continues from it if it exists",
        command=False,
    )


NOTHING = AlignConfig(attention="none", heads="none", ffn="none", scaling=False)
"""Match no space at all."""
