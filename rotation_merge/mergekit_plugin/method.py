"""The merge method as mergekit's registry sees it. The planner does the work; called directly it refuses."""

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
    """mergekit's methods by name, ours among them only when it is asked for by name.

    `registered_methods()` lists methods that merge single tensors; ours needs the planner and cannot. Delegates of our
    own are known to the tasks of a merge of ours alone (`rotation_merge:NAME`); a stock recipe that names one gets a
    line.
    """

    def __missing__(self, name: str) -> MergeMethod:
        if name == METHOD:
            return OURS
        from rotation_merge.mergekit_plugin.delegates import OWN, PREFIX

        if name.startswith(PREFIX) and name.removeprefix(PREFIX) in OWN:
            return OWN[name.removeprefix(PREFIX)]
        if name in OWN:
            with one_line():
                raise RecipeError(
                    f"merge_method '{name}' is a delegate of rotation_merge, mergekit has no method of that name",
                    remedy=f"write 'merge_method: rotation_merge', and 'delegate: {name}' under parameters",
                )
        raise KeyError(name)


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
