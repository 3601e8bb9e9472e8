"""What long runs keep: a line of JSON for everything that was computed, so that a run that was stopped goes on there.

    {"key": "...", "value": ..., "by": "table2", "seconds": 3.21}

Seconds are processor time, without that of what was kept inside.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

FILE = "papers.jsonl"
"""Beside the checkpoints that it is about."""
TRAINING = "training"
"""Who spends the seconds that these take."""


def clock() -> float:
    """Processor seconds of this process and of the commands that it ran."""
    return sum(os.times()[:4])


class Journal:
    """What a file keeps, by key.

    Args:
        file: made with the first line; a line that was cut off, as where a run was killed, is left out.
        again: begin anew: what the file has is not read.
    """

    def __init__(self, file: Path, again: bool = False) -> None:
        self.file, self.spent = file, 0.0
        self.found: dict[str, dict[str, Any]] = {}
        if file.exists() and not again:
            for line in file.read_text(encoding="utf-8").splitlines():
                try:
                    entry = json.loads(line)
                except json.JSONDecodeError:
                    continue
                self.found[entry["key"]] = entry

    def kept(self, key: str, compute: Callable[[], Any], by: str) -> Any:
        """What `compute` returns (anything that JSON holds), or has returned in an earlier run under this key."""
        if key not in self.found:
            began, before = clock(), self.spent
            value = compute()
            self.keep(key, value, by, clock() - began - (self.spent - before))
        return self.found[key]["value"]

    def keep(self, key: str, value: Any, by: str, seconds: float) -> None:
        self.spent += seconds
        self.found[key] = {"key": key, "value": value, "by": by, "seconds": round(seconds, 2)}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a+", encoding="utf-8") as file:
            file.write(self._broken() + json.dumps(self.found[key]) + "\n")

    def _broken(self) -> str:
        """An end of line, where the last one lacks it."""
        if not self.file.exists() or not self.file.stat().st_size:
            return ""
        with self.file.open("rb") as file:
            file.seek(-1, 2)
            return "" if file.read() == b"\n" else "\n"

    def seconds(self) -> dict[str, float]:
        """Processor seconds by who spent them."""
        found: dict[str, float] = {}
        for entry in self.found.values():
            if "by" in entry:
                found[entry["by"]] = found.get(entry["by"], 0.0) + entry["seconds"]
        return found
