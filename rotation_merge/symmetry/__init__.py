"""The symmetry groups: elements act on one dimension, transforms on the axes of a space, groups know the best ones.

The public names are loaded when one is first used, so that options are read without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rotation_merge.symmetry.element import Linear, Monomial
    from rotation_merge.symmetry.group import Stats
    from rotation_merge.symmetry.transform import ROLES, Space, Transform, orders_of

__all__ = ["ROLES", "Linear", "Monomial", "Space", "Stats", "Transform", "orders_of"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    file = {"Linear": "element", "Monomial": "element", "Stats": "group"}.get(name, "transform")
    return getattr(import_module(f"rotation_merge.symmetry.{file}"), name)
