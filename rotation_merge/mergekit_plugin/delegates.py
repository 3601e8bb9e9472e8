"""The available delegates: mergekit's methods and our own, and what mergekit's registry knows of ours."""

from __future__ import annotations

from typing import Any, NoReturn

from mergekit import merge_methods
from mergekit.merge_methods.base import MergeMethod, MergeMethodSpec

from rotation_merge.averaging.registry import METHODS
from rotation_merge.errors import RecipeError
from rotation_merge.mergekit_plugin import METHOD

OWN: dict[str, MergeMethod] = {method.spec.name: method for method in METHODS}
"""Delegates of our own, each a merge method of recipes, too: `merge_method: NAME` merges models as they are."""


def names() -> list[str]:
    """Everything that can be a delegate."""
    return sorted({*OWN, *(method.spec.name for method in merge_methods.registered_methods())})


def get(name: str) -> MergeMethod:
    """A delegate by its name; ours before mergekit's."""
    return OWN[name] if name in OWN else merge_methods.get(name)


class RotationMergeMethod(MergeMethod):
    """Entry in the registry, so that recipes can name the method; they are compiled, and called directly it refuses."""

    spec = MergeMethodSpec(name=METHOD, pretty_name="Rotation Merge", reference_url="https://arxiv.org/abs/2502.00264")

    def validate_inputs(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise, because this is only reached where `run_merge` is bypassed."""
        problem = "merge_method rotation_merge aligns whole models and cannot merge single tensors"
        raise RecipeError(problem, remedy="use mergekit-yaml, mergekit-multi or mergekit.merge.run_merge")

    def _execute(self, *args: Any, **kwargs: Any) -> NoReturn:
        self.validate_inputs()
