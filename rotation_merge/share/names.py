"""Names of models and files in recipes and reports: the local ones, and those on the hub."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

from rotation_merge.errors import RotationMergeError, short
from rotation_merge.mergekit_plugin.document import walk
from rotation_merge.mergekit_plugin.recipe import MODEL_INPUT, inputs_in
from rotation_merge.model.hub import HubFile, is_hub_name, no_answer, reachable

TARGET = re.compile(r"(?:datasets/)?[\w.-]+/[\w.-]+(?:/[\w./-]+)?(?:@[\w./-]+)?")
"""Forms of a name on the hub: org/name@revision, a file there, or one of a dataset."""

MEASURED = "statistics of "
"""Prefix of a report's entries on the data of statistics."""

ELSEWHERE = ("datasets/", "demo:")
"""Beginnings of names of samples that are no files here."""

Origins = dict[str, dict[str, Any]]
"""Facts on the origins of models, by name: `hub`, `revision`, `license`."""


def targets_of(words: Iterable[str], names: Iterable[str]) -> dict[str, str]:
    """The names on the hub that `--as LOCAL=org/name@revision` gives, by the names of models and files.

    Args:
        names: as the merge has them; LOCAL may be another spelling of the same path.

    Raises:
        RotationMergeError: a word has another form.
    """
    targets: dict[str, str] = {}
    for word in words:
        local, _, target = word.rpartition("=")
        if not local or not TARGET.fullmatch(target):
            raise RotationMergeError(f"--as {word} is incomplete", remedy="write --as LOCAL=org/name@revision")
        spellings = [
            name for name in names if os.path.exists(name) and os.path.realpath(name) == os.path.realpath(local)
        ]
        targets |= dict.fromkeys([*spellings, local.rstrip("/") or local], target)
    return targets


def _on_hub(target: str) -> tuple[str, str | None]:
    """A model of the hub at a revision, by default the newest, and its licence where the hub tells.

    Raises:
        RotationMergeError: no revision is named, and the hub does not tell.
    """
    from huggingface_hub import HfApi

    hub, _, revision = target.partition("@")
    if hub.count("/") != 1:
        return target, None
    try:
        if not reachable():
            raise OSError(no_answer()[0])
        facts = HfApi().model_info(hub, revision=revision or None)
    except Exception as error:  # of the client of HTTP below, which is another each year
        if revision:
            return target, None
        problem = f"its revision is unknown ({short(error)})"
        raise RotationMergeError(problem, where=hub, remedy=f"write {hub}@REVISION") from error
    licence = None if facts.card_data is None else facts.card_data.license
    return f"{hub}@{revision or facts.sha}", licence if isinstance(licence, str) else None


def pinned(names: Mapping[str, str], origins: Origins) -> dict[str, str]:
    """The names with revisions; the origins of models that were read from folders are completed by them."""
    on_the_hub = {target: _on_hub(target) for target in dict.fromkeys(names.values())}
    for name, facts in origins.items():
        if name in names and not facts.get("hub"):
            target, licence = on_the_hub[names[name]]
            hub, _, revision = target.partition("@")
            facts.update(hub=hub, revision=revision or None, license=facts.get("license") or licence)
    return {name: on_the_hub[target][0] for name, target in names.items()}


def origins_of(models: Origins) -> Origins:
    """The origins in a report, adapters apart, by names without revisions."""
    origins = {}
    for name, facts in models.items():
        adapter = facts.get("adapter")
        origins[_bare(name.partition("+")[0] if adapter else name)] = facts
        if adapter:
            origins[_bare(str(adapter["name"]))] = adapter
    return origins


def _bare(name: str) -> str:
    """A name without a revision."""
    return name if os.path.exists(name) else name.partition("@")[0]


def inputs_of(recipe: str) -> tuple[list[str], dict[str, str]]:
    """The models that a recipe reads, adapters apart, without revisions; and files that are not on the hub, by kind."""
    inputs = inputs_in(recipe) if recipe else {}
    models = {part: "" for name, kind in inputs.items() if kind == MODEL_INPUT for part in _parts(name)}
    known = {name: kind for name, kind in inputs.items() if kind != MODEL_INPUT and not name.startswith(ELSEWHERE)}
    return [*models], {name: kind for name, kind in known.items() if HubFile.of(name) is None}


def _parts(name: str) -> list[str]:
    """A model and its adapter, without revisions."""
    return [name] if os.path.exists(name) else [_bare(part) for part in name.split("+")]


def is_local(name: str, origins: Origins) -> bool:
    """Whether a model's name means something on this machine only."""
    return os.path.exists(name) or not is_hub_name(name) or (name in origins and not origins[name].get("hub"))


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
    beside = {str(entry["of"]).removeprefix(MEASURED): str(entry["file"]) for entry in used if entry.get("file")}
    if not beside:
        return recipe
    contents = list(yaml.safe_load_all(recipe))
    mappings = [value for _, value in walk(contents) if isinstance(value, dict)]
    entries = [(entry, model) for entry in mappings if (model := str(entry.get("model"))) in beside]
    for entry, model in entries:
        entry["parameters"] = {**(entry.get("parameters") or {}), "statistics": beside[model]}
    for model in beside.keys() - {model for _, model in entries}:
        problem = f"the recipe has no entry that could name its statistics '{beside[model]}'"
        raise RotationMergeError(problem, where=model, remedy="write 'statistics: FILE' under its own parameters")
    return yaml.safe_dump_all(contents, sort_keys=False, width=1 << 20, allow_unicode=True)
