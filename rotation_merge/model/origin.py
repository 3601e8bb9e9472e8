"""The origin of a model: its hub repository, revision and licence."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any

from mergekit.common import ModelPath, ModelReference

from rotation_merge.model.card import metadata_in
from rotation_merge.model.folder import place_of
from rotation_merge.model.hub import is_hub_name

_SNAPSHOT = re.compile(r"[/\\]models--([^/\\]+?)--([^/\\]+)[/\\]snapshots[/\\]([0-9a-f]{40})(?=[/\\]|$)")


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
    place = os.path.abspath(place_of(part, cache) or os.devnull)
    folder = place if os.path.isdir(place) else os.path.dirname(place)
    snapshot, repo = _SNAPSHOT.search(folder), part.path.partition(":")[0]
    if snapshot is not None:
        return {"hub": f"{snapshot[1]}/{snapshot[2]}", "revision": snapshot[3], "license": licence(folder)}
    hub = repo if is_hub_name(repo) and not os.path.exists(part.path) else None
    return {"hub": hub, "revision": part.revision if hub else None, "license": licence(folder)}


def licence(folder: str) -> str | None:
    """The licence in the card beside a model; None if it states none."""
    stated = metadata_in(folder).get("license")
    return stated if isinstance(stated, str) and stated.strip() else None
