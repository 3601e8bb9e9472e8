"""The similarity of two models of one architecture, from a few of their matrices."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from glob import escape, glob

import torch

from rotation_merge.architecture.model import Architecture, TensorInfo
from rotation_merge.model.contents import ADAPTER_CONFIG
from rotation_merge.model.tensors import TensorSource, are_equal
from rotation_merge.model.view import View

RELATED = 0.5
"""Cosine of the angle between matrices of two models from which they count as near: fine-tunes of one base are
above 0.9, models trained independently at 0 (a planted twin too: alignment has to bring it back)."""


@dataclass(frozen=True)
class Nearness:
    """Cosines of the angles between matrices of the same name in two models."""

    cosines: tuple[float, ...] = ()

    @property
    def least(self) -> float:
        """The smallest; 0 where none could be compared."""
        return min(self.cosines, default=0.0)

    @property
    def shared(self) -> bool:
        """Whether the two share their coordinates: no kind of matrix was moved."""
        return self.least >= RELATED

    @property
    def words(self) -> str:
        """The cosines in words, as part of a sentence."""
        return f"cosines of {len(self.cosines)} of their matrices: {self.least:.2f} to {max(self.cosines):.2f}"


def cosine_text(value: float) -> str:
    """A cosine with two digits; a small negative one reads 0.00, too; NaN is unknown."""
    return "unknown" if math.isnan(value) else f"{round(value, 2) + 0.0:.2f}"


def nearness(architecture: Architecture, first: TensorSource, second: TensorSource) -> Nearness:
    """Compare one matrix of each kind, spread over the layers; embeddings say little of coordinates.

    Args:
        first, second: both under the architecture's names.
    """
    cosines = []
    for name in _spread(architecture, first, second):
        a, b = first[name].float(), second[name].float()
        if a.shape == b.shape and bool(a.any()) and bool(b.any()):
            cosines.append(float(torch.cosine_similarity(a.flatten(), b.flatten(), dim=0)))
    return Nearness(tuple(cosines))


def _spread(architecture: Architecture, first: TensorSource, second: TensorSource) -> list[str]:
    """One matrix of each kind that both models hold, each from another layer if possible."""
    kinds: dict[tuple[str, str], list[TensorInfo]] = {}
    for block in architecture.blocks:
        for info in block.tensors:
            matrix = len(info.axes) - info.stacked == 2
            if block.index is not None and matrix and info.name in first and info.name in second:
                kinds.setdefault((block.module, info.key), []).append(info)
    last = max(1, len(kinds) - 1)
    return [layers[round(number * (len(layers) - 1) / last)].name for number, layers in enumerate(kinds.values())]


def likeness(anchor: View, donor: View) -> float:
    """Mean cosine of the angle between matrices of the same name; NaN where no two can be compared."""
    cosines = nearness(anchor.architecture, anchor, donor).cosines
    return sum(cosines) / len(cosines) if cosines else math.nan


def equality(base: View, donor: View) -> str:
    """A remark on a donor whose tensors are all the base's; empty if one differs, which is read first where most do."""
    if donor.shapes != base.shapes:
        return ""
    names = dict.fromkeys([*_spread(base.architecture, base, donor), *base])
    return equality_words(base, donor) if all(are_equal(base[name], donor[name]) for name in names) else ""


def equality_words(base: View, donor: View) -> str:
    """The remark on a donor that equals the base, with the adapters that lie in its folder."""
    words = f"equals the base ({base.reference})"
    if donor.files is None or donor.files.adapter is not None:
        return words if donor.files is None else f"{words}: its adapter changes nothing"
    configs = sorted(glob(os.path.join(escape(donor.folder), "*", ADAPTER_CONFIG)))
    folders = [os.path.dirname(path) for path in configs]
    if not folders:
        return f"{words}: it brings nothing to the merge"
    names = ", ".join(map(os.path.basename, folders))
    return f"{words}; an adapter lies in {names}: name {donor.reference}+{folders[0]}"


@dataclass(frozen=True)
class SampledChanges:
    """Changes of a few matrices from a base to its fine-tunes.

    Attributes:
        lengths: by model, the norm of its changes to all of them, over that of the base's matrices.
        cosine: mean over the matrices and over pairs of models, of the angle between their changes; 0 of one model.
    """

    lengths: Mapping[str, float]
    cosine: float = 0.0

    @property
    def ratio(self) -> float:
        """The longest over the shortest; models that are the base do not count."""
        lengths = [length for length in self.lengths.values() if length > 0]
        return max(lengths) / min(lengths) if lengths else 1.0


def sampled_changes(base: View, models: Mapping[str, View]) -> SampledChanges:
    """Changes of the matrices that `nearness` looks at."""
    squares, cosines, whole = dict.fromkeys(models, 0.0), [], 0.0
    for name in _spread(base.architecture, base, next(iter(models.values()))):
        start = base[name].double()
        tensors = {key: model[name] for key, model in models.items() if name in model}
        if any(tensor.shape != start.shape for tensor in tensors.values()):
            continue
        changes = {key: (tensor.double() - start).flatten() for key, tensor in tensors.items()}
        whole += float(start.square().sum())
        for key, change in changes.items():
            squares[key] += float(change.square().sum())
        moved = [change for change in changes.values() if bool(change.any())]
        cosines += [float(a @ b / (a.norm() * b.norm())) for a, b in itertools.combinations(moved, 2)]
    lengths = {key: math.sqrt(square / (whole or 1.0)) for key, square in squares.items()}
    return SampledChanges(lengths, sum(cosines) / len(cosines) if cosines else 0.0)
