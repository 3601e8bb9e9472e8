"""What a recipe may say to rotation_merge, and reading it: names, scopes and values of the parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mergekit import merge_methods
from mergekit.common import ModelReference
from mergekit.config import (
    ConditionalParameter,
    ConfigReader,
    InputModelDefinition,
    InputSliceDefinition,
    MergeConfiguration,
    OutputModuleDefinition,
    OutputSliceDefinition,
    evaluate_setting,
)
from mergekit.merge_methods.base import MergeMethod
from mergekit.tokenizer.config import TokenEmbeddingConfig, TokenizerConfig
from pydantic import BaseModel

from rotation_merge.errors import RecipeError, nearest
from rotation_merge.matching.options import CHOICES, MatchOptions

METHOD = "rotation_merge"

OPTIONS: dict[str, str] = {
    "attention": "maps inside attention heads",
    "heads": "order of attention heads",
    "ffn": "order of FFN neurons and of experts",
    "rescale": "positive (where allowed, signed) rescaling; sequential: after the rotation, as the paper does",
    "residual": "group of the residual stream",
    "layers": "all, or ranges such as 0-5,11: match only these layers",
}
"""Options of matching; allowed at every level, with filters and per-layer lists, resolved once a block."""

DONOR: dict[str, str] = {
    "finetuned_from": "the donor is a fine-tune of this model: its task vector is carried over to the anchor",
    "alignment": "file of transforms to apply instead of matching",
}
"""Options that belong to one donor."""

GLOBAL: dict[str, str] = {
    "delegate": "the mergekit method that does the averaging",
    "unsupported": "error, or merge: merge without alignment what cannot be aligned",
    "exclude": "comma-separated parts of tensor names: such tensors are copied from base_model",
    "untie": "true: give the output its own head where residual rotation needs it",
    "anchor": "base, or mean: align all models to their running mean",
    "report": "true: also write the report as an HTML page",
}
"""Options of the whole merge."""

TOP_LEVEL = tuple(MergeConfiguration.model_fields)
"""Keys of a recipe."""

_GLOBAL_CHOICES: dict[str, tuple[Any, ...]] = {
    "unsupported": ("error", "merge"),
    "untie": (False, True),
    "anchor": ("base", "mean"),
    "report": (False, True),
}


def check_keys(document: Mapping[str, Any]) -> None:
    """Refuse keys that mergekit would ignore, at every level, and a misspelt name of our method.

    Raises:
        RecipeError: an unknown key, with the nearest known one.
    """
    _check_level(document, MergeConfiguration, "recipe")
    method = document.get("merge_method")
    if method is not None and method not in (m.spec.name for m in merge_methods.registered_methods()):
        raise RecipeError(f"there is no merge method '{method}'", where="recipe", remedy=f"did you mean '{METHOD}'?")


def _check_level(document: Mapping[str, Any], schema: type[BaseModel], where: str) -> None:
    for key, value in document.items():
        if key not in schema.model_fields:
            remedy = nearest(str(key), schema.model_fields)
            if schema is MergeConfiguration and key in {**OPTIONS, **DONOR, **GLOBAL}:
                remedy = "it stands under 'parameters'"
            raise RecipeError(f"there is no key '{key}' here", where=where, remedy=remedy)
        place = f"{where}, {key}" if where == "recipe" else f"{where}.{key}"
        if key == "parameters" and isinstance(value, dict):
            _check_conditions(value, place)
        elif schema_below := _BELOW.get(key):
            for step, item in _items(value, key in _MAPPINGS):
                if isinstance(item, dict):
                    _check_level(item, schema_below, place + step)


def _check_conditions(settings: Mapping[str, Any], where: str) -> None:
    """The keys of {filter, value} entries."""
    for name, setting in settings.items():
        for _, condition in _items(setting, mapping=False):
            if isinstance(condition, dict):
                for key in condition:
                    if key not in ConditionalParameter.model_fields:
                        known = nearest(str(key), ConditionalParameter.model_fields)
                        raise RecipeError(f"there is no key '{key}' here", where=f"{where}.{name}", remedy=known)


def _items(value: Any, mapping: bool) -> Iterable[tuple[str, Any]]:
    """What stands below a key, each with how to write its place."""
    if mapping:
        return [(f".{name}", item) for name, item in value.items()] if isinstance(value, dict) else []
    return [(f"[{i}]", item) for i, item in enumerate(value)] if isinstance(value, list) else [("", value)]


_BELOW: dict[str, type[BaseModel]] = {
    "models": InputModelDefinition,
    "slices": OutputSliceDefinition,
    "sources": InputSliceDefinition,
    "modules": OutputModuleDefinition,
    "tokenizer": TokenizerConfig,
    "tokens": TokenEmbeddingConfig,
}
_MAPPINGS = ("modules", "tokens")


def restore_paths(document: Any) -> Any:
    """Undo what mergekit-multi does to parameters: a model reference written out as a mapping becomes a path again.

    (It replaces every string equal to the name of a merge, also where only a string may stand.)
    """
    if isinstance(document, dict):
        return {k: _paths(v) if k == "parameters" else restore_paths(v) for k, v in document.items()}
    return [restore_paths(item) for item in document] if isinstance(document, list) else document


def _paths(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {"model", "lora", "override_architecture"}:
            return value["model"]["path"]
        return {k: _paths(v) for k, v in value.items()}
    return [_paths(v) for v in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class Recipe:
    """The parts of a merge configuration that concern the alignment."""

    config: MergeConfiguration
    base: ModelReference
    delegate: MergeMethod
    exclude: tuple[str, ...]
    unsupported: str
    untie: bool
    mean: bool
    report: bool

    @classmethod
    def read(cls, config: MergeConfiguration) -> Recipe:
        """Read and check everything that needs no model.

        Raises:
            RecipeError: names the parameter, where it stands, and the remedy.
        """
        if config.base_model is None:
            raise RecipeError(
                "base_model is missing", where="recipe", remedy="name the model that donors are aligned to"
            )
        values = config.parameters or {}
        delegate = _delegate(values)
        for where, settings, allowed in _scopes(config):
            _check_names(where, settings, allowed, delegate)
        chosen = {name: _choice(name, values.get(name, choices[0])) for name, choices in _GLOBAL_CHOICES.items()}
        return cls(
            config=config,
            base=config.base_model,
            delegate=delegate,
            exclude=tuple(part.strip() for part in str(values.get("exclude", "")).split(",") if part.strip()),
            unsupported=chosen["unsupported"],
            untie=chosen["untie"],
            mean=chosen["anchor"] == "mean",
            report=chosen["report"],
        )

    def options(self, reader: ConfigReader, block: str, donor: ModelReference) -> MatchOptions:
        """The options for one donor in one block; filters see the block's module path."""
        values = {}
        for name in OPTIONS:
            value = _setting(name, reader.parameter_sources(donor), block, reader.t)
            if value is not None:
                values[name] = _normal(name, value)
        return MatchOptions.from_values(values)

    def donor_setting(self, name: str, reader: ConfigReader, donor: ModelReference) -> str | None:
        """`finetuned_from` or `alignment` of one donor."""
        value = _setting(name, reader.parameter_sources(donor), "", 0.0)
        return None if value in (None, False, "none") else str(value)

    def excluded(self, tensor: str) -> bool:
        return any(part in tensor for part in self.exclude)


def _setting(name: str, scopes: Iterable[Mapping[str, Any] | None], block: str, t: float) -> Any:
    for scope in scopes:
        if scope is not None and name in scope:
            value = evaluate_setting(block, scope[name], t, validate=lambda v: v)
            if value is not None:
                return value
    return None


def _normal(name: str, value: Any) -> Any:
    """YAML reads off/no as False; for options that are words it means none."""
    if name == "rescale":
        return {"none": False, "joint": True, "true": True, "false": False}.get(str(value).lower(), value)
    if name == "layers":
        return str(value)
    return "none" if value is False and "none" in CHOICES.get(name, ()) else value


def _choice(name: str, value: Any) -> Any:
    choices = _GLOBAL_CHOICES[name]
    if not any(value == choice and type(value) is type(choice) for choice in choices):
        words = ", ".join(str(choice).lower() for choice in choices)
        raise RecipeError(f"parameter '{name}' is {value!r}", where="recipe", remedy=f"it must be one of: {words}")
    return value


def _delegate(values: Mapping[str, Any]) -> MergeMethod:
    name = values.get("delegate", "linear")
    known = [m.spec.name for m in merge_methods.registered_methods() if m.spec.name != METHOD]
    if not isinstance(name, str) or name not in known:
        raise RecipeError(
            f"no merge method '{name}' to delegate to", where="parameters", remedy=nearest(str(name), known)
        )
    return merge_methods.get(name)


def _scopes(config: MergeConfiguration) -> Iterable[tuple[str, Mapping[str, Any], tuple[str, ...]]]:
    """Every place where parameters stand, with the groups of names allowed there."""
    everywhere = ("options",)
    yield "parameters", config.parameters or {}, ("options", "global")
    for model in config.models or []:
        yield f"models.{model.model}.parameters", model.parameters or {}, ("options", "donor")
    modules = {"": config} if config.slices else (config.modules or {})
    for name, module in modules.items():
        prefix = f"modules.{name}." if name else ""
        if name:
            yield f"{prefix}parameters", module.parameters or {}, everywhere
            for model in module.models or []:
                yield f"{prefix}models.{model.model}.parameters", model.parameters or {}, ("options", "donor")
        for i, piece in enumerate(module.slices or []):
            yield f"{prefix}slices[{i}].parameters", piece.parameters or {}, everywhere
            for source in piece.sources:
                where = f"{prefix}slices[{i}].{source.model}.parameters"
                yield where, source.parameters or {}, ("options", "donor")


def _check_names(where: str, settings: Mapping[str, Any], allowed: tuple[str, ...], delegate: MergeMethod) -> None:
    groups = {"options": OPTIONS, "donor": DONOR, "global": GLOBAL}
    own = [parameter.name for parameter in delegate.spec.parameters]
    known = [*own, *(name for group in allowed for name in groups[group])]
    elsewhere = {name for group in groups.values() for name in group}
    for name in settings:
        if name in known:
            continue
        if name in elsewhere:
            place = "under 'parameters' of the recipe" if name in GLOBAL else "under one donor's 'parameters'"
            raise RecipeError(f"parameter '{name}' does not belong here", where=where, remedy=f"it stands {place}")
        raise RecipeError(
            f"there is no parameter '{name}' (delegate {delegate.spec.name})", where=where, remedy=nearest(name, known)
        )
