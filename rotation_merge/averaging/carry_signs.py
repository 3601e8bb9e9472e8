"""Entries of a carried change that samples agree with: the signs of the new base's gradients as a mask (GradFix).

Rinaldi et al. 2025 (arXiv 2510.09658): of a task vector those entries are kept whose sign is that of most samples' step
downhill from the new base. Here the change has been moved into the new base's coordinates before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from rotation_merge.averaging.scores import scores
from rotation_merge.samples.functions import Batch


def votes(model: Any, examples: Iterable[Batch], task: str) -> dict[str, Tensor]:
    """How many more examples want an entry of a weight larger than want it smaller, by the model's own names.

    Args:
        model: its parameters are made to have gradients.
        examples: one by one, with labels.

    Raises:
        DataError: the samples have no labels for this model.
    """
    parameters = dict(model.requires_grad_(True).named_parameters())
    found = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    device, draw = next(model.parameters()).device, torch.Generator()
    for example in examples:
        given = {name: tensor.to(device) for name, tensor in example.items()}
        made = model(**{name: tensor for name, tensor in given.items() if name != "labels"})
        likely = torch.stack(list(scores(model, made, given, task, "data", draw))).sum()
        gradients = torch.autograd.grad(likely, list(parameters.values()), allow_unused=True)
        for name, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                found[name] += gradient.sign()
    return found


def agreeing(change: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], float]:
    """A change without the entries that go where most examples do not want to; and the share of entries that stay."""
    kept = {name: torch.where(one.sign() == wanted[name].sign(), one, 0.0) for name, one in change.items()}
    before, after = (sum(int(one.count_nonzero()) for one in some.values()) for some in (change, kept))
    return kept, after / max(before, 1)
