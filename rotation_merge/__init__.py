"""Align transformers by their symmetries, then merge them with mergekit.

Importing the package registers the merge method `rotation_merge` with mergekit (once) and is otherwise cheap: the
public names below are loaded when they are first used.
"""

from rotation_merge.plugin.hooks import install

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from rotation_merge.api import align
    from rotation_merge.errors import RotationMergeError

__version__ = "0.1.0"

_PUBLIC = {"align": "rotation_merge.api", "RotationMergeError": "rotation_merge.errors"}

__all__ = ["RotationMergeError", "align"]


def __getattr__(name: str) -> "Any":
    if name in _PUBLIC:
        from importlib import import_module

        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'rotation_merge' has no attribute '{name}'")


install()
