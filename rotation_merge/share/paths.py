"""The paths in a recipe from elsewhere: names of the hub, and files beside the recipe; nothing else is run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from rotation_merge.config import FILE, FOLDER, MODEL, NEW_FILE
from rotation_merge.errors import RecipeError, RotationMergeError
from rotation_merge.mergekit_plugin.document import Path, documents, dotted
from rotation_merge.mergekit_plugin.keys import BY_NAME
from rotation_merge.share.contents import PART

MODELS = (
    *("base_model", "model", "lora", "path", "source", "tokenizer_source", "name"),
    *(name for name, key in BY_NAME.items() if key.option.kind is MODEL),
)
FILES = tuple(name for name, key in BY_NAME.items() if key.option.kind in (FILE, NEW_FILE, FOLDER))
"""Keys of recipes whose values name models (`name`: one that mergekit-multi writes), and files or folders to read or to
write."""

TEXTS = ("chat_template", "filter", "token")
"""Keys of texts, which may begin with a slash."""

REPOSITORY = r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*"
MODEL_NAME = re.compile(rf"{REPOSITORY}(@[\w./-]+)?(\+{REPOSITORY}(@[\w./-]+)?)?")
FILE_NAME = re.compile(rf"(datasets/)?{REPOSITORY}(/[A-Za-z0-9_][\w.-]*)+@[\w./-]+")
"""Names of the hub: a model, with an adapter, and a file at a revision."""

REMEDY = "do not run it; ask its publisher"


def check_paths(text: str, name: str) -> None:
    """Refuse a recipe that names anything but models of the hub, files of it, and files beside the recipe.

    Args:
        name: of the recipe, for errors.

    Raises:
        RotationMergeError: names the entry and its value.
    """
    try:
        parsed = documents(text)
    except RecipeError as error:
        raise RotationMergeError(f"{error.where}: {error.what}", where=name, remedy=REMEDY) from error
    for document in parsed:
        if not isinstance(document.value, dict):
            raise RotationMergeError("is not a recipe", where=name, remedy=REMEDY)
        for path, value in _scalars(document.value, ()):
            if isinstance(value, str):
                _check(value, path, name)
            elif value is not None and not isinstance(value, int | float):
                problem = f"holds a {type(value).__name__}, which no recipe has"
                raise RotationMergeError(problem, where=f"{name}, {dotted(path)}", remedy=REMEDY)


def words_of(text: str) -> list[str]:
    """Every word of a recipe."""
    scalars = (scalar for document in documents(text) for _, scalar in _scalars(document.value, ()))
    return [scalar for scalar in scalars if isinstance(scalar, str)]


def _scalars(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _scalars(item, (*path, str(key)))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _scalars(item, (*path, index))
    else:
        yield path, value


def _check(text: str, path: Path, name: str) -> None:
    key = next((step for step in reversed(path) if step in (*FILES, *MODELS, *TEXTS)), "")
    allowed: object
    if key in FILES:
        allowed = PART.fullmatch(text) or FILE_NAME.fullmatch(text) or re.fullmatch(r"demo:\w+", text)
    elif key in MODELS:
        allowed = PART.fullmatch(text) or MODEL_NAME.fullmatch(text)
    else:
        allowed = key in TEXTS or not _leads_out(text)
    if not allowed:
        problem = f"names '{text}', which is neither a name on the hub nor a file beside the recipe"
        raise RotationMergeError(problem, where=f"{name}, {dotted(path)}", remedy=REMEDY)


def _leads_out(text: str) -> bool:
    """Whether a text is a path that is absolute, of a home directory, of a drive, or has a folder above."""
    parts = re.split(r"[/\\]", text)
    return text.startswith(("/", "\\", "~")) or ".." in parts or bool(re.match(r"[A-Za-z]:[/\\]", text))
