"""Getting into mergekit: hooks, extensions, the merge method. The only code that touches its private parts."""

METHOD = "rotation_merge"
"""The merge method's name."""

failed: "dict[str, Exception]" = {}
"""Modules of mergekit that could not be extended, and why."""
