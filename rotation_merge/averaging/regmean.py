r"""RegMean: linear maps averaged by the Grams of their inputs, everything else by the mean.

Directions: a weight here is W, shape (outputs, inputs), so that ``y = W x``; G is the Gram of inputs.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from mergekit.merge_methods.base import BasePolicy, InputContract, MergeMethodSpec
from torch import Tensor

from rotation_merge.averaging.methods import Inputs, Source, StatisticsMethod, weighted_mean
from rotation_merge.averaging.parameters import WEIGHT, parameter
from rotation_merge.config import NotNegative, Share
from rotation_merge.errors import StatisticsError
from rotation_merge.model.apply import read_tensor
from rotation_merge.run.maps import linear_map
from rotation_merge.run.statistics import behind_norm


class RegMean(StatisticsMethod):
    """Linear maps by the Grams of their inputs, everything else by the mean."""

    statistics = "gram"
    spec = MergeMethodSpec(
        name="regmean",
        pretty_name="RegMean",
        reference_url="https://arxiv.org/abs/2212.09849",
        parameters=(
            WEIGHT,
            parameter("shrink", 0.9, "factor of the off-diagonals of Grams", Share),
            parameter("ridge", 1e-3, "ridge added to Grams, relative to their mean diagonal", NotNegative),
        ),
        contract=InputContract(base=BasePolicy.OPTIONAL),
    )

    def measured(self, name: str, model: Hashable, device: torch.device) -> Inputs:
        """The Gram of a map's inputs, (inputs, inputs), float64; where one tensor holds experts, (experts, ...).

        Where a norm feeds the map, what was measured is the Gram of its normalised inputs (x_hat, 1); the map reads
        ``x = D x_hat + c`` with the norm's gain D and shift c.
        """
        block, info, piece = self.models.places[name]
        statistics, linear = self.models.statistics[model], linear_map(block, info)
        gram = statistics.gram(info.name)
        if gram is None or linear is None:
            problem, remedy = f"hold nothing of tensor '{info.name}'", "if transformers runs it in parts, use 'refit'"
            raise StatisticsError(problem, where=statistics.path, remedy=f"measure again; {remedy}")
        gram, norm, view = gram.to(device).double(), linear.norm, self.models.views[model]

        def stored(key: str | None) -> Tensor | None:
            part = None if key is None else block.tensor(key)
            tensor = None if part is None else read_tensor(part, view.tensors)
            return None if tensor is None else tensor.to(device).double()

        if statistics.axes[info.name] in statistics.split:
            gain, shift = (None, None) if norm is None else (stored(norm.gain), stored(norm.shift))
            offset = 0.0 if norm is None else norm.offset
            gram = behind_norm(gram, linear, None if gain is None else gain + offset, shift)
        inputs = gram[..., :-1, :-1]
        return {"gram": inputs[piece] if info.stacked else inputs}

    def average(self, sources: Sequence[Source], parameters: Mapping[str, Any]) -> Tensor:
        r"""``W = (sum_k a_k W_k G_k) (sum_k a_k G_k)^-1``, the Grams shrunk and with their ridge.

        Raises:
            StatisticsError: the sum of the Grams is singular.

        Source: Jin, Ren, Preotiuc-Pietro and Cheng 2023, equation 1.
        """
        grams = [s.share * shrunk(s.inputs["gram"], parameters["shrink"], parameters["ridge"]) for s in sources]
        if all(float(gram.trace()) == 0 for gram in grams):
            return weighted_mean(sources)
        # what the models agree on comes out bit for bit: solve for the differences from the first
        first = sources[0].weight.double()
        right, total = torch.zeros_like(first), torch.zeros_like(grams[0])
        for gram, source in zip(grams, sources, strict=True):
            total += gram
            right += (source.weight.double() - first) @ gram
        lower, failed = torch.linalg.cholesky_ex(total)
        if int(failed) or not float(lower.diagonal().min() ** 2) > 1e-13 * float(total.diagonal().max()):
            remedy = "set 'ridge' (0.001 is a good start), or measure on more samples"
            raise StatisticsError("the Grams of a map are singular: too few samples, or none", remedy=remedy)
        return first + torch.cholesky_solve(right.T, lower).T


def shrunk(gram: Tensor, shrink: float, ridge: float) -> Tensor:
    """A Gram (n, n) with its off-diagonals times `shrink`, plus `ridge` times the mean of the diagonal."""
    diagonal = gram.diagonal()
    floor = ridge * diagonal.sum() / len(gram)
    return shrink * gram + torch.diag((1 - shrink) * diagonal + floor)
