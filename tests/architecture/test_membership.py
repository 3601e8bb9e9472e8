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
from test_groups import broken

from rotation_merge import Alignment
from rotation_merge.architecture.build import build
from rotation_merge.architecture.model import Architecture
from rotation_merge.architecture.registry import find
from rotation_merge.matching.alignment import load_file
from rotation_merge.matching.stream import Transforms
from rotation_merge.symmetry.admitted import WIDEST, GroupOptions, admitted, stream_group

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


def everything(found: Architecture, wanted: Any) -> tuple[Transforms, tuple[str, ...]]:
    """A random transform of every space, and the streams to be folded for it."""
    transforms: Transforms = {}
    folded = []
    for name, space in found.spaces().items():
        if space.kind != "stream":
            transforms[name] = admitted(space, wanted).random(gen())
        elif (kind := found.stream_groups[name][-1]) != "none":
            transforms[name] = found.stream_group(name, kind).random(gen())
            folded += [name] if kind == "rotation" else []
    return transforms, tuple(folded)


@pytest.mark.parametrize("name", NAMES)
def test_members_pass(name: str) -> None:
    found = architecture(name)
    for wanted in (GroupOptions(heads="permutation"), WIDEST):
        for space, transform in everything(found, wanted)[0].items():
            described = found.spaces()[space]
            if described.kind != "stream":
                assert admitted(described, WIDEST).admits(transform)
                assert admitted(described, WIDEST).admits(transform.inverse().compose(transform))


@pytest.mark.parametrize("name", NAMES)
def test_everything_else_is_refused(name: str, tmp_path: Path) -> None:
    """What is wrong in one space is in no group of it."""
    found = architecture(name)
    transforms, folded = everything(found, WIDEST)
    save_for(tmp_path / "whole", Alignment(transforms, folded), found, "a", "b")
    assert load_file(tmp_path / "whole", found).transforms.keys() == transforms.keys()
    kinds = {transform.kind: space for space, transform in transforms.items()}
    for space in kinds.values():
        good = transforms[space]
        for part, element in good.elements.items():
            for bad in broken(element):
                torn = replace(good, elements={**good.elements, part: bad})
                assert not found.widest_group(found.spaces()[space], torn).admits(torn)


@pytest.mark.parametrize("name", ["llama-llama", "bert-classifier", "gpt_neox-parallel", "mixtral-mixtral"])
def test_a_turned_stream_under_layer_norm(name: str) -> None:
    found = architecture(name if name in NAMES else next(n for n in NAMES if n.startswith(name.split("-")[0])))
    for stream, groups in found.stream_groups.items():
        if "rotation" in groups:
            size = found.streams[stream].sizes["size"]
            turned = stream_group("rotation", size, fixes_ones=False).random(gen())
            assert found.stream_group(stream, "rotation").admits(turned) != found.layer_normed(stream)
