"""Matching the local spaces of single output blocks, ahead of the merge that asks for one after the other.

Matching hides behind reading, averaging and writing, and scales with cores. Only a few blocks are matched ahead, so
that a large model's files are still in memory when the merge comes to read them. Until they are done the thread that
asks computes with the threads that are left, at least one: more would only wait for cores that others use.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from threading import Lock

import torch
from torch import Tensor

from rotation_merge.matching.alignment import Alignment
from rotation_merge.matching.block import BlockMatch, match_block, named
from rotation_merge.matching.options import AlignConfig
from rotation_merge.matching.run import Run
from rotation_merge.mergekit_plugin.output import OutputBlock
from rotation_merge.model.blocks import read_block
from rotation_merge.model.tensors import TensorSource, as_tensors
from rotation_merge.symmetry import Transform
from rotation_merge.workers import in_order, workers_for


@dataclass(frozen=True, eq=False)
class BlockMatching:
    """One donor's block that is to be matched to the anchor's.

    Attributes:
        anchor, donor: the models' tensors, folded, by the names of the output.
        names: of both models.
        whole: gives the alignment of the donor's streams, in which local spaces are matched.
    """

    out: OutputBlock
    anchor: TensorSource = field(repr=False)
    donor: TensorSource = field(repr=False)
    names: tuple[str, str]
    options: AlignConfig
    run: Run = field(repr=False)
    whole: Callable[[], Alignment] | None = None

    @property
    def key(self) -> str:
        """Its name in the ledger of interrupted work."""
        return f"{self.out.label}:{self.names[1]}"

    @property
    def weights(self) -> int:
        """Number of weights in the block."""
        shapes = as_tensors(self.anchor).shapes
        return sum(math.prod(shapes.get(name, (0,))) for info in self.out.block.tensors for name in info.names)

    def matched(self, device: torch.device | None = None) -> BlockMatch:
        """Reads both blocks, and matches them, unless an earlier run has."""
        return BlockMatch.once(self.run.ledger, self.key, lambda: self._match(device))

    def _match(self, device: torch.device | None) -> BlockMatch:
        anchor, donor = self._read(self.anchor), self._read(self.donor)
        streams = {} if self.whole is None else on_device(self.whole().transforms, device)
        with named(*self.names):
            return match_block(self.out.anchor, anchor, donor, self.options, streams)

    def _read(self, source: TensorSource) -> dict[str, Tensor]:
        local = {space.name for space in self.out.block.spaces.values()}
        compared = [i for i in self.out.block.tensors if any(space.name in local for space in i.spaces())]
        return read_block(replace(self.out.block, tensors=tuple(compared)), source)


def on_device(transforms: Mapping[str, Transform], device: torch.device | None) -> Mapping[str, Transform]:
    """Transforms on a device; None: where they are."""
    return transforms if device is None else {name: transform.to(device) for name, transform in transforms.items()}


class BlockMatches:
    """The matches of a merge's blocks, each found once: on a CPU by a pool, ahead of the merge.

    Args:
        single: one block at a time (`--low-cpu-memory`).
        device: gives the accelerator of a thread; None: a pool works ahead on the CPU.
    """

    def __init__(self, single: bool, device: Callable[[], torch.device | None] | None = None) -> None:
        self.single, self.device = single, device
        self.jobs: list[BlockMatching] = []
        self._ahead = self._matched_ahead()
        self._transforms: dict[str, Mapping[str, Transform]] = {}
        self._locks: dict[str, Lock] = defaultdict(Lock)

    def of(self, job: BlockMatching) -> Mapping[str, Transform]:
        """The transforms of a block's local spaces, waited for; the following blocks are started.

        Args:
            job: one of the jobs.

        Raises:
            AlignmentError: as matching does.
        """
        device = None if self.device is None else self.device()
        if job.key not in self._transforms:
            self._wait(job, device)
        return on_device(self._transforms[job.key], device)

    def _wait(self, job: BlockMatching, device: torch.device | None) -> None:
        with self._locks["" if self.device is None else job.key]:
            while job.key not in self._transforms:
                matched_job, match = next(self._ahead) if self.device is None else (job, job.matched(device))
                matched_job.run.record(matched_job.names[1], match.rows)
                matched_job.run.keep(matched_job.names[1], match.transforms)
                self._transforms[matched_job.key] = match.transforms
            if len(self._transforms) == len(self.jobs):
                self.end()

    def _matched_ahead(self) -> Generator[tuple[BlockMatching, BlockMatch], None, None]:
        """All matches, in the order in which the merge will ask for them."""
        jobs, threads = sorted(self.jobs, key=lambda job: job.out.label), torch.get_num_threads()
        count = 1 if self.single else workers_for(max(job.weights for job in jobs))
        matches = in_order([lambda job: job.matched()] * count, jobs)  # which ends with this generator
        for job in jobs:
            match = next(matches)
            torch.set_num_threads(max(1, threads - count))
            yield job, match

    def end(self) -> None:
        """Drop all waiting work; running blocks end by themselves, and no process waits for them."""
        self._ahead.close()


class DonorTransforms(dict[str, Transform]):
    """The transforms of one donor by the output's names of its spaces, each found whenever it is asked for.

    Args:
        spaces: the anchor's names of all spaces, by those of the output.
        jobs: by name in the output, what matches a local space; all others are those of the whole model.
        whole: gives the alignment of the whole model, where there is one.
    """

    def __init__(
        self,
        spaces: Mapping[str, str],
        jobs: Mapping[str, BlockMatching],
        whole: Callable[[], Alignment] | None,
        matches: BlockMatches,
    ) -> None:
        super().__init__()
        self.spaces, self.jobs, self.whole, self.matches = spaces, jobs, whole, matches

    def __missing__(self, name: str) -> Transform:
        if name in self.jobs:
            return self.matches.of(self.jobs[name])[self.spaces[name]]
        if self.whole is None:
            raise KeyError(name)
        return self.whole().transforms[self.spaces[name]]

    def __contains__(self, name: object) -> bool:
        return name in self.jobs or (self.whole is not None and self.spaces.get(str(name)) in self.whole().transforms)
