"""A delegate's contract: number of models, base, required parameters."""

from __future__ import annotations

from collections.abc import Collection
from typing import get_args

from mergekit.common import ModelReference
from mergekit.merge_methods.base import BasePolicy, InputContract, MergeMethod, ParameterScope, ParameterSpec

from rotation_merge.mergekit_plugin.recipe.document import Document
from rotation_merge.mergekit_plugin.recipe.parameter_scopes import MergeInputs, groups, reference

KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a word"}
"""Types of mergekit's parameters, in words."""


def wanted(parameter: ParameterSpec) -> str:
    """The type of a delegate's parameter in words."""
    types = [kind for kind in (parameter.value_type, *get_args(parameter.value_type)) if kind in KINDS]
    return KINDS[types[0]] if types else str(parameter.value_type)


def is_plain(contract: InputContract, models: Collection[list[ModelReference]], base: ModelReference | None) -> bool:
    """Whether the delegate receives the anchor as an ordinary model, not as its base.

    True where the delegate's contract admits these models only without a base: passthrough then gets the donor alone,
    nuslerp the anchor and a donor as two ordinary models.
    """
    if contract.max_inputs == 1 or base is None or contract.base == BasePolicy.FORBIDDEN:
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


def plain(document: Document, delegate: MergeMethod) -> bool:
    """`is_plain` for the models of a recipe."""
    models = [group.models for group in groups(document.value)]
    return is_plain(delegate.spec.contract, models, reference(document.value.get("base_model")))


def check_contract(document: Document, delegate: MergeMethod) -> None:
    """Collect violations of the delegate's contract, and missing parameters."""
    base = None if plain(document, delegate) else reference(document.value.get("base_model"))
    for group in groups(document.value):
        inputs = group.inputs(base)
        try:
            delegate.validate_inputs(inputs, base)
        except (ValueError, RuntimeError) as error:
            text = str(error).removeprefix("Merge method ")
            listed = f"{len(inputs)} models, the base among them" if base in inputs else f"{len(inputs)} models"
            document.fault(
                group.path,
                f"delegate {delegate.spec.name}: {text[:1].lower()}{text[1:]}",
                f"it is given {listed}; add or remove models, or choose another delegate",
            )
        for parameter in delegate.spec.parameters:
            if parameter.required and not any(parameter.name in settings for settings in group.shared):
                _check_required(document, parameter, group, base, delegate.spec.name)


def _check_required(
    document: Document, parameter: ParameterSpec, group: MergeInputs, base: ModelReference | None, delegate: str
) -> None:
    name, problem = parameter.name, f"delegate {delegate} needs the parameter '{parameter.name}'"
    if parameter.scope == ParameterScope.SHARED:
        if not document.misspelt(("parameters", name)):
            document.fault(("parameters",), problem, f"add '{name}' to the parameters")
        return
    for i, model in enumerate(group.inputs(base)):
        if model == base and parameter.scope == ParameterScope.NON_BASE:
            continue
        if i >= len(group.models):
            remedy = f"list {model} under 'models' with its own '{name}' (0 leaves it out)"
            document.fault(("base_model",), f"{problem} for {model}, the base", remedy)
        elif name not in group.settings[i] and not document.misspelt((*group.entries[i], name)):
            document.fault(group.entries[i], f"{problem} for {model}", f"add 'parameters: {{{name}: ...}}'")
