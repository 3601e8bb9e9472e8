"""The contract of every architecture file: what it declares is a symmetry of the real transformers model, and it
declares everything."""

from __future__ import annotations

import contextlib

import pytest
import torch
from tiny_models import ALL, Case, Planted, difference, further, outputs, planted, twin_of

import rotation_merge as rm
from rotation_merge import AlignConfig, RotationMergeError
from rotation_merge.architecture import Architecture, families, registry, resolve
from rotation_merge.architecture.schema import OUTSIDE, ArchitectureSpec
from rotation_merge.diagnose.proof import LOCAL, MISTAKES, changed, mistake_is_visible

by_case = pytest.mark.parametrize("case", ALL, ids=lambda case: f"{case.family}-{case.name}")

RESIDUAL = ("permutation", "signed_permutation")


def must_move(architecture: Architecture, residual: str, scaling: bool = True) -> set[str]:
    """Tensors that a random gauge cannot leave alone: values, outputs, neurons, gains of queries and keys, and what
    touches a moved stream."""
    routers = {info.name for info in architecture.tensors() if info.common is not None and not info.common.head}
    roles = {"v", "o", "in", "out"} | ({"q_norm", "k_norm", "q_gain", "k_gain"} if scaling else set())
    streams = {name for name, groups in architecture.stream_groups.items() if residual != "none" and residual in groups}
    return routers | {
        info.name
        for info in architecture.tensors()
        for axis in info.axes
        for part in axis.parts
        if (part.role in roles and part.space.values != "fixed") or part.space.name in streams
    }


def where_admitted(architecture: Architecture, group: str) -> str:
    """The option that moves by a group the streams that admit it."""
    return ",".join(f"{name}={group}" for name, groups in architecture.stream_groups.items() if group in groups)


def unmoved(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in before if torch.equal(after[name], before[name])]


@by_case
def test_declared_groups_are_symmetries(case: Case) -> None:
    """(a): a random element of every declared group moves weights and leaves float64 outputs within 1e-9."""
    model = planted(case)
    groups = {group for admitted in model.architecture.stream_groups.values() for group in admitted}
    options = {("none", "local"): LOCAL} | {
        (group, group): AlignConfig(residual=where_admitted(model.architecture, group))
        for group in RESIDUAL
        if group in groups
    }
    for (residual, what), option in options.items():
        after = model.twin(option)
        moves = must_move(model.architecture, residual, bool(option.scaling))
        assert not moves.intersection(unmoved(model.state, after)), what
        assert model.differs(after) <= 1e-9, what
    if model.rotatable:
        _rotations_of_folded_streams_are_symmetries(model.untied)


def _rotations_of_folded_streams_are_symmetries(model: Planted) -> None:
    """Gains folded into the readers, writers centred under LayerNorm; then folding alone, and a random rotation."""
    architecture, streams = model.architecture, model.architecture.folds(dict.fromkeys(model.rotatable, "rotation"))
    drawn = rm.Alignment.random(model.pair, seed=5, residual=where_admitted(architecture, "rotation"))
    assert drawn.folded == streams
    alone = drawn.apply_anchor(model.pair).state_dict()
    assert unmoved(model.state, alone) != list(model.state)
    assert model.differs(alone) <= 1e-9
    gains = [(b.tensor(n.gain), n.offset) for b in architecture.blocks for n in b.norms if n.stream in streams]
    assert all(bool((alone[i.name] + offset == 1).all()) for i, offset in gains if i is not None and i.name in alone)
    after = drawn.apply(model.pair).state_dict()
    assert set(after) == set(model.state)
    assert not must_move(architecture, "rotation").intersection(unmoved(model.state, after))
    assert model.differs(after) <= 1e-9


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "qwen3_5", "t5"])
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


@pytest.mark.parametrize("case", further(), ids=lambda case: f"{case.family}-{case.name}")
def test_every_class_that_a_file_names(case: Case) -> None:
    """Heads of every kind: the local groups are symmetries, and nothing is unknown."""
    model = planted(case)
    after = model.twin(heads="permutation", residual=where_admitted(model.architecture, "permutation") or "none")
    assert not must_move(model.architecture, "permutation").intersection(unmoved(model.state, after))
    assert model.differs(after) <= 1e-9


@by_case
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


@by_case
def test_names_of_a_loaded_module_work_too(case: Case) -> None:
    """transformers may name (and fuse) the tensors of a loaded model otherwise than those of its checkpoint.

    First without rescaling, so that heads are moved by elements of O(d) alone; then neurons with it, which tells rows
    that are multiplied from gates.
    """
    found = planted(case)
    model, given = found.made, found.given
    expected = outputs(model, given)
    config = {**model.config.to_dict(), "architectures": [case.class_name]}
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    architecture = resolve(config, list(before), case.name)
    after = twin_of((before, config), heads="permutation", scaling=False)
    assert not must_move(architecture, "none", False).intersection(unmoved(before, after))
    model.load_state_dict(after)
    assert difference(outputs(model, given), expected) <= 1e-9
    model.load_state_dict(twin_of((before, config), attention="none"))
    assert difference(outputs(model, given), expected) <= 1e-9
    model.load_state_dict(before)


@by_case
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
