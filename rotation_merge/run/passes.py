"""Runs a model over samples, in as many passes as memory needs, resuming after an interruption."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rotation_merge.errors import StatisticsError
from rotation_merge.files import Store, read_part
from rotation_merge.linalg.finite import all_finite
from rotation_merge.model.tensors import Tensors, as_tensors, by_name
from rotation_merge.run.ledger import SECONDS
from rotation_merge.run.statistics import write_error
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

    @property
    def key(self) -> str:
        """Its name among the parts of a measurement."""
        return " ".join((self.name, *sorted(self.blocks)))


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

    def result(self, pass_: StatisticsPass) -> Tensors | None:
        """The results of a finished pass, read when they are asked for; None if it is not finished."""
        tensors = self.get(pass_.key)
        return None if tensors is None else self._stored(pass_, tensors)

    def begun(self, pass_: StatisticsPass) -> tuple[int, Sums]:
        """Steps that an interrupted run has done in a pass, and their sums."""
        state: tuple[int, Sums] | None = self.get(_running(pass_))
        return state or (0, {})

    def keep(self, pass_: StatisticsPass, done: int, sums: Sums) -> None:
        """Write the state of a pass."""
        with self._writing(sums):
            self.put(_running(pass_), (done, dict(sums)))

    def done(self, pass_: StatisticsPass, tensors: dict[str, Tensor]) -> Tensors:
        """Write the results of a pass, and give them as `result` does."""
        with self._writing(tensors):
            self.put(pass_.key, tensors)
        self._file(_running(pass_)).unlink(missing_ok=True)
        return self._stored(pass_, tensors)

    def _stored(self, pass_: StatisticsPass, tensors: dict[str, Tensor]) -> Tensors:
        described, path = as_tensors(tensors), self._file(pass_.key)
        return Tensors(described.shapes, described.dtypes, by_name(lambda key: read_part(path, mapped=True)[key]))

    @contextmanager
    def _writing(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """
        Raises:
            StatisticsError: a tensor holds NaN or infinity, or cannot be written.
        """
        for key, tensor in tensors.items():
            if not all_finite([tensor]):
                problem = f"'{key}' would hold NaN or infinity"
                remedy = "look at the model's weights, and at the samples"
                raise StatisticsError(problem, where=str(self.out), remedy=remedy)
        try:
            yield
        except OSError as error:
            raise write_error(self.out, error) from error


def _running(pass_: StatisticsPass) -> str:
    return f"{pass_.key} running"


def together(parts: Iterable[Tensors]) -> Tensors:
    """The tensors of several sources under one."""
    holders = {key: part for part in parts for key in part}
    shapes = {key: part.shapes[key] for key, part in holders.items()}
    dtypes = {key: part.dtypes[key] for key, part in holders.items()}
    return Tensors(shapes, dtypes, by_name(lambda key: holders[key][key]))


def run_passes(passes: Sequence[StatisticsPass], state: UnfinishedMeasurement | None, progress: Progress) -> Tensors:
    """Runs all passes that have no results yet, and gives all results.

    Args:
        state: None: results stay in memory.
    """
    return together([_results(pass_, state, progress) for pass_ in passes])


def _results(pass_: StatisticsPass, state: UnfinishedMeasurement | None, progress: Progress) -> Tensors:
    if state is None:
        return as_tensors(pass_.finish(_run(pass_, None, progress)))
    results = state.result(pass_)
    return state.done(pass_, pass_.finish(_run(pass_, state, progress))) if results is None else results


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
