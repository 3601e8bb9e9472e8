"""Numbers that are equal up to rounding: two ways of computing one thing add in another order, and so do processors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def assert_equal_up_to_rounding(
    actual: Mapping[str, Tensor] | Tensor, expected: Mapping[str, Tensor] | Tensor, units: float = 64
) -> None:
    """Names, shapes, dtypes and whole numbers are equal, floating ones but for some units in the last place.

    Args:
        units: in the last place of a tensor's largest entry: by default what a dozen sums in another order leave. What
            has gone through a whole model and back is given more.
    """
    if isinstance(actual, Tensor) and isinstance(expected, Tensor):
        actual, expected = {"": actual}, {"": expected}
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        within = (
            units * torch.finfo(tensor.dtype).eps * float(tensor.abs().max()) if tensor.is_floating_point() else 0.0
        )
        torch.testing.assert_close(actual[name], tensor, rtol=0.0, atol=within, msg=lambda text, n=name: f"{n}: {text}")
