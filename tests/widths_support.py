"""Models in larger sizes, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from plugin_support import make, state, twin, write_state
from tiny_models import ALL, Case
from torch import Tensor

import rotation_merge as rm

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

SIZES = (
    *("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "shared_intermediate_size"),
    *("n_embd", "n_head", "n_inner", "ffn_dim", "mlp_ratio", "d_model", "d_ff", "num_heads"),
)
"""What configs call the sizes of streams and of neurons, and the numbers of heads."""
ROUTED = ("granitemoeshared", "mixtral")
"""Types whose `intermediate_size` is that of routed experts, which stay."""


def doubled(config: dict[str, Any], *only: str) -> dict[str, Any]:
    """The config of a model with twice of everything but dimensions of a head and routed experts."""
    keys = only or [key for key in SIZES if key != "intermediate_size" or config["model_type"] not in ROUTED]
    return {**config, **{key: 2 * config[key] for key in keys if type(config.get(key)) is int}}


def widened(large: Any, small: Any) -> rm.Alignment:
    """What brings a model, and fine-tunes of it, to a larger one's sizes and does nothing else."""
    return rm.align(large, small, widths=True, attention="none", heads="none", ffn="none", scaling=False)


def of_sizes(case: Case, config: dict[str, Any], where: Path) -> Path:
    """A model of a case in other sizes, with random weights of its class."""
    model = case.model_class(case.model_class.config_class.from_dict(config)).double()
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter)
    model.save_pretrained(where)
    return where


LARGE = {"hidden_size": 64, "intermediate_size": 80, "num_attention_heads": 8, "num_key_value_heads": 4}


def tuned_from(state: dict[str, Tensor], size: float = 0.05) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    noise = {n: size * torch.randn(t.shape, generator=draw, dtype=torch.float64) for n, t in state.items()}
    return {n: (t + noise[n]).to(t.dtype) if t.is_floating_point() else t for n, t in state.items()}


def unlike_models(folder: Path) -> dict[str, Path]:
    """A small Llama and its fine-tune, both as a larger one in other coordinates, and with layers that do nothing."""
    small = make("llama", folder / "small")
    large = make("llama", folder / "large", seed=5, **LARGE)
    tuned = write_state(tuned_from(state(small)), small, folder / "tuned")
    grown = widened(str(large), str(small))
    own = state(small)
    only = {n: t if "proj" in n else own[n] for n, t in state(tuned).items()}
    maps = write_state(only, small, folder / "maps")  # of which nothing but linear maps changed
    found = {"small": small, "tuned": tuned, "maps": maps, "other": large}
    for name, path in (("wide", small), ("wide-tuned", tuned), ("wide-maps", maps)):
        grown.apply(str(path), strict=False).save_pretrained(folder / f"{name}-inner")
        found[name] = twin(folder / f"{name}-inner", folder / name, residual="rotation", heads="permutation")
    deep = make("llama", folder / "deep", seed=3, num_hidden_layers=4)
    for name, path in (("deep", small), ("deep-tuned", tuned), ("deep-maps", maps)):
        found[name] = write_state(inserted(state(path), state(deep)), deep, folder / f"{name}-made")
    return found


def inserted(own: dict[str, Tensor], deep: dict[str, Tensor]) -> dict[str, Tensor]:
    """The layers 0 and 1 of a model as 1 and 2 of a deeper one, whose others write nothing."""
    idle = {n: t.zero_() if "o_proj" in n or "down_proj" in n else t for n, t in deep.items()}
    moved = {n.replace("layers.1.", "layers.2.").replace("layers.0.", "layers.1."): t for n, t in own.items()}
    return {**idle, **moved}
