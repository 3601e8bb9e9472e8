"""What a recipe may say to rotation_merge, and reading it: names, scopes and values of the parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mergekit import merge_methods
from mergekit.common import ModelReference
from mergekit.config import ConfigReader, MergeConfiguration, evaluate_setting
from mergekit.merge_methods.base import MergeMethod

from rotation_merge.errors import RecipeError, nearest
from rotation_merge.matching.options import CHOICES, MatchOptions, VaryingOptions
from rotation_merge.recipe.names import DONOR, GLOBAL, GLOBAL_CHOICES, LEGACY, METHOD, OPTIONS
from rotation_merge.recipe.rules import (
    check_dtypes,
    check_inputs,
    check_shared,
    check_slices,
    check_value,
    filters,
    groups,
    is_plain,
    leaves,
)


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
    """The parts of a merge configuration that concern the alignment.

    Attributes:
        base: the anchor.
        delegate: the method that averages.
        plain: the delegate is not told that the anchor is the base (see `rules.is_plain`).
        exclude: parts of names of tensors that are copied from the anchor.
    """

    config: MergeConfiguration
    base: ModelReference
    delegate: MergeMethod
    plain: bool
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
        check_dtypes(config)
        check_slices(config)
        for where, settings, allowed in _scopes(config):
            _check_names(where, settings, allowed, delegate)
            _check_values(where, settings, delegate)
        found = list(groups(config))
        plain = is_plain(delegate.spec.contract, [group.models for group in found], config.base_model)
        check_inputs(delegate, found, None if plain else config.base_model)
        chosen = {name: _choice(name, values.get(name, choices[0])) for name, choices in GLOBAL_CHOICES.items()}
        return cls(
            config=config,
            base=config.base_model,
            delegate=delegate,
            plain=plain,
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

    def varying(self, reader: ConfigReader, donor: ModelReference) -> MatchOptions:
        """The options for one donor, which know those of each block."""
        scopes = [scope for scope in reader.parameter_sources(donor) if scope is not None]
        varied = any(isinstance(s[n], list) or filters(s[n]) for s in scopes for n in OPTIONS.keys() & s.keys())
        whole = self.options(reader, "", donor)
        return VaryingOptions(whole, lambda b, t: self.options(reader.with_t(t), b, donor)) if varied else whole

    def donor_setting(self, name: str, reader: ConfigReader, donor: ModelReference) -> str | None:
        """`finetuned_from` or `alignment` of one donor."""
        value = _setting(name, reader.parameter_sources(donor), "", 0.0)
        return None if value in (None, False, "none") else str(value)

    def check_filters(self, blocks: Iterable[str]) -> None:
        """Filters of our own options see blocks, not tensors: one that fits none was written for tensors.

        Args:
            blocks: module paths of the anchor's blocks.

        Raises:
            RecipeError: names the filter and what blocks are called.
        """
        names = list(blocks)
        example = next((name for name in names if name.endswith(".0")), names[0])
        for where, settings, _ in _scopes(self.config):
            for option in settings.keys() & OPTIONS.keys():
                for text in filters(settings[option]):
                    if not any(text in name for name in names):
                        raise RecipeError(
                            f"the filter '{text}' of '{option}' matches no block",
                            where=where,
                            remedy=f"options of the alignment hold for whole blocks, which are called like '{example}'",
                        )

    def excluded(self, tensor: str) -> bool:
        return any(part in tensor for part in self.exclude)


def _setting(name: str, scopes: Iterable[Mapping[str, Any] | None], block: str, t: float) -> Any:
    for scope in scopes:
        if scope is not None and name in scope:
            value = evaluate_setting(block, scope[name], t, validate=lambda v: v)
            if value is not None:
                return value
    return None


def _check_values(where: str, settings: Mapping[str, Any], delegate: MergeMethod) -> None:
    """Values of every setting in one scope."""
    own = {parameter.name: parameter for parameter in delegate.spec.parameters}
    for name, setting in settings.items():
        if name in (*_WHOLE, *DONOR, *GLOBAL) and (isinstance(setting, list) or filters(setting)):
            raise RecipeError(
                f"parameter '{name}' holds for the whole model, lists and filters do not fit it",
                where=where,
                remedy="write ranges such as '0-5,11' in one string" if name == "layers" else "give one value",
            )
        if name in OPTIONS:
            _check_option(name, setting, where)
            if name in own:
                check_shared(own[name], setting, where, delegate.spec.name)
        elif name in own:
            check_value(own[name], setting, where)
        elif name in (*DONOR, "exclude") and not isinstance(setting, str) and setting is not False:
            raise RecipeError(f"parameter '{name}' is {setting!r}", where=where, remedy="it must be a string")


def _check_option(name: str, setting: Any, where: str) -> None:
    for value in leaves(setting):
        try:
            MatchOptions.from_values({name: _normal(name, value)})
        except RecipeError as error:
            raise RecipeError(error.what, where=where, remedy=error.remedy) from None


_WHOLE = ("residual", "layers")
"""Options that have one value for a whole donor."""


def _normal(name: str, value: Any) -> Any:
    """YAML reads off/no as False; for options that are words it means none."""
    if name == "rescale":
        return {"none": False, "joint": True, "true": True, "false": False}.get(str(value).lower(), value)
    if name == "layers":
        return str(value)
    return "none" if value is False and "none" in CHOICES.get(name, ()) else value


def _choice(name: str, value: Any) -> Any:
    choices = GLOBAL_CHOICES[name]
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
        if name in known or name in LEGACY:
            continue
        if name in elsewhere:
            place = "under 'parameters' of the recipe" if name in GLOBAL else "under one donor's 'parameters'"
            raise RecipeError(f"parameter '{name}' does not belong here", where=where, remedy=f"it stands {place}")
        raise RecipeError(
            f"there is no parameter '{name}' with delegate {delegate.spec.name}",
            where=where,
            remedy=nearest(name, known),
        )
