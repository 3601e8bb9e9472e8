"""A checkpoint of a shape that people have, with made-up weights: written tensor by tensor, in shards, never held.

    python benchmarks/shapes.py --shape llama-1b OUT
    python benchmarks/shapes.py --shape llama-8b --layers 3 --vocabulary 16032 --donor near OUT

Without `--donor` the anchor; a donor is a fine-tune of it (`near`: 2% noise), a twin that was moved by a random element
of every local group and has the noise, too (`planted`), or drawn anew (`far`). The same arguments give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rotation_merge.architecture.build import build
from rotation_merge.architecture.model import Architecture, TensorInfo
from rotation_merge.architecture.registry import shipped
from rotation_merge.matching.gauge import random_gauge
from rotation_merge.matching.options import AlignConfig
from rotation_merge.model.apply import transform_tensor
from rotation_merge.symmetry import SpaceTransform

OPTIONS: dict[str, object] = {"attention": "rotation", "heads": "permutation", "ffn": "permutation", "scaling": True}
DONORS = ("near", "planted", "far")
NOISE = 0.02
SHARD = 10**9
_PIECE = 1 << 24  # entries made at a time


@dataclass(frozen=True)
class Shape:
    """Sizes of a model."""

    family: str
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
            "architectures": shipped()[self.family].classes[:1],
            "model_type": self.family,
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "hidden_act": "silu" if self.family == "llama" else "gelu",
            "tie_word_embeddings": self.tied,
            "dtype": "bfloat16",
        }

    @cached_property
    def architecture(self) -> Architecture:
        spec = shipped()[self.family]
        return build(spec, self.config, spec.bases[0], [])

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """What a checkpoint holds, by name: everything that is not optional, and the head where it is its own."""
        return {
            name: info
            for name, info in self.architecture.named().items()
            if not info.optional or (name == "lm_head.weight" and not self.tied)
        }

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The lengths of every tensor."""
        return {name: tuple(axis.size or self.vocabulary for axis in info.axes) for name, info in self.tensors.items()}

    @property
    def parameters(self) -> int:
        return sum(map(math.prod, self.sizes.values()))


SHAPES = {
    "llama-tiny": Shape("llama", 256, 688, 8, 4, 4, 1000, tied=True),
    "llama-300m": Shape("llama", 1024, 2816, 16, 4, 24, 32000, tied=True),
    "llama-1b": Shape("llama", 2048, 8192, 32, 8, 16, 128256, tied=True),
    "llama-8b": Shape("llama", 4096, 14336, 32, 8, 32, 128256),
    "llama-70b": Shape("llama", 8192, 28672, 64, 8, 80, 128256),
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
        donor: one of `DONORS`; None: the anchor.
        number: which of several such donors.
    """
    result = torch.empty(lengths, dtype=torch.bfloat16)
    for part, x in pieces(name, lengths, 10 + number if donor == "far" else 1):
        result[part] = x
    if donor in ("near", "planted"):
        scale = NOISE * float(result[:4096].float().std())
        for part, noise in pieces(f"noise of {name}", lengths, 100 + number):
            unit = noise / 0.02 if len(lengths) > 1 else (noise - 1) / 0.1
            result[part] = result[part].float().add_(unit, alpha=scale)
    return result


def write(shape: Shape, where: Path, donor: str | None = None, number: int = 0) -> Path:
    """A checkpoint in a folder, one shard of it and one tensor in memory."""
    from mergekit.io import TensorWriter

    gauge: Mapping[str, SpaceTransform] = {}
    if donor == "planted":
        gauge = random_gauge(shape.architecture, AlignConfig(**OPTIONS), torch.Generator().manual_seed(7))  # type: ignore[arg-type]
    writer = TensorWriter(str(where), max_shard_size=SHARD)
    for name, info in shape.tensors.items():
        tensor = made(name, shape.sizes[name], donor, number)
        writer.save_tensor(name, transform_tensor(tensor, info, gauge).bfloat16())
    writer.finalize()
    (where / "config.json").write_text(json.dumps(shape.config, indent=1))
    return where


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that say which shape."""
    parser.add_argument(
        "--shape", choices=[name for name, s in SHAPES.items() if s.family == "llama"], default="llama-300m"
    )
    parser.add_argument("--layers", type=int, help="other than the shape has")
    parser.add_argument("--vocabulary", type=int, help="tokens, other than the shape has")


def chosen(arguments: argparse.Namespace) -> Shape:
    shape = SHAPES[arguments.shape]
    given = {"layers": arguments.layers, "vocabulary": arguments.vocabulary}
    return replace(shape, **{name: value for name, value in given.items() if value is not None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--donor", choices=DONORS)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    shape = chosen(arguments)
    write(shape, arguments.out, arguments.donor)
    print(f"{arguments.out}: {shape.parameters:,} weights, {asdict(shape)}")


if __name__ == "__main__":
    main()
