"""What a recipe may say to rotation_merge: one line of data for each parameter. What is not here is no parameter."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rotation_merge.averaging.config import RefitConfig
from rotation_merge.carrying.config import AUTO, TransferConfig
from rotation_merge.errors import RecipeError, nearest
from rotation_merge.matching.options import CHOICES, AlignConfig, by_stream

METHOD = "rotation_merge"
"""The merge method's name."""

LEGACY = ("int8_mask",)
"""Parameters that mergekit-evolve writes into every recipe although no method reads them any more."""

DTYPES = ("bfloat16", "float16", "float32", "float64")

SHARES = ("t", "density")
"""Parameters of delegates that are shares of something, which mergekit takes beyond it, too."""


@dataclass(frozen=True)
class Kind:
    """A kind of value.

    Attributes:
        words: what it is called, after "it must be".
        holds: whether a value is of the kind.
        role: whether it names what is read, what is written, or neither.
    """

    words: str
    holds: Callable[[Any], bool]
    role: str


READ, WRITTEN, NEITHER = "read", "written", "neither"


def _text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


FILE, MODEL = Kind("a file", _text, READ), Kind("a model", _text, READ)
FOLDER, NEW_FILE = Kind("a folder", _text, WRITTEN), Kind("a file to write", _text, WRITTEN)
NAMES, RANGES = Kind("names", _text, NEITHER), Kind("all, or ranges", _text, NEITHER)
STREAMS = Kind(
    "groups by stream (decoder=rotation,encoder=permutation)", lambda value: by_stream(value) is not None, NEITHER
)
PAIRS = Kind("OLD:NEW,... or ranges (0-3:0-3,4:6)", _text, NEITHER)
METHOD_NAME = Kind("a merge method", _text, NEITHER)
NUMBER = Kind("a number", _number, NEITHER)
COUNT = Kind("a whole number above 0", lambda value: type(value) is int and value > 0, NEITHER)

BLOCK, WHOLE = "block", "whole"
"""Options of matching, allowed anywhere. BLOCK: with filters and per-layer lists, resolved once a block. WHOLE: one
value for a whole donor."""
EACH = "each"
"""One value for a model; under it, or for all models under the recipe's parameters."""
DONOR_ONLY = "donor"
"""Only under one donor."""
RECIPE = "recipe"
"""Only under the recipe's parameters: holds for the merge."""

PLACES = {
    BLOCK: "anywhere",
    WHOLE: "anywhere",
    EACH: "under the recipe or one model",
    DONOR_ONLY: "under one donor",
    RECIPE: "under the recipe",
}
"""Where parameters of a scope stand, in words."""


@dataclass(frozen=True)
class Key:
    """One parameter.

    Attributes:
        scope: where it may stand.
        values: what it may be: words, numbers, true and false as they stand, and kinds of values.
        words: what it does.
        default: what holds where it is not given.
        delegates: our own delegates that read it (empty: it holds whatever the delegate).
    """

    name: str
    scope: str
    values: tuple[Any, ...]
    words: str
    default: Any = None
    delegates: tuple[str, ...] = ()

    def check(self, value: Any) -> Any:
        """The value, if it is one that the parameter may have; YAML reads off and no as false, which here is none.

        Raises:
            RecipeError: it is none of them.
        """
        if value is False and self.default is None and False not in self.values:
            return None
        literals = [v for v in self.values if not isinstance(v, Kind)]
        if any(value == known and type(value) is type(known) for known in literals):
            return value
        if any(kind.holds(value) for kind in self.values if isinstance(kind, Kind)):
            return None if value == "none" and self.default is None else value
        close = nearest(str(value), [str(word).lower() for word in literals]) if isinstance(value, str) else ""
        remedy = close if "did you mean" in close else f"it must be {self.allowed}"
        raise RecipeError(f"parameter '{self.name}' is {value!r}", remedy=remedy)

    @property
    def allowed(self) -> str:
        """What it may be, in words."""
        words = [v.words if isinstance(v, Kind) else str(v).lower() for v in self.values]
        return words[0] if len(words) == 1 else f"one of: {', '.join(words)}"


_KINDS: dict[type, tuple[Any, ...]] = {int: (COUNT,), float: (NUMBER,), bool: (False, True)}


def _of_transfer(field: str, scope: str = DONOR_ONLY, *values: Any) -> Key:
    """A parameter of carried donors, as `TransferConfig` describes it.

    Args:
        values: what it may be, where its kind does not say it.
    """
    option, default = TransferConfig.options()[field], getattr(TransferConfig, field)
    values = values or option.choices or (*option.words, *_KINDS[option.kind])
    return Key(option.key or field, scope, values, option.help, default)


def _of_refit(field: str, scope: str = RECIPE, *values: Any) -> Key:
    """A parameter of delegate refit, as `RefitConfig` describes it."""
    described, default = RefitConfig.options()[field], getattr(RefitConfig, field)
    return Key(field, scope, values or described.choices or _KINDS[described.kind], described.help, default, ("refit",))


def _aligning(name: str, scope: str, *kinds: Kind) -> Key:
    """An option of matching, as its field in `AlignConfig` says."""
    described = AlignConfig.described(name)
    return Key(name, scope, (*described.choices, *kinds), described.help, getattr(AlignConfig, name))


KEYS = (
    _aligning("attention", BLOCK),
    _aligning("heads", BLOCK),
    _aligning("ffn", BLOCK),
    _aligning("rescale", BLOCK),
    _aligning("residual", WHOLE, STREAMS),
    _aligning("shift_head", BLOCK),
    _aligning("layers", WHOLE, RANGES),
    _of_transfer("match_on", EACH),
    Key("finetuned_from", DONOR_ONLY, (MODEL,), "the donor is a fine-tune of this model: its task vector is carried"),
    *map(_of_transfer, ("method", "scale", "widths")),
    _of_transfer("layers_map", DONOR_ONLY, AUTO, PAIRS),
    _of_transfer("steps"),
    _of_transfer("judge", DONOR_ONLY, FILE),
    _of_transfer("controls"),
    Key(
        "alignment",
        DONOR_ONLY,
        (FILE,),
        "file of transforms to apply instead of matching",
    ),
    Key(
        "statistics",
        EACH,
        (FILE,),
        "what 'rotation-merge measure' wrote of the model; by itself or beside the model. Not given: beside the model",
        delegates=("regmean", "fisher", "kfac"),
    ),
    Key(
        "data",
        EACH,
        ("self", "synthetic", FILE),
        "samples; for ot_fusion one pool for all models (not given: weights alone), for refit each model's own, for "
        "donors that are carried ('carry', 'scale: auto') or matched on activations ('match_on') theirs",
        delegates=("ot_fusion", "refit"),
    ),
    _of_refit("samples", EACH),
    *map(_of_refit, ("targets", "start")),
    _of_refit("spill", RECIPE, FOLDER),
    Key("delegate", RECIPE, (METHOD_NAME,), "the merge method that does the averaging", "linear"),
    Key("unsupported", RECIPE, ("error", "merge"), "merge: merge without alignment what cannot be aligned", "error"),
    Key("exclude", RECIPE, (NAMES,), "comma-separated parts of tensor names: such tensors are copied from base_model"),
    Key("heads_of", RECIPE, ("base", "each"), "each: the merged body is also written under every donor's head", "base"),
    Key("untie", RECIPE, (False, True), "true: give the output its own head where residual rotation needs it", False),
    Key("anchor", RECIPE, ("base", "mean"), "mean: align all models to their running mean", "base"),
    Key(
        "save_alignment", RECIPE, (False, True, NEW_FILE), "keep the transforms used, in this file or beside the model"
    ),
    Key("preset", RECIPE, ("near", "far", "auto"), "options for near or far models; auto: as the weights say"),
    Key(
        "prove",
        RECIPE,
        (False, True),
        "true: compare outputs of donors moved by alignment files with the donors'",
        False,
    ),
    Key("report", RECIPE, (False, True), "true: also write the report as an HTML page", False),
)
"""Every parameter. To add one, add a line; `Recipe.value` and `Recipe.of_model` read it."""

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
    return tuple(key.name for key in KEYS if key.scope in scopes)


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
    return "none" if value is False and "none" in CHOICES.get(name, ()) else value
