"""Merges by singular vectors of the changes: TSV-M and Iso-C.

A map onto a vocabulary (a head, also one that is the embedding) is merged by `wudi` here: it has far more outputs than
inputs, so that the few inputs which TSV-M divides among the models are no room for all of them. Of three fine-tunes of
SmolLM2-135M, whose head is the embedding, `tsv` with `calibrate: svc` so loses 0.02 nats less on their texts and 0.02
less on the base's own (`benchmarks/real/measure.py real merges`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rotation_merge.averaging.methods import weighted_sum
from rotation_merge.averaging.sliced import SlicedMatrix, Svd, combined
from rotation_merge.averaging.task_vectors import TaskVectorMethod, spec_of
from rotation_merge.averaging.wudi import WUDI_RIDGE, Wudi


class SingularVectors(TaskVectorMethod):
    """A method that merges by singular vectors, and heads by `wudi`, of changes multiplied by the models' weights."""

    def head_change(
        self, changes: Sequence[SlicedMatrix], weights: Sequence[float], parameters: Mapping[str, Any]
    ) -> SlicedMatrix:
        self.note("heads", Wudi.spec.name)
        weighed = [change * weight for change, weight in zip(changes, weights, strict=True)]
        return Wudi().change(weighed, [1.0] * len(weighed), {"ridge": WUDI_RIDGE})


class Tsv(SingularVectors):
    """TSV-M: the largest singular triples of each change, directions made orthogonal to those of the others.

    Of each of T changes at most size / T triples are kept (fewer of a change of lower rank, such as a LoRA's), those of
    all stand side by side, and both sides are replaced by their polar factors. Triples that rounding to float32 may
    have made do not count; rounding to narrower types cannot be told from what training changed, and counts.

    Source: Gargiulo and others 2025 (Task Singular Vectors, arXiv 2412.00081), algorithm 1.
    """

    spec = spec_of("tsv", "TSV-M", "2412.00081")

    def change(
        self, changes: Sequence[SlicedMatrix], weights: Sequence[float], parameters: Mapping[str, Any]
    ) -> SlicedMatrix:
        lefts, values, rights = [], [], []
        for change, weight in zip(changes, weights, strict=True):
            svd = change.svd()
            most = max(1, parameters.get("size", len(svd.values)) // len(changes))
            count = min(most, _count(svd, change.error))
            lefts.append(svd.left(count).whole())
            values.append(weight * svd.values[:count])
            rights.append(svd.right(count))
        columns, rows = (SlicedMatrix.of(x).svd().isometry() for x in (torch.cat(lefts, 1), torch.cat(rights)))
        return columns * torch.cat(values) @ rows.whole()


class Iso(SingularVectors):
    """Iso-C: the sum of the changes with all its singular values replaced by their mean.

    Changes of low rank get the mean over the directions that they span.

    Source: Marczak and others 2025 (No Task Left Behind, arXiv 2502.04959), algorithm 1.
    """

    spec = spec_of("iso", "Iso-C", "2502.04959")

    def change(
        self, changes: Sequence[SlicedMatrix], weights: Sequence[float], parameters: Mapping[str, Any]
    ) -> SlicedMatrix:
        svd = combined(changes, lambda rows: weighted_sum(rows, weights)).svd()
        count = _count(svd, sum(weight * change.error for weight, change in zip(weights, changes, strict=True)))
        return svd.isometry(count) * (float(svd.values[:count].sum()) / max(1, count))


def _count(svd: Svd, error: float) -> int:
    """How many singular values a rounding of this norm cannot have made; at least one if the change is not zero."""
    return min(svd.rank, max(1, int((svd.values > error).sum())))
