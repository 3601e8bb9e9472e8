"""Tensors of a merge compared with the span of its parents': permuted, scaled, or unlike all of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

from rotation_merge.architecture.model import Block, Space, TensorInfo
from rotation_merge.diagnose.doctor.case import Case
from rotation_merge.diagnose.doctor.cause import Cause
from rotation_merge.diagnose.doctor.parents import (
    HEADS,
    Layout,
    Parent,
    ParentSpan,
    all_permuted_alike,
    layouts_in,
    parents_of,
)
from rotation_merge.errors import RotationMergeError, named
from rotation_merge.mergekit_plugin.document import METHOD
from rotation_merge.model.blocks import read_tensor
from rotation_merge.model.tensors import TensorSource
from rotation_merge.workers import Progress

SMALL, LARGE = 0.8, 1.25
"""Share of the parents that a merge holds, from which on it is scaled."""
LOST, KEPT = 0.5, 0.9
"""Cosine of a tensor to the span of its parents': below the first it is unlike them, above the second it is theirs."""
MOST = 0.2
"""Share of the tensors that may be unlike the parents' before that says nothing of single ones any more."""

SOLVED = ("refit", "ot_fusion", "regmean", "fisher")
"""Delegates whose tensors need not lie near the span of the parents'."""

SPOILS = ("RoPE layout", "order of heads", "order of neurons", "scale", "unlike its parents")
"""Causes of this kind; each alone explains odd norms of weights and activations."""


@dataclass(frozen=True)
class TensorComparison:
    """One tensor of a merge beside its parents'.

    Attributes:
        cosine: to the span of theirs.
        share: of their mean that it holds.
        ratio: of its norm to the mean of theirs.
    """

    name: str
    layer: str
    cosine: float
    share: float
    ratio: float

    @property
    def scaled(self) -> bool:
        """Whether it is theirs times a number."""
        smaller, larger = max(self.share, self.ratio) < SMALL, min(self.share, self.ratio) > LARGE
        return self.cosine > KEPT and (smaller or larger)


@dataclass
class Comparison:
    """All tensors of a merge beside its parents'.

    Attributes:
        layouts: of tensors in another order than the tensors of the same space.
        ordered: names of all tensors in another order than the parents'.
    """

    tensors: list[TensorComparison] = field(default_factory=list)
    layouts: list[Layout] = field(default_factory=list)
    ordered: set[str] = field(default_factory=set)


def of_span(case: Case, progress: Progress | None) -> Iterator[Cause]:
    """Faults of single tensors of a merge compared with its parents.

    For a recipe, of parents compared with the first one.

    Raises:
        RotationMergeError: a model cannot be read.
    """
    yield from _of_parents(case, progress)
    if case.merged_model is None or not case.parents:
        return
    parents = parents_of(case, progress)
    comparison = compare(case.merged_model.architecture.blocks, case.merged_model, parents, progress)
    yield from _permuted(case.name, comparison)
    if parents.complete and not _scales_itself(case):
        yield from _scaled(case.name, comparison)
        if _delegate(case) not in SOLVED:
            yield from _unlike(comparison)


def _of_parents(case: Case, progress: Progress | None) -> Iterator[Cause]:
    """Parents with another layout than the first one's."""
    if case.method == METHOD or case.recipe.get("slices") or case.recipe.get("modules"):
        return
    for name in case.parents[1:]:
        anchor, donor = case.models[case.parents[0]], case.models[name]
        first = ParentSpan([Parent(anchor.architecture, anchor)])
        try:
            yield from _permuted(name, compare(donor.architecture.blocks, donor, first, progress))
        except RotationMergeError:  # which `of_pairs` says
            continue


def _delegate(case: Case) -> str:
    parameters = case.recipe.get("parameters") or {}
    return str(parameters.get("delegate", "linear")) if case.method == METHOD else case.method


def _scales_itself(case: Case) -> bool:
    """Whether a recipe stacks layers and scales them explicitly."""
    return _delegate(case) == "passthrough" and "scale" in str(case.recipe)


def compare(
    blocks: tuple[Block, ...], merged: TensorSource, parents: ParentSpan, progress: Progress | None = None
) -> Comparison:
    """Every matrix of the layers beside those of the parents."""
    result = Comparison()
    layers = [block for block in blocks if block.index is not None]
    for number, block in enumerate(layers):
        if progress is not None:
            progress("comparing", number, len(layers))
        orders: dict[str, tuple[Space, dict[tuple[str, str], Layout | None]]] = {}
        for info in block.tensors:
            pair = _pair(block, info, merged, parents)
            if pair is None:
                continue
            tensor, parent_tensors = pair
            result.tensors.append(_beside(info.name, block.name, tensor, parent_tensors))
            for space, role, layout in layouts_in(info, tensor, torch.stack(parent_tensors).mean(0)):
                orders.setdefault(space.name, (space, {}))[1][role, info.name] = layout
        for space, by_tensor in orders.values():
            permuted = [layout for layout in by_tensor.values() if layout is not None]
            result.ordered |= {layout.tensor for layout in permuted}
            result.layouts += [] if all_permuted_alike(space, by_tensor) else permuted
    return result


def _pair(
    block: Block, info: TensorInfo, merged: TensorSource, parents: ParentSpan
) -> tuple[Tensor, list[Tensor]] | None:
    """A matrix of the merge and the parents' matrices, in float32; None if there is nothing to compare."""
    tensor = read_tensor(info, merged) if len(info.axes) > 1 else None
    if tensor is None or not tensor.is_floating_point() or not bool(tensor.any()):
        return None
    parent_tensors = [parent_tensor.float() for parent_tensor in parents.tensors(block, info, tuple(tensor.shape))]
    parent_tensors = [parent_tensor for parent_tensor in parent_tensors if bool(parent_tensor.any())]
    return (tensor.float(), parent_tensors) if parent_tensors and bool(torch.isfinite(tensor).all()) else None


def _beside(name: str, layer: str, merged: Tensor, parents: list[Tensor]) -> TensorComparison:
    flat_parents = torch.stack([parent.flatten() for parent in parents])
    flat = merged.flatten()
    gram, inner = (flat_parents @ flat_parents.T).double(), (flat_parents @ flat).double()
    weights = torch.linalg.lstsq(gram, inner[:, None], driver="gelsd").solution[:, 0]
    norm = float(flat.norm())
    within = max(0.0, float(weights @ inner)) ** 0.5
    count = len(parents)
    share = float(inner.sum() / count) / max(float(gram.sum()) / count**2, 1e-300)
    ratio = norm / max(float(gram.diagonal().sqrt().mean()), 1e-300)
    return TensorComparison(name, layer, min(1.0, within / norm), share, ratio)


WORDS = {
    "rope": ("RoPE layout", "in the other RoPE layout (pairs side by side, or halves)"),
    "heads": ("order of heads", "in another order of heads"),
    "neurons": ("order of neurons", "in another order of neurons"),
}
CONVERTED = (
    "convert that model to the layout of the others (its conversion script permutes queries and keys), then merge again"
)
ORDERED = "the other tensors of the layer kept their order: take these from a parent, or merge again"


def _permuted(name: str, comparison: Comparison) -> Iterator[Cause]:
    """Tensors in another order than their neighbours, compared with the parents."""
    for kind, (title, words) in WORDS.items():
        layouts = [layout for layout in comparison.layouts if layout.kind == kind]
        if not layouts:
            continue
        worst = max(layouts, key=lambda layout: layout.after - layout.before)
        parts = named(dict.fromkeys(HEADS.get(layout.role, "neurons") for layout in layouts))
        spaces = len({layout.space for layout in layouts})
        problem = (
            f"{parts} of {spaces} layer{'s' if spaces > 1 else ''} are the parents' {words}: '{worst.tensor}' has a "
            f"cosine of {worst.before:.2f} to theirs, {worst.after:.2f} after reordering"
        )
        yield Cause(
            title, 0.98, problem, worst.tensor if spaces == 1 else name, CONVERTED if kind == "rope" else ORDERED
        )


def _scaled(name: str, comparison: Comparison) -> Iterator[Cause]:
    """Tensors that are the parents' times a number."""
    scaled = [beside for beside in comparison.tensors if beside.scaled]
    if not scaled:
        return
    share = median(beside.share for beside in scaled)
    remedy = "divide them by it, or merge again with weights that add up to 1"
    if len(scaled) > (1 - MOST) * len(comparison.tensors):
        problem = f"all weights are {share:.2f} times those of the parents ({len(scaled)} matrices compared)"
        yield Cause("scale", 0.98, problem, name, remedy)
    elif len(scaled) < MOST * len(comparison.tensors) or len(scaled) == 1:
        worst = min(scaled, key=lambda beside: min(beside.share, 1 / beside.share))
        problem = f"{_some(scaled)} {share:.2f} times those of the parents, all others unchanged"
        yield Cause("scale", 0.9, problem, worst.name, remedy)


def _unlike(comparison: Comparison) -> Iterator[Cause]:
    """Single tensors that have nothing of the parents'."""
    looked_at = [beside for beside in comparison.tensors if beside.name not in comparison.ordered]
    unlike = [beside for beside in looked_at if beside.cosine < LOST]
    if not unlike or sum(beside.cosine > KEPT for beside in looked_at) < (1 - MOST) * len(looked_at):
        return
    worst = min(unlike, key=lambda beside: beside.cosine)
    problem = f"{_some(unlike)} unlike the parents' (cosine to their span {worst.cosine:.2f}, all others above {KEPT})"
    yield Cause("unlike its parents", 0.9, problem, worst.name, "take them from a parent, or merge again")


def _some(tensors: list[TensorComparison]) -> str:
    names = named(f"'{beside.name}'" for beside in tensors)
    return f"{names} {'is' if len(tensors) == 1 else 'are'}"
