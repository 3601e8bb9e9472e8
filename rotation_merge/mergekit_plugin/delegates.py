"""The available delegates: mergekit's methods and our own."""

from __future__ import annotations

from mergekit import merge_methods
from mergekit.merge_methods.base import MergeMethod

from rotation_merge.averaging.registry import METHODS

OWN: dict[str, MergeMethod] = {method.spec.name: method for method in METHODS}
"""Delegates of our own, each a merge method of recipes, too: `merge_method: NAME` merges models as they are."""


def names() -> list[str]:
    """Everything that can be a delegate."""
    known = [method.spec.name for method in merge_methods.registered_methods()]
    return sorted({*OWN, *known})


def get(name: str) -> MergeMethod:
    """A delegate by its name; ours before mergekit's.

    Raises:
        RuntimeError: there is none.
    """
    return OWN[name] if name in OWN else merge_methods.get(name)
