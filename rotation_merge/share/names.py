"""Names of models and files in recipes, reports and cards: the local ones, and those on the hub."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import yaml

from rotation_merge.diagnose.sources import files, references
from rotation_merge.errors import RecipeError, RotationMergeError
from rotation_merge.mergekit_plugin.document import at, documents
from rotation_merge.model.hub import HubFile, is_hub_name

TARGET = re.compile(r"(?:datasets/)?[\w.-]+/[\w.-]+(?:/[\w./-]+)?(?:@[\w./-]+)?")
"""Forms of a name on the hub: org/name@revision, a file there, or one of a dataset."""


def check_repository(name: str) -> None:
    """Refuse an invalid repository name, before the hub is asked.

    Raises:
        RotationMergeError: names it.
    """
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise RotationMergeError(f"'{name}' names no repository", remedy="write org/name")


def given_names(texts: Iterable[str]) -> dict[str, str]:
    """Names from `--as LOCAL=org/name@revision`.

    Raises:
        RotationMergeError: one is no such thing.
    """
    targets = {}
    for text in texts:
        local, sign, target = text.rpartition("=")
        if not sign or not local or not TARGET.fullmatch(target):
            raise RotationMergeError(f"--as {text} is incomplete", remedy="write --as LOCAL=org/name@revision")
        targets[local.rstrip("/") or local] = target
    return targets


def same_places(targets: Mapping[str, str], known: Iterable[str]) -> dict[str, str]:
    """Names from `--as`, also for other spellings of a path: `./donor` for `donor`."""
    places = {os.path.realpath(name): target for name, target in targets.items() if os.path.exists(name)}
    places_of_known = {name: os.path.realpath(name) for name in known if os.path.exists(name)}
    return {**{name: places[place] for name, place in places_of_known.items() if place in places}, **targets}


def models_in(recipe: str, report: Mapping[str, Any]) -> list[str]:
    """Every model that a recipe or a report names, each adapter by itself; without revisions."""
    names = [name for document in _documents(recipe) for _, name in references(document)]
    names += [str(source) for document in _documents(recipe) if (source := _tokenizer(document))]
    names += [name for name, facts in report.get("models", {}).items() for name in (name, _adapter(facts)) if name]
    parts = [part for name in names for part in (name.split("+") if not os.path.exists(name) else [name])]
    return list(dict.fromkeys(part if os.path.exists(part) else part.partition("@")[0] for part in parts))


def _adapter(facts: Mapping[str, Any]) -> str | None:
    return (facts.get("adapter") or {}).get("name")


def _tokenizer(document: Mapping[str, Any]) -> str | None:
    """A model that a tokenizer is taken from."""
    tokenizer = document.get("tokenizer_source") or at(document, ("tokenizer", "source"))
    return tokenizer if isinstance(tokenizer, str) and tokenizer not in ("base", "union") else None


def files_in(recipe: str) -> dict[str, str]:
    """Files that a recipe reads and that are here, by name: alignment, statistics or data."""
    names = {}
    for document in _documents(recipe):
        for path, name in files(document):
            if HubFile.of(name) is None and not name.startswith("datasets/"):
                names[name] = str(path[-1])
    return names


def written_in(recipe: str) -> list[str]:
    """Files and folders that a recipe writes: they travel as files, or not at all."""
    outputs = [at(d, ("parameters", "save_alignment")) for d in _documents(recipe)]
    return [name for name in outputs if isinstance(name, str)]


def _documents(recipe: str) -> list[Mapping[str, Any]]:
    try:
        return [d.value for d in documents(recipe) if isinstance(d.value, Mapping)] if recipe.strip() else []
    except RecipeError as error:
        raise RecipeError(error.what, where="the recipe of this merge", remedy=error.remedy) from error


def known_names(report: Mapping[str, Any]) -> dict[str, str]:
    """Models with a known place on the hub, because they were read from its cache."""
    places = {}
    for name, facts in report.get("models", {}).items():
        adapter = facts.get("adapter")
        parts = [(name if adapter is None else name.partition("+")[0], facts)]
        parts += [] if adapter is None else [(str(adapter.get("name")), adapter)]
        for part, origin in parts:
            if origin.get("hub") and origin.get("revision"):
                local = part if os.path.exists(part) else part.partition("@")[0]
                places[local] = f"{origin['hub']}@{origin['revision']}"
    return places


def is_local(name: str) -> bool:
    """Whether a model's name means something on this machine only."""
    return os.path.exists(name) or not is_hub_name(name)


def remaining_local_path(text: str, local: Iterable[str]) -> str | None:
    """A path of this machine that a text still contains: a local name, a path beside one, or the home directory."""
    folders = {os.path.dirname(os.path.abspath(name)) for name in local if os.path.isabs(name)}
    folders |= {os.path.expanduser("~")}
    for folder in sorted(folders - {"/", os.sep}):
        match = re.search(rf"(?<![\w./~-]){re.escape(folder)}(?:/[^\s\"'`|,;)<\\]*)?(?![\w-])", text)
        if match:
            return match[0]
    return None


STATISTICS = "statistics of "
"""Prefix of a report's entries on the data of statistics."""

Edit = tuple[int, int, str]
"""Start and end in the text, and the replacement."""


def completed(recipe: str, used: Sequence[Mapping[str, Any]]) -> str:
    """The recipe with `statistics: FILE` under each model with statistics beside it.

    Args:
        used: the report's entries on data; with `file` if the recipe did not name it.

    Raises:
        RotationMergeError: the recipe has no place for one.
    """
    files = {str(x["of"]).removeprefix(STATISTICS): str(x["file"]) for x in used if x.get("file")}
    if not files:
        return recipe
    edits: dict[int, Edit] = {}
    placed = set()
    for root in yaml.compose_all(recipe, Loader=yaml.SafeLoader):
        for name, entry in _entries(root):
            if name not in files:
                continue
            edit = _edit(recipe, entry, files[name])
            if edits.setdefault(edit[0], edit) == edit:  # an alias stands for the parameters of two models
                placed.add(name)
    for name in files:
        if name not in placed:
            problem = f"the recipe has no entry that could name its statistics '{files[name]}'"
            raise RotationMergeError(problem, where=name, remedy="write 'statistics: FILE' under its own parameters")
    for start, end, text in sorted(edits.values(), reverse=True):
        recipe = f"{recipe[:start]}{text}{recipe[end:]}"
    return recipe


def _entries(node: yaml.Node | None) -> Iterator[tuple[str, yaml.MappingNode]]:
    """The keys that name a model next to its parameters, if written as one word."""
    if isinstance(node, yaml.MappingNode):
        model_node = next((v for k, v in node.value if k.value == "model" and isinstance(v, yaml.ScalarNode)), None)
        if model_node is not None:
            yield model_node.value, node
        for _, value in node.value:
            yield from _entries(value)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _entries(item)


def _edit(text: str, entry: yaml.MappingNode, file: str) -> Edit:
    """The edit that adds a file to an entry's parameters."""
    line = f"statistics: {json.dumps(file, ensure_ascii=False)}"
    parameters = next((value for key, value in entry.value if key.value == "parameters"), None)
    if parameters is None:
        return _before(entry, f"parameters: {{{line}}}")
    if isinstance(parameters, yaml.MappingNode) and parameters.value:
        return _before(parameters, line)
    start, end = parameters.start_mark.index, parameters.end_mark.index  # nothing, or an empty mapping
    return start, end, f"{'' if text[start - 1 : start].isspace() else ' '}{{{line}}}"


def _before(node: yaml.MappingNode, line: str) -> Edit:
    """A line before the first key of a mapping."""
    first = node.value[0][0].start_mark
    end = ", " if node.flow_style else "\n" + " " * first.column
    return first.index, first.index, f"{line}{end}"
