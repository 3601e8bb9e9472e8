"""Whether a recipe is ours. Asked of every recipe that mergekit reads, so nothing of mergekit's is needed for it."""

from __future__ import annotations

import difflib
from typing import Any

from rotation_merge.recipe.document import documents
from rotation_merge.recipe.names import METHOD


def is_ours(document: Any) -> bool:
    """Whether a recipe names our method, perhaps misspelt or under a misspelt key."""
    if not isinstance(document, dict):
        return False
    if "merge_method" in document:
        return resembles(document["merge_method"])
    return METHOD in [value for value in document.values() if isinstance(value, str)]


def resembles(name: object) -> bool:
    """Whether `name` is our method's name, perhaps misspelt."""
    return isinstance(name, str) and bool(difflib.get_close_matches(name.lower(), [METHOD], cutoff=0.8))


def ours_in(text: str) -> list[bool]:
    """For each document of a recipe file, whether it is ours.

    Raises:
        RecipeError: the text is not YAML.
    """
    return [is_ours(document.value) for document in documents(text)]
