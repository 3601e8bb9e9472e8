"""What extending mergekit leaves behind."""

failed: "dict[str, Exception]" = {}
"""Modules of mergekit that could not be extended, and why."""
