"""What an alignment file holds is proven: members of every space of every architecture pass, nothing else does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

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


def architecture_of(case: tiny.Case) -> Architecture:
    config = {**case.model_class.config_class(**case.config).to_dict(), "architectures": [case.class_name]}
    spec = find(config)
    assert spec is not None
    return build(spec, config, spec.bases[0], spec.spellings[0])


def gen() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def everything(architecture: Architecture, options: GroupOptions) -> Transforms:
    """A random transform of every space."""
    transforms: Transforms = {}
    for name, space in architecture.spaces().items():
        if space.kind != "stream":
            transforms[name] = admitted(space, options).random(gen())
        elif (kind := architecture.stream_groups[name][-1]) != "none":
            transforms[name] = architecture.stream_group(name, kind).random(gen())
    return transforms


@pytest.mark.parametrize("case", tiny.ALL, ids=lambda case: f"{case.family}-{case.name}")
def test_members_pass_and_what_is_wrong_in_one_space_is_refused(case: tiny.Case, tmp_path: Path) -> None:
    architecture = architecture_of(case)
    spaces = architecture.spaces()
    for options in (GroupOptions(heads="permutation"), WIDEST):
        transforms = everything(architecture, options)
        for name, transform in transforms.items():
            if spaces[name].kind != "stream":
                assert admitted(spaces[name], WIDEST).admits(transform)
                assert admitted(spaces[name], WIDEST).admits(transform.inverse().compose(transform))
    rotated = tuple(name for name, groups in architecture.stream_groups.items() if groups[-1] == "rotation")
    save_for(tmp_path / "whole", Alignment(transforms, rotated), architecture, "a", "b")
    assert load_file(tmp_path / "whole", architecture).transforms.keys() == transforms.keys()
    for name in {transform.kind: name for name, transform in transforms.items()}.values():
        for part, element in transforms[name].elements.items():
            for bad in broken(element):
                torn = replace(transforms[name], elements={**transforms[name].elements, part: bad})
                assert not architecture.widest_group(spaces[name], torn).admits(torn)
    for stream in rotated:
        turned = stream_group("rotation", architecture.streams[stream].sizes["size"], fixes_ones=False).random(gen())
        assert architecture.stream_group(stream, "rotation").admits(turned) != architecture.layer_normed(stream)
