"""Tensors of a merge compared with the span of its parents': scaled, unlike all of them, or faded layer by layer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import mean, median

import torch
from torch import Tensor

from rotation_merge.architecture.model import Block, TensorInfo
from rotation_merge.diagnose.doctor.case import Case, Cause
from rotation_merge.diagnose.doctor.parents import Parent, parents_of
from rotation_merge.errors import AlignmentError, RotationMergeError, named
from rotation_merge.matching.block import checked, match_block
from rotation_merge.matching.options import AlignConfig
from rotation_merge.mergekit_plugin import METHOD
from rotation_merge.model.apply import read_tensor, transform_tensor
from rotation_merge.model.view import View
from rotation_merge.workers import Progress

SMALL, LARGE = 0.8, 1.25
"""Share of the parents that a merge holds, from which on it is scaled (the mean of two unrelated models: 0.71)."""
LOST, KEPT = 0.5, 0.9
"""Cosine of a tensor to the span of its parents': below the first it is unlike them, above the second it is theirs."""
MOST = 0.2
"""Share of the tensors that may be scaled or not before that says nothing of single ones any more."""
MOST_UNLIKE = 0.35
"""The same of tensors that are unlike the parents': queries and keys of all layers are 2 of 7."""

ORDERS = AlignConfig(attention="none", heads="permutation", scaling=False)
"""Maps under which tensors of a layer may stand in another order together: the layer computes the same."""

SOLVED = ("refit", "ot_fusion", "regmean", "fisher")
"""Delegates whose tensors need not lie near the span of the parents'."""

LAYOUT = "RoPE layout"
SPOILS = (LAYOUT, "scale", "unlike its parents")
"""Causes of this kind; each alone explains odd norms of weights and activations."""


@dataclass(frozen=True)
class TensorComparison:
    """One matrix of a merge beside its parents'.

    Attributes:
        layer: its block's name.
        rotary: whether it holds queries or keys that RoPE turns.
        cosine: to the span of theirs.
        share: of their mean that it holds.
        ratio: of its norm to the mean of theirs.
    """

    name: str
    layer: str
    rotary: bool
    cosine: float
    share: float
    ratio: float

    @property
    def scaled(self) -> bool:
        """Whether it is theirs times a number."""
        smaller, larger = max(self.share, self.ratio) < SMALL, min(self.share, self.ratio) > LARGE
        return self.cosine > KEPT and (smaller or larger)

    @property
    def averaged(self) -> float:
        """Norm of the mean of both, over the mean of their norms; of a tensor beside one other."""
        square = 1 + self.ratio**2 + 2 * self.share
        return math.sqrt(max(square, 0.0)) / (1 + self.ratio)


Comparisons = list[TensorComparison]
Pairs = dict[str, tuple[Tensor, list[Tensor]]]
"""Tensors of a block of the merge, and the parents', by key."""


def of_span(case: Case, progress: Progress | None) -> Iterator[Cause]:
    """Faults of single tensors of a merge compared with its parents; of a recipe, of its parents beside the first.

    Raises:
        RotationMergeError: a model cannot be read.
    """
    if case.method != METHOD and not case.sliced:
        yield from _of_parents(case, progress)
    if case.merged_model is None or not case.parents:
        return
    try:
        with parents_of(case) as (parents, complete):
            compared = _in_order(case.merged_model, parents, _compared(case.merged_model, parents, progress))
    except RotationMergeError:  # of a merge that cannot be made any more, as of numbers that `of_weights` names
        if case.method != METHOD:
            raise
        return
    causes = list(_unlike(case.name, compared))
    if not complete or (case.delegate == "passthrough" and "scale" in str(case.recipe)):
        causes = [cause for cause in causes if cause.name == LAYOUT]
    else:
        causes = [*_scaled(case.name, compared), *(causes if case.delegate not in SOLVED else ())]
    yield from causes or of_layers("weights", _by_layer(compared, [tensor.ratio for tensor in compared]), SMALL, LARGE)


def _of_parents(case: Case, progress: Progress | None) -> Iterator[Cause]:
    """Parents with another layout than the first one's, and whose mean with it would fade."""
    for name in case.parents[1:]:
        try:
            compared = _compared(case.models[name], [Parent(case.models[case.parents[0]])], progress)
        except RotationMergeError:  # which `of_pairs` says
            continue
        yield from (cause for cause in _unlike(name, compared) if cause.name == LAYOUT)
        if case.merged is None and case.method == "linear":
            shares = _by_layer(compared, [tensor.averaged for tensor in compared])
            yield from of_layers("weights", shares, SMALL, math.inf)


def _compared(merged: View, parents: Sequence[Parent], progress: Progress | None = None) -> Comparisons:
    """Every matrix of the layers beside those of the parents."""
    layers = [block for block in merged.architecture.blocks if block.index is not None]
    compared: Comparisons = []
    for number, block in enumerate(layers):
        if progress is not None:
            progress("comparing", number, len(layers))
        compared += _of_block(block, _pairs(block, merged, parents))
    return compared


def _in_order(merged: View, parents: Sequence[Parent], compared: Comparisons) -> Comparisons:
    """The same with heads, neurons and experts of layers in order, where only few matrices are unlike the parents'."""
    unlike = [tensor.layer for tensor in compared if tensor.cosine < LOST]
    if not 0 < 2 * len(unlike) < len(compared):
        return compared
    for block in (block for block in merged.architecture.blocks if block.name in unlike and block.index is not None):
        pairs = _pairs(block, merged, parents)
        means = {key: torch.stack(stored).mean(0) for key, (_, stored) in pairs.items()}
        ours = {key: tensor for key, (tensor, _) in pairs.items()}
        with suppress(AlignmentError):  # of numbers too large for matching, which stay in their order
            transforms = match_block(block, *checked(block, means, ours), ORDERS, with_rows=False).transforms
            moved = {i.key: transform_tensor(ours[i.key], i, transforms) for i in block.tensors if i.key in ours}
            ordered = _of_block(block, {key: (tensor, pairs[key][1]) for key, tensor in moved.items()})
            compared = [*(tensor for tensor in compared if tensor.layer != block.name), *ordered]
    return compared


def _pairs(block: Block, merged: View, parents: Sequence[Parent]) -> Pairs:
    """The tensors of a block that can be compared, in float32."""
    pairs: Pairs = {}
    for info in block.tensors:
        tensor = read_tensor(info, merged)
        if tensor is not None and tensor.is_floating_point() and bool(torch.isfinite(tensor).all()):
            counterparts = (parent.tensor(block, info) for parent in parents)
            if stored := [x for x in counterparts if x is not None and x.shape == tensor.shape]:
                pairs[info.key] = (tensor.float(), stored)
    return pairs


def _of_block(block: Block, pairs: Pairs) -> Iterator[TensorComparison]:
    """The matrices of a block beside the parents'; zeros say nothing."""
    for info in block.tensors:
        tensor, stored = pairs.get(info.key, (None, []))
        stored = [parent for parent in stored if bool(parent.any())]
        if tensor is not None and len(info.axes) > 1 and bool(tensor.any()) and stored:
            yield _beside(block, info, tensor, stored)


def _beside(block: Block, info: TensorInfo, merged: Tensor, parents: list[Tensor]) -> TensorComparison:
    rows, flat = torch.stack([parent.flatten() for parent in parents]), merged.flatten()
    gram, inner = (rows @ rows.T).double(), (rows @ flat).double()
    weights = torch.linalg.lstsq(gram, inner[:, None], driver="gelsd").solution[:, 0]
    norm, count = float(flat.norm()), len(parents)
    cosine = min(1.0, max(0.0, float(weights @ inner)) ** 0.5 / norm)
    share = float(inner.sum() / count) / max(float(gram.sum()) / count**2, 1e-300)
    ratio = norm / max(float(gram.diagonal().sqrt().mean()), 1e-300)
    rotary = any(part.role in ("q", "k") and part.space.rotary for axis in info.axes for part in axis.parts)
    return TensorComparison(info.name, block.name, bool(rotary), cosine, share, ratio)


def _scaled(name: str, compared: Comparisons) -> Iterator[Cause]:
    """Tensors that are the parents' times a number."""
    scaled = [tensor for tensor in compared if tensor.scaled]
    if not scaled:
        return
    words = f"{median(tensor.share for tensor in scaled):.2f} times those of the parents"
    remedy = "divide them by it, or merge again with weights that add up to 1"
    if len(scaled) > (1 - MOST) * len(compared):
        yield Cause("scale", 0.98, f"all weights are {words} ({len(scaled)} matrices compared)", name, remedy)
    elif len(scaled) < MOST * len(compared) or len(scaled) == 1:
        worst = min(scaled, key=lambda tensor: min(tensor.share, 1 / tensor.share))
        yield Cause("scale", 0.9, f"{_names(scaled)}: {words}, all others unchanged", worst.name, remedy)


def _unlike(name: str, compared: Comparisons) -> Iterator[Cause]:
    """Single tensors that have nothing of the parents'."""
    unlike = [tensor for tensor in compared if tensor.cosine < LOST]
    if not unlike or sum(tensor.cosine > KEPT for tensor in compared) < (1 - MOST_UNLIKE) * len(compared):
        return
    worst = min(unlike, key=lambda tensor: tensor.cosine)
    problem = f"{_names(unlike)}: cosine to the span of the parents' {worst.cosine:.2f}, all others above {KEPT}"
    if len(unlike) > 1 and set(unlike) == {tensor for tensor in compared if tensor.rotary}:
        problem += "; these are all queries and keys, maybe in the other RoPE layout (pairs side by side, or halves)"
        remedy = "convert that model to the layout of the others (by its conversion script), then merge again"
        yield Cause(LAYOUT, 0.95, problem, name, remedy)
    else:
        remedy = "take them from a parent, or merge again: tensors of one layer must have their heads in one order"
        yield Cause("unlike its parents", 0.9, problem, worst.name, remedy)


def _names(tensors: Comparisons) -> str:
    return named(f"'{tensor.name}'" for tensor in tensors)


def _by_layer(compared: Comparisons, values: Sequence[float]) -> dict[str, float]:
    """Means of values of the matrices of each layer."""
    layers: dict[str, list[float]] = {}
    for tensor, value in zip(compared, values, strict=True):
        layers.setdefault(tensor.layer, []).append(value)
    return {layer: mean(in_layer) for layer, in_layer in layers.items()}


def of_layers(words: str, shares: dict[str, float], small: float, large: float) -> Iterator[Cause]:
    """Layers that hold much less, or much more, than the parents' mean.

    Smaller norms are an effect of averaging unlike matrices.

    Args:
        shares: of that mean, by layer.
    """
    faded = [layer for layer, share in shares.items() if share < small]
    if faded:
        least = min(shares, key=lambda layer: shares[layer])
        problem = (
            f"{words} fade in {len(faded)} of {len(shares)} layers, to {shares[least]:.2f} of the parents' in {least}"
        )
        remedy = "align the models first ('preset: far'), then 'delegate: refit' or 'rotation-merge polish'"
        yield Cause("vanished variance", 0.7, problem, faded[0], remedy)
    elif shares and (most := max(shares, key=lambda layer: shares[layer])) and shares[most] > large:
        problem = f"{words} grow to {shares[most]:.2f} of the parents'"
        yield Cause("scale", 0.7, problem, most, "lower the weights of the models, or the method's 'lambda'")
