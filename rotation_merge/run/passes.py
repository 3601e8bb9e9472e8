"""Runs a model over samples, in as many passes as memory needs, resuming after an interruption."""

from __future__ import annotations

import json
import math
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from rotation_merge.files import Store
from rotation_merge.run.ledger import SECONDS
from rotation_merge.run.statistics_file import DeferredTensor, write_error, write_statistics
from rotation_merge.run.sums import Sums
from rotation_merge.workers import Progress as Progress


@dataclass(frozen=True)
class StatisticsPass:
    """One pass over the samples.

    Attributes:
        name: shown as progress.
        blocks: names of the blocks that it looks at.
        steps: number of steps.
        run: adds one step to the sums.
        finish: means out of sums, as they are stored.
    """

    name: str
    blocks: frozenset[str]
    steps: int
    run: Callable[[int, Sums], None]
    finish: Callable[[Sums], dict[str, Tensor]]


class UnfinishedMeasurement(Store):
    """The finished passes of an interrupted measurement, and the state of the current one."""

    def __init__(self, out: Path, identity: Mapping[str, Any]) -> None:
        """Take up the passes of an interrupted measurement with the same identity.

        Args:
            out: the statistics file that it stands beside.
            identity: key of all inputs and options of the measurement.
        """
        super().__init__(str(out))
        self.out = out
        try:
            self.begin(json.dumps(identity, sort_keys=True, default=str))
        except OSError as error:
            self.remove()
            raise write_error(out, error) from error

    def __enter__(self) -> UnfinishedMeasurement:
        return self

    def part(self, pass_: StatisticsPass) -> Path:
        """The result file of a pass."""
        return self.file(f"{self._name(pass_)}.safetensors")

    def begun(self, pass_: StatisticsPass) -> tuple[int, Sums]:
        """Steps that an interrupted run has done in a pass, and their sums."""
        path = self._running(pass_)
        try:
            with safe_open(str(path), framework="pt") as file:
                done = int((file.metadata() or {})["done"])
            return done, load_file(path)
        except (OSError, SafetensorError, KeyError, ValueError):
            return 0, {}

    def keep(self, pass_: StatisticsPass, done: int, sums: Sums) -> None:
        """Write the state of a pass."""
        write_statistics(self._running(pass_), stored(sums), {"done": str(done)}, self.out)

    def done(self, pass_: StatisticsPass, tensors: dict[str, Tensor]) -> None:
        """Write the results of a pass."""
        write_statistics(self.part(pass_), stored(tensors), {}, self.out)
        self._running(pass_).unlink(missing_ok=True)

    def _running(self, pass_: StatisticsPass) -> Path:
        return self.file(f"{self._name(pass_)}.running.safetensors")

    @staticmethod
    def _name(pass_: StatisticsPass) -> str:
        return f"{pass_.name}-{zlib.crc32(' '.join(sorted(pass_.blocks)).encode()):08x}".replace(" ", "-")


def stored(tensors: Mapping[str, Tensor]) -> dict[str, DeferredTensor]:
    """Tensors in memory in their stored form."""

    def load(tensor: Tensor) -> Callable[[], Tensor]:
        return lambda: tensor

    return {key: DeferredTensor(tuple(t.shape), t.dtype, load(t)) for key, t in tensors.items()}


def run_passes(
    passes: Sequence[StatisticsPass], state: UnfinishedMeasurement | None, progress: Progress
) -> dict[str, DeferredTensor]:
    """Runs all passes that have no result file yet, and gives all results.

    Args:
        state: None: results stay in memory.
    """
    tensors: dict[str, DeferredTensor] = {}
    for pass_ in passes:
        if state is None:
            tensors.update(stored(pass_.finish(_run(pass_, None, progress))))
            continue
        path = state.part(pass_)
        if not path.exists():
            state.done(pass_, pass_.finish(_run(pass_, state, progress)))
        tensors.update(stored_in(path))
    return tensors


def _run(pass_: StatisticsPass, state: UnfinishedMeasurement | None, progress: Progress) -> Sums:
    done, sums = (0, Sums()) if state is None else state.begun(pass_)
    last, marks = time.monotonic(), _marks(sums)
    progress(pass_.name, done, pass_.steps)
    try:
        while done < pass_.steps:
            pass_.run(done, sums)
            done += 1
            marks = _marks(sums)
            progress(pass_.name, done, pass_.steps)
            if state is not None and time.monotonic() - last > SECONDS:
                state.keep(pass_, done, sums)
                last = time.monotonic()
    except KeyboardInterrupt:
        if (
            state is not None and _marks(sums) == marks
        ):  # else a part of a step is in them; what was written last is not
            state.keep(pass_, done, sums)
        raise
    return sums


def _marks(sums: Sums) -> dict[str, tuple[int, int]]:
    """Version marks of sums, which change whenever a sum does."""
    return {key: (id(total), total._version) for key, total in sums.items()}


def stored_in(path: Path) -> Iterator[tuple[str, DeferredTensor]]:
    """The tensors of a file, read on demand."""
    with safe_open(str(path), framework="pt") as file:
        for key in file.keys():  # noqa: SIM118 (not a mapping)
            tensor = file.get_tensor(key)
            yield key, DeferredTensor(tuple(tensor.shape), tensor.dtype, _loader(path, key))


def _loader(path: Path, key: str) -> Callable[[], Tensor]:
    def load() -> Tensor:
        with safe_open(str(path), framework="pt") as file:
            tensor: Tensor = file.get_tensor(key)
        return tensor

    return load


def room() -> int:
    """Bytes that sums may take: half of the free memory."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, ValueError, OSError):
        return 4 << 30


def fits(shapes: Mapping[str, Sequence[int]], device: str) -> bool:
    """Whether a model's weights, in float32, take at most three quarters of the memory that is free."""
    free = torch.cuda.mem_get_info(device)[0] if device.startswith("cuda") else 2 * room()
    return 4 * sum(math.prod(shape) for shape in shapes.values()) <= 0.75 * free


def packed(sizes: Mapping[str, int], most: int) -> list[frozenset[str]]:
    """Blocks in order, as many together as fit."""
    groups: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if groups[-1] and used + size > most:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    return [frozenset(group) for group in groups if group]
