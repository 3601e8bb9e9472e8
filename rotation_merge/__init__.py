"""Align transformers by their symmetries, then merge them with mergekit.

Importing the package registers the merge method `rotation_merge` with mergekit (once) and is otherwise cheap: the
public names below are loaded when they are first used.
"""

from rotation_merge.seam.hooks import install

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from rotation_merge.api import align, carry
    from rotation_merge.errors import RotationMergeError
    from rotation_merge.learning.fit import fit
    from rotation_merge.learning.records import FitOptions
    from rotation_merge.matching.options import MatchOptions

__version__ = "0.1.0"

_PUBLIC = {
    "align": "rotation_merge.api",
    "carry": "rotation_merge.api",
    "fit": "rotation_merge.learning.fit",
    "FitOptions": "rotation_merge.learning.records",
    "MatchOptions": "rotation_merge.matching.options",
    "RotationMergeError": "rotation_merge.errors",
}

__all__ = ["FitOptions", "MatchOptions", "RotationMergeError", "align", "carry", "fit"]


def __getattr__(name: str) -> "Any":
    if name in _PUBLIC:
        from importlib import import_module

        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'rotation_merge' has no attribute '{name}'")


install()
