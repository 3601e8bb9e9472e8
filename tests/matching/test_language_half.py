"""A text-only donor for the language half of a model that sees: that half is merged, the rest stays the anchor's."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest
import torch
import transformers
from cli_support import error_of, parsed, run
from plugin_support import make as make_llama
from plugin_support import merged, recipe_for, state
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


def twins(case: Case, folder: Path) -> tuple[Path, Path, dict[str, torch.Tensor]]:
    """A wrapper and its language half as a text-only checkpoint in other coordinates; and the wrapper's tensors."""
    model = make(case).float()
    _, before = save(model, folder / "anchor")
    kind, whole = getattr(transformers, TEXT[case.family]), load(case, folder / "anchor").float()
    words = {k: v for k, v in whole.config.text_config.to_dict().items() if k not in ("model_type", "architectures")}
    text = kind(kind.config_class(**{**words, "tie_word_embeddings": whole.config.tie_word_embeddings}))
    half = whole.language_model if hasattr(whole, "language_model") else whole  # Llama 4's has a head of its own
    body = half.model if half is not whole else whole.model.language_model
    own = {"model." + name: x for name, x in body.state_dict().items()}
    text.load_state_dict({**own, "lm_head.weight": half.lm_head.weight})
    text.save_pretrained(folder / "plain")
    twin = rotation_merge.Alignment.random(folder / "plain", heads="permutation", seed=3)
    twin.apply(folder / "plain").save_pretrained(folder / "text")
    return folder / "anchor", folder / "text", before


@pytest.mark.slow
@pytest.mark.parametrize("family", TEXT)
def test_a_text_only_twin_is_recovered(family: str, tmp_path: Path) -> None:
    """Merged with its wrapper it gives the wrapper back, every tensor of the other half bit for bit; with a note."""
    case = wrapper(family)
    anchor, donor, before = twins(case, tmp_path)
    result = merged(recipe_for("linear", anchor, donor), tmp_path / "out")
    assert set(result) == set(before)
    blocks = rotation_merge.average([anchor]).architecture.blocks
    words = {name for block in blocks if block.module == "text" for info in block.tensors for name in info.names}
    assert any(not torch.equal(result[name], before[name]) for name in words)
    for name, tensor in before.items():
        same = torch.equal(result[name], tensor)
        assert (result[name] - tensor).norm() <= 1e-5 * tensor.norm() if name in words else same, name
    models = [load(case, path) for path in (anchor, tmp_path / "out")]
    given = inputs(case, models[0])
    assert difference(*(outputs(model, given) for model in models)) <= 1e-3
    assert "is text only" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.slow
def test_commands_and_the_library_take_it_too(tmp_path: Path) -> None:
    """`align` writes a whole model that answers to text as the donor does; `rotation_merge.align` gives the half."""
    case = wrapper("qwen3_vl")
    anchor, donor, _ = twins(case, tmp_path)
    done = parsed("align", anchor, donor, tmp_path / "out", "--heads", "permutation")
    assert done["proof"]["difference"] <= done["proof"]["allowed"]
    assert done["after"] <= 1e-3 < done["before"]
    assert state(tmp_path / "out").keys() == state(anchor).keys()
    told = json.loads(run("doctor", tmp_path / "out", anchor, donor, "--json").stdout)
    assert not [cause for cause in told["causes"] if str(cause["where"]).startswith(str(tmp_path / "out"))]
    model, whole = transformers.Qwen3ForCausalLM.from_pretrained(donor), load(case, anchor).float()
    alignment = rotation_merge.align(whole, model, heads="permutation")
    aligned, own = alignment.apply(model).state_dict(), whole.model.language_model.state_dict()
    assert aligned.keys() <= model.state_dict().keys()
    assert all((aligned["model." + name] - x).norm() <= 1e-5 * x.norm() for name, x in own.items())
    assert any("text only" in note for note in alignment.report.notes)


@pytest.mark.slow
def test_with_an_adapter_it_is_written_in_the_type_of_its_base(tmp_path: Path) -> None:
    anchor, donor, _ = twins(wrapper("qwen3_vl"), tmp_path)
    model = transformers.Qwen3ForCausalLM.from_pretrained(donor, dtype=torch.bfloat16)
    model.save_pretrained(donor)
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    tuned.peft_config["default"].base_model_name_or_path = str(donor)
    tuned.save_pretrained(tmp_path / "lora")
    parsed("align", anchor, f"{donor}+{tmp_path / 'lora'}", tmp_path / "out")
    words = {name: x.dtype for name, x in state(tmp_path / "out").items() if "language_model.layers" in name}
    assert words
    assert set(words.values()) == {torch.bfloat16}


def test_another_family_is_none(tmp_path: Path) -> None:
    """Layers of another kind are refused as before."""
    save(make(wrapper("gemma3_vlm")).float(), tmp_path / "anchor")
    words = make_llama("llama", tmp_path / "words")
    assert "architecture is llama, that of" in error_of("align", tmp_path / "anchor", words, tmp_path / "out")
