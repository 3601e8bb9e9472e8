"""A text-only donor for the language half of a model that sees: that half is merged, the rest stays the anchor's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from cli_support import parsed, run
from plugin_support import merged, one_error, recipe_for, state
from tiny_models import ALL, Case, difference, inputs, load, make, outputs, save

import rotation_merge

TEXT = {
    "gemma3_vlm": "Gemma3ForCausalLM",
    "mistral3": "MistralForCausalLM",
    "qwen2_5_vl": "Qwen2ForCausalLM",
    "qwen3_vl": "Qwen3ForCausalLM",
    "llava": "LlamaForCausalLM",
    "internvl": "Qwen2ForCausalLM",
    "gemma4_vlm": "Gemma4ForCausalLM",
    "qwen3_5_vlm": "Qwen3_5ForCausalLM",
    "llama4_vlm": "Llama4ForCausalLM",
}
"""Text-only classes with the layers of the language halves."""


def wrapper(family: str) -> Case:
    fits = [case for case in ALL if case.family == family and case.class_name.endswith("ConditionalGeneration")]
    kind = TEXT[family].removesuffix("ForCausalLM").lower()
    return next((c for c in fits if c.config["text_config"].get("model_type", kind).startswith(kind)), fits[0])


def text_of(anchor: Path, case: Case, where: Path) -> Path:
    """The anchor's language half as a text-only checkpoint of its own, its weights in other coordinates."""
    kind = getattr(transformers, TEXT[case.family])
    whole = load(case, anchor).float()
    words = {k: v for k, v in whole.config.text_config.to_dict().items() if k not in ("model_type", "architectures")}
    model = kind(kind.config_class(**{**words, "tie_word_embeddings": whole.config.tie_word_embeddings}))
    half = whole.language_model if hasattr(whole, "language_model") else whole  # Llama 4's has a head of its own
    body = half.model if half is not whole else whole.model.language_model
    own = {"model." + name: x for name, x in body.state_dict().items()}
    known = model.state_dict()
    missing, odd = model.load_state_dict({**own, "lm_head.weight": half.lm_head.weight}, strict=False)
    assert not missing
    assert not odd
    assert known.keys() == model.state_dict().keys()
    model.save_pretrained(where / "plain")
    twin = rotation_merge.Alignment.random(where / "plain", heads="permutation", seed=3)
    twin.apply(where / "plain").save_pretrained(where / "text")
    return where / "text"


@pytest.mark.slow
@pytest.mark.parametrize("family", TEXT)
def test_a_text_only_twin_is_recovered(family: str, tmp_path: Path) -> None:
    """Merged with its wrapper it gives the wrapper back, every tensor of the other half bit for bit; with a note."""
    case = wrapper(family)
    model = make(case).float()
    _, before = save(model, tmp_path / "anchor")
    donor = text_of(tmp_path / "anchor", case, tmp_path)
    result = merged(recipe_for("linear", tmp_path / "anchor", donor), tmp_path / "out")
    assert set(result) == set(before)
    told = json.loads(run("doctor", tmp_path / "out", tmp_path / "anchor", donor, "--json").stdout)
    assert not [cause for cause in told["causes"] if str(cause["where"]).startswith(str(tmp_path / "out"))]
    blocks = rotation_merge.average([tmp_path / "anchor"]).architecture.blocks
    words = {name for block in blocks if block.module == "text" for info in block.tensors for name in info.names}
    assert any(not torch.equal(result[name], before[name]) for name in words)
    for name, tensor in before.items():
        if name in words:
            assert (result[name] - tensor).norm() <= 1e-5 * tensor.norm(), name
        else:
            assert torch.equal(result[name], tensor), name
    given = inputs(case, model)
    expected = outputs(load(case, tmp_path / "anchor"), given)
    assert difference(outputs(load(case, tmp_path / "out"), given), expected) <= 1e-3
    assert "is text only" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.slow
def test_commands_and_the_library_take_it_too(tmp_path: Path) -> None:
    """`align` writes a whole model that answers to text as the donor does; `rotation_merge.align` gives the half."""
    case = wrapper("qwen3_vl")
    save(make(case).float(), tmp_path / "anchor")
    donor = text_of(tmp_path / "anchor", case, tmp_path)
    done = parsed("align", tmp_path / "anchor", donor, tmp_path / "out", "--heads", "permutation")
    assert done["proof"]["difference"] <= done["proof"]["allowed"]
    assert done["after"] <= 1e-3 < done["before"]
    assert state(tmp_path / "out").keys() == state(tmp_path / "anchor").keys()
    model = transformers.Qwen3ForCausalLM.from_pretrained(donor)
    whole = load(case, tmp_path / "anchor").float()
    alignment = rotation_merge.align(whole, model, heads="permutation")
    aligned = alignment.apply(model).state_dict()
    assert aligned.keys() <= model.state_dict().keys()
    own = whole.model.language_model.state_dict()
    assert all((aligned["model." + name] - x).norm() <= 1e-5 * x.norm() for name, x in own.items())
    assert any("text only" in note for note in alignment.report.notes)


def test_another_family_is_none(tmp_path: Path) -> None:
    """Layers of another kind are refused as before, and other sizes by what differs."""
    case = wrapper("gemma3_vlm")
    save(make(case).float(), tmp_path / "anchor")
    other = run("align", tmp_path / "anchor", plain("llama", tmp_path / "llama"), tmp_path / "out")
    assert "architecture is llama, that of" in one_error(other.output)
    other = run("align", tmp_path / "anchor", plain("gemma", tmp_path / "gemma"), tmp_path / "out")
    assert other.exit_code == 2
    assert not (tmp_path / "out").exists()


def plain(kind: str, where: Path) -> Path:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"num_hidden_layers": 2, "vocab_size": 60, "pad_token_id": 0, "head_dim": 8}
    found = {"llama": transformers.LlamaForCausalLM, "gemma": transformers.Gemma3ForCausalLM}[kind]
    found(found.config_class(**sizes)).save_pretrained(where)
    return where
