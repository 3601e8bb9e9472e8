"""Work over the blocks of models: in threads, on several devices, or by the workers of a Ray or Dask cluster.

Threads run the pieces here, joblib on a cluster. Each is computed with one torch thread, so that results have the same
bytes however many workers there are, and results come in the order of the pieces. Workers of a cluster read the models
themselves, from paths that all machines see. Torch is imported by what computes, so that commands begin without it.
"""

from __future__ import annotations

import ctypes
import logging
import os
import pickle
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from functools import cache, lru_cache, partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import psutil

from rotation_merge import __version__
from rotation_merge.errors import RotationMergeError, short

Progress = Callable[[str, float, float], None]
"""Called with a label, the amount done and the total (0: unknown). It may raise to end the work."""

_listener: ContextVar[Progress] = ContextVar("rotation_merge_progress", default=lambda task, done, total: None)
listener = _listener.get
"""The progress listener of this thread; a function that does nothing if there is none."""


@contextmanager
def listening(progress: Progress) -> Iterator[None]:
    """Within the block, sends the progress of this thread's work to `progress`."""
    token = _listener.set(progress)
    try:
        yield
    finally:
        _listener.reset(token)


BYTES_A_WEIGHT = 16
"""Peak bytes per weight of matching a block: both models as stored, float32 copies, tables."""
SHARE = 0.5
"""Of the free memory that workers may take together."""
AHEAD = 2
"""Results per worker of a cluster that may wait for the caller."""
_CGROUP = Path("/sys/fs/cgroup")


def workers_for(weights: int) -> int:
    """The number of blocks of this size to compute at once: limited by torch's threads and free memory."""
    import torch

    allowed = int(SHARE * free_memory() / (BYTES_A_WEIGHT * max(weights, 1)))
    return max(1, min(torch.get_num_threads(), allowed))


def free_memory() -> int:
    """Bytes that are free on this machine, or in the control group that this process is in."""
    free = int(psutil.virtual_memory().available)
    with suppress(OSError, ValueError):  # no such group, or "max": none is set
        most, used = (int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        free = min(free, max(most - used, 0))
    return free


KEPT_FREED, _OWN_PAGES = 1 << 29, 1 << 26
"""Bytes of freed memory that stay with the process; bytes of a block of memory that is given back at once."""


@cache
def keep_freed_memory() -> None:
    """Lets glibc's allocator keep some of the memory that is freed, instead of getting it anew page by page."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(-1, KEPT_FREED)  # M_TRIM_THRESHOLD
        mallopt(-3, _OWN_PAGES)  # M_MMAP_THRESHOLD


Workload = Any
"""What all pieces share, such as two opened models (pickled, it stores their paths): `piece(step, item)` runs a step on
the piece that an item names; `at_once` says how many pieces this process may run (0: one after the other, on the
calling thread); `on(device, home)` is the same workload on another device, with results moved to `home`."""

Spread = Callable[[Workload, Any, Sequence[Any]], Iterator[Any]]
"""Runs a step of a workload on items, and returns results in the order of the items."""


def in_threads(work: Workload, step: Any, items: Sequence[Any]) -> Iterator[Any]:
    """Runs pieces in this process, on as many threads as the workload allows."""
    piece = partial(work.piece, step)
    return in_order([piece] * work.at_once, items) if work.at_once else map(piece, items)


def on_devices(names: Sequence[str]) -> Spread:
    """Runs pieces on several devices of this machine, one at a time on each; results are moved to the first."""

    def spread(work: Workload, step: Any, items: Sequence[Any]) -> Iterator[Any]:
        return in_order([partial(work.on(name, names[0]).piece, step) for name in names], items)

    return spread


def in_order(functions: Sequence[Callable[[Any], Any]], items: Iterable[Any]) -> Iterator[Any]:
    """A function of every item, in order, each function in a thread of its own.

    At most one finished result for each thread waits to be taken. A pool's further threads, and joblib's list of
    results, would cost memory: each thread has an arena of its own. No process waits for these when it ends.

    Args:
        functions: which give the same; the next item goes to the one that is free.
    """
    import torch

    gradients, threads = torch.is_grad_enabled(), torch.get_num_threads()
    jobs: SimpleQueue[tuple[Future[Any], Any] | None] = SimpleQueue()
    waiting: deque[Future[Any]] = deque()
    for function in functions:
        Thread(target=_serve, args=(jobs, partial(on_one_thread, gradients, function)), daemon=True).start()
    try:
        for item in items:
            waiting.append(Future())
            jobs.put((waiting[-1], item))
            if len(waiting) > len(functions):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()
        for _ in functions:
            jobs.put(None)
        torch.set_num_threads(threads)  # which those of new threads are taken from


def _serve(jobs: SimpleQueue[tuple[Future[Any], Any] | None], call: Callable[[Any], Any]) -> None:
    """Runs in a thread: does jobs until there is none, or one fails: nobody asks for those behind it."""
    while (job := jobs.get()) is not None:
        future, item = job
        try:
            if future.set_running_or_notify_cancel():
                future.set_result(call(item))
        except BaseException as error:
            future.set_exception(error)
            return
        finally:
            del job, future, item  # which are somebody else's now


def on_one_thread(gradients: bool, function: Callable[..., Any], *arguments: Any) -> Any:
    """A function's result, computed with one torch thread and the caller's gradient mode."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.set_grad_enabled(gradients):
            return function(*arguments)
    finally:
        torch.set_num_threads(threads)


PATIENCE = 10
"""Seconds in which a cluster has to answer."""
AGAIN = "run again to continue behind the last finished block, with fewer workers a machine where memory was short"
SAME = "see that every machine has the same version of rotation-merge, and the models under the same paths"


@contextmanager
def on_backend(name: str, device: str = "cpu") -> Iterator[Spread]:
    """Runs pieces by the workers of a joblib backend while the block lasts.

    Args:
        name: `threads`; `ray` or `dask`: the cluster that RAY_ADDRESS or DASK_SCHEDULER_ADDRESS names, otherwise one
            that is started on this machine and ends with the block.
        device: where workers compute: cpu, or cuda with one GPU each.

    Raises:
        RotationMergeError: the backend is not installed, or nobody answers; later, a worker's error.
    """
    if name == "threads":
        yield in_threads
        return
    where = f"--backend {name}"
    from joblib import Parallel, delayed, effective_n_jobs, parallel_config
    from joblib.parallel import get_active_backend

    with ExitStack() as stack:
        try:
            stack.enter_context(parallel_config(name, **(_ray if name == "ray" else _dask)(device, stack)))
            _report_deaths(get_active_backend()[0])
            parallel, count = stack.enter_context(Parallel(batch_size=1)), effective_n_jobs(None)
        except ImportError as error:
            install = f"pip install 'rotation-merge[{name}]'"
            raise RotationMergeError(f"{error.name} is not installed", where=where, remedy=install) from error
        except Exception as error:
            problem = f"the cluster cannot be used ({short(error)})"
            raise RotationMergeError(problem, where=where, remedy="check its address and workers") from error

        def spread(work: Workload, step: Any, items: Sequence[Any]) -> Iterator[Any]:
            import cloudpickle
            import torch

            work = work if device == "cpu" else work.on(device, "cpu")
            pickled = cloudpickle.dumps(work), cloudpickle.dumps(step)
            call = partial(_piece, __version__, torch.is_grad_enabled(), *pickled)
            for start in range(0, len(items), AHEAD * count):
                try:
                    results = parallel(map(delayed(call), items[start : start + AHEAD * count]))
                except Exception as error:
                    problem = f"{type(error).__name__}: {short(error)}"
                    raise RotationMergeError(problem, where=where, remedy=AGAIN) from error
                for result in results:
                    if isinstance(result, Exception):
                        raise result
                    yield result

        yield spread


def _ray(device: str, stack: ExitStack) -> dict[str, Any]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray.util.joblib import register_ray

    if not ray.is_initialized():
        host, _, port = os.environ.get("RAY_ADDRESS", "").removeprefix("ray://").rpartition(":")
        if host:  # Ray itself would wait for minutes and end the process
            socket.create_connection((host.strip("[]"), int(port)), PATIENCE).close()
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
        stack.callback(ray.shutdown)
    register_ray()
    if device == "cpu":
        return {"n_jobs": -1}
    gpus = int(ray.cluster_resources().get("GPU", 0))
    if not gpus:
        raise RuntimeError("no worker has a GPU")
    return {"n_jobs": gpus, "ray_remote_args": {"num_gpus": 1}}


def _dask(device: str, stack: ExitStack) -> dict[str, Any]:
    from distributed import Client

    stack.enter_context(Client(timeout=PATIENCE))
    return {"n_jobs": -1}


def _report_deaths(backend: Any) -> None:
    """joblib's Dask backend calls back for results only: it would wait forever for a task whose workers died."""
    submit = backend.submit

    def reporting(function: Any, callback: Callable[[Any], None]) -> Any:
        future = submit(function, callback)
        if isinstance(future, Future):
            future.add_done_callback(lambda task: callback(task.exception()) if task.exception() else None)
        return future

    backend.submit = reporting


_unpickled = lru_cache(maxsize=2)(pickle.loads)
"""In a worker: the latest workload and step."""


def _piece(version: str, gradients: bool, work: bytes, step: bytes, item: Any) -> Any:
    """Runs in a worker of a cluster: the result of a piece, or in its place the error, which names the machine."""
    where = f"worker {socket.gethostname()}"
    try:
        if version != __version__:
            raise RotationMergeError(f"rotation-merge is {__version__} here, but {version} where the command runs")
        return on_one_thread(gradients, _unpickled(work).piece, _unpickled(step), item)
    except RotationMergeError as error:
        place = f"{error.where}, {where}" if error.where else where
        return type(error)(error.what, where=place, remedy=error.remedy or SAME)
    except Exception as error:
        return RotationMergeError(f"{type(error).__name__}: {short(error)}", where=where, remedy=AGAIN)
