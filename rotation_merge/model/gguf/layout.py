"""The correspondence of transformers' tensors with those of a GGUF, from `families.json`.

The order of numbers is that of llama.cpp's converter: queries and keys of Llama have the two numbers of a RoPE pair
side by side, gains of Gemma are stored with the one that its norms add, GPT-2's linear maps as (out, in), experts of
a layer in one tensor.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rotation_merge.architecture.registry import overlay
from rotation_merge.model.gguf.file import GgufFile

CONVERTER = "convert it with llama.cpp's convert_hf_to_gguf.py"

FREQUENCIES, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
"""Tensors of a GGUF that are part of transformers' config: divisors of rotary frequencies."""


@dataclass(frozen=True)
class Family:
    """A class of transformers' as llama.cpp names and lays out its tensors.

    Attributes:
        architecture: as `general.architecture` says it.
        class_name, model_type: transformers' words.
        config: entries of transformers' config, and the metadata that hold them.
        tensors: stems of names, and where they lie in the file: the stem there, and a layout.
        named: a word in the file's own names that tells it from others of the architecture.
        when: least values of metadata that tell it from others.
        holds: a tensor that tells it from others.
        fixed: entries of the config that hold if no metadata say otherwise; 0 stands for none.
        written: metadata that no entry of the config gives.
        present: entries of the config that are true where the file has a tensor.
        head_dim: whether the config has the size of a head.
        rope: `every` layer has the same rotary positions, or they are `global and local`; empty: there are none.
        scalar: layers of the one size whose attention is scaled by hidden_size / heads, not by a head's size.
    """

    architecture: str
    class_name: str
    model_type: str
    config: Mapping[str, str]
    tensors: Mapping[str, tuple[str, str]]
    named: str = ""
    when: Mapping[str, float] = field(default_factory=dict)
    holds: str = ""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    written: Mapping[str, Any] = field(default_factory=dict)
    present: Mapping[str, str] = field(default_factory=dict)
    head_dim: bool = False
    rope: str = ""
    scalar: int = 0

    def fits(self, gguf: GgufFile) -> bool:
        """Whether a file belongs to this family, by its header."""
        names = " ".join(str(gguf.metadata.get(f"general.{key}", "")) for key in ("name", "basename")).lower()
        return (
            gguf.architecture == self.architecture
            and self.named in names
            and all((gguf.value(key) or 0) >= least for key, least in self.when.items())
            and (not self.holds or self.holds in gguf.entries)
        )

    def places(self, layers: int, experts: int) -> Iterator[tuple[str, Place]]:
        """Stems of the names of all tensors of a model, and their places."""
        for stem, (template, layout) in self.tensors.items():
            for i in range(layers) if "{i}" in stem else [0]:
                for e in range(experts) if "{e}" in stem else [None]:
                    yield stem.format(i=i, e=e), Place(template.format(i=i), layout, e)


@dataclass(frozen=True)
class Place:
    """Location of a transformers tensor in a GGUF.

    Attributes:
        stem: the name without its last word (weight or bias).
        layout: order of its rows there; empty: the same order.
        expert: which of the matrices that are stored one after the other.
    """

    stem: str
    layout: str = ""
    expert: int | None = None


@cache
def families() -> tuple[Family, ...]:
    """All families; of several that fit a file, the last one counts."""
    content = json.loads(Path(__file__).with_name("families.json").read_text(encoding="utf-8"))
    return tuple(_family(_extended(content, name)) for name in content)


def _family(values: dict[str, Any]) -> Family:
    stems = {stem: (place, "") if isinstance(place, str) else tuple(place) for stem, place in values["tensors"].items()}
    return Family(class_name=values.pop("class"), **{**values, "tensors": stems})


def _extended(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    """An entry laid over that which it extends; null takes out."""
    values = dict(content[name])
    below = values.pop("extends", None)
    return overlay(_extended(content, below) if below else {}, values)


Move = Callable[[Tensor, Mapping[str, Any]], Tensor]


def read_layout(layout: str, tensor: Tensor, config: Mapping[str, Any]) -> Tensor:
    """A tensor of a GGUF in transformers' order."""
    return LAYOUTS[layout][0](tensor, config)


def write_layout(layout: str, tensor: Tensor, config: Mapping[str, Any]) -> Tensor:
    """A tensor of transformers' in a GGUF's order."""
    return LAYOUTS[layout][1](tensor, config)


def _paired(key: str) -> tuple[Move, Move]:
    """Heads with interleaved RoPE pairs (i, i + d/2) in the file."""

    def read(tensor: Tensor, config: Mapping[str, Any]) -> Tensor:
        return tensor.reshape(config[key], -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)

    def write(tensor: Tensor, config: Mapping[str, Any]) -> Tensor:
        return tensor.reshape(config[key], 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)

    return read, write


def _from_groups(tensor: Tensor, config: Mapping[str, Any]) -> Tensor:
    """Rows of KV groups (queries, a key, a value) as all queries, all keys, all values."""
    groups, heads, size = _falcon(config)
    rows = tensor.reshape(groups, heads // groups + 2, size, *tensor.shape[1:])
    return torch.cat([part.flatten(0, 2) for part in (rows[:, :-2], rows[:, -2:-1], rows[:, -1:])])


def _to_groups(tensor: Tensor, config: Mapping[str, Any]) -> Tensor:
    groups, heads, size = _falcon(config)
    parts = tensor.split([heads * size, groups * size, groups * size])
    rows = [part.reshape(groups, -1, size, *tensor.shape[1:]) for part in parts]
    return torch.cat(rows, 1).reshape(tensor.shape)


def _falcon(config: Mapping[str, Any]) -> tuple[int, int, int]:
    heads = config["num_attention_heads"]
    return config["num_kv_heads"], heads, config["hidden_size"] // heads


def _transposed(tensor: Tensor, _: Mapping[str, Any]) -> Tensor:
    return tensor.t().contiguous() if tensor.ndim > 1 else tensor


LAYOUTS: dict[str, tuple[Move, Move]] = {
    "": (lambda tensor, _: tensor, lambda tensor, _: tensor),
    "rope q": _paired("num_attention_heads"),
    "rope k": _paired("num_key_value_heads"),
    "plus one": (lambda tensor, _: tensor - 1, lambda tensor, _: tensor.float() + 1),
    "transposed": (_transposed, _transposed),
    "row": (lambda tensor, _: tensor.reshape(1, -1), lambda tensor, _: tensor.reshape(-1)),
    "groups": (_to_groups, _from_groups),
}
"""Functions that read a tensor of a GGUF, and that write it."""
