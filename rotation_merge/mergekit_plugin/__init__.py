"""Getting into mergekit: hooks, extensions, the merge method. The only code that touches its private parts."""

METHOD = "rotation_merge"
"""The merge method's name."""

failed: "dict[str, Exception]" = {}
"""Modules of mergekit that could not be extended, and why."""

SWITCH = "ROTATION_MERGE_PLUGIN"
"""Environment variable that, set to 0, leaves mergekit alone."""


def switched_off() -> bool:
    """Whether the user wants mergekit to be left alone."""
    from os import environ

    return environ.get(SWITCH) == "0"
