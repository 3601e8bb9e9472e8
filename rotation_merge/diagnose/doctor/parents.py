"""Parents of a merged model as the merge saw them: the layers that it took, in the coordinates it moved them to.

Against them permuted layouts show: queries and keys in the other RoPE layout, heads or neurons of one tensor in another
order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rotation_merge.architecture.model import Architecture, Block, Part, Space, TensorInfo
from rotation_merge.diagnose.doctor.case import Case, is_small
from rotation_merge.diagnose.donors import RecipeDonor
from rotation_merge.errors import RotationMergeError
from rotation_merge.linalg.assignment import assign
from rotation_merge.matching.aligned_output import read_alignment
from rotation_merge.matching.alignment import Alignment
from rotation_merge.matching.moving import moved_tensors
from rotation_merge.matching.options import NOTHING, WEIGHTS
from rotation_merge.matching.pair import Pair, open_pair
from rotation_merge.mergekit_plugin.document import METHOD
from rotation_merge.model.apply import split_axis
from rotation_merge.model.blocks import read_tensor
from rotation_merge.model.open import parse_reference
from rotation_merge.model.tensors import TensorSource
from rotation_merge.workers import Progress

Layers = Mapping[int | None, int]
"""A parent's layer by the merge's."""


@dataclass(frozen=True)
class Parent:
    """A parent as the merge saw it.

    Attributes:
        source: its tensors, as they are stored or as they were moved.
        layers: its layer by the merge's; None: each meets its own.
    """

    architecture: Architecture
    source: TensorSource
    layers: Layers | None = None

    @cached_property
    def _blocks(self) -> dict[tuple[str, str, int | None], Block]:
        return {(block.module, block.place, block.index): block for block in self.architecture.blocks}

    def tensor(self, block: Block, info: TensorInfo) -> Tensor | None:
        """The parents' counterpart of a tensor of the merge; None if there is none."""
        index = block.index
        if self.layers is not None:
            if index not in self.layers:
                return None
            index = self.layers[index]
        parent_block = self._blocks.get((block.module, block.place, index))
        parent_info = None if parent_block is None else parent_block.tensor(info.key)
        if parent_block is None or parent_info is None:
            return None
        return read_tensor(parent_info, self.source)


@dataclass(frozen=True)
class ParentSpan:
    """All parents of a merged model.

    Attributes:
        complete: whether the merge lies in or near the span of the parents; else some parents are unknown or were
            changed.
    """

    members: list[Parent] = field(default_factory=list)
    complete: bool = True

    def tensors(self, block: Block, info: TensorInfo, shape: tuple[int, ...]) -> list[Tensor]:
        """The parents' counterparts of a tensor of the merge that have its shape."""
        tensors = (parent.tensor(block, info) for parent in self.members)
        return [tensor for tensor in tensors if tensor is not None and tuple(tensor.shape) == shape]


def parents_of(case: Case, progress: Progress | None) -> ParentSpan:
    """The parents that are here, as the merge saw them.

    Raises:
        RotationMergeError: one cannot be read.
    """
    if case.recipe.get("slices") or case.recipe.get("modules"):
        named = {name: layers for name, layers in _sliced_parents(case).items() if name in case.models}
        sliced = [Parent(case.models[name].architecture, case.models[name], layers) for name, layers in named.items()]
        return ParentSpan(sliced, complete=case.method != METHOD and not case.absent)
    if case.method != METHOD:
        plain = [Parent(model.architecture, model) for model in case.models.values()]
        return ParentSpan(plain, complete=not case.absent)
    return _moved(case, progress)


def _sliced_parents(case: Case) -> dict[str, dict[int | None, int]]:
    """Models of a recipe with slices, each with its layers by the merge's layers.

    For a recipe of ours only the first model of each slice, which is not moved.
    """
    layers_of: dict[str, dict[int | None, int]] = {}
    modules: Any = case.recipe.get("modules") or {}
    for slices in [case.recipe.get("slices"), *(module.get("slices") for module in modules.values())]:
        begin = 0
        for piece in slices or []:
            sources = piece["sources"][:1] if case.method == METHOD else piece["sources"]
            for source in sources:
                known = layers_of.setdefault(str(parse_reference(str(source["model"]))), {})
                for offset, layer in enumerate(range(*source["layer_range"])):
                    known.setdefault(begin + offset, layer)
            begin += len(range(*piece["sources"][0]["layer_range"]))
    return layers_of


def _moved(case: Case, progress: Progress | None) -> ParentSpan:
    """The anchor and the donors of a recipe of ours: matched once more, or moved by their files."""
    anchor, complete = case.models[case.parents[0]], bool(case.donors) and not case.absent
    pairs: list[tuple[RecipeDonor, Pair, Alignment]] = []
    for donor in case.donors.values():
        aligned = _alignment(case, donor, progress)
        complete = complete and aligned is not None
        pairs += [] if aligned is None else [(donor, *aligned)]
    if not pairs:
        return ParentSpan([Parent(anchor.architecture, anchor)], complete)
    folded = next((alignment.folded for _, _, alignment in pairs if alignment.folded), ())
    layout = pairs[0][1].architecture
    members = [Parent(layout, moved_tensors(layout, pairs[0][1].sources[0], {}, folded))]
    for donor, pair, alignment in pairs:
        sources = [pair.sources[1]]
        if donor.origin is not None:  # whose change was carried: the fine-tune moves as its base does
            sources.append(open_pair(donor.origin, donor.name, NOTHING, donor.untie, any_base=True).sources[1])
        moved = (moved_tensors(pair.architecture, source, alignment.transforms, folded) for source in sources)
        members += [Parent(pair.architecture, tensors) for tensors in moved]
    return ParentSpan(members, complete)


def _alignment(case: Case, donor: RecipeDonor, progress: Progress | None) -> tuple[Pair, Alignment] | None:
    """The alignment of a donor; None if it is unknown, or the models are large."""
    settings: Any = case.recipe.get("parameters") or {}
    if donor.match_on != WEIGHTS or settings.get("anchor") == "mean" or donor.name not in case.models:
        return None
    options, names = NOTHING if donor.file else donor.options, (donor.anchor, donor.matched)
    extras: dict[str, Any] = {
        "untie": donor.untie,
        "words": donor.words,
        "unsupported": donor.unsupported,
        "excluded": donor.excluded,
    }
    try:
        pair = open_pair(*names, options, any_base=True, **extras)
        if donor.file:
            return pair, read_alignment(pair, donor.file)
        return (pair, case.match(pair, progress)) if is_small(donor.anchor) else None
    except RotationMergeError:
        return None


ALIKE, BETTER = 0.5, 0.2
"""Least cosine to the parents in a permuted layout, and least improvement over the stored layout."""
SAMPLED = 256
"""Rows whose nearest row among the parents' is looked for."""

HEADS = {"q": "query heads", "k": "key heads", "v": "value heads", "o": "output columns of heads"}


@dataclass(frozen=True)
class Layout:
    """A tensor that is the parents' in another order.

    Attributes:
        kind: `rope`, `heads` or `neurons`.
        space: whose coordinates stand in another order.
        order: which of the parents' coordinates stands at each place, in units of the kind: of KV groups, heads, rows.
        before, after: cosine to the parents as it stands, and put in order.
    """

    kind: str
    space: str
    role: str
    tensor: str
    order: tuple[int, ...]
    before: float
    after: float


Found = tuple[Space, str, Layout | None]


def layouts_in(info: TensorInfo, merged: Tensor, parents: Tensor) -> Iterator[Found]:
    """Compare one tensor of a merge with the mean of its parents.

    Yields each space with its role in the tensor and the order of its coordinates that fits the parents better.
    """
    if info.stacked or merged.ndim != len(info.axes):
        return
    for dim, axis in enumerate(info.axes):
        if not axis.parts:
            continue
        views = zip(*(split_axis(tensor, dim, axis) for tensor in (merged, parents)), axis.pieces, strict=True)
        for ours, parents_view, piece in views:
            if len(piece) != 1:
                continue
            part = piece[0]
            if part.space.kind == "attention" and part.role in HEADS:
                units = (_units(view, dim, part) for view in (ours, parents_view))
                yield part.space, part.role, _of_heads(part, info.name, *units)
            elif part.space.kind == "ffn" and merged.ndim > 1:
                rows = (view.movedim(dim, 0).flatten(1) for view in (ours, parents_view))
                yield part.space, part.role, _of_neurons(part, info.name, *rows)


def _units(view: Tensor, dim: int, part: Part) -> Tensor:
    """Heads (of keys and values: groups), their dimensions, and all else."""
    inner = len(part.factors)
    heads = view.movedim(list(range(dim, dim + inner)), list(range(inner))).flatten(0, inner - 2)
    return heads.flatten(2) if heads.ndim > 2 else heads[..., None]


def _of_heads(part: Part, name: str, merged: Tensor, parents: Tensor) -> Layout | None:
    before = _cosine(merged, parents)
    place = (part.space.name, part.role, name)
    if part.role in ("q", "k") and part.space.rotary:
        turned = {order: _cosine(merged[:, list(order)], parents) for order in _rope_orders(part, merged.shape[1])}
        order, after = max(turned.items(), key=lambda pair: pair[1])
        if after >= ALIKE and after >= before + BETTER:
            return Layout("rope", *place, order, before, after)
    if len(merged) < 2:
        return None
    alike = _cosines(merged.flatten(1), parents.flatten(1))
    order = tuple(assign(alike).tolist())
    moved = [i for i, j in enumerate(order) if i != j]
    if not moved:
        return None
    before, after = (float(torch.stack([alike[i, o[i]] for i in moved]).mean()) for o in (range(len(order)), order))
    return Layout("heads", *place, order, before, after) if after >= ALIKE and after >= before + BETTER else None


def _rope_orders(part: Part, size: int) -> list[tuple[int, ...]]:
    """Orders that convert rotary pairs between halves and neighbours.

    Coordinates without rotary embedding stay in place.
    """
    turned = part.space.rotary // part.space.rotary_parts
    pairs = torch.arange(turned).view(2, -1)
    orders = []
    for order in (pairs.T.flatten(), pairs.T.flatten().argsort()):
        whole = torch.arange(size)
        for k in range(part.space.rotary_parts):
            whole[k * turned : (k + 1) * turned] = order + k * turned
        orders.append(tuple(whole.tolist()))
    return orders


def _of_neurons(part: Part, name: str, merged: Tensor, parents: Tensor) -> Layout | None:
    before = _cosine(merged, parents)
    if before >= ALIKE or merged.shape[1] < 2:
        return None
    sample = torch.linspace(0, len(merged) - 1, min(SAMPLED, len(merged))).long()
    best = _cosines(merged[sample], parents).max(1)
    after = float(best.values.median())
    moved = float((best.indices != sample).float().mean())
    if moved < 0.5 or after < ALIKE or after < before + BETTER:
        return None
    return Layout("neurons", part.space.name, part.role, name, tuple(best.indices.tolist()), before, after)


def _cosine(merged: Tensor, parents: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(merged.flatten(), parents.flatten(), dim=0))


def _cosines(ours: Tensor, parents: Tensor) -> Tensor:
    """Cosine similarity of each row of the first matrix with each row of the second."""
    tiny = torch.finfo(torch.float32).tiny
    ours, parents = (x / x.norm(dim=1, keepdim=True).clamp(min=tiny) for x in (ours, parents))
    return ours @ parents.T


def all_permuted_alike(space: Space, orders: Mapping[tuple[str, str], Layout | None]) -> bool:
    """Whether one order fits all tensors of a space, so that the function is unchanged.

    Args:
        orders: by role and tensor; None: it stands in order.
    """
    if any(layout is not None and layout.kind == "rope" for layout in orders.values()):
        return False
    if space.kind == "ffn":
        permutations = [layout.order for layout in orders.values() if layout is not None]
        return len(permutations) == len(orders) and all(_agree(permutations[0], order) for order in permutations)
    groups, each = space.sizes["groups"], space.sizes["per_group"]
    still = {"q": groups * each, "o": groups * each, "k": groups, "v": groups}
    known = [
        (role, tuple(range(still[role])) if layout is None else layout.order) for (role, _), layout in orders.items()
    ]
    heads = {order for role, order in known if role in "qo"}
    shared = {order for role, order in known if role in "kv"}
    shared |= {tuple(head // each for head in order[::each]) for order in heads}
    together = all(head // each == order[i - i % each] // each for order in heads for i, head in enumerate(order))
    return together and len(heads) <= 1 and len(shared) <= 1


def _agree(first: tuple[int, ...], second: tuple[int, ...]) -> bool:
    """Whether two orders of neurons from samples agree, up to neurons that resemble each other."""
    same = sum(a == b for a, b in zip(first, second, strict=False))
    return len(first) == len(second) and same >= 0.8 * len(first)
