"""Matching the local spaces of single output blocks, ahead of the merge that asks for one after the other.

Matching hides behind reading, averaging and writing, and scales with cores. Only a few blocks are matched ahead, so
that a large model's files are still in memory when the merge comes to read them. Until they are done the thread that
asks computes with the threads that are left, at least one: more would only wait for cores that others use.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from threading import Lock

import torch
from torch import Tensor

from rotation_merge.matching.alignment import Alignment
from rotation_merge.matching.block import BlockMatch, match_block, named
from rotation_merge.matching.options import AlignConfig
from rotation_merge.matching.run import Run
from rotation_merge.mergekit_plugin.output import OutputBlock
from rotation_merge.model.apply import read_block
from rotation_merge.model.tensors import Tensors
from rotation_merge.symmetry import Transform
from rotation_merge.workers import in_order, workers_for

Transforms = Mapping[str, Transform]

Finder = tuple[Callable[[], Transforms], str]
"""Gives the transforms that the one of a space is among, and its name there."""


@dataclass(frozen=True, eq=False, repr=False)
class BlockMatching:
    """One donor's block that is to be matched to the anchor's.

    Attributes:
        anchor, donor: the models' tensors, folded, by the names of the output.
        names: of both models.
        whole: gives the alignment of the donor's streams, in which local spaces are matched.
    """

    out: OutputBlock
    anchor: Tensors
    donor: Tensors
    names: tuple[str, str]
    options: AlignConfig
    whole: Callable[[], Alignment] | None = None

    @property
    def key(self) -> str:
        """Its name in the ledger of interrupted work."""
        return f"{self.out.label}:{self.names[1]}"

    @property
    def weights(self) -> int:
        """Number of weights in the block."""
        names = (name for info in self.out.block.tensors for name in info.names)
        return sum(math.prod(self.anchor.shapes.get(name, (0,))) for name in names)

    def match(self, device: torch.device | None = None) -> BlockMatch:
        """Reads both blocks and matches them."""
        anchor, donor = self._read(self.anchor), self._read(self.donor)
        streams = {} if self.whole is None else on_device(self.whole().transforms, device)
        with named(*self.names):
            return match_block(self.out.anchor, anchor, donor, self.options, streams)

    def _read(self, source: Tensors) -> dict[str, Tensor]:
        local = {space.name for space in self.out.block.spaces.values()}
        compared = [i for i in self.out.block.tensors if any(space.name in local for space in i.spaces())]
        return read_block(replace(self.out.block, tensors=tuple(compared)), source)


def on_device(transforms: Transforms, device: torch.device | None) -> Transforms:
    """Transforms on a device; None: where they are."""
    return transforms if device is None else {name: transform.to(device) for name, transform in transforms.items()}


class BlockMatches:
    """The matches of a merge's blocks, each found once: on a CPU by a pool, ahead of the merge.

    Args:
        run: records them, and has those of an earlier run.
        device: gives the accelerator of a thread; None: a pool works ahead on the CPU.
        single: one block at a time (`--low-cpu-memory`).
    """

    def __init__(self, run: Run, device: Callable[[], torch.device | None], single: bool = False) -> None:
        self.run, self.device, self.single = run, device, single
        self.jobs: list[BlockMatching] = []
        self._ahead = self._matched_ahead()
        self._transforms: dict[str, Transforms] = {}
        self._locks: dict[str, Lock] = defaultdict(Lock)

    def of(self, job: BlockMatching) -> Transforms:
        """The transforms of a job's local spaces, waited for; the following jobs are started."""
        device = self.device()
        if job.key not in self._transforms:
            with self._locks["" if device is None else job.key]:
                while job.key not in self._transforms:
                    matched, match = next(self._ahead) if device is None else (job, self._match(job, device))
                    self.run.record(matched.names[1], match.rows)
                    self._transforms[matched.key] = match.transforms
                if len(self._transforms) == len(self.jobs):
                    self.end()
        return on_device(self._transforms[job.key], device)

    def _match(self, job: BlockMatching, device: torch.device | None = None) -> BlockMatch:
        return BlockMatch.once(self.run.ledger, job.key, lambda: job.match(device))

    def _matched_ahead(self) -> Generator[tuple[BlockMatching, BlockMatch], None, None]:
        """All matches, in the order in which the merge will ask for them."""
        jobs, threads = sorted(self.jobs, key=lambda job: job.out.label), torch.get_num_threads()
        count = 1 if self.single else workers_for(max(job.weights for job in jobs))
        matches = in_order([self._match] * count, jobs)  # which ends with this generator
        for job in jobs:
            match = next(matches)
            torch.set_num_threads(max(1, threads - count))
            yield job, match

    def end(self) -> None:
        """Drop all waiting work; running blocks end by themselves, and no process waits for them."""
        self._ahead.close()


class LazyTransforms(dict[str, Transform]):
    """Transforms by space, each found whenever it is asked for.

    Args:
        finders: by space; none: nothing moves.
    """

    def __init__(self, finders: Mapping[str, Finder]) -> None:
        super().__init__()
        self.finders = finders

    def __missing__(self, space: str) -> Transform:
        find, name = self.finders[space]
        return find()[name]

    def __contains__(self, space: object) -> bool:
        if space not in self.finders:
            return False
        find, name = self.finders[str(space)]
        return name in find()
