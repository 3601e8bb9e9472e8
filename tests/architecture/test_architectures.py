"""The contract of every architecture file: what it declares is a symmetry of the real transformers model, and it
declares everything."""

from __future__ import annotations

import contextlib

import pytest
import torch
from tiny_models import ALL, Case, planted
from variants import ONE

from rotation_merge import AlignConfig, RotationMergeError
from rotation_merge.architecture import families, registry
from rotation_merge.architecture.schema import OUTSIDE, ArchitectureSpec
from rotation_merge.diagnose.proof import LOCAL, MISTAKES, changed, mistake_is_visible


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "gpt_neox", "t5"])
def test_permutations_inside_heads_are_symmetries(family: str) -> None:
    """`attention: permutation`: both sides where rotary embedding leaves coordinates, else values, gates with them."""
    model = planted(next(case for case in ALL if case.family == family))
    options = AlignConfig(attention="permutation", ffn="none", scaling=False)
    after = model.twin(options)
    assert model.differs(after) <= 1e-9
    still = {i.name for i in model.architecture.tensors() if torch.equal(after[i.name], model.state[i.name])}
    roles = {p.role for i in model.architecture.tensors() if i.name not in still for a in i.axes for p in a.parts}
    assert {"v", "o"} <= roles
    assert ("k" in roles) == (family != "llama")


@pytest.mark.parametrize("case", ALL, ids=lambda case: f"{case.family}-{case.name}")
def test_every_tensor_is_covered_and_every_axis_labelled(case: Case) -> None:
    """(d) and (e): nothing of the checkpoint is unknown; each axis is of a space, or explicitly of none."""
    model = planted(case)
    state, architecture = model.state, model.architecture
    named = architecture.named()
    assert architecture.family == case.family
    assert set(state) == set(named)
    for info in architecture.tensors():
        shape = list(state[info.name].shape)
        assert len(info.axes) == len(shape) + info.stacked, info.name
        assert all(axis.parts or axis.label in OUTSIDE for axis in info.axes), info.name
    for block in architecture.blocks:
        used = {space.name for info in block.tensors for space in info.spaces()}
        assert {space.name for space in block.spaces.values()} <= used, block.name
    for stream, output in architecture.handed_out.items():
        assert any(output in name.split(".") for name in model.expected), f"{stream} is handed out as {output}"


@pytest.mark.slow
@pytest.mark.parametrize("case", ONE, ids=lambda case: case.family)
def test_a_wrong_file_is_found_out(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """(b): the same test fails for a wrong head count and, where they matter, for other mistakes in a file."""
    model = planted(case)
    right = families()[case.family].model_dump()
    for change in MISTAKES.values():
        if not mistake_is_visible(change, model.architecture):
            continue
        monkeypatch.setitem(registry._extra, case.family, ArchitectureSpec.model_validate(changed(right, change)))
        with contextlib.suppress(RotationMergeError):
            assert model.differs(model.twin(LOCAL)) > 1e-6, change.__name__


def test_every_family_has_a_tiny_model() -> None:
    assert {case.family for case in ALL} == set(families())
