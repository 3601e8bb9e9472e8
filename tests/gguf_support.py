"""Tiny models in GGUF: stored ones of every family, and Llamas that are written with the `gguf` package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

STORED = Path(__file__).parent / "model" / "gguf"
"""Files of every family, with `truth.json`: config, dtypes, shapes and checksums of the tensors, last logits."""

ROWS = 300
"""Of the embeddings of Llamas: 256 bytes, some merges, special tokens, and rows that have no token."""

TEXT = "The 12 foxes aren't <|end|> here,  über\n\n3.14 東"


def stored_truth() -> dict[str, dict[str, Any]]:
    """What each stored file is, by its name: its model's logits, and config and tensors as they were read first."""
    content: dict[str, dict[str, Any]] = json.loads((STORED / "truth.json").read_text())
    return content


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """As GPT-2's, with a few merges."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "a"), ("1", "2"), ("e", "r")]
    names = [*letters, *(a + b for a, b in merges)]
    fast = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=merges))
    fast.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(add_prefix_space=False)])
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken("<|start|>", special=True), AddedToken("<|end|>", special=True)])
    fast.add_tokens([AddedToken("<tool>", normalized=False)])
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return PreTrainedTokenizerFast(
        tokenizer_object=fast, bos_token="<|start|>", eos_token="<|end|>", pad_token="<|end|>", chat_template=template
    )


def piece_tokenizer() -> PreTrainedTokenizerFast:
    """As Llama 2's: sentencepiece's pairs, and bytes for what has no piece."""
    letters = ["▁", *"abcdefghijklmnopqrst", "T", "1"]
    merges = [("t", "h"), ("▁", "th"), ("▁th", "e"), ("e", "r"), ("▁", "a"), ("a", "n"), ("▁", "f")]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *(a + b for a, b in merges), *letters]
    vocab = {name: i for i, name in enumerate(names)}
    fast = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    fast.decoder = decoders.Sequence(steps)
    fast.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names[:3]])
    fast.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=fast, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def saved(folder: Path, seed: int = 0) -> LlamaForCausalLM:
    """A Llama whose weights are numbers of float16, in float32, and a tokenizer of bytes."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 12}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=ROWS, max_position_embeddings=32, **sizes, **heads)
    config.dtype = torch.float32
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        parameter.data = (torch.randn_like(parameter) * 0.3 + (parameter.ndim == 1)).half().float()
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return model


NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def name_in_gguf(name: str) -> str:
    """llama.cpp's name of a tensor of a Llama."""
    stem, end = name.rsplit(".", 1)
    if not stem.startswith("model.layers."):
        return f"{TOP[stem]}.{end}"
    layer, part = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{NAMES[part]}.{end}"


def written(
    folder: Path, out: Path, kind: str = "F16", architecture: str = "llama", split: int = 0, **metadata: Any
) -> Path:
    """A Llama with a tokenizer of bytes, written as a GGUF by the `gguf` package.

    Args:
        kind: type of the matrices.
        split: tensors in a part; 0: all in one file.
        metadata: in the place of the right ones; None leaves one out.
    """
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    writer = gguf.GGUFWriter(str(out), architecture, split_max_tensors=split)
    for key, value in {**_sizes(model.config), **_tokens(folder, model.config.vocab_size), **metadata}.items():
        if value is not None:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for name, tensor in model.state_dict().items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):  # RoPE pairs side by side
            pairs = tensor.reshape(-1, 2, model.config.head_dim // 2, *tensor.shape[1:])
            tensor = pairs.transpose(1, 2).reshape(tensor.shape)
        fits = tensor.ndim > 1 and (kind == "F16" or tensor.shape[-1] % 32 == 0)
        stored = gguf.GGMLQuantizationType[kind if fits else "F32" if tensor.ndim == 1 else "F16"]
        writer.add_tensor(name_in_gguf(name), gguf.quantize(tensor.numpy(), stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def _sizes(config: LlamaConfig) -> dict[str, Any]:
    return {
        "general.name": "a",
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.block_count": config.num_hidden_layers,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.key_length": config.head_dim,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "llama.rope.dimension_count": config.head_dim,
    }


def _tokens(folder: Path, rows: int) -> dict[str, Any]:
    """Metadata of a tokenizer that cuts bytes as GPT-2's does, if it joins any; rows that have no token are padded."""
    content = json.loads((folder / "tokenizer.json").read_text())
    if not content["model"]["merges"]:
        return {"tokenizer.ggml.model": "none"}
    names = {number: token for token, number in content["model"]["vocab"].items()}
    kinds = dict.fromkeys(names, 1)
    for token in content["added_tokens"]:
        names[token["id"]], kinds[token["id"]] = token["content"], 3 if token["special"] else 4
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    ids = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id, "padding": tokenizer.pad_token_id}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [names.get(number, f"[PAD{number}]") for number in range(rows)],
        "tokenizer.ggml.token_type": [kinds.get(number, 5) for number in range(rows)],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in content["model"]["merges"]],
        **{f"tokenizer.ggml.{name}_token_id": number for name, number in ids.items() if number is not None},
        "tokenizer.ggml.add_bos_token": False,
        **({"tokenizer.chat_template": tokenizer.chat_template} if tokenizer.chat_template else {}),
    }
