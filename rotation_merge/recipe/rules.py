"""What a delegate and our own options ask of a recipe's models and values, checked before any model is opened."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from mergekit.common import ModelReference, dtype_from_name
from mergekit.config import ConditionalParameter, ConfigReader, MergeConfiguration
from mergekit.merge_methods.base import BasePolicy, InputContract, MergeMethod, ParameterScope, ParameterSpec
from pydantic import ValidationError

from rotation_merge.errors import RecipeError, nearest

DTYPES = ("bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True)
class Group:
    """Models that are merged with one another: those of a slice, or of the whole recipe or module.

    Attributes:
        where: its place in the recipe.
        models: in the order of the recipe, without the base that mergekit adds.
        adds_base: whether mergekit adds a base that is not listed.
        reader: where parameters are looked up.
        own: parameters of each model.
    """

    where: str
    models: list[ModelReference]
    adds_base: bool
    reader: ConfigReader
    own: list[Mapping[str, Any]]

    def inputs(self, base: ModelReference | None) -> list[ModelReference]:
        """What the delegate gets when `base` is its base."""
        return [*self.models, base] if self.adds_base and base and base not in self.models else self.models


def groups(config: MergeConfiguration) -> Iterator[Group]:
    """Every set of models that the delegate will see."""
    modules = {"": config, **{f"modules.{name}.": module for name, module in (config.modules or {}).items()}}
    for prefix, part in modules.items():
        reader = ConfigReader(config=config, t=0, module=None if part is config else part)
        if part.models:
            own = [model.parameters or {} for model in part.models]
            yield Group(f"{prefix}models", [model.model for model in part.models], True, reader, own)
        for i, piece in enumerate(part.slices or []):
            own = [source.parameters or {} for source in piece.sources]
            models = [source.model for source in piece.sources]
            yield Group(f"{prefix}slices[{i}]", models, False, reader.for_out_slice(piece), own)
            if piece.base_model is not None and piece.base_model != config.base_model:
                raise RecipeError(
                    f"base_model is {piece.base_model}, that of the recipe is {config.base_model}",
                    where=f"{prefix}slices[{i}]",
                    remedy="all slices share one anchor; remove the slice's own base_model",
                )


def check_slices(config: MergeConfiguration) -> None:
    """Sources of a slice have equally long ranges of layers, from a first to a later one.

    Raises:
        RecipeError: names the slice.
    """
    modules = {"": config, **{f"modules.{name}.": module for name, module in (config.modules or {}).items()}}
    for prefix, part in modules.items():
        for i, piece in enumerate(part.slices or []):
            where = f"{prefix}slices[{i}]"
            lengths = []
            for source in piece.sources:
                first, last = source.layer_range
                if not 0 <= first < last:
                    raise RecipeError(
                        f"layer_range is [{first}, {last}]",
                        where=f"{where}, {source.model}",
                        remedy="write [first layer, one after the last]",
                    )
                lengths.append(last - first)
            if len(set(lengths)) != 1:
                raise RecipeError(
                    f"its sources have {', '.join(map(str, lengths))} layers" if lengths else "it has no sources",
                    where=where,
                    remedy="give every source of a slice the same number of layers",
                )


def is_plain(contract: InputContract, models: Collection[list[ModelReference]], base: ModelReference | None) -> bool:
    """Whether the delegate gets the anchor without being told that it is the base.

    True where the delegate's contract admits these models only without a base: passthrough then gets the donor alone,
    nuslerp the anchor and a donor as two ordinary models.
    """
    if contract.max_inputs == 1 or base is None:
        return True
    return (
        contract.base == BasePolicy.OPTIONAL
        and any(_refusal(contract, group if base in group else [*group, base], base) for group in models)
        and not any(_refusal(contract, group, None) for group in models)
    )


def _refusal(contract: InputContract, models: list[ModelReference], base: ModelReference | None) -> str | None:
    try:
        contract.validate_ids(models, base)
    except ValueError as error:
        return str(error)
    return None


def check_inputs(delegate: MergeMethod, found: Collection[Group], base: ModelReference | None) -> None:
    """The delegate's contract, and the parameters it cannot do without.

    Raises:
        RecipeError: names the place, what the delegate wants and how to give it.
    """
    name = delegate.spec.name
    for group in found:
        inputs = group.inputs(base)
        if refusal := _refusal(delegate.spec.contract, inputs, base):
            text = refusal.removeprefix("Merge method ")
            listed = f"{len(inputs)} models, the base among them" if base in inputs else f"{len(inputs)} models"
            raise RecipeError(
                f"delegate {name}: {text[:1].lower()}{text[1:]}",
                where=group.where,
                remedy=f"it is given {listed}; add or remove models, or choose another delegate",
            )
        for parameter in delegate.spec.parameters:
            if parameter.required:
                _check_given(parameter, group, inputs, base, name)


def _check_given(
    parameter: ParameterSpec, group: Group, inputs: list[ModelReference], base: ModelReference | None, delegate: str
) -> None:
    if any(parameter.name in (settings or {}) for settings in group.reader.parameter_sources(None)):
        return
    what = f"delegate {delegate} needs the parameter '{parameter.name}'"
    if parameter.scope == ParameterScope.SHARED:
        raise RecipeError(what, where="parameters", remedy=f"add '{parameter.name}: ...' there")
    for i, model in enumerate(inputs):
        if i < len(group.own) and parameter.name in group.own[i]:
            continue
        if model == base and parameter.scope == ParameterScope.NON_BASE:
            continue
        remedy = f"add 'parameters: {{{parameter.name}: ...}}' under this model"
        if i >= len(group.own):
            remedy = f"list the base model under 'models' with its own '{parameter.name}' (0 leaves it out)"
        raise RecipeError(f"{what} for {model}", where=group.where, remedy=remedy)


def check_dtypes(config: MergeConfiguration) -> None:
    """dtype and out_dtype are known floating-point types."""
    for key in ("dtype", "out_dtype"):
        name = getattr(config, key)
        try:
            dtype = dtype_from_name(name)
        except RuntimeError:
            raise RecipeError(
                f"{key} is {name!r}, which does not exist", where="recipe", remedy=nearest(str(name), DTYPES)
            ) from None
        if dtype is not None and not dtype.is_floating_point:
            raise RecipeError(
                f"{key} is {name!r}, weights are floating-point numbers",
                where="recipe",
                remedy=f"choose one of: {', '.join(DTYPES)}",
            )


def leaves(setting: Any) -> Iterator[Any]:
    """The scalars of a setting: itself, the entries of a per-layer list, the values behind filters."""
    if isinstance(setting, ConditionalParameter):
        yield from leaves(setting.value)
    elif isinstance(setting, list):
        for item in setting:
            yield from leaves(item)
    else:
        yield setting


def filters(setting: Any) -> list[str]:
    """The filters of a setting, those that match everything left out."""
    conditions = setting if isinstance(setting, list) else [setting]
    found = [c.filter for c in conditions if isinstance(c, ConditionalParameter)]
    return [text for text in found if text not in (None, "*")]


KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a word"}
"""Types of mergekit's parameters, in words."""


def wanted(parameter: ParameterSpec) -> str:
    """What values a delegate's parameter has, in words."""
    types = [kind for kind in (parameter.value_type, *get_args(parameter.value_type)) if kind in KINDS]
    return KINDS[types[0]] if types else str(parameter.value_type)


def check_value(parameter: ParameterSpec, setting: Any, where: str) -> None:
    """A delegate's own parameter has values of its type, and finite ones."""
    for value in leaves(setting):
        try:
            valid = parameter.validate(value)
        except ValidationError:
            raise RecipeError(
                f"parameter '{parameter.name}' is {value!r}", where=where, remedy=f"it must be {wanted(parameter)}"
            ) from None
        if isinstance(valid, float) and not math.isfinite(valid):
            raise RecipeError(f"parameter '{parameter.name}' is {value!r}", where=where, remedy="give a finite number")


def check_shared(parameter: ParameterSpec, setting: Any, where: str | None, delegate: str) -> None:
    """An option of ours that the delegate has under the same name holds for both, so both must know its value.

    Raises:
        RecipeError: the delegate does not know a value.
    """
    for value in leaves(setting):
        try:
            parameter.validate(value)
        except ValidationError:
            raise RecipeError(
                f"parameter '{parameter.name}' is {value!r}, which also holds for delegate {delegate}: "
                f"its own '{parameter.name}' is {wanted(parameter)}",
                where=where,
                remedy=f"write {wanted(parameter)}, or choose a delegate without '{parameter.name}'",
            ) from None
