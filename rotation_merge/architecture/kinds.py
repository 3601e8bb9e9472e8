"""What classes of one family compute where only some of their configs have an entry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    """Whether models of two different kinds compute the same by the same weights and entries."""
    return any(first_kind in kinds and second_kind in kinds for kinds in ALIKE)


def spelled_out(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config, or one within a config, with the values by which its class computes where it says nothing, so that it
    can be compared with one of another kind."""
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
