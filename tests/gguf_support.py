"""Tiny models as GGUF files: with a tokenizer of bytes, written here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tiny_models import ALL, Case, make
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rotation_merge.model.gguf.writer import plan_gguf
from rotation_merge.model.open import open_model

ROWS = 300
"""Of the embeddings: 256 bytes, some merges, special tokens, and rows that have no token."""

TEXT = "The 12 foxes aren't <|end|> here,  über\n\n3.14 東"


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


def case_of(family: str, name: str, **config: Any) -> Case:
    """A tiny model of a family, with as many tokens as the tokenizer has room for."""
    found = next(case for case in ALL if (case.family, case.name) == (family, name))
    sizes = {"vocab_size": ROWS, "pad_token_id": None, **config}
    return replace(found, name=f"{name}, {sorted(sizes)}", config={**found.config, **sizes})


def saved(case: Case, folder: Path, seed: int = 0) -> Any:
    """A checkpoint whose weights are numbers of float16, in float32; the model."""
    model = make(case, seed).float()
    for parameter in model.parameters():
        parameter.data = parameter.data.half().float()
    model.config.dtype = torch.float32
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return model


def written(folder: Path, out: Path, kind: str = "f16") -> Path:
    """A checkpoint as a GGUF."""
    plan_gguf(open_model(str(folder)), kind).write(str(out))
    return out
