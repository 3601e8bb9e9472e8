"""Parameters of recipes: fields of configs that recipes have; any other name is an error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rotation_merge.averaging.config import RefitConfig
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
    is_text,
    option,
)
from rotation_merge.matching.options import AlignConfig, MatchConfig

METHOD = "rotation_merge"
"""The merge method's name."""

LEGACY = ("int8_mask",)
"""Parameters that mergekit-evolve writes into every recipe although no method reads them any more."""

SHARES = ("t", "density")
"""Parameters of delegates that are shares of something, which mergekit takes beyond it, too."""

NAMES = Kind("names", is_text)
METHOD_NAME = Kind("a merge method", is_text)

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

    finetuned_from: str | None = option(
        None,
        "the donor is a fine-tune of this model: its task vector is carried",
        MODEL,
        scope=DONOR_ONLY,
        detail="The base that the donor was fine-tuned from. It is aligned to the anchor, and the delegate receives "
        "anchor + map(donor - base).",
    )
    alignment: str | None = option(
        None,
        "file of transforms to apply instead of matching",
        FILE,
        scope=DONOR_ONLY,
        detail="A file of transforms, written by `rotation-merge align --alignment` or `rotation-merge fit`, to apply "
        "instead of matching: a path, or `org/repo/file@revision` on the hub. Options of matching beside it are an "
        "error.",
    )
    statistics: str | None = option(
        None,
        "what 'rotation-merge measure' wrote of the model; by itself or beside the model. Not given: beside the model",
        FILE,
        scope=EACH,
        delegates=("regmean", "fisher", "kfac"),
        detail="File written by `rotation-merge measure`. Default: the one beside the model.",
    )
    data: str | None = option(
        None,
        "samples; for ot_fusion one pool for all models (not given: weights alone), for refit each model's own, for "
        "donors that are carried ('carry', 'scale: auto') or matched on activations ('match_on') theirs",
        FILE,
        words=("self", "synthetic"),
        scope=EACH,
        delegates=("ot_fusion", "refit"),
        detail="Samples: one pool for all models with `ot_fusion` (default: weights alone), each model's own with "
        "`refit`; also for donors that are carried (`carry`, `scale: auto`) or matched on activations (`match_on`).",
    )
    delegate: str = option(
        "linear",
        "the merge method that does the averaging",
        METHOD_NAME,
        scope=RECIPE,
        detail="The merge method that averages. See [Delegates](delegates.md).",
    )
    unsupported: str = option(
        "error",
        "merge: merge without alignment what cannot be aligned",
        choices=("error", "merge"),
        scope=RECIPE,
        detail="`merge`: tensors that cannot be aligned are merged as they are; the report names them.",
    )
    exclude: str | None = option(
        None,
        "comma-separated parts of tensor names: such tensors are copied from base_model",
        NAMES,
        scope=RECIPE,
        detail="Comma-separated parts of tensor names. These tensors are copied from `base_model`.",
    )
    heads_of: str = option(
        "base",
        "each: the merged body is also written under every donor's head",
        choices=("base", "each"),
        scope=RECIPE,
        detail="`each`: also write the merged body under every donor's head.",
    )
    anchor: str = option(
        "base",
        "mean: align all models to their running mean",
        choices=("base", "mean"),
        scope=RECIPE,
        detail="`mean`: align all models to their running mean, in the coordinates of `base_model`.",
    )
    save_alignment: bool | str | None = option(
        None,
        "keep the transforms used, in this file or beside the model",
        NEW_FILE,
        words=(False, True),
        scope=RECIPE,
        detail="Store the transforms for `alignment:`. `true`: as `alignment.safetensors` beside the model. Further "
        "donors: `NAME-2`, `NAME-3`.",
    )
    preset: str | None = option(
        None,
        "options for near or far models; auto: as the weights say",
        str,
        choices=("near", "far", "auto"),
        scope=RECIPE,
        detail="Options for near or far models. `auto`: decided by the weights.",
    )
    prove: bool = option(
        False,
        "true: compare outputs of donors moved by alignment files with the donors'",
        scope=RECIPE,
        detail="`true`: check that donors moved by alignment files keep their outputs.",
    )
    report: bool = option(
        False,
        "true: also write the report as an HTML page",
        scope=RECIPE,
        detail="Also write the report as an HTML page, `report.html`.",
    )


@dataclass(frozen=True)
class Key:
    """A recipe's parameter.

    Attributes:
        option: what there is to say of it.
        default: what holds where it is not given.
    """

    name: str
    option: Option
    default: Any = None

    def check(self, value: Any) -> Any:
        """The value, if it is one that the parameter may have; YAML reads off and no as false, which here is none.

        Raises:
            RecipeError: it is none of them.
        """
        if value is False and self.default is None and False not in self.option.words:
            return None
        self.option.check(self.name, value, "parameter")
        return None if value == "none" and self.default is None else value


CONFIGS: tuple[type[Config], ...] = (AlignConfig, MatchConfig, TransferConfig, RefitConfig, RecipeConfig)
"""Configs with fields that recipes have. A field with a `scope` is a parameter: `Recipe.value` and `Recipe.of_model`
read it."""

KEYS = tuple(
    Key(described.key or name, described, getattr(config, name))
    for config in CONFIGS
    for name, described in config.options().items()
    if described.scope
)
"""Every parameter."""

PRESETS = {
    "near": {"heads": "none", "residual": "none"},
    "far": {"heads": "permutation", "residual": "largest"},
}
"""What `preset` sets where a recipe does not say otherwise."""

UNMOVED = "unmoved"
RELATIONS: dict[str, dict[str, Any]] = {
    **PRESETS,
    UNMOVED: {"attention": "none", "heads": "none", "ffn": "none", "rescale": False},
}
"""The same by how a donor lies to the anchor; unmoved: its change is added as it is."""

BY_NAME = {key.name: key for key in KEYS}


def names(*scopes: str) -> tuple[str, ...]:
    """Names of the parameters of some scopes, in the order of the table."""
    return tuple(key.name for key in KEYS if key.option.scope in scopes)


OPTIONS = names(BLOCK, WHOLE)
"""Options of matching."""

OF_MODEL = names(EACH, DONOR_ONLY)
"""Parameters that say something about one model."""


def normal(name: str, value: Any) -> Any:
    """YAML reads off/no as False; for options that are words it means none."""
    if name == "rescale":
        return {"none": False, "joint": True, "true": True, "false": False}.get(str(value).lower(), value)
    if name == "layers":
        return str(value)
    return "none" if value is False and "none" in BY_NAME[name].option.literals else value
