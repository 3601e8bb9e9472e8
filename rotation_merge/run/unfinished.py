"""The finished parts of an interrupted measurement, from which the same command continues."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from rotation_merge.errors import StatisticsError
from rotation_merge.files import Store, read_part
from rotation_merge.linalg.finite import all_finite
from rotation_merge.model.tensors import Tensors, as_tensors, by_name
from rotation_merge.run.statistics import write_error
from rotation_merge.run.sums import Sums


class UnfinishedMeasurement(Store):
    """Results of the parts of a measurement (a block, or the Fisher diagonals), and sums of one that is running."""

    def __init__(self, out: Path, identity: Mapping[str, Any]) -> None:
        """Take up the parts of an interrupted measurement with the same identity.

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

    def result(self, name: str) -> Tensors | None:
        """The results of a finished part, read when they are asked for; None if it is not finished."""
        tensors = self.get(name)
        return None if tensors is None else self._stored(name, tensors)

    def begun(self, name: str) -> tuple[int, Sums]:
        """Steps that an interrupted run has done of a part, and their sums."""
        state: tuple[int, Sums] | None = self.get(_running(name))
        return state or (0, {})

    def keep(self, name: str, done: int, sums: Sums) -> None:
        """Write the state of a part."""
        with self._writing(sums):
            self.put(_running(name), (done, dict(sums)))

    def done(self, name: str, tensors: dict[str, Tensor]) -> Tensors:
        """Write the results of a part, and give them as `result` does."""
        with self._writing(tensors):
            self.put(name, tensors)
        self._file(_running(name)).unlink(missing_ok=True)
        return self._stored(name, tensors)

    def _stored(self, name: str, tensors: dict[str, Tensor]) -> Tensors:
        described, path = as_tensors(tensors), self._file(name)
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


def _running(name: str) -> str:
    return f"{name} running"


def together(parts: Iterable[Tensors]) -> Tensors:
    """The tensors of several sources under one."""
    holders = {key: part for part in parts for key in part}
    shapes = {key: part.shapes[key] for key, part in holders.items()}
    dtypes = {key: part.dtypes[key] for key, part in holders.items()}
    return Tensors(shapes, dtypes, by_name(lambda key: holders[key][key]))
