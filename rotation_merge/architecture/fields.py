"""The effect of differences between two configs; `fields.json` describes every entry that a supported class reads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

ALIKE = (
    ("llama", "mistral", "ministral3", "qwen2", "qwen2_5_vl_text", "seed_oss", "smollm3", "granite"),
    ("qwen3", "qwen3_vl_text"),
    ("roberta", "xlm-roberta", "camembert"),
    ("ernie4_5", "helium"),
    ("granitemoe", "granitemoeshared"),
    ("deepseek_v3", "kimi_k2", "glm4_moe_lite"),
    ("t5", "mt5"),
)
"""Kinds of models (`model_type`) whose classes compute alike where entries of their configs do not say otherwise."""


def alike(first_kind: Any, second_kind: Any) -> bool:
    """Whether two kinds of models have the same outputs for the same weights and entries."""
    return any(first_kind in kinds and second_kind in kinds for kinds in ALIKE)


def with_class_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with its class's defaults for missing entries, nested configs included.

    So it can be compared with a config of another class.
    """
    layers, size, heads = (config.get(name) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    explicit: dict[str, Any] = {
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
        "scale_decoder_outputs": False,
        **config,
    }
    if width := config.get("head_dim") or (size // heads if size and heads else None):
        explicit.setdefault("attention_multiplier", width**-0.5)
    window, positions = config.get("sliding_window"), config.get("max_position_embeddings")
    slides = bool(window) and (not positions or window < positions)
    kinds = config.get("layer_types") or [SLIDING if slides else FULL] * (layers or 0)
    if {*kinds} <= {SLIDING, FULL}:
        explicit["layer_types"] = kinds if slides else [FULL] * len(kinds)
        explicit["sliding_window"] = window if slides and SLIDING in kinds else None
    explicit.setdefault("no_rope_layers", [1] * len(kinds))
    rope = config.get("rope_parameters")
    if isinstance(rope, Mapping) and "rope_theta" in rope:
        explicit["rope_parameters"] = {"rope_type": "default", "partial_rotary_factor": 1.0, **rope}
    return explicit


FULL, SLIDING = "full_attention", "sliding_attention"


Verdict = Literal["refused", "warned", "harmless"]


@dataclass(frozen=True)
class Field:
    """One entry of a config: the consequence of a difference between two models, and the reason.

    Attributes:
        forward: whether the forward pass computes otherwise by it, as far as that is to be told from rounding.
    """

    verdict: Verdict
    why: str
    forward: bool = False


@dataclass(frozen=True)
class Difference:
    """An entry, by its path in the config, with the anchor's and the donor's values.

    Attributes:
        kinds: whether the two are of different kinds (`model_type`).
    """

    name: str
    field: Field
    anchor: Any
    donor: Any
    kinds: bool = False

    def __str__(self) -> str:
        return f"'{self.name}' is {self.donor!r}, against {self.anchor!r}"


@cache
def fields() -> dict[str, Field]:
    """Every entry that is known, by name."""
    groups = json.loads(Path(__file__).with_name("fields.json").read_text(encoding="utf-8"))
    return {
        name: Field(group["verdict"], group["why"], group.get("forward", False))
        for group in groups
        for name in group["fields"].split()
    }


UNKNOWN = Field("warned", "no supported class reads it")


def differences(anchor: Mapping[str, Any], donor: Mapping[str, Any], own_family: bool = False) -> Iterator[Difference]:
    """Harmful differences between two configs, nested configs included.

    Args:
        own_family: the family is none of ours, so that entries that are not known may matter.
    """
    known = fields()
    for name, anchor_value, donor_value, kinds in _pairs(anchor, donor):
        last = name.rpartition(".")[2]
        field = known.get(last, UNKNOWN if own_family else None)
        same = _plain(anchor_value) == _plain(donor_value) or (
            last == "model_type" and alike(anchor_value, donor_value)
        )
        if field is not None and field.verdict != "harmless" and not same:
            yield Difference(name, field, anchor_value, donor_value, kinds)


APART = ("id2label", "label2id", "_name_or_path")  # compared elsewhere, or never the same


def _pairs(
    anchor: Mapping[str, Any], donor: Mapping[str, Any], prefix: str = "", kinds: bool = False
) -> Iterator[tuple[str, Any, Any, bool]]:
    """Values of the entries of both configs by path, and whether the models are of different kinds.

    Tables are compared entry by entry. For different kinds, an entry that one config lacks counts as None.
    """
    names = [*anchor, *(name for name in donor if name not in anchor)]
    if anchor.get("model_type") != donor.get("model_type"):
        anchor, donor, kinds = with_class_defaults(anchor), with_class_defaults(donor), True
    for name in names:
        anchor_value, donor_value = anchor.get(name), donor.get(name)
        if name in APART or not (prefix or kinds or (name in anchor and name in donor)):
            continue
        if isinstance(anchor_value, Mapping) and isinstance(donor_value, Mapping):
            yield from _pairs(anchor_value, donor_value, f"{prefix}{name}.", kinds)
        else:
            yield prefix + name, anchor_value, donor_value, kinds


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
