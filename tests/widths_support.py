"""Models in larger sizes, for tests."""

from __future__ import annotations

from typing import Any

import torch
from tiny_models import ALL

from rotation_merge.architecture import resolve
from rotation_merge.architecture.registry import find, tied_head
from rotation_merge.architecture.sizes import size_keys
from rotation_merge.model.widen import Widening

ONE_OF_EACH = {  # what makes widening them hard
    "llama": "llama, tied, biases",
    "qwen3": "untied",
    "gemma2": "tied",
    "olmo2": "tied",
    "phi3": "partial rotary",
    "mixtral": "untied",
    "gpt2": "untied",
    "vit": "classifier",
    "dinov2": "swiglu",
    "falcon_h1": "plain",
    "granitemoe": "shared",
    "opt": "projected",
}
CASES = [case for case in ALL if ONE_OF_EACH.get(case.family) == case.name]


def doubled(config: dict[str, Any], only: str = "") -> dict[str, Any]:
    """The config of a model with twice of everything but dimensions of a head."""
    spec = find(config)
    assert spec is not None
    keys = [only] if only else [key for key in size_keys(spec) if "head_dim" not in key and key != "d_kv"]
    return {**config, **{key: 2 * config[key] for key in keys if type(config.get(key)) is int}}


def widening(config: dict[str, Any], state: dict[str, torch.Tensor], wide: dict[str, Any]) -> Widening:
    tied = tied_head(config, state, "small")
    pair = (resolve(one, list(state), "small") for one in (config, wide))
    return Widening(*pair, tied[0] if tied else None, "small", "large")
