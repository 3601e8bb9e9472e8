"""Workloads that go wrong, which workers in other processes import."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from rotation_merge.model.tensors import Tensors, as_tensors


def die(folder: Path) -> None:
    """End this process as the system would where memory runs out, and leave a note."""
    (folder / str(os.getpid())).touch()
    os.kill(os.getpid(), signal.SIGKILL)


def deadly(source: Mapping[str, Tensor], folder: Path) -> Tensors:
    """The tensors of a source; the first process to read a certain one dies, if it is another than this."""
    here = os.getpid()

    def change(name: str, tensor: Tensor) -> Tensor:
        if name == "model.layers.3.mlp.up_proj.weight" and os.getpid() != here and not any(folder.iterdir()):
            die(folder)
        return tensor

    return as_tensors(source).map(change)


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
