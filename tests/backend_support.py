"""Workloads that go wrong, which workers in other processes import."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from torch import Tensor


def die(folder: Path) -> None:
    """End this process as the system would where memory runs out, and leave a note."""
    (folder / str(os.getpid())).touch()
    os.kill(os.getpid(), signal.SIGKILL)


class Deadly:
    """A source that kills the process which reads it, once; not the one that made it."""

    def __init__(self, source: Any, folder: Path) -> None:
        self.source, self.folder, self.here = source, folder, os.getpid()

    def __contains__(self, name: object) -> bool:
        return name in self.source

    def __getitem__(self, name: str, /) -> Tensor:
        if name == "model.layers.3.mlp.up_proj.weight" and os.getpid() != self.here and not any(self.folder.iterdir()):
            die(self.folder)
        tensor: Tensor = self.source[name]
        return tensor


class Failing:
    """Every piece raises an error."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def piece(self, step: None, item: int) -> None:
        raise self.error


class Echo:
    """Every piece gives its number, the first ones last."""

    def piece(self, step: None, item: int) -> int:
        time.sleep(0.2 if item == 0 else 0)
        return item


class Killing:
    """Every piece kills its worker."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def piece(self, step: None, item: int) -> None:
        die(self.folder)
