"""Parameters of recipes: fields of configs that recipes have; any other name is an error."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

from pydantic.dataclasses import dataclass

from rotation_merge.averaging.config import CalibrationConfig, RefitConfig
from rotation_merge.carrying.config import TransferConfig
from rotation_merge.config import (
    BLOCK,
    DONOR_ONLY,
    EACH,
    FILE,
    MODEL,
    NEW_FILE,
    RECIPE,
    WHOLE,
    Config,
    Kind,
    Option,
    option,
)
from rotation_merge.errors import RecipeError
from rotation_merge.matching.options import AlignConfig, MatchConfig

LEGACY = ("int8_mask",)
"""Parameters of older releases of mergekit, which recipes of every method still carry although nothing reads them."""

PLACES = {
    BLOCK: "anywhere",
    WHOLE: "anywhere",
    EACH: "under the recipe or one model",
    DONOR_ONLY: "under one donor",
    RECIPE: "under the recipe",
}
"""Where parameters of a scope stand, in words."""


@dataclass(frozen=True)
class RecipeConfig(Config):
    """Recipe keys other than the options of aligning, carrying and refitting."""

    finetuned_from: Annotated[str, MODEL] | None = option(
        None,
        "base that the donor was fine-tuned from. It is aligned to the anchor, and the delegate receives anchor + "
        "map(donor - base)",
        scope=DONOR_ONLY,
    )
    alignment: Annotated[str, FILE] | None = option(
        None,
        "alignment file to apply instead of matching, written by `rotation-merge align --alignment`: a path, "
        "or `org/repo/file@revision` on the hub",
        scope=DONOR_ONLY,
    )
    statistics: Annotated[str, FILE] | None = option(
        None,
        "file that `rotation-merge measure` wrote. Not given: the one beside the model",
        scope=EACH,
        delegates=("regmean", "fisher"),
    )
    data: Annotated[str, FILE] | Literal["self", "synthetic"] | None = option(
        None,
        "samples: one pool for all models with `ot_fusion` (not given: it matches on weights), else those of each "
        "model; also for `carry`, `carry_scale: auto` and `match_on`",
        scope=EACH,
        delegates=("ot_fusion", "refit"),
    )
    delegate: Annotated[str, Kind("a merge method")] = option("linear", "merge method that averages", scope=RECIPE)
    unsupported: Literal["error", "merge"] = option(
        "error",
        "tensors that cannot be aligned. `merge`: merge them as they are; the report names them",
        scope=RECIPE,
    )
    exclude: Annotated[str, Kind("names")] | None = option(
        None,
        "comma-separated parts of tensor names; tensors with such names are copied from `base_model`",
        scope=RECIPE,
    )
    heads_of: Literal["base", "each"] = option(
        "base",
        "output head of the merge. `each`: also write the merged body under every donor's head",
        scope=RECIPE,
    )
    anchor: Literal["base", "mean"] = option(
        "base",
        "model that donors are aligned to. `mean`: the running mean of all models, in the coordinates of `base_model`",
        scope=RECIPE,
    )
    save_alignment: Annotated[str, NEW_FILE] | Literal[False, True] | None = option(
        None,
        "write the alignment for `alignment:`, to a file beside the model. `true`: to `alignment.safetensors`. Of "
        "further donors: to `NAME-2`, `NAME-3`",
        scope=RECIPE,
    )
    preset: Literal["near", "far", "auto"] | None = option(
        None,
        "options for near or for far models. `auto`: chosen from the weights",
        scope=RECIPE,
    )
    prove: bool = option(False, "check that donors moved by alignment files keep their outputs", scope=RECIPE)


CONFIGS: tuple[type[Config], ...] = (
    AlignConfig,
    MatchConfig,
    TransferConfig,
    RefitConfig,
    CalibrationConfig,
    RecipeConfig,
)
"""Configs with fields that recipes have. A field with a `scope` is a parameter: `Recipe.value` and `Recipe.of_model`
read it."""


BY_NAME: dict[str, Option] = {
    option.recipe_key: option for config in CONFIGS for option in config.options().values() if option.scope
}
"""Every parameter."""


def names(*scopes: str) -> tuple[str, ...]:
    """Names of the parameters of some scopes, in the order of the table."""
    return tuple(name for name, option in BY_NAME.items() if option.scope in scopes)


OPTIONS = names(BLOCK, WHOLE)
"""Options of matching."""

MATCHING = (*OPTIONS, "preset", "match_on")
"""Parameters that only say how donors are matched."""

MERGING = (
    "exclude",
    "heads_of",
    "unsupported",
    "statistics",
    "data",
    "samples",
    "targets",
    "start",
    *CalibrationConfig.options(),
)
"""Parameters of merging, as opposed to aligning."""

OF_MODEL = names(EACH, DONOR_ONLY)
"""Parameters that say something about one model."""

UNMOVED = "unmoved"
PRESETS: dict[str, dict[str, Any]] = {
    "near": {"heads": "none", "residual": "none"},
    "far": {"heads": "permutation", "residual": "largest"},
    UNMOVED: {"attention": "none", "heads": "none", "ffn": "none", "scaling": False},
}
"""Options by a donor's relation to the anchor, which `preset` names; the recipe's own take precedence. Unmoved: its
change is added as it is."""


def checked(name: str, value: Any) -> Any:
    """A value of one of our parameters in the form that it is kept in: `none` of an optional one is None.

    YAML reads off and no as false, which counts as `none`.

    Raises:
        RecipeError: it is none that the parameter may have.
    """
    option, optional = BY_NAME[name], BY_NAME[name].default is None
    if name == "scaling":
        value = {"none": False, "joint": True, "true": True, "false": False}.get(str(value).lower(), value)
    elif name == "layers":
        value = str(value)
    elif name == "save_alignment" and isinstance(value, str):
        if os.path.isabs(value) or os.path.normpath(value).split(os.sep)[0] in (os.curdir, os.pardir):
            problem = f"'{value}' is not a name inside the merged model's folder"
            raise RecipeError(problem, remedy="write 'true', or a name such as 'maps.safetensors'")
    elif value is False and "none" in option.literals:
        value = "none"
    elif value is False and optional and False not in option.words:
        return None
    option.check(name, value, "parameter")
    return None if value == "none" and optional else value
