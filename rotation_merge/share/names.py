"""Names of models and files in recipes, reports and cards: the local ones, and those on the hub."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import yaml

from rotation_merge.diagnose.sources import files, references
from rotation_merge.errors import RecipeError, RotationMergeError
from rotation_merge.mergekit_plugin.document import documents, walk
from rotation_merge.model.hub import HubFile, is_hub_name

TARGET = re.compile(r"(?:datasets/)?[\w.-]+/[\w.-]+(?:/[\w./-]+)?(?:@[\w./-]+)?")
"""Forms of a name on the hub: org/name@revision, a file there, or one of a dataset."""

STATISTICS = "statistics of "
"""Prefix of a report's entries on the data of statistics."""


def given_names(texts: Iterable[str], known: Iterable[str] = ()) -> dict[str, str]:
    """Names from `--as LOCAL=org/name@revision`.

    Args:
        known: names of models and files, which another spelling of the same path stands for, too.

    Raises:
        RotationMergeError: one is no such thing.
    """
    targets = {}
    for text in texts:
        local, _, target = text.rpartition("=")
        if not local or not TARGET.fullmatch(target):
            raise RotationMergeError(f"--as {text} is incomplete", remedy="write --as LOCAL=org/name@revision")
        targets[local.rstrip("/") or local] = target
    places = {os.path.realpath(name): target for name, target in targets.items() if os.path.exists(name)}
    spelled = {name: places.get(os.path.realpath(name)) for name in known if os.path.exists(name)}
    return {**{name: target for name, target in spelled.items() if target}, **targets}


def parts_of(models: Mapping[str, dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """A report's models, each adapter by itself, with what is known of their origins."""
    for name, origin in models.items():
        adapter = origin.get("adapter")
        yield _bare(name.partition("+")[0] if adapter else name), origin
        if adapter:
            yield _bare(str(adapter.get("name"))), adapter


def _bare(name: str) -> str:
    """A name without a revision."""
    return name if os.path.exists(name) else name.partition("@")[0]


def models_in(recipe: str, models: Mapping[str, dict[str, Any]]) -> list[str]:
    """Every model that a recipe or a report names, each adapter by itself; without revisions."""
    names = [name for document in recipe_documents(recipe) for _, name in references(document)]
    for document in recipe_documents(recipe):
        tokenizer = document.get("tokenizer_source") or dict(walk(document)).get(("tokenizer", "source"))
        names += [tokenizer] if isinstance(tokenizer, str) and tokenizer not in ("base", "union") else []
    parts = [part for name in names for part in ([name] if os.path.exists(name) else name.split("+"))]
    return list(dict.fromkeys([*map(_bare, parts), *(name for name, _ in parts_of(models))]))


def files_in(recipe: str) -> dict[str, str]:
    """Files that a recipe reads and that are here, by name: alignment, statistics or data."""
    named = [(name, str(path[-1])) for document in recipe_documents(recipe) for path, name in files(document)]
    return {name: kind for name, kind in named if HubFile.of(name) is None and not name.startswith("datasets/")}


def written_in(recipe: str) -> list[str]:
    """Files and folders that a recipe writes: they travel as files, or not at all."""
    outputs = [dict(walk(d)).get(("parameters", "save_alignment")) for d in recipe_documents(recipe)]
    return [name for name in outputs if isinstance(name, str)]


def recipe_documents(recipe: str) -> list[Mapping[str, Any]]:
    """The documents of a recipe.

    Raises:
        RecipeError: it is no YAML.
    """
    try:
        return [d.value for d in documents(recipe) if isinstance(d.value, Mapping)] if recipe.strip() else []
    except RecipeError as error:
        raise RecipeError(error.what, where="the recipe of this merge", remedy=error.remedy) from error


def known_names(models: Mapping[str, dict[str, Any]]) -> dict[str, str]:
    """Models with a known place on the hub, because they were read from its cache."""
    return {
        name: f"{origin['hub']}@{origin['revision']}"
        for name, origin in parts_of(models)
        if origin.get("hub") and origin.get("revision")
    }


def is_local(name: str) -> bool:
    """Whether a model's name means something on this machine only."""
    return os.path.exists(name) or not is_hub_name(name)


def check_no_local_path(place: str, text: str, local: Iterable[str]) -> None:
    """Refuse a text that names a path of this machine: a local name, a path beside one, or the home directory.

    Args:
        place: of the text in what is published.

    Raises:
        RotationMergeError: names the path.
    """
    folders = {os.path.dirname(os.path.abspath(name)) for name in local if os.path.isabs(name)}
    folders |= {os.path.expanduser("~")}
    for folder in sorted(folders - {"/", os.sep}):
        if match := re.search(rf"(?<![\w./~-]){re.escape(folder)}(?:/[^\s\"'`|,;)<\\]*)?(?![\w-])", text):
            remedy = f"add --as {match[0]}=org/name@revision, or remove the path"
            raise RotationMergeError(f"names '{match[0]}', a path on this machine", where=place, remedy=remedy)


def completed(recipe: str, used: Sequence[Mapping[str, Any]]) -> str:
    """The recipe with `statistics: FILE` under each model with statistics beside it; comments go where one is added.

    Args:
        used: the report's entries on data; with `file` if the recipe did not name it.

    Raises:
        RotationMergeError: the recipe has no place for one.
    """
    beside = {str(x["of"]).removeprefix(STATISTICS): str(x["file"]) for x in used if x.get("file")}
    if not beside:
        return recipe
    contents, placed = list(yaml.safe_load_all(recipe)), set()
    for entry in (entry for content in contents for entry in _entries(content) if entry["model"] in beside):
        entry["parameters"] = {**(entry.get("parameters") or {}), "statistics": beside[entry["model"]]}
        placed.add(entry["model"])
    if missing := [name for name in beside if name not in placed]:
        problem = f"the recipe has no entry that could name its statistics '{beside[missing[0]]}'"
        raise RotationMergeError(problem, where=missing[0], remedy="write 'statistics: FILE' under its own parameters")
    return yaml.safe_dump_all(contents, sort_keys=False, width=1 << 20, allow_unicode=True)


def _entries(value: Any) -> Iterator[dict[str, Any]]:
    """The mappings that name a model, if written as one word."""
    if isinstance(value, dict) and isinstance(value.get("model"), str):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _entries(item)
