"""Matching the local spaces of single output blocks, ahead of the merge that asks for one after the other.

Matching hides behind reading, averaging and writing, and scales with cores. Only a few blocks are matched ahead, so
that a large model's files are still in memory when the merge comes to read them. Until they are done the thread that
asks computes with the threads that are left, at least one: more would only wait for cores that others use.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.pool import AsyncResult, ThreadPool
from threading import Lock

import torch
from torch import Tensor

from rotation_merge.architecture.model import Block
from rotation_merge.matching.block import BlockMatch, match_block, named
from rotation_merge.matching.options import AlignConfig
from rotation_merge.matching.run import Run
from rotation_merge.matching.serialisation import match_once
from rotation_merge.mergekit_plugin.wholes import Whole
from rotation_merge.model.blocks import read_tensor
from rotation_merge.model.fold import Fold
from rotation_merge.model.tensors import Tensors
from rotation_merge.symmetry import Transform
from rotation_merge.workers import on_one_thread, workers_for


@dataclass(frozen=True, eq=False)
class BlockMatching:
    """One donor's block that is to be matched to the anchor's.

    Attributes:
        key: in the ledger of interrupted work.
        label: sorts blocks in the order in which mergekit asks for them.
        block: the anchor's.
        keys: of the tensors that are compared.
        anchor, donor: the models' tensors, by the names of the anchor's block.
        whole: gives the alignment of the donor's streams, in which local spaces are matched.
        weights: number of weights in the block.
    """

    key: str
    label: str
    block: Block
    keys: tuple[str, ...]
    anchor: Tensors = field(repr=False)
    donor: Tensors = field(repr=False)
    anchor_name: str
    donor_name: str
    options: AlignConfig
    run: Run = field(repr=False)
    fold: Fold | None = None
    whole: Whole | None = None
    weights: int = 1

    def matched(self, device: torch.device | None = None) -> BlockMatch:
        """Reads both blocks, and matches them, unless an earlier run has."""
        return match_once(self.run.ledger, self.key, lambda: self._match(device))

    def _match(self, device: torch.device | None) -> BlockMatch:
        anchor, donor = (self._read(source, device) for source in (self.anchor, self.donor))
        streams = {} if self.whole is None else self.whole().transforms
        if device is not None:
            streams = {name: transform.to(device) for name, transform in streams.items()}
        with named(self.anchor_name, self.donor_name):
            return match_block(self.block, anchor, donor, self.options, streams)

    def _read(self, source: Tensors, device: torch.device | None) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for key in self.keys:
            info = self.block.tensor(key)
            tensor = None if info is None else read_tensor(info, source)
            if tensor is not None:
                tensors[key] = tensor if device is None else tensor.to(device)
        return tensors if self.fold is None else self.fold.block(self.block, tensors)


class BlockMatches:
    """The matches of a merge's blocks, each found once: on a CPU by a pool, ahead of the merge.

    Args:
        single: one block at a time (`--low-cpu-memory`).
        pooled: whether a pool works ahead; not on an accelerator.
    """

    def __init__(self, single: bool, pooled: bool) -> None:
        self.single, self.pooled = single, pooled
        self._waiting: dict[str, BlockMatching] = {}
        self._running: dict[str, AsyncResult[BlockMatch]] = {}
        self._found: dict[str, Mapping[str, Transform]] = {}
        self._pool: ThreadPool | None = None
        self._count, self._threads = 0, torch.get_num_threads()
        self._locks: dict[str, Lock] = defaultdict(Lock)

    def add(self, job: BlockMatching) -> None:
        """A block that will be asked for."""
        self._waiting[job.key] = job

    def of(self, job: BlockMatching, device: torch.device | None) -> Mapping[str, Transform]:
        """The transforms of a block's local spaces, waited for; the following blocks are started.

        Args:
            device: that they are matched and given on; None: the CPU.

        Raises:
            AlignmentError: as matching does.
        """
        with self._locks[job.key]:
            if job.key not in self._found:
                match = self._result(job) if self.pooled else job.matched(device)
                job.run.record(job.donor_name, job.block, match.records)
                job.run.keep(job.donor_name, match.transforms)
                self._found[job.key] = match.transforms
            found = self._found[job.key]
        return found if device is None else {name: transform.to(device) for name, transform in found.items()}

    def _result(self, job: BlockMatching) -> BlockMatch:
        pool = self._pool or self._begun()
        if job.key in self._waiting:
            self._begin(job, pool)
        following = [*self._waiting.values()][: self._count + 1 - len(self._running)]
        for queued in following:
            self._begin(queued, pool)
        try:
            match = self._running.pop(job.key).get()
        except BaseException:
            self.end()
            raise
        if not self._waiting and not self._running:
            self.end()
        return match

    def _begun(self) -> ThreadPool:
        weights = max((job.weights for job in self._waiting.values()), default=1)
        self._count, self._threads = 1 if self.single else workers_for(weights), torch.get_num_threads()
        self._pool = ThreadPool(self._count)
        torch.set_num_threads(max(1, self._threads - self._count))
        self._waiting = dict(sorted(self._waiting.items(), key=lambda item: item[1].label))
        return self._pool

    def end(self) -> None:
        """Drop all waiting work; running blocks end by themselves, and no process waits for them."""
        if self._pool is not None:
            self._pool.terminate()
            torch.set_num_threads(self._threads)

    def _begin(self, job: BlockMatching, pool: ThreadPool) -> None:
        self._waiting.pop(job.key, None)
        self._running[job.key] = pool.apply_async(on_one_thread, (torch.is_grad_enabled(), job.matched))
