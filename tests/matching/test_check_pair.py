"""What pairs of models are refused for and warned of, over all families; every path asks (test_only_way_in.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tiny_models import ALL, Case, Planted, planted
from variants import FIRST

import rotation_merge as rm

STILL: dict[str, Any] = {"attention": "none", "heads": "none", "ffn": "none", "scaling": False}
SOME = [case for case in ALL if case in FIRST or "tie_word_embeddings" in case.config]
by_case = pytest.mark.parametrize("case", SOME, ids=lambda case: f"{case.family}-{case.name}")


def itself(model: Any, untie: bool = False, **options: Any) -> rm.Alignment:
    """What a model may do that meets itself."""
    return rm.Alignment.random(model, untie=untie, **options)


def told(model: Planted, **changes: Any) -> list[str]:
    """What is said of a model against one whose config differs."""
    report = rm.align(model.pair, (model.state, {**model.config, **changes}), **STILL).report
    return [note for note in report.notes if "against" in note]


# --- tied heads


@pytest.mark.slow
@by_case
def test_laws_of_pairs(case: Case) -> None:
    """What is true of every model met by another that lacks a tensor, or ties its head."""
    a_tied_head_forbids_rotations(case)
    what_one_lacks_may_not_stay_behind(case)


def a_tied_head_forbids_rotations(case: Case) -> None:
    """Stored or not, what the config ties is one parameter: folding cannot serve it as a head and as an embedding."""
    model = planted(case)
    head, stream = model.tied or ("", "")
    if stream not in model.rotatable:
        return
    own = model.untied
    for state in (model.state, own.state):
        one = state, model.config
        alone = len(model.architecture.streams) > len(model.rotatable)
        for asked in [f"{stream}=rotation", *([] if alone else ["rotation"])]:
            with pytest.raises(
                rm.RotationMergeError, match=rf"'{head}' is tied .*untie: true.*residual: \w*permutation"
            ):
                itself(one, residual=asked)
        assert stream not in itself(one, residual="largest", **STILL).folded
        freed = itself(one, untie=True, residual="largest", **STILL).folded
        assert freed[: len(model.rotatable)] == model.rotatable
    assert itself(own.pair, residual="largest", **STILL).folded[: len(model.rotatable)] == model.rotatable


# --- stored extras


def what_one_lacks_may_not_stay_behind(case: Case) -> None:
    """Every tensor with an axis in a local space, left out of either model, is refused, or the model is incomplete."""
    model = planted(case)
    local = {
        info.name: info
        for info in model.architecture.tensors()
        if info.optional and any(part.space.kind != "stream" for axis in info.axes for part in axis.parts)
    }
    for name in list(local)[:3]:
        other = {key: tensor for key, tensor in model.state.items() if key not in local[name].names}, model.config
        if incomplete(other):
            continue
        for first, second in ((model.pair, other), (other, model.pair)):
            with pytest.raises(rm.RotationMergeError, match=r"is missing, (anchor|donor) has it"):
                rm.align(first, second, heads="permutation", residual="largest")


def incomplete(model: Any) -> bool:
    """Whether a model is refused by itself."""
    try:
        rm.average([model])
    except rm.RotationMergeError:
        return True
    return False


# --- configs that differ


QUESTIONABLE: dict[str, tuple[str, dict[str, Any]]] = {
    "rope_parameters.rope_theta": ("llama", {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}),
    "rms_norm_eps": ("llama", {"rms_norm_eps": 1e-3}),
    "max_position_embeddings": ("llama", {"max_position_embeddings": 4096}),
    "hidden_act": ("bert", {"hidden_act": "gelu_new"}),
    "tie_word_embeddings": ("t5", {"tie_word_embeddings": False}),
}


@pytest.mark.parametrize("name", QUESTIONABLE)
def test_what_makes_a_merge_questionable_is_a_warning(name: str) -> None:
    family, change = QUESTIONABLE[name]
    model = planted(next(case for case in ALL if case.family == family))
    assert not told(model)
    assert any(f"'{name}' is " in line for line in told(model, **change)), told(model, **change)


def test_a_module_that_transformers_read_from_gguf_is_of_floats(tmp_path: Path) -> None:
    """Its config names the file's codes, its weights are none, and it is written without; codes that it kept are
    refused as any others."""
    model = planted(next(case for case in ALL if case.family == "llama"))
    config = {**model.config, "quantization_config": {"quant_method": "gguf", "gguf_file": "model.Q4_1.gguf"}}
    donor = model.twin(), config
    moved = rm.align((model.state, config), donor).apply(donor)
    assert all(torch.allclose(moved[name], tensor) for name, tensor in model.state.items())
    moved.save_pretrained(tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    kept = {**model.state, "model.layers.0.mlp.up_proj.weight": torch.zeros(48, 36, dtype=torch.uint8)}
    with pytest.raises(rm.RotationMergeError, match=r"quantised \(uint8"):
        rm.align((kept, config), donor)


# --- residual by stream


def test_residual_by_stream_and_the_largest() -> None:
    case = next(case for case in ALL if case.class_name == "Qwen2_5_VLForConditionalGeneration")
    model = planted(case)
    first, second = admitted = model.architecture.stream_groups
    assert [admitted[name][-1] for name in (first, second)] == ["rotation"] * 2
    for asked, wanted in (("largest", "rotation"), (f"{first}=permutation", f"{first}=permutation")):
        report = rm.align(model.pair, model.pair, residual=asked, **STILL).report
        assert yaml.safe_load(report.recipe)["residual"] == wanted
    with pytest.raises(rm.RotationMergeError, match=r"no stream 'nosuch'; "):
        itself(model.pair, residual="nosuch=permutation")
    with pytest.raises(rm.RotationMergeError, match="option 'residual'"):
        rm.AlignConfig(residual=f"{first}=turning")


@by_case
def test_the_largest_groups_leave_outputs_alone(case: Case) -> None:
    """Through the Python API: a twin is moved back under `largest`, each stream by its own group, outputs kept."""
    model = planted(case)
    if case.images or len(model.architecture.stream_groups) < 2:
        return
    other = {name: tensor + 0.3 * torch.randn_like(tensor) for name, tensor in model.state.items()}
    anchor, donor = (other, model.config), (model.state, model.config)
    alignment = rm.align(anchor, donor, residual="largest", heads="permutation")
    assert model.differs(alignment.apply(donor).state_dict()) <= 1e-9
