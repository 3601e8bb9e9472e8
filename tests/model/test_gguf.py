"""Models in GGUF: what is written is read back, as transformers reads it, and what is damaged is told in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import GGUFReader
from gguf_support import TEXT, byte_tokenizer, case_of, piece_tokenizer, saved, written
from plugin_support import load, state

import rotation_merge as rm

SCALAR = {"query_pre_attn_scalar": 12, "sliding_window": 4}

FAMILIES = {
    "llama": case_of("llama", "llama"),
    "llama, tied, biases": case_of("llama", "llama, tied, biases"),
    "llama 3": case_of(
        "llama",
        "llama",
        head_dim=32,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "llama, stretched": case_of(
        "llama", "llama", rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    ),
    "mistral": case_of("llama", "mistral"),
    "qwen2": case_of("llama", "qwen2"),
    "qwen3": case_of("qwen3", "untied"),
    "gemma2": case_of("gemma2", "tied", **SCALAR),
    "gemma3": case_of("gemma3", "tied", **SCALAR),
    "phi3": case_of("phi3", "grouped"),
    "phi3, partial": case_of("phi3", "partial rotary", bos_token_id=0, eos_token_id=0),
    "mixtral": case_of("mixtral", "untied"),
    "qwen2_moe": case_of("qwen_moe", "qwen2"),
    "qwen3_moe": case_of("qwen_moe", "qwen3", norm_topk_prob=True),
    "gpt2": case_of("gpt2", "tied"),
    "gpt2, untied": case_of("gpt2", "untied", activation_function="gelu_new"),
    "starcoder2": case_of("starcoder2", "grouped"),
    "olmo2": case_of("olmo2", "grouped"),
    "falcon": case_of("falcon", "multi-query"),
    "falcon, two norms": case_of("falcon", "new, grouped", num_ln_in_parallel_attn=2),
    "falcon, grouped": case_of("falcon", "new, one norm"),
}
"""llama.cpp's families that users merge."""


def _logits(model: Any) -> torch.Tensor:
    ids = torch.tensor([[5, 17, 3, 40, 8, 250, 99, 1, 2, 77, 31, 6]])
    with torch.no_grad():
        found: torch.Tensor = model(ids, use_cache=False).logits
    return found


pytestmark = pytest.mark.usefixtures("gguf_home")


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_written_is_read_back(name: str, tmp_path: Path) -> None:
    model = saved(FAMILIES[name], tmp_path / "model")
    out = written(tmp_path / "model", tmp_path / "out.gguf")
    first, again = state(tmp_path / "model"), rm.average([str(out)])
    assert set(again) == set(first)
    assert again.architecture.family == rm.average([str(tmp_path / "model")]).architecture.family
    for key, tensor in first.items():
        torch.testing.assert_close(again[key].float(), tensor, rtol=0, atol=1e-6)
    torch.testing.assert_close(_logits(load(str(out))), _logits(model.eval()), rtol=1e-4, atol=1e-4)


OTHERS = {
    "llama": FAMILIES["llama"],
    "mistral": FAMILIES["mistral"],
    "qwen2": FAMILIES["qwen2"],
    "qwen3": case_of("qwen3", "untied", head_dim=128),
    "gemma2": FAMILIES["gemma2"],
    "gemma3": FAMILIES["gemma3"],
    "phi3": FAMILIES["phi3"],
    "qwen2_moe": case_of("qwen_moe", "qwen2", moe_intermediate_size=1408, shared_expert_intermediate_size=5632),
    "qwen3_moe": case_of("qwen_moe", "qwen3", moe_intermediate_size=768, norm_topk_prob=True),
    "gpt2": case_of("gpt2", "tied", n_positions=1024),
    "gpt2, untied": case_of("gpt2", "untied", n_positions=1024, n_inner=None, activation_function="gelu_new"),
    "starcoder2": FAMILIES["starcoder2"],
    "falcon": case_of("falcon", "multi-query", bias=False),
}
"""Families that transformers' own reader has, with settings that it takes whatever the file says. It has no Mixtral, no
OLMo2, no groups of Falcon's and no scaling of rotary positions."""


@pytest.mark.parametrize("name", OTHERS)
def test_weights_are_those_that_transformers_reads(name: str, tmp_path: Path) -> None:
    saved(OTHERS[name], tmp_path / "model")
    written(tmp_path / "model", tmp_path / "out.gguf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="out.gguf", dtype=torch.float32)
    ours = load(str(tmp_path / "out.gguf")).state_dict()
    assert ours.keys() == theirs.state_dict().keys()
    for key, value in theirs.state_dict().items():
        torch.testing.assert_close(ours[key], value, rtol=0, atol=0)


ALIKE = {
    **OTHERS,
    "mistral": case_of("llama", "mistral", sliding_window=None),
    "gemma2": case_of("gemma2", "tied", head_dim=256, query_pre_attn_scalar=256, sliding_window=4),
    "gemma3": case_of("gemma3", "tied", head_dim=256, query_pre_attn_scalar=256, sliding_window=4),
}
"""With settings that transformers' reader gives its config: it has no windows in Mistral, and no scales of Gemma's."""


@pytest.mark.parametrize("name", ALIKE)
def test_outputs_are_those_of_the_model_that_transformers_reads(name: str, tmp_path: Path) -> None:
    saved(ALIKE[name], tmp_path / "model")
    written(tmp_path / "model", tmp_path / "out.gguf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="out.gguf", dtype=torch.float32)
    torch.testing.assert_close(_logits(load(str(tmp_path / "out.gguf"))), _logits(theirs.eval()), rtol=1e-4, atol=1e-4)


CONVERTER = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import convert_hf_to_gguf
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
convert_hf_to_gguf.main()
"""
PLAIN = ("llama", "llama, tied, biases", "llama 3", "llama, stretched", "mistral", "qwen2", "qwen3", "mixtral")
CONVERTED = (*PLAIN, "qwen2_moe", "qwen3_moe", "starcoder2", "olmo2", "falcon, two norms", "falcon, grouped")


@pytest.mark.skipif("LLAMA_CPP" not in os.environ, reason="LLAMA_CPP names the folder of llama.cpp's converter")
@pytest.mark.parametrize("name", CONVERTED)
def test_the_file_is_that_of_llama_cpps_converter(name: str, tmp_path: Path) -> None:
    saved(FAMILIES[name], tmp_path / "model")
    written(tmp_path / "model", tmp_path / "ours.gguf")
    arguments = [str(tmp_path / "model"), "--outfile", str(tmp_path / "theirs.gguf"), "--outtype", "f16"]
    subprocess.run([sys.executable, "-c", CONVERTER, os.environ["LLAMA_CPP"], *arguments], check=True)
    names = ("ours.gguf", "theirs.gguf")
    ours, theirs = ({entry.name: entry for entry in GGUFReader(tmp_path / name).tensors} for name in names)
    assert ours.keys() == theirs.keys()
    for key, entry in theirs.items():
        assert ours[key].tensor_type == entry.tensor_type
        np.testing.assert_allclose(ours[key].data.squeeze(), entry.data.squeeze(), rtol=1e-6, atol=0)
    first = state(tmp_path / "model")
    for key, tensor in rm.average([str(tmp_path / "theirs.gguf")]).items():
        torch.testing.assert_close(tensor.float(), first[key], rtol=0, atol=1e-6)


def _tokenizer(file: Path) -> Any:
    """The tokenizer that goes with a file, beside what is written of it."""
    folder = file.with_suffix("")
    rm.average([str(file)]).save_pretrained(folder)
    return transformers.AutoTokenizer.from_pretrained(folder)


def test_the_tokenizer_comes_back(tmp_path: Path) -> None:
    saved(FAMILIES["llama"], tmp_path / "model")
    ours, first = _tokenizer(written(tmp_path / "model", tmp_path / "out.gguf")), byte_tokenizer()
    assert ours(TEXT).input_ids == first(TEXT).input_ids
    assert ours.decode(ours(TEXT).input_ids) == TEXT
    assert (ours.bos_token, ours.eos_token, ours.chat_template) == (
        first.bos_token,
        first.eos_token,
        first.chat_template,
    )
    assert ours.get_vocab() == first.get_vocab()


def test_several_chat_templates_come_back(tmp_path: Path) -> None:
    saved(FAMILIES["llama"], tmp_path / "model")
    first = byte_tokenizer()
    first.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    first.save_pretrained(tmp_path / "model")
    assert _tokenizer(written(tmp_path / "model", tmp_path / "out.gguf")).chat_template == first.chat_template


def test_sentencepieces_tokenizer_comes_back(tmp_path: Path) -> None:
    saved(FAMILIES["llama"], tmp_path / "model")
    first = piece_tokenizer()
    first.save_pretrained(tmp_path / "model")
    out = written(tmp_path / "model", tmp_path / "out.gguf")
    first = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    ours = _tokenizer(out)
    for text in (TEXT, "the fathers and   the other", " a", ""):
        assert ours(text).input_ids == first(text).input_ids, text
        assert ours.decode(ours(text).input_ids) == first.decode(first(text).input_ids)
    assert (ours.bos_token_id, ours.eos_token_id, ours.unk_token_id) == (1, 2, 0)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="out.gguf")
    assert ours("the fathers and the other").input_ids == theirs("the fathers and the other").input_ids
