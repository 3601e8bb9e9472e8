"""What a recipe may say to rotation_merge, and reading it: names, scopes and values of the parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mergekit.common import ModelReference
from mergekit.config import ConfigReader, MergeConfiguration, evaluate_setting
from mergekit.merge_methods.base import MergeMethod

from rotation_merge.errors import RecipeError, nearest
from rotation_merge.matching.options import CHOICES, MatchOptions, VaryingOptions
from rotation_merge.recipe import delegates
from rotation_merge.recipe.names import BLOCK, BY_NAME, EACH, LEGACY, OF_MODEL, OPTIONS, RECIPE, names
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
        values: the parameters of the whole merge, by name (see `value`).
    """

    config: MergeConfiguration
    base: ModelReference
    delegate: MergeMethod
    plain: bool
    exclude: tuple[str, ...]
    values: Mapping[str, Any]

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
        chosen = {name: _checked(name, values[name]) for name in names(RECIPE) if name in values}
        return cls(
            config=config,
            base=config.base_model,
            delegate=delegate,
            plain=plain,
            exclude=tuple(part.strip() for part in (chosen.get("exclude") or "").split(",") if part.strip()),
            values=chosen,
        )

    def value(self, name: str) -> Any:
        """A parameter of the whole merge, its default where it is not given."""
        value = self.values.get(name)
        return BY_NAME[name].default if value is None else value

    @property
    def unsupported(self) -> str:
        return str(self.value("unsupported"))

    @property
    def untie(self) -> bool:
        return bool(self.value("untie"))

    @property
    def mean(self) -> bool:
        return bool(self.value("anchor") == "mean")

    @property
    def report(self) -> bool:
        return bool(self.value("report"))

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
        varied = any(isinstance(s[n], list) or filters(s[n]) for s in scopes for n in s.keys() & set(OPTIONS))
        whole = self.options(reader, "", donor)
        return VaryingOptions(whole, lambda b, t: self.options(reader.with_t(t), b, donor)) if varied else whole

    def of_model(self, name: str, reader: ConfigReader, model: ModelReference) -> Any:
        """A parameter that says something about one model, its default where it is not given."""
        value = _setting(name, reader.parameter_sources(model), "", 0.0)
        value = None if value is None else BY_NAME[name].check(value)
        return BY_NAME[name].default if value is None else value

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
            for option in settings.keys() & set(OPTIONS):
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
        if name in BY_NAME and BY_NAME[name].scope != BLOCK and (isinstance(setting, list) or filters(setting)):
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
        elif name in OF_MODEL:
            _checked(name, setting)


def _check_option(name: str, setting: Any, where: str) -> None:
    for value in leaves(setting):
        try:
            MatchOptions.from_values({name: _normal(name, value)})
        except RecipeError as error:
            raise RecipeError(error.what, where=where, remedy=error.remedy) from None


def _normal(name: str, value: Any) -> Any:
    """YAML reads off/no as False; for options that are words it means none."""
    if name == "rescale":
        return {"none": False, "joint": True, "true": True, "false": False}.get(str(value).lower(), value)
    if name == "layers":
        return str(value)
    return "none" if value is False and "none" in CHOICES.get(name, ()) else value


def _checked(name: str, value: Any) -> Any:
    try:
        return BY_NAME[name].check(value)
    except RecipeError as error:
        raise RecipeError(error.what, where="parameters", remedy=error.remedy) from None


def _delegate(values: Mapping[str, Any]) -> MergeMethod:
    name = values.get("delegate", "linear")
    known = delegates.names()
    if not isinstance(name, str) or name not in known:
        raise RecipeError(
            f"no merge method '{name}' to delegate to", where="parameters", remedy=nearest(str(name), known)
        )
    return delegates.get(name)


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
    groups = {"options": OPTIONS, "donor": OF_MODEL, "global": names(RECIPE, EACH)}
    own = [parameter.name for parameter in delegate.spec.parameters]
    known = [*own, *(name for group in allowed for name in groups[group])]
    elsewhere = {name for group in groups.values() for name in group}
    for name in settings:
        if name in known or name in LEGACY:
            continue
        if name in elsewhere:
            place = "under 'parameters' of the recipe" if name in names(RECIPE) else "under one donor's 'parameters'"
            raise RecipeError(f"parameter '{name}' does not belong here", where=where, remedy=f"it stands {place}")
        raise RecipeError(
            f"there is no parameter '{name}' with delegate {delegate.spec.name}",
            where=where,
            remedy=nearest(name, known),
        )
