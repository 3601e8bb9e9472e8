"""What long runs keep: a line of JSON for everything that was computed, so that a run that was stopped goes on there.

{"key": "...", "value": ...}
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

FILE = "papers.jsonl"
"""Beside the checkpoints that it is about."""


def clock() -> float:
    """Processor seconds of this process and of the commands that it ran."""
    return sum(os.times()[:4])


class Journal:
    """What a file keeps, by key.

    Args:
        file: made with the first line; a line that was cut off, as where a run was killed, is left out. Without it
            everything is computed again.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.found: dict[str, Any] = {}
        if file.exists():
            for line in file.read_text(encoding="utf-8").splitlines():
                try:
                    entry = json.loads(line)
                except json.JSONDecodeError:
                    continue
                self.found[entry["key"]] = entry["value"]

    def kept(self, key: str, compute: Callable[[], Any]) -> Any:
        """What `compute` returns (anything that JSON holds), or has returned in an earlier run under this key."""
        if key not in self.found:
            self.found[key] = compute()
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("a+", encoding="utf-8") as file:
                file.write(self._broken() + json.dumps({"key": key, "value": self.found[key]}) + "\n")
        return self.found[key]

    def _broken(self) -> str:
        """An end of line, where the last one lacks it."""
        if not self.file.exists() or not self.file.stat().st_size:
            return ""
        with self.file.open("rb") as file:
            file.seek(-1, 2)
            return "" if file.read() == b"\n" else "\n"
