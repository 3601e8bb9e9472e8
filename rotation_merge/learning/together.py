"""Several processes that fit as one: each takes its share of a batch's rows, and gradients of maps are summed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import torch
from torch import Tensor, distributed

Result = TypeVar("Result")


class Together:
    """The processes of `torchrun`, or the one that there is.

    Weights, activations and data stay where they are; what goes between processes are the small parameters' gradients,
    losses and decisions.

    Attributes:
        rank, count: which process this is, of how many.
    """

    def __init__(self) -> None:
        joined = distributed.is_available() and distributed.is_initialized()
        self.rank, self.count = (distributed.get_rank(), distributed.get_world_size()) if joined else (0, 1)

    def part(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This process's rows of a batch; none where there are fewer rows than processes before it."""
        return {name: tensor[self.rank :: self.count] for name, tensor in batch.items()}

    def total(self, value: Tensor) -> Tensor:
        """The sum over all processes, without gradients."""
        found = value.detach().clone()
        if self.count > 1:
            distributed.all_reduce(found)
        return found

    def gradients(self, parameters: Iterable[Tensor]) -> None:
        """Every parameter's gradient becomes the sum over all processes."""
        if self.count == 1:
            return
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            distributed.all_reduce(parameter.grad)

    def agreed(self, decide: Callable[[], Result]) -> Result:
        """What the first process finds; the others wait for it."""
        if self.count == 1:
            return decide()
        found = [decide() if self.rank == 0 else None]
        distributed.broadcast_object_list(found)
        return found[0]  # type: ignore[return-value]
