"""Whether a recipe is ours. Asked of every recipe that mergekit reads, so nothing of mergekit's is needed for it."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from rotation_merge.mergekit_plugin.recipe.document import documents
from rotation_merge.mergekit_plugin.recipe.names import METHOD


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
    """Whether each document of a recipe file is ours.

    Raises:
        RecipeError: the text is not YAML.
    """
    return [is_ours(document.value) for document in documents(text)]


_file: ContextVar[str | None] = ContextVar("rotation_merge_recipe_file", default=None)


@contextmanager
def read_from(path: str) -> Iterator[None]:
    """Remember within the block which file recipes are read from."""
    token = _file.set(path)
    try:
        yield
    finally:
        _file.reset(token)


def recipe_file() -> str | None:
    """The file that recipes are read from; None: none is known."""
    return _file.get()
