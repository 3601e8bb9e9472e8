"""The origin of a model: its hub repository, revision and licence."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any

from mergekit.common import ModelPath, ModelReference

from rotation_merge.model.card import front_matter
from rotation_merge.model.gguf import is_gguf, located
from rotation_merge.model.hub import is_hub_name

_SNAPSHOT = re.compile(r"[/\\]models--([^/\\]+?)--([^/\\]+)[/\\]snapshots[/\\]([0-9a-f]{40})(?=[/\\]|$)")

HEADS = ("config.json", "adapter_config.json")
"""A file that every model of the hub, or every adapter, has: where it lies in the cache tells the revision."""


def origins(models: Iterable[ModelReference], cache: str | None = None) -> dict[str, dict[str, Any]]:
    """Origin of each model and its adapter, by the model's name in a report.

    Its entries are `hub` (org/name), `revision` (the commit that was read) and `license`. Unknown values are None;
    nothing is fetched.
    """
    facts_by_name = {}
    for reference in models:
        facts = _of(reference.model, cache)
        if reference.lora is not None:
            facts["adapter"] = {"name": str(reference.lora), **_of(reference.lora, cache)}
        facts_by_name[str(reference)] = facts
    return facts_by_name


def _of(part: ModelPath, cache: str | None) -> dict[str, Any]:
    name = part.path
    if is_gguf(name):
        folder, name = located(name, part.revision, cache)
    else:
        folder = name if os.path.isdir(name) else _cached(part, cache)
    place = _SNAPSHOT.search(os.path.abspath(folder)) if folder else None
    if place is not None:
        return {"hub": f"{place[1]}/{place[2]}", "revision": place[3], "license": licence(folder)}
    hub = name if folder != name and is_hub_name(name) and not os.path.exists(name) else None
    return {"hub": hub, "revision": part.revision if hub else None, "license": licence(folder) if folder else None}


def _cached(part: ModelPath, cache: str | None) -> str | None:
    """The cache folder of a downloaded repository, at the revision that loading it gives."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    for name in HEADS if is_hub_name(part.path) else ():
        try:
            path = try_to_load_from_cache(part.path, name, cache_dir=cache, revision=part.revision)
        except (HFValidationError, OSError):
            return None
        if isinstance(path, str):
            return os.path.dirname(path)
    return None


def licence(folder: str | None) -> str | None:
    """The licence in the card beside a model; None if it states none."""
    try:
        with open(os.path.join(folder or "", "README.md"), encoding="utf-8") as file:
            stated = front_matter(file.read())[0].get("license")
    except (OSError, UnicodeDecodeError):
        return None
    return stated if isinstance(stated, str) and stated.strip() else None
