"""Torch's global random numbers, seeded for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw from a seed within the block; afterwards the caller's random numbers go on as if nothing had been drawn.

    Generators are seeded one by one: where no GPU is in use, `torch.manual_seed` notes the seed, with the stack of its
    caller, for GPUs that may come; for every tensor of a merge that takes longer than the merge.
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else range(0)
    with torch.random.fork_rng(devices=devices):
        for generator in (torch.default_generator, *(torch.cuda.default_generators[device] for device in devices)):
            generator.manual_seed(seed)
        yield
