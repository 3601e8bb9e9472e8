"""SVC: a merged change whose singular values are divided by how much the models' changes overlap along them.

What several changes share is counted several times in their sum, and half of it is lost where a rule cuts. Behind any
rule that merges changes of one base, each singular value is brought back to what the changes themselves hold there.

Source: Singular Value Calibration (arXiv 2602.05536).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from mergekit.merge_methods.base import MergeMethod, TensorGroup
from torch import Tensor

from rotation_merge.averaging.methods import MergedModels, OwnMethod
from rotation_merge.averaging.sliced import ZERO, SlicedMatrix
from rotation_merge.averaging.task_vectors import changes_of, map_parts

IDLE = "'calibrate: svc' brings nothing behind wudi, which settles overlaps itself"
"""What is said where somebody asks for it there."""


def calibrated(merged: SlicedMatrix, changes: Sequence[SlicedMatrix], alpha: float) -> SlicedMatrix:
    r"""A merged change M (outputs, inputs) with singular values ``s_r <- s_r T / sum_t max(alpha, o_rt)``.

    ``o_rt = <u_r^T M, u_r^T D_t> / |u_r^T D_t|^2`` is the share of the change D_t that M has along its left singular
    vector u_r. Changes that are zero do not count, and where a change is no more than rounding, its share is none. So a
    change alone stays as it is, and equal changes give themselves, whatever their sum was multiplied by.

    Args:
        changes: of the T models, (outputs, inputs), in the same slices as M.
        alpha: the least share that counts: along what one of T models changes alone, a sum grows by up to
            ``T / (1 + (T - 1) alpha)``.
    """
    counting = [change for change in changes if change.norm > 0.0]
    if not counting or not merged.norm:
        return merged
    svd = merged.svd()
    left, rows = svd.left(svd.rank), svd.values[: svd.rank, None] * svd.right(svd.rank)
    shares = rows.new_zeros(svd.rank)
    for change in counting:
        parts = torch.zeros_like(rows)
        for part in change.parts:
            parts.addmm_(left.rows(part).mT, change.rows(part))
        squared, least = parts.square().sum(1), max(ZERO * change.norm, change.error)
        share = (rows * parts).sum(1) / squared.clamp_min(least**2)
        shares += torch.where(squared > least**2, share, 0.0).clamp_min(alpha)
    return left @ (rows * (len(counting) / shares)[:, None])


def calibrate(
    change: Tensor,
    base: Tensor,
    tuned: Sequence[Tensor],
    parameters: Mapping[str, Any],
    alpha: float,
    vocabulary: bool = False,
) -> None:
    """Calibrate the merged change of one map in place.

    Args:
        change: (outputs, inputs), float64.
        base, tuned: of the same shape: the map in the base, and in each of the models.
        parameters: of the delegate; where it has merged long changes shortened, they count as that.
        alpha: as of `calibrated`.
        vocabulary: whether there may be very many outputs.
    """
    parts = map_parts(change, vocabulary)
    changes, _ = changes_of(base, tuned, parts, parameters.get("lengths") != "auto")
    result = calibrated(SlicedMatrix(lambda part: change[part], parts), changes, alpha)
    for part in parts:
        change[part] = result.rows(part)


class Calibrated(OwnMethod):
    """A delegate that merges changes of one base, mergekit's or ours, and SVC behind it, map by map.

    Args:
        inner: the delegate, whose parameters it has.
        alpha: as of `calibrated`.
    """

    needs_base = True
    tied = True

    def __init__(self, inner: MergeMethod, alpha: float) -> None:
        self.inner, self.alpha = inner, alpha
        self.spec = replace(inner.spec, name=f"{inner.spec.name}, calibrated")

    def on(self, models: MergedModels) -> Self:
        method = super().on(models)
        if isinstance(self.inner, OwnMethod):
            method.inner = self.inner.on(models)
        if self.inner.spec.name == "wudi":
            models.tell(f"{IDLE}.")
        return method

    def words(self) -> list[str]:
        inner = self.inner.words() if isinstance(self.inner, OwnMethod) else []
        count = len(self.models.log["calibrated"])
        return [*inner, f"Singular values of {count} merged linear maps are calibrated (SVC, alpha {self.alpha:g})."]

    def participants(
        self, name: str, weights: Mapping[Hashable, float], parameters: Mapping[str, Any]
    ) -> list[Hashable]:
        if isinstance(self.inner, OwnMethod):
            return self.inner.participants(name, weights, parameters)
        return [self.models.base, *weights]

    def _merged(self, group: TensorGroup, parameters: dict[str, Any], out_dtype: torch.dtype | None) -> Tensor:
        name, base = str(group.metadata.name), next(entry.tensor for entry in group.entries if entry.is_base)
        if not base.is_floating_point():
            return base
        exact = group  # in which a method of ours sees what was rounded
        if not isinstance(self.inner, OwnMethod):
            exact = replace(group, entries=tuple(replace(e, tensor=e.tensor.double()) for e in group.entries))
        plain = {**parameters, **({"lambda": 1.0} if "lambda" in parameters else {})}
        (merged,) = self.inner((exact,), parameters=plain, out_dtype=torch.float64)
        change = merged - base
        if (linear := self.linear(name)) is not None:
            weights = parameters.get("weight", {})
            tuned = [e.tensor for e in group.entries if not e.is_base and weights.get(e.id, 1.0) != 0]
            maps = [linear.as_matrices(tensor) for tensor in (change, base, *tuned)]
            vocabulary = linear.info.vocabulary_axis is not None
            for of_map, start, *of_models in zip(*maps, strict=True) if maps[0].ndim == 3 else [maps]:
                calibrate(of_map, start, of_models, parameters, self.alpha, vocabulary)
            self.note("calibrated", name)
        merged = change.mul_(parameters.get("lambda", 1.0)).add_(base)
        return self.rounded(merged, name, base, out_dtype)
