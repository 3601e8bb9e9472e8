"""Blocks matched ahead of mergekit's executor, which asks for one after the other.

Matching then hides behind reading, averaging and writing, and scales with cores. Workers read blocks themselves, from
the same loaders, and only a few blocks ahead, so that a large model's files are still in memory when the merge comes.
Until they are done the thread that asks computes with the threads that are left, at least one: more would only wait for
cores that others use.
"""

from __future__ import annotations

from multiprocessing.pool import AsyncResult, ThreadPool
from typing import Protocol

import torch

from rotation_merge.matching.alignment import Alignment
from rotation_merge.matching.block import BlockMatch
from rotation_merge.workers import on_one_thread, workers_for


class Job(Protocol):
    """A block to match, known by its key; `whole` is the task that gives the alignment of the whole model, if any."""

    key: str
    label: str
    donor_name: str
    whole: object | None

    def match(self, whole: Alignment | None) -> BlockMatch: ...


class PrefetchScheduler:
    """The blocks of one merge, matched in parallel in the order of labels, in which mergekit asks for them."""

    def __init__(self, single: bool) -> None:
        """Start with no blocks waiting.

        Args:
            single: only one block at a time (`--low-cpu-memory`).
        """
        self.single, self.weights = single, 1
        self._waiting: dict[str, Job] = {}
        self._running: dict[str, AsyncResult[BlockMatch]] = {}
        self._whole: dict[str, Alignment | None] = {}
        self._pool: ThreadPool | None = None
        self._count, self._threads = 0, torch.get_num_threads()

    def add(self, job: Job, weights: int) -> None:
        """A block of so many weights will be asked for."""
        self._waiting[job.key] = job
        self.weights = max(self.weights, weights)

    def result(self, job: Job, whole: Alignment | None) -> BlockMatch:
        """The match of a block, waited for; the following blocks are started.

        Raises:
            AlignmentError: as matching does.
        """
        if self._pool is None:
            self._count, self._threads = 1 if self.single else workers_for(self.weights), torch.get_num_threads()
            self._pool = ThreadPool(self._count)
            torch.set_num_threads(max(1, self._threads - self._count))
            self._waiting = dict(sorted(self._waiting.items(), key=lambda item: item[1].label))
        self._whole[job.donor_name] = whole
        if job.key in self._waiting:
            self._begin(job, self._pool)
        following = [queued for queued in self._waiting.values() if self._can_begin(queued)]
        for queued in following[: self._count + 1 - len(self._running)]:
            self._begin(queued, self._pool)
        try:
            block_match = self._running.pop(job.key).get()
        except BaseException:
            self.end()
            raise
        if not self._waiting and not self._running:
            self.end()
        return block_match

    def end(self) -> None:
        """Drop all waiting work; running blocks end by themselves, and no process waits for them."""
        if self._pool is not None:
            self._pool.terminate()
            torch.set_num_threads(self._threads)

    def _can_begin(self, job: Job) -> bool:
        return job.whole is None or job.donor_name in self._whole

    def _begin(self, job: Job, pool: ThreadPool) -> None:
        del self._waiting[job.key]
        arguments = (torch.is_grad_enabled(), job.match, self._whole.get(job.donor_name))
        self._running[job.key] = pool.apply_async(on_one_thread, arguments)
