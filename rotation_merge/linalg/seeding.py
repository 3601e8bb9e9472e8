"""Torch's global random numbers, seeded for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw from a seed within the block; afterwards the caller's random numbers go on as if nothing had been drawn."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else range(0)
    with torch.random.fork_rng(devices=devices):
        # not torch.manual_seed: for GPUs that may come it notes its caller's stack, which takes longer than a merge
        for generator in (torch.default_generator, *(torch.cuda.default_generators[device] for device in devices)):
            generator.manual_seed(seed)
        yield
