"""Merge methods as mergekit's registry sees them. A recipe of ours is compiled; called directly, ours refuse."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from mergekit.merge_methods.base import MergeMethod, MergeMethodSpec

from rotation_merge.errors import RecipeError
from rotation_merge.mergekit_plugin.console import one_line
from rotation_merge.mergekit_plugin.document import METHOD

_REFUSAL = "merge_method rotation_merge aligns whole models and cannot merge single tensors"
_REMEDY = "use mergekit-yaml or mergekit-multi instead of mergekit-pytorch"


class Methods(dict[str, MergeMethod]):
    """mergekit's methods by name, ours among them only when they are asked for by name.

    `registered_methods()` lists methods that merge single tensors; ours know more of the models and cannot.
    """

    def __missing__(self, name: str) -> MergeMethod:
        if name == METHOD:
            return OURS
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
    ) -> None:
        """Raise, because this is only reached when the planner was bypassed."""
        with one_line():
            raise RecipeError(_REFUSAL, remedy=_REMEDY)

    def _execute(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        with one_line():
            raise RecipeError(_REFUSAL, remedy=_REMEDY)
        return ()


OURS = RotationMergeMethod()
