"""Checkpoints of shapes that people have, with made-up weights: written tensor by tensor, in shards, never held.

A donor is a fine-tune of the anchor (`near`: 2% noise), a twin that was moved by a random element of every local group
and has the noise, too (`planted`), or drawn anew (`far`). The same arguments give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import rotation_merge as rm

OPTIONS: dict[str, Any] = {"attention": "rotation", "heads": "permutation", "ffn": "permutation", "scaling": True}
NOISE = 0.02
SHARD = 10**9
_PIECE = 1 << 24  # entries made at a time


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama."""

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    layers: int
    vocabulary: int
    tied: bool = False

    @property
    def config(self) -> dict[str, Any]:
        """Its config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "hidden_act": "silu",
            "tie_word_embeddings": self.tied,
            "dtype": "bfloat16",
        }

    @cached_property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The lengths of every tensor of a checkpoint, by name."""
        with torch.device("meta"):
            model = LlamaForCausalLM(LlamaConfig(**self.config))
        tensors = model.state_dict() if not self.tied else model.model.state_dict(prefix="model.")
        return {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    @property
    def parameters(self) -> int:
        return sum(map(math.prod, self.sizes.values()))


SHAPES = {
    "llama-tiny": Shape(256, 688, 8, 4, 4, 1000, tied=True),
    "llama-300m": Shape(1024, 2816, 16, 4, 24, 32000, tied=True),
    "llama-1b": Shape(2048, 8192, 32, 8, 16, 128256, tied=True),
    "llama-8b": Shape(4096, 14336, 32, 8, 32, 128256),
    "llama-70b": Shape(8192, 28672, 64, 8, 80, 128256),
}


def rows(lengths: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """A weight whose rows have heavy-tailed norms, as trained ones have, float32."""
    x = torch.randn(lengths, generator=generator)
    spread = (0.3 * torch.randn(lengths[:1], generator=generator)).exp_()
    return x.mul_(spread.reshape(-1, *[1] * (len(lengths) - 1)))


def pieces(name: str, lengths: tuple[int, ...], seed: int) -> Iterator[tuple[slice, Tensor]]:
    """A tensor, some rows at a time, float32: weights of the size that training gives them, gains near one."""
    step = max(1, _PIECE * lengths[0] // math.prod(lengths))
    for start in range(0, lengths[0], step):
        part = slice(start, min(start + step, lengths[0]))
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name} {start}".encode()))
        size = (part.stop - part.start, *lengths[1:])
        yield (
            part,
            (1 + 0.1 * torch.randn(size, generator=generator) if len(size) == 1 else 0.02 * rows(size, generator)),
        )


def made(name: str, lengths: tuple[int, ...], donor: str | None, number: int = 0) -> Tensor:
    """A tensor of the anchor, or of a donor before it is moved, bfloat16.

    Args:
        donor: `near` or `far`; None: the anchor.
        number: which of several such donors.
    """
    result = torch.empty(lengths, dtype=torch.bfloat16)
    for part, x in pieces(name, lengths, 10 + number if donor == "far" else 1):
        result[part] = x
    if donor == "near":
        scale = NOISE * float(result[:4096].float().std())
        for part, noise in pieces(f"noise of {name}", lengths, 100 + number):
            unit = noise / 0.02 if len(lengths) > 1 else (noise - 1) / 0.1
            result[part] = result[part].float().add_(unit, alpha=scale)
    return result


def write(shape: Shape, where: Path, donor: str | None = None, number: int = 0) -> Path:
    """A checkpoint in a folder, one shard of it and one tensor in memory."""
    from mergekit.io import TensorWriter

    if donor == "planted":
        near = write(shape, where.with_name(f"{where.name}-still"), "near", number)
        rm.Alignment.random(near, seed=7, **OPTIONS).apply(near).save_pretrained(where)
        return where
    writer = TensorWriter(str(where), max_shard_size=SHARD)
    for name, lengths in shape.sizes.items():
        writer.save_tensor(name, made(name, lengths, donor, number))
    writer.finalize()
    (where / "config.json").write_text(json.dumps(shape.config, indent=1))
    return where


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that say which shape."""
    parser.add_argument("--shape", choices=SHAPES, default="llama-300m")
    parser.add_argument("--layers", type=int, help="other than the shape has")
    parser.add_argument("--vocabulary", type=int, help="tokens, other than the shape has")


def chosen(arguments: argparse.Namespace) -> Shape:
    shape = SHAPES[arguments.shape]
    given = {"layers": arguments.layers, "vocabulary": arguments.vocabulary}
    return replace(shape, **{name: value for name, value in given.items() if value is not None})
