"""The contract of every architecture file: what it declares is a symmetry of the real transformers model, and it
declares everything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import ALL, Case, difference, foldable, further, inputs, make, outputs, reload, save

from rotation_merge.architectures import Architecture, families, registry, resolve
from rotation_merge.architectures.schema import OUTSIDE, ArchitectureSpec
from rotation_merge.errors import RotationMergeError
from rotation_merge.matching.gauge import random_gauge
from rotation_merge.matching.model import Alignment, aligned_tensors
from rotation_merge.matching.options import MatchOptions
from rotation_merge.matching.state import transform_state

by_case = pytest.mark.parametrize("case", ALL, ids=lambda case: f"{case.family}-{case.name}")

LOCAL = {
    "heads, neurons and experts": MatchOptions(heads="permutation"),
    "invertible maps": MatchOptions(attention="invertible", rescale=False),
}
RESIDUAL = ("permutation", "signed_permutation")


def moved(
    config: dict[str, Any], state: dict[str, torch.Tensor], options: MatchOptions, name: str, seed: int = 5
) -> Any:
    architecture = resolve(config, list(state), name)
    return transform_state(
        architecture, state, random_gauge(architecture, options, torch.Generator().manual_seed(seed))
    )


def must_move(architecture: Architecture, residual: str) -> set[str]:
    """Tensors that a random gauge cannot leave alone: values, outputs, neurons, and what touches a moved stream."""
    roles = {"v", "o", "in", "out"}
    streams = {name for name, groups in architecture.stream_groups.items() if residual != "none" and residual in groups}
    return {
        info.name
        for info in architecture.tensors()
        for axis in info.axes
        for part in axis.parts
        if (part.role in roles and part.space.values != "fixed") or part.space.name in streams
    }


def unmoved(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in before if torch.equal(after[name], before[name])]


@by_case
def test_declared_groups_are_symmetries(case: Case, tmp_path: Path) -> None:
    """(a): a random element of every declared group moves weights and leaves float64 outputs within 1e-9."""
    model = make(case)
    given = inputs(case, model)
    config, state = save(model, tmp_path)
    expected = outputs(reload(case, tmp_path, state), given)
    architecture = resolve(config, list(state), case.name)
    groups = {group for admitted in architecture.stream_groups.values() for group in admitted}
    options = LOCAL | {group: MatchOptions(residual=group) for group in RESIDUAL if group in groups}
    for what, option in options.items():
        after = moved(config, state, option, case.name)
        assert not must_move(architecture, option.residual).intersection(unmoved(state, after)), what
        assert difference(outputs(reload(case, tmp_path, after), given), expected) <= 1e-9, what


@pytest.mark.parametrize("case", further(), ids=lambda case: f"{case.family}-{case.name}")
def test_every_class_that_a_file_names(case: Case, tmp_path: Path) -> None:
    """Heads of every kind: the local groups are symmetries, and nothing is unknown."""
    model = make(case)
    given = inputs(case, model)
    config, state = save(model, tmp_path)
    expected = outputs(reload(case, tmp_path, state), given)
    architecture = resolve(config, list(state), case.name)
    residual = "permutation" if any(len(groups) > 1 for groups in architecture.stream_groups.values()) else "none"
    after = moved(config, state, MatchOptions(heads="permutation", residual=residual), case.name)
    assert not must_move(architecture, residual).intersection(unmoved(state, after))
    assert difference(outputs(reload(case, tmp_path, after), given), expected) <= 1e-9


@by_case
def test_every_tensor_is_covered_and_every_axis_labelled(case: Case, tmp_path: Path) -> None:
    """(d) and (e): nothing of the checkpoint is unknown; each axis is of a space, or explicitly of none."""
    config, state = save(make(case), tmp_path)
    architecture = resolve(config, list(state), case.name)
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


@by_case
def test_names_of_a_loaded_module_work_too(case: Case) -> None:
    """transformers may name (and fuse) the tensors of a loaded model otherwise than those of its checkpoint.

    Without rescaling, so that heads are moved by elements of O(d) alone.
    """
    model = make(case)
    given = inputs(case, model)
    expected = outputs(model, given)
    config = {**model.config.to_dict(), "architectures": [case.class_name]}
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    after = moved(config, before, MatchOptions(heads="permutation", rescale=False), case.name)
    assert not must_move(resolve(config, list(before), case.name), "none").intersection(unmoved(before, after))
    model.load_state_dict(after)
    assert difference(outputs(model, given), expected) <= 1e-9


def wrong_heads(entry: Any) -> Any:
    """Half as many heads, twice as wide."""
    if entry.get("kind") != "attention":
        return entry
    halves = {key: f"({entry[key]}) // 2" for key in ("heads", "kv_heads") if entry[key] is not None}
    return {**entry, **halves, "head_dim": f"({entry['head_dim']}) * 2"}


def wrong_rotary(entry: Any) -> Any:
    """The other layout of RoPE pairs."""
    if "layout" not in entry:
        return entry
    return {**entry, "layout": "half" if entry["layout"] == "interleaved" else "interleaved"}


def wrong_split(entry: Any) -> Any:
    """The parts of fused tensors the other way round."""
    return {key: value[::-1] if key in ("split", "interleave") and value else value for key, value in entry.items()}


def changed(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return change({key: changed(item, change) for key, item in value.items()})
    return [changed(item, change) for item in value] if isinstance(value, list) else value


def matters(case: Case, change: Callable[[Any], Any], architecture: Any) -> bool:
    """Whether this mistake can show: in some models there is nothing to get wrong."""
    if change is wrong_heads:
        return True
    if change is wrong_rotary:
        spaces = [s for block in architecture.blocks for s in block.spaces.values() if s.kind == "attention"]
        return any(s.rotary > 2 and s.norm not in ("layer_head", "affine_head") for s in spaces)
    fused = [axis.parts for info in architecture.tensors() for axis in info.axes if len(axis.parts) > 1]
    return any(parts != parts[::-1] for parts in fused)


@by_case
def test_rotations_of_folded_streams_are_symmetries(case: Case, tmp_path: Path) -> None:
    """(a), for the largest residual group: gains folded into the readers, writers centred under LayerNorm."""
    model = foldable(case, tmp_path)
    gauge = random_gauge(model.architecture, MatchOptions(residual="rotation"), torch.Generator().manual_seed(5))
    after = dict(aligned_tensors(model.architecture, model.state, Alignment(gauge, model.streams)))
    assert set(after) == set(model.state)
    assert not must_move(model.architecture, "rotation").intersection(unmoved(model.state, after))
    assert model.differs(after) <= 1e-9


@pytest.mark.parametrize("change", [wrong_heads, wrong_rotary, wrong_split], ids=lambda change: change.__name__)
@by_case
def test_a_wrong_file_is_found_out(
    case: Case, change: Callable[[Any], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(b): the same test fails for a wrong head count, rotary layout or split."""
    model = make(case)
    given = inputs(case, model)
    config, state = save(model, tmp_path)
    expected = outputs(reload(case, tmp_path, state), given)
    if not matters(case, change, resolve(config, list(state), case.name)):
        pytest.skip("nothing to get wrong here")
    wrong = changed(families()[case.family].model_dump(), change)
    monkeypatch.setitem(registry._extra, case.family, ArchitectureSpec.model_validate(wrong))
    try:
        after = moved(config, state, LOCAL["heads, neurons and experts"], case.name)
    except RotationMergeError:
        return
    assert difference(outputs(reload(case, tmp_path, after), given), expected) > 1e-6


def test_every_family_has_a_tiny_model() -> None:
    assert {case.family for case in ALL} == set(families())
