"""Workloads that go wrong, which workers in other processes import."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from rotation_merge.model.tensors import Tensors, as_tensors


@dataclass
class Work:
    """Every piece calls a function with its number."""

    do: Callable[[int], object]

    def piece(self, step: None, item: int) -> object:
        return self.do(item)


def echo(item: int) -> int:
    """Its number, the first ones last."""
    time.sleep(0.2 if item == 0 else 0)
    return item


def fail(error: Exception, item: int) -> None:
    raise error


def die(folder: Path, item: int) -> None:
    """End this process as the system would where memory runs out, and leave a note."""
    (folder / str(os.getpid())).touch()
    os.kill(os.getpid(), signal.SIGKILL)


def deadly(source: Mapping[str, Tensor], folder: Path) -> Tensors:
    """The tensors of a source; the first process to read a certain one dies, if it is another than this."""
    here = os.getpid()

    def change(name: str, tensor: Tensor) -> Tensor:
        if name == "model.layers.3.mlp.up_proj.weight" and os.getpid() != here and not any(folder.iterdir()):
            die(folder, 0)
        return tensor

    return as_tensors(source).map(change)
