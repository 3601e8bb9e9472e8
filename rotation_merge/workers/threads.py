"""Runs blocks in parallel threads, with results in order.

Every worker computes with one thread, so that results are the same bytes however many there are; many small parallel
regions, which on a busy machine wait for each other, become few large ones.
"""

from __future__ import annotations

import ctypes
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from threading import Lock, get_ident
from typing import TypeVar

import psutil
import torch

Item = TypeVar("Item")
Result = TypeVar("Result")

BYTES_A_WEIGHT = 16
"""Peak bytes per weight of matching a block: both models as stored, float32 copies, tables."""
SHARE = 0.5
"""Of the free memory that workers may take together."""
_CGROUP = Path("/sys/fs/cgroup")

_TRIM, _MAP = -1, -3  # glibc's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD
KEPT_FREED, _APART = 1 << 29, 1 << 26  # bytes of freed memory that stay with the process; of a block that is given back


class Workers:
    """A pool of `count` threads; `close` restores the number of torch threads."""

    def __init__(self, count: int) -> None:
        self.count, self._threads = count, torch.get_num_threads()
        self._pool = ThreadPoolExecutor(count, "match", initializer=torch.set_num_threads, initargs=(1,))
        self._running, self._lock = set[int](), Lock()

    def submit(self, work: Callable[[Item], Result], item: Item) -> Future[Result]:
        """Like an executor's `submit`; keeps the caller's gradient mode."""
        return self._pool.submit(self._run, torch.is_grad_enabled(), work, item)

    def _run(self, gradients: bool, work: Callable[[Item], Result], item: Item) -> Result:
        with self._lock:
            self._running.add(get_ident())
        try:
            with torch.set_grad_enabled(gradients):
                return work(item)
        finally:
            with self._lock:
                self._running.discard(get_ident())

    def close(self, wait: bool = True) -> None:
        """Wait for running blocks, or stop them at their next Python step after an interruption.

        Otherwise the process would run until the last block is done. Blocks that have not begun are dropped.
        """
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            for thread in () if wait else self._running:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(KeyboardInterrupt))
        self._pool.shutdown(wait=wait)
        torch.set_num_threads(self._threads)


def in_order(work: Callable[[Item], Result], items: Iterable[Item], count: int) -> Iterator[Result]:
    """`work` of every item, in order; at most `count` run at once, and at most one finished result waits for each.

    With `count` 0 nothing runs ahead, and everything on the thread that asks.
    """
    if not count:
        yield from map(work, items)
        return
    workers, done = Workers(count), False
    waiting: deque[Future[Result]] = deque()
    try:
        for item in items:
            waiting.append(workers.submit(work, item))
            if len(waiting) > count:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
        done = True
    finally:
        workers.close(wait=done)


def workers_for(weights: int) -> int:
    """The number of blocks of this size to match at once: limited by torch's threads and free memory."""
    allowed = int(SHARE * free_memory() / (BYTES_A_WEIGHT * max(weights, 1)))
    return max(1, min(torch.get_num_threads(), allowed))


def free_memory() -> int:
    """Bytes that are free on this machine, or in the control group that this process is in."""
    free = int(psutil.virtual_memory().available)
    try:
        most, used = ((_CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return free if most == "max" else min(free, max(int(most) - int(used), 0))
    except (OSError, ValueError):
        return free


@cache
def keep_freed_memory() -> None:
    """Lets glibc's allocator keep some of the memory that is freed.

    By default it gives blocks of a tensor's size back to the system and gets them anew, page by page, for the next
    one: a large share of a merge's time.
    """
    limit = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if limit is not None:
        limit(_TRIM, KEPT_FREED)
        limit(_MAP, _APART)
