"""Tensors of a merge compared with the span of its parents': scaled, or unlike all of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from rotation_merge.architecture.model import Block, TensorInfo
from rotation_merge.diagnose.doctor.case import Case, Cause
from rotation_merge.diagnose.doctor.parents import Parent, ParentSpan, parents_of
from rotation_merge.errors import RotationMergeError, named
from rotation_merge.matching.block import match_block
from rotation_merge.matching.options import AlignConfig
from rotation_merge.mergekit_plugin import METHOD
from rotation_merge.model.apply import read_tensor, transform_tensor
from rotation_merge.model.tensors import TensorSource
from rotation_merge.workers import Progress

SMALL, LARGE = 0.8, 1.25
"""Share of the parents that a merge holds, from which on it is scaled."""
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
    """One tensor of a merge beside its parents'.

    Attributes:
        rotary: whether it holds queries or keys that RoPE turns.
        cosine: to the span of theirs.
        share: of their mean that it holds.
        ratio: of its norm to the mean of theirs.
    """

    name: str
    rotary: bool
    cosine: float
    share: float
    ratio: float

    @property
    def scaled(self) -> bool:
        """Whether it is theirs times a number."""
        smaller, larger = max(self.share, self.ratio) < SMALL, min(self.share, self.ratio) > LARGE
        return self.cosine > KEPT and (smaller or larger)


def of_span(case: Case, progress: Progress | None) -> Iterator[Cause]:
    """Faults of single tensors of a merge compared with its parents.

    For a recipe, of parents compared with the first one: whether they have its layout of RoPE.

    Raises:
        RotationMergeError: a model cannot be read.
    """
    yield from _of_parents(case, progress)
    if case.merged_model is None or not case.parents:
        return
    parents = parents_of(case, progress)
    compared = compare(case.merged_model.architecture.blocks, case.merged_model, parents, progress)
    unlike = list(_unlike(case.name, compared))
    if not parents.complete or _scales_itself(case):
        yield from (cause for cause in unlike if cause.name == LAYOUT)
        return
    yield from _scaled(case.name, compared)
    if _delegate(case) not in SOLVED:
        yield from unlike


def _of_parents(case: Case, progress: Progress | None) -> Iterator[Cause]:
    """Parents with another layout than the first one's."""
    if case.method == METHOD or case.recipe.get("slices") or case.recipe.get("modules"):
        return
    for name in case.parents[1:]:
        anchor, donor = case.models[case.parents[0]], case.models[name]
        first = ParentSpan([Parent(anchor.architecture, anchor)])
        try:
            causes = list(_unlike(name, compare(donor.architecture.blocks, donor, first, progress)))
        except RotationMergeError:  # which `of_pairs` says
            continue
        yield from (cause for cause in causes if cause.name == LAYOUT)


def _delegate(case: Case) -> str:
    return str(case.parameters.get("delegate", "linear")) if case.method == METHOD else case.method


def _scales_itself(case: Case) -> bool:
    """Whether a recipe stacks layers and scales them explicitly."""
    return _delegate(case) == "passthrough" and "scale" in str(case.recipe)


def compare(
    blocks: tuple[Block, ...], merged: TensorSource, parents: ParentSpan, progress: Progress | None = None
) -> list[TensorComparison]:
    """Every matrix of the layers beside those of the parents.

    Where only few are unlike theirs, heads, neurons and experts are put in order first.
    """
    layers = [block for block in blocks if block.index is not None]
    compared = []
    for number, block in enumerate(layers):
        if progress is not None:
            progress("comparing", number, len(layers))
        compared.append(_of_block(block, dict(_pairs(block, merged, parents))))
    unlike = [sum(tensor.cosine < LOST for tensor in tensors) for tensors in compared]
    if 2 * sum(unlike) < sum(map(len, compared)):
        for number in (number for number, count in enumerate(unlike) if count):
            pairs = dict(_pairs(layers[number], merged, parents))
            compared[number] = _of_block(layers[number], _in_order(layers[number], pairs))
    return [tensor for tensors in compared for tensor in tensors]


Pair = tuple[Tensor, list[Tensor]]
"""A tensor of the merge, and the parents'."""


def _pairs(block: Block, merged: TensorSource, parents: ParentSpan) -> Iterator[tuple[str, Pair]]:
    """The tensors of a block that can be compared, in float32, by their keys."""
    for info in block.tensors:
        tensor = read_tensor(info, merged)
        if tensor is None or not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
            continue
        if parent_tensors := parents.tensors(block, info, tuple(tensor.shape)):
            yield info.key, (tensor.float(), parent_tensors)


def _in_order(block: Block, pairs: dict[str, Pair]) -> dict[str, Pair]:
    """The tensors of the merge, their heads, neurons and experts in the parents' order as far as all agree in one."""
    parent_means = {key: torch.stack(stored).mean(0) for key, (_, stored) in pairs.items()}
    ours = {key: tensor for key, (tensor, _) in pairs.items()}
    transforms = match_block(block, parent_means, ours, ORDERS, with_rows=False).transforms
    infos = {info.key: info for info in block.tensors}
    return {key: (transform_tensor(ours[key], infos[key], transforms), pairs[key][1]) for key in pairs}


def _of_block(block: Block, pairs: dict[str, Pair]) -> list[TensorComparison]:
    """The matrices of a block beside the parents'; zeros say nothing."""
    compared = []
    for info in block.tensors:
        tensor, parent_tensors = pairs.get(info.key, (None, []))
        parent_tensors = [tensor for tensor in parent_tensors if bool(tensor.any())]
        if tensor is not None and len(info.axes) > 1 and bool(tensor.any()) and parent_tensors:
            compared.append(_beside(info, tensor, parent_tensors))
    return compared


def _beside(info: TensorInfo, merged: Tensor, parents: list[Tensor]) -> TensorComparison:
    flat_parents = torch.stack([parent.flatten() for parent in parents])
    flat = merged.flatten()
    gram, inner = (flat_parents @ flat_parents.T).double(), (flat_parents @ flat).double()
    weights = torch.linalg.lstsq(gram, inner[:, None], driver="gelsd").solution[:, 0]
    norm = float(flat.norm())
    within = max(0.0, float(weights @ inner)) ** 0.5
    count = len(parents)
    share = float(inner.sum() / count) / max(float(gram.sum()) / count**2, 1e-300)
    ratio = norm / max(float(gram.diagonal().sqrt().mean()), 1e-300)
    rotary = any(part.role in ("q", "k") and part.space.rotary for axis in info.axes for part in axis.parts)
    return TensorComparison(info.name, rotary, min(1.0, within / norm), share, ratio)


def _scaled(name: str, compared: list[TensorComparison]) -> Iterator[Cause]:
    """Tensors that are the parents' times a number."""
    scaled = [beside for beside in compared if beside.scaled]
    if not scaled:
        return
    share = median(beside.share for beside in scaled)
    remedy = "divide them by it, or merge again with weights that add up to 1"
    if len(scaled) > (1 - MOST) * len(compared):
        problem = f"all weights are {share:.2f} times those of the parents ({len(scaled)} matrices compared)"
        yield Cause("scale", 0.98, problem, name, remedy)
    elif len(scaled) < MOST * len(compared) or len(scaled) == 1:
        worst = min(scaled, key=lambda beside: min(beside.share, 1 / beside.share))
        problem = f"{_some(scaled)} {share:.2f} times those of the parents, all others unchanged"
        yield Cause("scale", 0.9, problem, worst.name, remedy)


def _unlike(name: str, compared: list[TensorComparison]) -> Iterator[Cause]:
    """Single tensors that have nothing of the parents'."""
    unlike = [beside for beside in compared if beside.cosine < LOST]
    if not unlike or sum(beside.cosine > KEPT for beside in compared) < (1 - MOST_UNLIKE) * len(compared):
        return
    worst = min(unlike, key=lambda beside: beside.cosine)
    problem = f"{_some(unlike)} unlike the parents' (cosine to their span {worst.cosine:.2f}, all others above {KEPT})"
    if len(unlike) > 1 and set(unlike) == {beside for beside in compared if beside.rotary}:
        layouts = (
            "these are all queries and keys: they may stand in the other RoPE layout (pairs side by side, or halves)"
        )
        remedy = (
            "convert that model to the layout of the others (its conversion script permutes them), then merge again"
        )
        yield Cause(LAYOUT, 0.95, f"{problem}; {layouts}", name, remedy)
    else:
        remedy = "take them from a parent, or merge again: tensors of one layer must have their heads in one order"
        yield Cause("unlike its parents", 0.9, problem, worst.name, remedy)


def _some(tensors: list[TensorComparison]) -> str:
    names = named(f"'{beside.name}'" for beside in tensors)
    return f"{names} {'is' if len(tensors) == 1 else 'are'}"
