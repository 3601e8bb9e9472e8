"""The state of the hooks in this process, and whether they are enabled. Imported at every interpreter start."""

SWITCH = "ROTATION_MERGE_PLUGIN"
"""Environment variable that, set to 0, leaves mergekit alone."""

CHECK = "ROTATION_MERGE_CHECK"
"""Environment variable that, set to 1, has merges by mergekit's own methods looked at when they are written."""

failed: "dict[str, Exception]" = {}
"""Modules of mergekit that could not be extended, and why."""


def switched_off() -> bool:
    """Whether the user wants mergekit to be left alone."""
    from os import environ

    return environ.get(SWITCH) == "0"
