"""Merge methods as mergekit's registry sees them. A recipe of ours is compiled; called directly, ours refuse."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NoReturn

from mergekit.merge_methods.base import MergeMethod, MergeMethodSpec

from rotation_merge.errors import RecipeError
from rotation_merge.mergekit_plugin.document import METHOD


class Methods(dict[str, MergeMethod]):
    """mergekit's methods by name, ours among them only when they are asked for by name.

    `registered_methods()` lists methods that merge single tensors; ours know more of the models and cannot.
    """

    def __missing__(self, name: str) -> MergeMethod:
        if name == METHOD:
            return RotationMergeMethod()
        from rotation_merge.mergekit_plugin.delegates import OWN

        return OWN[name]


class RotationMergeMethod(MergeMethod):
    """Entry in the registry, so that recipes can name the method."""

    spec = MergeMethodSpec(
        name=METHOD,
        pretty_name="Rotation Merge",
        reference_url="https://arxiv.org/abs/2502.00264",
    )

    def validate_inputs(
        self, input_ids: Sequence[Hashable], base_id: Hashable | None = None, *, group_name: str | None = None
    ) -> NoReturn:
        """Raise, because this is only reached where `run_merge` is bypassed."""
        problem = "merge_method rotation_merge aligns whole models and cannot merge single tensors"
        raise RecipeError(problem, remedy="use mergekit-yaml, mergekit-multi or mergekit.merge.run_merge")

    def _execute(self, *args: Any, **kwargs: Any) -> NoReturn:
        self.validate_inputs(())
