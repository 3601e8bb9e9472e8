"""Models in GGUF: what is written is read back, as transformers reads it, and what is damaged is told in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gguf_support import TEXT, byte_tokenizer, case_of, piece_tokenizer, saved, written

from rotation_merge.model.checkpoint import open_model
from rotation_merge.model.gguf.file import open_gguf
from rotation_merge.run.functions import load

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


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Config and tokenizer of GGUF files go to a folder of the tests."""
    from huggingface_hub import constants

    before, constants.HF_HOME = constants.HF_HOME, str(tmp_path_factory.mktemp("home"))
    yield
    constants.HF_HOME = before


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_written_is_read_back(name: str, tmp_path: Path) -> None:
    model = saved(FAMILIES[name], tmp_path / "model")
    out = written(tmp_path / "model", tmp_path / "out.gguf")
    first, again = open_model(str(tmp_path / "model")), open_model(str(out))
    tensors = {key for key in first.names if key != first.tied_head}
    assert set(again.names) == tensors
    assert again.architecture.family == first.architecture.family
    for key in tensors:
        torch.testing.assert_close(again[key].float(), first[key], rtol=0, atol=1e-6)
        assert again.dtypes[key] == again[key].dtype
        assert again.shapes[key] == first.shapes[key]
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
    ours = open_gguf(str(written(tmp_path / "model", tmp_path / "ours.gguf")))
    arguments = [str(tmp_path / "model"), "--outfile", str(tmp_path / "theirs.gguf"), "--outtype", "f16"]
    subprocess.run([sys.executable, "-c", CONVERTER, os.environ["LLAMA_CPP"], *arguments], check=True)
    theirs = open_gguf(str(tmp_path / "theirs.gguf"))
    assert ours.entries.keys() == theirs.entries.keys()
    for key, entry in theirs.entries.items():
        assert ours.entries[key].kind == entry.kind
        torch.testing.assert_close(ours.entries[key].read().squeeze(), entry.read().squeeze(), rtol=1e-6, atol=0)
    first, again = open_model(str(tmp_path / "model")), open_model(str(tmp_path / "theirs.gguf"))
    for key in again.names:
        torch.testing.assert_close(again[key].float(), first[key], rtol=0, atol=1e-6)


def test_the_tokenizer_comes_back(tmp_path: Path) -> None:
    saved(FAMILIES["llama"], tmp_path / "model")
    out = written(tmp_path / "model", tmp_path / "out.gguf")
    ours, first = transformers.AutoTokenizer.from_pretrained(open_model(str(out)).folder), byte_tokenizer()
    assert ours(TEXT).input_ids == first(TEXT).input_ids
    assert ours.decode(ours(TEXT).input_ids) == TEXT
    assert (ours.bos_token, ours.eos_token, ours.chat_template) == (
        first.bos_token,
        first.eos_token,
        first.chat_template,
    )
    assert ours.get_vocab() == first.get_vocab()


def test_sentencepieces_tokenizer_comes_back(tmp_path: Path) -> None:
    saved(FAMILIES["llama"], tmp_path / "model")
    first = piece_tokenizer()
    first.save_pretrained(tmp_path / "model")
    out = written(tmp_path / "model", tmp_path / "out.gguf")
    first = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    ours = transformers.AutoTokenizer.from_pretrained(open_model(str(out)).folder)
    for text in (TEXT, "the fathers and   the other", " a", ""):
        assert ours(text).input_ids == first(text).input_ids, text
        assert ours.decode(ours(text).input_ids) == first.decode(first(text).input_ids)
    assert (ours.bos_token_id, ours.eos_token_id, ours.unk_token_id) == (1, 2, 0)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="out.gguf")
    assert ours("the fathers and the other").input_ids == theirs("the fathers and the other").input_ids


def test_types_that_are_not_written_here_are_read_as_ggml_reads_them() -> None:
    """K-quants and others, from a file that ggml's reference code made, with what it makes of each."""
    entries = open_gguf(str(Path(__file__).with_name("quantised.gguf"))).entries
    kinds = [name for name in entries if f"{name}.numbers" in entries]
    assert {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"} <= set(kinds)
    for name in kinds:
        assert entries[name].kind == name
        torch.testing.assert_close(entries[name].read(), entries[f"{name}.numbers"].read(), rtol=0, atol=0)


def test_one_expert_is_read_without_the_others(tmp_path: Path) -> None:
    saved(FAMILIES["mixtral"], tmp_path / "model")
    whole = open_gguf(str(written(tmp_path / "model", tmp_path / "out.gguf"))).entries["blk.0.ffn_up_exps.weight"]
    assert whole.part(2).size * 4 == whole.size
    assert (whole.part(2).read() == whole.read()[2]).all()
