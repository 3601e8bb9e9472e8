"""What can be said of delegates and options without a recipe: for listings and the generated reference."""

from __future__ import annotations

from dataclasses import dataclass

from mergekit import merge_methods
from mergekit.merge_methods.base import BasePolicy, InputContract, ParameterScope

from rotation_merge.matching.options import CHOICES, MatchOptions
from rotation_merge.recipe.names import DONOR, GLOBAL, GLOBAL_CHOICES, METHOD, OPTIONS


@dataclass(frozen=True)
class Delegate:
    """One merge method of mergekit, as a delegate.

    Attributes:
        models: how many it takes, in words.
        base: whether it uses base_model.
        required, optional: its parameters; `weight*` stands under each model.
    """

    name: str
    title: str
    models: str
    base: str
    required: list[str]
    optional: list[str]
    url: str | None


@dataclass(frozen=True)
class Option:
    """One parameter of rotation_merge."""

    name: str
    where: str
    values: str
    default: str
    text: str


def delegates() -> list[Delegate]:
    """Every registered method that can do the averaging, by name."""
    found = []
    for method in merge_methods.registered_methods():
        spec = method.spec
        if spec.name == METHOD:
            continue
        names = {p: p.name + ("" if p.scope == ParameterScope.SHARED else "*") for p in spec.parameters}
        found.append(
            Delegate(
                spec.name,
                spec.pretty_name or spec.name,
                _models(spec.contract),
                spec.contract.base.value if isinstance(spec.contract.base, BasePolicy) else str(spec.contract.base),
                [name for p, name in names.items() if p.required],
                [name for p, name in names.items() if not p.required],
                spec.reference_url,
            )
        )
    return sorted(found, key=lambda d: d.name)


def _models(contract: InputContract) -> str:
    low, high = contract.min_inputs, contract.max_inputs
    words = str(low) if low == high else f"{low} or more" if high is None else f"{low} to {high}"
    if contract.min_non_base is not None and contract.min_non_base == contract.max_non_base:
        words += f", {contract.min_non_base} beside the base"
    return words


def options() -> list[Option]:
    """Every parameter of rotation_merge itself."""
    found = []
    defaults = MatchOptions()
    for name, text in OPTIONS.items():
        values = ", ".join(str(v).lower() for v in CHOICES[name]) if name in CHOICES else "all, or ranges"
        found.append(Option(name, "anywhere", values, str(getattr(defaults, name)).lower(), text))
    for name, text in DONOR.items():
        values = "a model" if name == "finetuned_from" else "a file"
        found.append(Option(name, "under one donor", values, "none", text))
    for name, text in GLOBAL.items():
        choices = [str(choice).lower() for choice in GLOBAL_CHOICES.get(name, ())]
        values = ", ".join(choices) or ("a merge method" if name == "delegate" else "names")
        default = choices[0] if choices else "linear" if name == "delegate" else "none"
        found.append(Option(name, "under the recipe", values, default, text))
    return found
