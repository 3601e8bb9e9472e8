"""Pieces of work done by the workers of a Ray cluster, on this machine or on others.

A worker receives the shared part of the pieces once and keeps it open; it reads files itself, from storage that all
machines see. Ray replaces a worker that dies and repeats its piece; results of others stay.
"""

from __future__ import annotations

import logging
import os
import socket
import traceback
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError

from rotation_merge import __version__
from rotation_merge.errors import RotationMergeError, WorkerError, no_space, short
from rotation_merge.workers.pieces import HERE, PieceExecutor, Workload

LOG = logging.getLogger(__name__)

RETRIES = 3
"""Number of retries of a piece whose worker died."""
PYTHON = 1 << 29
"""Bytes that a worker takes before it has read anything."""
AHEAD = 2
"""Pieces that are asked for in advance, for each worker."""
PATIENCE = 10.0
"""Seconds in which a cluster has to answer."""
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
"""Environment that turns off Ray's usage reports and its warning about coming versions."""
MEND = "fewer workers on a machine ('ray start --num-cpus'), or machines with more memory"
FULL = ("ObjectStoreFullError", "OutOfDiskError")
"""Ray's exceptions for a full object store."""
ROOM = "free some space in its folder for temporary files, or name another ('ray start --temp-dir', RAY_TMPDIR)"
INSTALL = "pip install 'rotation-merge[ray]'"


@contextmanager
def spread(address: str | None, device: str = "cpu") -> Iterator[PieceExecutor]:
    """An executor for pieces of work: a Ray cluster's workers, or this process if there is no address.

    Args:
        address: `auto` (the cluster that this machine belongs to, or that RAY_ADDRESS names), `local` (one that is
            started here, and ends with the block), or HOST:PORT.
        device: where workers compute: cpu, cuda or auto.

    Raises:
        RotationMergeError: Ray is not installed, or nobody answers.
    """
    if address is None:
        yield HERE
        return
    cluster = Cluster(address, device)
    try:
        yield cluster
    finally:
        cluster.close()


class Cluster:
    """The workers of a Ray cluster; see `spread`."""

    apart = True

    def __init__(self, address: str, device: str) -> None:
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        try:
            import ray
        except ImportError as error:
            raise RotationMergeError("--ray needs Ray", remedy=INSTALL) from error
        self.ray, self.address = ray, address
        self._given: tuple[Workload, ObjectReference] | None = None
        self._own = not ray.is_initialized()
        if self._own:
            self._connect()
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        self.device = device if device != "auto" else "cuda" if any(node.get("GPU") for node in nodes) else "cpu"
        self.kind = "GPU" if self.device == "cuda" else "CPU"
        nodes = [node for node in nodes if node.get(self.kind)]
        self.workers = int(sum(node[self.kind] for node in nodes))
        self.memory = int(max((node.get("memory", 0) for node in nodes), default=0))
        if not self.workers:
            self.close()
            raise RotationMergeError(f"the cluster has no {self.kind}", where=f"--ray {address}", remedy="add a worker")
        LOG.info("%d workers of the Ray cluster %s", self.workers, address)

    def _connect(self) -> None:
        settings: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if self.address == "local":
            settings["include_dashboard"] = False
        else:
            _answers(self.address)
        try:
            self.ray.init(address=self.address, **settings)
        except Exception as error:  # Ray raises errors of many classes here
            raise _silent(self.address, short(error)) from error

    def each(self, work: Workload, step: Any, items: Sequence[Any]) -> Iterator[Any]:
        """See `PieceExecutor`.

        Raises:
            RotationMergeError: a worker's error, with the name of its machine.
        """
        do = self._remote(work)
        if self._given is None or self._given[0] is not work:
            self._given = work, self._put(work.on(self.device, "cpu") if self.kind == "GPU" else work)
        parcel, step_parcel = self._given[1], self._put(step)
        waiting: deque[Any] = deque()
        try:
            for item in items:
                waiting.append(do.remote(__version__, parcel, step_parcel, item))
                if len(waiting) > AHEAD * self.workers:
                    yield self._result(waiting.popleft())
            while waiting:
                yield self._result(waiting.popleft())
        finally:
            for reference in waiting:
                self.ray.cancel(reference)

    def _remote(self, work: Workload) -> Any:
        needed = PYTHON + work.size
        if needed > self.memory:
            sizes = f"{needed / 1e9:.1f} GB, the largest machine gives {self.memory / 1e9:.1f} GB"
            raise RotationMergeError(f"a worker needs {sizes}", where=f"--ray {self.address}", remedy=MEND)
        gpus = {"num_gpus": 1} if self.kind == "GPU" else {}
        return self.ray.remote(do_piece).options(num_cpus=1, memory=needed, max_retries=RETRIES, **gpus)

    def _put(self, value: Any) -> ObjectReference:
        try:
            return ObjectReference(uuid.uuid4().hex, [self.ray.put(value)])
        except self.ray.exceptions.RayError as error:
            raise _died(error, self.address) from error

    def _result(self, reference: Any) -> Any:
        try:
            result = self.ray.get(reference)
        except self.ray.exceptions.RayError as error:
            raise _died(error, self.address) from error
        if isinstance(result, Failure):
            LOG.debug("%s", result.traceback)
            raise result.error
        return result

    def close(self) -> None:
        """Disconnect from the cluster, or stop the one that was started here."""
        if self._own:
            self.ray.shutdown()


@dataclass(frozen=True)
class ObjectReference:
    """A reference into Ray's object store, in a list so that Ray does not load it for every piece."""

    key: str
    reference: list[Any]


@dataclass(frozen=True)
class Failure:
    """The error of a piece, and its traceback."""

    error: RotationMergeError
    traceback: str


_OPEN: dict[str, tuple[str, Any]] = {}
"""In a worker: the latest work and the latest step, with their keys."""


def do_piece(version: str, work: ObjectReference, step: ObjectReference, item: Any) -> Any:
    """Runs in a worker: does one piece, or returns its failure."""
    import ray

    torch.set_num_threads(1)  # as blocks are matched anywhere else, so that the bytes are the same
    try:
        if version != __version__:
            problem = f"rotation-merge is {__version__} here, but {version} where the command runs"
            raise WorkerError(problem, remedy="install the same version on every machine")
        for name, parcel in (("work", work), ("step", step)):
            if name not in _OPEN or _OPEN[name][0] != parcel.key:
                _OPEN.pop(name, None)  # before the next one takes its memory
                _OPEN[name] = parcel.key, ray.get(parcel.reference[0])
        return _OPEN["work"][1].piece(_OPEN["step"][1], item)
    except Exception as error:
        return Failure(_said(error, socket.gethostname()), traceback.format_exc())


def _said(error: Exception, host: str) -> RotationMergeError:
    """A worker's error, with the name of its machine."""
    worker = f"worker {host}"
    if isinstance(error, RotationMergeError):
        return type(error)(error.what, where=f"{error.where}, {worker}" if error.where else worker, remedy=error.remedy)
    if no_space(error):
        return WorkerError(f"the disk is full ({short(error)})", where=worker, remedy="free some space there")
    if isinstance(error, OSError) and error.filename:
        return WorkerError(short(error.strerror), where=f"{error.filename}, {worker}", remedy="check the storage")
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
        return WorkerError("out of memory", where=worker, remedy=MEND)
    remedy = "check the storage" if isinstance(error, OSError | SafetensorError) else "run again with -vv to see where"
    return WorkerError(f"{type(error).__name__}: {short(error)}", where=worker, remedy=remedy)


def _died(error: Exception, address: str) -> RotationMergeError:
    """The error for a piece that no worker finished, or that could not be sent."""
    if type(error).__name__ in FULL:
        problem = f"Ray's object store is full ({short(error)})"
        return WorkerError(problem, where=f"--ray {address}", remedy=ROOM)
    if "rotation_merge" in str(error) and "No module named" in str(error):
        problem, remedy = "a worker has no rotation_merge", "install it on every machine, or set PYTHONPATH there"
        return WorkerError(problem, where=f"--ray {address}", remedy=remedy)
    problem = f"workers died {RETRIES + 1} times on the same piece ({type(error).__name__})"
    return WorkerError(problem, where=f"--ray {address}", remedy=MEND)


def _answers(address: str) -> None:
    """Refuses an address where nothing answers; Ray itself would wait a minute and end the process."""
    if address == "auto":
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), PATIENCE):
            pass
    except (OSError, ValueError) as error:
        raise _silent(address, short(error)) from error


def _silent(address: str, why: str) -> RotationMergeError:
    remedy = "start one with 'ray start --head', or use --ray local"
    if address != "auto":
        remedy += "; where it asks for a token, set RAY_AUTH_MODE=token"
    problem = f"no Ray cluster answers ({why.partition('. ')[0]})"
    return RotationMergeError(problem, where=f"--ray {address}", remedy=remedy)
