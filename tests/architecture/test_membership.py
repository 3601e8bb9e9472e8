"""What an alignment file holds is proven: members of every space of every architecture pass, nothing else does."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny_models as tiny
import torch
from matching_support import save_for
from torch import Tensor

from rotation_merge import Alignment
from rotation_merge.architecture.build import build
from rotation_merge.architecture.model import Architecture
from rotation_merge.architecture.registry import find
from rotation_merge.matching.alignment import Transforms, load_alignment
from rotation_merge.symmetry import (
    ConvolutionTransform,
    ExpertTransform,
    GroupElement,
    HeadTransform,
    MixerTransform,
    Monomial,
    NeuronTransform,
    Orthogonal,
    Permutation,
    Scaling,
    SpaceTransform,
    StreamTransform,
    TranslationTransform,
)
from rotation_merge.symmetry.admitted import LARGEST, WIDEST, admitted

NAMES = {f"{case.family}-{case.name}": case for case in tiny.ALL}


@cache
def architecture(name: str) -> Architecture:
    case = NAMES[name]
    config = {**case.model_class.config_class(**case.config).to_dict(), "architectures": [case.class_name]}
    spec = find(config)
    assert spec is not None
    return build(spec, config, spec.bases[0], spec.spellings[0])


def gen(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def everything(found: Architecture, wanted: Any, seed: int = 0) -> tuple[Transforms, tuple[str, ...]]:
    """A random transform of every space, and the streams to be folded for it."""
    transforms: Transforms = {}
    folded = []
    for name, space in found.spaces().items():
        if space.kind != "stream":
            transforms[name] = admitted(space, wanted).random(gen(seed))
        elif (kind := found.stream_groups[name][-1]) != "none":
            transforms[name] = found.stream_group(name, kind).random(gen(seed))
            folded += [name] if kind == "rotation" else []
    return transforms, tuple(folded)


def first(index: Tensor) -> Tensor:
    """An index that takes its first entry everywhere."""
    return index[..., :1].expand_as(index).clone()


def spoilt(element: GroupElement) -> list[GroupElement]:
    """Elements beside every group, or beside that of any head."""
    found: list[GroupElement] = [Permutation(torch.zeros(element.batch, element.size, dtype=torch.int64))]
    found.append(Scaling(torch.zeros(element.batch, element.size, dtype=torch.float64)))
    found.append(Scaling(torch.full((element.batch, element.size), torch.nan, dtype=torch.float64)))
    found.append(Orthogonal(torch.ones(element.batch, element.size, element.size, dtype=torch.float64)))
    found.append(Orthogonal(torch.zeros(element.batch, element.size, element.size, dtype=torch.float64) + 1e-30))
    return found


def corrupted(transform: SpaceTransform) -> list[SpaceTransform]:
    """The transform with one thing wrong, in every way."""
    match transform:
        case HeadTransform():
            found: list[SpaceTransform] = [
                replace(transform, groups=transform.groups + len(transform.groups)),
                replace(transform, queries=transform.queries + 1),
                replace(transform, groups=torch.cat([transform.groups, transform.groups])),
            ]
            if len(transform.groups) > 1:
                found.append(replace(transform, groups=first(transform.groups)))
            found += [replace(transform, qk=bad) for bad in spoilt(transform.qk)]
            found += [replace(transform, vo=bad) for bad in spoilt(transform.vo)]
            return found + [replace(transform, gains=bad) for bad in spoilt(transform.gains or transform.qk)]
        case NeuronTransform():
            return [replace(transform, element=bad) for bad in neurons(transform.element)] + [
                replace(transform, degree=transform.degree + 1)
            ]
        case ExpertTransform():
            return [replace(transform, neurons=bad) for bad in neurons(transform.neurons)] + [
                replace(transform, order=first(transform.order)),
                replace(transform, order=transform.order + 99999),
            ]
        case StreamTransform(element=Monomial() as element):
            half = replace(element, scaling=Scaling(0.5 * element.scaling.factor))
            return [replace(transform, element=bad) for bad in (*neurons(element), half)]
        case StreamTransform(element=Orthogonal(matrix=matrix)):
            beside = (matrix * 1.01, torch.ones_like(matrix), matrix[:, :-1, :-1])
            return [replace(transform, element=Orthogonal(bad)) for bad in beside]
        case MixerTransform():
            return [
                replace(transform, groups=transform.groups + 99999),
                replace(transform, heads=transform.heads + 1),
                replace(transform, shared=Permutation(first(transform.shared.index))),
                replace(transform, own=Permutation(transform.own.index + 1)),
            ]
        case ConvolutionTransform():
            each = replace(transform.element, permutation=Permutation(transform.element.permutation.index.roll(1, 1)))
            each.permutation.index[0] = transform.element.permutation.index[0]
            return [replace(transform, element=bad) for bad in (*neurons(transform.element), each)]
        case TranslationTransform(vector=vector):
            return [replace(transform, vector=bad) for bad in (vector[:-1], vector / 0, vector.repeat(2))]
    raise AssertionError(transform)


def neurons(element: Monomial) -> list[Monomial]:
    index, factor = element.permutation.index, element.scaling.factor
    orders = [first(index), index + 99999, index[:, :-1]]
    factors = [torch.zeros_like(factor), torch.full_like(factor, torch.nan), factor * 1e9, factor[:, :-1]]
    return [replace(element, permutation=Permutation(bad)) for bad in orders] + [
        replace(element, scaling=Scaling(bad)) for bad in factors
    ]


@pytest.mark.parametrize("name", NAMES)
def test_members_pass(name: str) -> None:
    found = architecture(name)
    for wanted in (LARGEST, WIDEST):
        for space, transform in everything(found, wanted)[0].items():
            described = found.spaces()[space]
            if described.kind != "stream":
                assert admitted(described, WIDEST).refuses(transform) is None
                assert admitted(described, WIDEST).refuses(transform.inverse().compose(transform)) is None


@pytest.mark.parametrize("name", NAMES)
def test_everything_else_is_refused(name: str, tmp_path: Path) -> None:
    """One thing wrong in one space, and the file is refused with the space's name."""
    found = architecture(name)
    transforms, folded = everything(found, WIDEST)
    kinds = {type(transform): space for space, transform in transforms.items()}
    save_for(tmp_path / "whole", Alignment(transforms, folded), found, "a", "b")
    assert load_alignment(tmp_path / "whole", found).alignment.transforms.keys() == transforms.keys()
    for space in kinds.values():
        described = found.spaces()[space]
        for bad in corrupted(transforms[space]):
            if described.kind != "stream":
                assert admitted(described, WIDEST).refuses(bad)
            else:
                assert all(found.stream_group(space, kind).refuses(bad) for kind in found.stream_groups[space])


@pytest.mark.parametrize("name", ["llama-llama", "bert-classifier", "gpt_neox-parallel", "mixtral-mixtral"])
def test_a_turned_stream_under_layer_norm(name: str) -> None:
    found = architecture(name if name in NAMES else next(n for n in NAMES if n.startswith(name.split("-")[0])))
    for stream, groups in found.stream_groups.items():
        if "rotation" in groups:
            size = found.streams[stream].sizes["size"]
            refused = found.stream_group(stream, "rotation").refuses(StreamTransform(Orthogonal.random(1, size, gen())))
            assert (refused is not None) == found.layer_normed(stream)
