"""What decides a result, cheaply told: the files that models consist of by size and time, versions, options."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any

from rotation_merge.checkpoints.models import Model
from rotation_merge.report.record import versions

ENDINGS = (".safetensors", ".bin", ".json")


def mark_of(models: Iterable[Model], others: Iterable[str] = (), **options: Any) -> str:
    """What a run is of, the same in another process, and other after any of it has changed.

    Args:
        others: files and folders that are read beside the models; what is none is passed over.
    """
    folders = [folder for model in models for folder in (model.folder, model.adapter.path if model.adapter else "")]
    found = [os.path.join(f, name) for f in filter(None, folders) for name in os.listdir(f) if name.endswith(ENDINGS)]
    beside = [path for path in others if os.path.exists(path)]
    files = {os.path.realpath(path) for path in (*found, *beside)} - {os.path.realpath(folder) for folder in folders}
    told = {path: [(facts := os.stat(path)).st_size, facts.st_mtime_ns] for path in files}
    return json.dumps({"files": told, "versions": versions(), **options}, sort_keys=True, default=str, indent=1)
