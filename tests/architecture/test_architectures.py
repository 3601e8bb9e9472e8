"""The contract of every architecture file: what it declares is a symmetry of the real transformers model, and it
declares everything."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from plugin_support import build as small
from tiny_models import ALL, Case, make, planted
from variants import ONE

import rotation_merge as rm
from rotation_merge.architecture import families, registry
from rotation_merge.architecture.schema import OUTSIDE, ArchitectureSpec
from rotation_merge.diagnose.proof import LOCAL, MISTAKES, changed, mistake_is_visible
from rotation_merge.symmetry.admitted import stream_group

by_case = pytest.mark.parametrize("case", ALL, ids=lambda case: f"{case.family}-{case.name}")
by_family = pytest.mark.parametrize("case", ONE, ids=lambda case: case.family)


def test_every_family_has_a_tiny_model() -> None:
    assert {case.family for case in ALL} == set(families())


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "gpt_neox", "t5"])
def test_permutations_inside_heads_are_symmetries(family: str) -> None:
    """`attention: permutation`: both sides where rotary embedding leaves coordinates, else values, gates with them."""
    model = planted(next(case for case in ALL if case.family == family))
    options = rm.AlignConfig(attention="permutation", ffn="none", scaling=False)
    after = model.twin(options)
    assert model.differs(after) <= 1e-9
    still = {i.name for i in model.architecture.tensors() if torch.equal(after[i.name], model.state[i.name])}
    roles = {p.role for i in model.architecture.tensors() if i.name not in still for a in i.axes for p in a.parts}
    assert {"v", "o"} <= roles
    assert ("k" in roles) == (family != "llama")


@by_case
def test_every_tensor_is_covered_and_every_axis_labelled(case: Case) -> None:
    """Nothing of the checkpoint is unknown; each axis is of a space, or explicitly of none."""
    model = planted(case)
    state, architecture = model.state, model.architecture
    assert architecture.family == case.family
    assert set(state) == set(architecture.named())
    for info in architecture.tensors():
        assert len(info.axes) == state[info.name].ndim + info.stacked, info.name
        assert all(axis.parts or axis.label in OUTSIDE for axis in info.axes), info.name
    for block in architecture.blocks:
        used = {space.name for info in block.tensors for space in info.spaces()}
        assert {space.name for space in block.spaces.values()} <= used, block.name
    for stream, output in architecture.handed_out.items():
        assert any(output in name.split(".") for name in model.expected), f"{stream} is handed out as {output}"


@pytest.mark.slow
@by_family
def test_a_wrong_file_is_found_out(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same test fails for a wrong head count and, where they matter, for other mistakes in a file."""
    model = planted(case)
    known = families()
    for change in MISTAKES.values():
        if not mistake_is_visible(change, model.architecture):
            continue
        wrong = ArchitectureSpec.model_validate(changed(known[case.family].model_dump(), change))
        monkeypatch.setattr(registry, "families", lambda wrong=wrong: {**known, case.family: wrong})
        with contextlib.suppress(rm.RotationMergeError):
            assert model.differs(model.twin(LOCAL)) > 1e-6, change.__name__


# --- what an alignment file may hold -----------------------------------------------------------------------------


@by_family
def test_a_file_holds_every_transform_and_streams_admit_what_they_name(case: Case, tmp_path: Path) -> None:
    """Where norms subtract the mean, no rotation that moves the all-ones vector."""
    model, generator = planted(case), torch.Generator().manual_seed(0)
    alignment = rm.Alignment.random(model.pair, heads="permutation", residual="largest")
    alignment.save(tmp_path / "map")
    assert rm.Alignment.load(tmp_path / "map").transforms.keys() == alignment.transforms.keys()
    for name, stream in model.architecture.streams.items():
        for kind in model.architecture.stream_groups[name]:
            drawn = model.architecture.stream_group(name, kind).random(generator)
            assert model.architecture.widest_group(stream, drawn).admits(drawn)
        if name in model.rotatable:
            turned = stream_group("rotation", stream.sizes["size"], fixes_ones=False).random(generator)
            assert model.architecture.stream_group(name, "rotation").admits(turned) != (
                model.architecture.layer_normed(name)
            )


# --- configs that say something else than the tensors ------------------------------------------------------------

ENDLESS = 400_000_000


def counts(config: Any, entry: str = "") -> Iterator[str]:
    """The entries of a config that count layers or experts, by their paths."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from counts(value, f"{entry}{name}.")
        elif type(value) is int and value > 0 and re.fullmatch(r"(n|.*_layers?|.*_experts|depth)", name):
            yield entry + name


@pytest.mark.usefixtures("soon")
@by_family
def test_no_architecture_is_laid_out_beyond_its_tensors(case: Case) -> None:
    """Layers and experts are counted before they are made."""
    model = make(case)
    config = {**model.config.to_dict(), "architectures": [case.class_name]}
    refused = []
    for entry in counts(config):
        spoilt = copy.deepcopy(config)
        part = spoilt
        *steps, last = entry.split(".")
        for step in steps:
            part = part[step]
        part[last] = ENDLESS
        try:
            rm.average([(model.state_dict(), spoilt)])
        except rm.RotationMergeError as error:
            refused.append(str(error))
    assert any(str(ENDLESS) in line for line in refused) or case.family == "nemotron_h"  # which lists its layers


FLAGS = ("attention_bias", "qkv_bias", "use_qkv_bias", "mlp_bias", "use_bias", "bias")
PROMISING = [case for case in ALL if any(case.config.get(flag) for flag in FLAGS)]
WORDS = "is true, but no such bias is stored for"


@pytest.mark.parametrize("case", PROMISING, ids=lambda case: f"{case.family}-{case.name}")
def test_models_that_transformers_makes_keep_the_promise_of_biases(case: Case) -> None:
    """Also where only some of the linear maps have a bias; without their biases some of the promise is broken."""
    model = case.model_class(case.model_class.config_class(**case.config))
    state, config = model.state_dict(), {**model.config.to_dict(), "architectures": [case.class_name]}
    bare = {name: tensor for name, tensor in state.items() if not name.endswith(".bias")}
    notes = [" ".join(rm.Alignment.random((tensors, config)).notes) for tensors in (state, bare)]
    assert [WORDS in text for text in notes] == [False, True]


@pytest.mark.parametrize("order", [1, -1])
def test_biases_that_are_not_there_are_told_of_an_anchor_and_of_a_donor(order: int) -> None:
    models = [(model.state_dict(), model.config.to_dict()) for model in (small("llama"), small("llama", 1))]
    models[1][1]["attention_bias"] = True
    report = rm.align(*models[::order]).report
    assert report is not None
    assert any(f"'attention_bias' {WORDS}" in note for note in report.notes)
