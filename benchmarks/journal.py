"""What long runs keep: a JSON file of everything that was computed, so that a run that was stopped goes on there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rotation_merge.files import write_text

FILE = "papers.json"
"""Beside the checkpoints that it is about."""


class Journal:
    """What a file keeps, by key.

    Args:
        file: made with the first value, and whole wherever a run is killed.
    """

    def __init__(self, file: Path) -> None:
        self.file, self.found = file, _read(file)

    def kept(self, key: str, compute: Callable[[], Any]) -> Any:
        """What `compute` returns (anything that JSON holds), or has returned in an earlier run under this key."""
        if key not in self.found:
            value = compute()
            self.found = {**_read(self.file), **self.found, key: value}
            write_text(self.file, json.dumps(self.found, indent=0))
        return self.found[key]


def _read(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else {}
