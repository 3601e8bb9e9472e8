"""Several processes that run one fit: each has a share of a batch's rows, and gradients are summed."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
from torch import Tensor, distributed

from rotation_merge.errors import RotationMergeError

LOG = logging.getLogger(__name__)

Result = TypeVar("Result")

PATIENCE = timedelta(days=1)
"""So long processes wait for the first, which matches weights alone."""


class ProcessGroup:
    """The processes of `torchrun`, or this process alone.

    Weights, activations and data stay local. Only gradients of the maps, losses and decisions are exchanged.

    Attributes:
        rank, count: which process this is, of how many.
    """

    def __init__(self) -> None:
        joined = distributed.is_available() and distributed.is_initialized()
        self.rank, self.count = (distributed.get_rank(), distributed.get_world_size()) if joined else (0, 1)

    def part(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This process's rows of a batch; none if there are fewer rows than processes before it."""
        return {name: tensor[self.rank :: self.count].contiguous() for name, tensor in batch.items()}

    def total(self, value: Tensor) -> Tensor:
        """The sum over all processes, without gradients."""
        total = value.detach().clone()
        if self.count > 1:
            distributed.all_reduce(total)
        return total

    def gradients(self, parameters: Iterable[Tensor]) -> None:
        """Replace every parameter's gradient by the sum over all processes."""
        if self.count == 1:
            return
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            distributed.all_reduce(parameter.grad)

    def agreed(self, decide: Callable[[], Result]) -> Result:
        """The value of the first process; the others wait for it."""
        if self.count == 1:
            return decide()
        decision = [decide() if self.rank == 0 else None]
        distributed.broadcast_object_list(decision)
        return decision[0]  # type: ignore[return-value]


@contextmanager
def joined(device: str) -> Iterator[tuple[ProcessGroup, str]]:
    """Join the processes that `torchrun` has started, and choose this one's device.

    Raises:
        RotationMergeError: another one has ended before this one.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield ProcessGroup(), device
        return
    on_gpu = device.startswith("cuda")
    if on_gpu:
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if on_gpu else "gloo", timeout=PATIENCE)
    try:
        yield ProcessGroup(), device
    except RuntimeError as error:
        if not isinstance(error, distributed.DistError) and "gloo" not in str(error):
            raise
        LOG.debug("%s", error)
        remedy = "read its message; the same command continues from the last saved state"
        raise RotationMergeError(
            "another process of this fit has ended, or cannot be reached", remedy=remedy
        ) from error
    finally:
        distributed.destroy_process_group()
