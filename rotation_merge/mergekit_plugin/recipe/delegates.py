"""The available delegates: mergekit's methods and our own."""

from __future__ import annotations

from dataclasses import dataclass

from mergekit import merge_methods
from mergekit.merge_methods.base import BasePolicy, InputContract, MergeMethod, ParameterScope

from rotation_merge.averaging.registry import METHODS
from rotation_merge.config import Option
from rotation_merge.mergekit_plugin.recipe.names import KEYS, METHOD, PLACES

OWN: dict[str, MergeMethod] = {method.spec.name: method for method in METHODS}
"""Delegates of our own. They need more than weights, so they stay out of mergekit's list and run only inside a
rotation_merge recipe."""

PREFIX = f"{METHOD}:"
"""Under `rotation_merge:NAME` the tasks of a merge find a delegate of our own in mergekit's registry."""


def names() -> list[str]:
    """Everything that can be a delegate."""
    known = [method.spec.name for method in merge_methods.registered_methods()]
    return sorted({*OWN, *known} - {METHOD})


def get(name: str) -> MergeMethod:
    """A delegate by its name; ours before mergekit's.

    Raises:
        RuntimeError: there is none.
    """
    return OWN[name] if name in OWN else merge_methods.get(name)


def registered_name(method: MergeMethod) -> str:
    """The delegate's name in mergekit's registry."""
    name = method.spec.name
    return f"{PREFIX}{name}" if OWN.get(name) is method else name


@dataclass(frozen=True)
class Delegate:
    """One delegate, in words.

    Attributes:
        models: number of models.
        base: whether it uses base_model.
        required, optional: its parameters; `weight*` stands under each model.
        own: whether it is one of ours.
    """

    name: str
    title: str
    models: str
    base: str
    required: list[str]
    optional: list[str]
    url: str | None
    own: bool = False


@dataclass(frozen=True)
class DelegateOption:
    """One parameter of rotation_merge; `text` is Markdown."""

    name: str
    where: str
    values: list[str]
    default: str
    text: str


def delegates() -> list[Delegate]:
    """Everything that can do the averaging, by name."""
    entries = []
    for spec in (get(name).spec for name in names()):
        parameters = {p: p.name + ("" if p.scope == ParameterScope.SHARED else "*") for p in spec.parameters}
        entries.append(
            Delegate(
                spec.name,
                spec.pretty_name or spec.name,
                _models(spec.contract),
                spec.contract.base.value if isinstance(spec.contract.base, BasePolicy) else str(spec.contract.base),
                [name for p, name in parameters.items() if p.required],
                [name for p, name in parameters.items() if not p.required],
                spec.reference_url,
                spec.name in OWN,
            )
        )
    return entries


def _models(contract: InputContract) -> str:
    low, high = contract.min_inputs, contract.max_inputs
    words = str(low) if low == high else f"{low} or more" if high is None else f"{low} to {high}"
    if contract.min_non_base is not None and contract.min_non_base == contract.max_non_base:
        words += f", {contract.min_non_base} beside the base"
    return words


def options() -> list[DelegateOption]:
    """Every parameter of rotation_merge itself."""
    return [
        DelegateOption(
            key.name,
            PLACES[key.option.scope],
            key.option.values,
            str(key.default).lower(),
            _sentence(key.option),
        )
        for key in KEYS
    ]


def _sentence(described: Option) -> str:
    """The help of an option, with the delegates that use it."""
    text = f"{described.help[:1].upper()}{described.help[1:]}."
    return (
        f"{text} Delegate: {', '.join(f'`{name}`' for name in described.delegates)}." if described.delegates else text
    )
