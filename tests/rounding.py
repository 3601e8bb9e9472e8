"""Numbers that are equal up to rounding: two ways of computing one thing add in another order, and so do processors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

UNITS = 64
"""By how many units in the last place of its largest entry a tensor may be off: what a dozen sums in another order
leave. What has gone through a whole model and back is given more."""


def assert_equal_up_to_rounding(
    found: Mapping[str, Tensor] | Tensor | float,
    wanted: Mapping[str, Tensor] | Tensor | float,
    units: float = UNITS,
    noise: float = 0.0,
    name: str = "",
) -> None:
    """Names, shapes, dtypes and whole numbers are equal, floating ones but for some units in the last place.

    Args:
        noise: what is left where sums of much larger numbers vanish, which is rounding as a whole.
    """
    if isinstance(found, Mapping) and isinstance(wanted, Mapping):
        assert found.keys() == wanted.keys()
        for key in wanted:
            assert_equal_up_to_rounding(found[key], wanted[key], units, noise, key)
        return
    first, second = (torch.tensor(x, dtype=torch.float64) if isinstance(x, float) else x for x in (found, wanted))
    assert isinstance(first, Tensor)
    assert isinstance(second, Tensor)
    within = 0.0
    if second.is_floating_point() and second.numel():
        within = noise + units * torch.finfo(second.dtype).eps * float(second.abs().max())
    torch.testing.assert_close(first, second, rtol=0.0, atol=within, msg=lambda text: f"{name}: {text}")
