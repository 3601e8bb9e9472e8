"""The entry point for a mergekit that supports entry points; the finder of `rotation_merge.pth` is then inactive."""

from __future__ import annotations

from typing import Any

from rotation_merge.mergekit_plugin import state


def __getattr__(name: str) -> Any:
    """`merge_method` for the group `mergekit.merge_methods`, `architecture` for `mergekit.architectures`."""
    if name == "merge_method":
        from rotation_merge.mergekit_plugin.method import OURS

        state.loaded.add("mergekit.merge_methods")
        return OURS
    if name == "architecture":
        from rotation_merge.mergekit_plugin.definitions import of_output

        state.loaded.add("mergekit.architectures")
        return of_output
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
