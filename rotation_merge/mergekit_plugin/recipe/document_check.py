"""The strictness that mergekit lacks, in its own commands: the first fault of a recipe stops it, with its place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from rotation_merge.errors import RecipeError
from rotation_merge.mergekit_plugin.recipe.detect import is_ours
from rotation_merge.mergekit_plugin.recipe.document import Document, Fault, documents
from rotation_merge.mergekit_plugin.recipe.settings import check_settings

_of_a_checked_file: ContextVar[bool] = ContextVar("_of_a_checked_file", default=False)


def check_document(content: dict[str, Any]) -> None:
    """Check a recipe without opening a model, unless its file has been checked already.

    Raises:
        RecipeError: the first fault.
    """
    if _of_a_checked_file.get():
        return
    document = Document(content)
    check_settings(document)
    document.raise_first()


@contextmanager
def checked_file(path: str) -> Iterator[None]:
    """Check every document of ours in a recipe file, once for all that is read from it meanwhile.

    Raises:
        RecipeError: the first fault, with line and column, and the number of others.
    """
    with open(path, encoding="utf-8") as file:
        text = file.read()
    try:
        recipes = documents(text)
    except RecipeError as error:
        raise RecipeError(error.what, where=f"{path}, {error.where}", remedy=error.remedy) from error
    ours = [document for document in recipes if is_ours(document.value)]
    for document in ours:
        check_settings(document)
    more = sum(fault.error for document in ours for fault in document.faults) - 1
    first = next((document.first for document in ours if document.first), None)
    if first is not None:
        raise RecipeError(first.what, where=_place(path, first), remedy=_remedy(path, first, more))
    token = _of_a_checked_file.set(True)
    try:
        yield
    finally:
        _of_a_checked_file.reset(token)


def _place(path: str, fault: Fault) -> str:
    position = f"line {fault.line}, column {fault.column}" if fault.line else ""
    return ", ".join(part for part in (path, position, fault.where) if part)


def _remedy(path: str, fault: Fault, more: int) -> str:
    if not more:
        return fault.remedy
    return f"{fault.remedy} ({more} more: rotation-merge check {path})"
