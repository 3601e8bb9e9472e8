"""Small models of every family, as their configs describe them: for proofs, tests and the page of the documentation."""

from __future__ import annotations

from typing import Any

from rotation_merge.architecture.build import lay_out, with_checkpoint_names
from rotation_merge.architecture.model import Architecture
from rotation_merge.architecture.schema import ArchitectureSpec

SIZES: dict[str, float] = {
    "head_dim d_kv": 16,
    "rotary_dim": 8,
    "num_hidden_layers n_layer n_layers num_layers num_decoder_layers encoder_layers decoder_layers depth": 2,
    "spatial_merge_size": 2,
    "downsample_ratio": 0.5,
    "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads": 4,
    "num_key_value_heads num_kv_heads num_experts num_local_experts mlp_ratio": 2,
    "hidden_size n_embd d_model dim intermediate_size moe_intermediate_size shared_expert_intermediate_size": 64,
    "d_ff ffn_dim encoder_ffn_dim decoder_ffn_dim hidden_dim": 64,
}
"""Config keys by the quantity that they count, with a value for a small model."""


def config_of(spec: ArchitectureSpec) -> dict[str, Any]:
    """The config of a small model of the family, everything optional left at its default."""
    sizes = {key: size for keys, size in SIZES.items() for key in keys.split()}
    named_parts = {module.config for module in spec.modules.values() if module.config}
    parts = {part: {**sizes, **spec.example.get(part, {})} for part in sorted(named_parts)}
    headed = [name for name in spec.classes if name not in spec.bare]
    named = {"architectures": headed[:1], "model_type": (spec.model_types or [""])[0]}
    return {**sizes, **named, "do_layer_norm_before": True, **spec.example, **parts}


def sample(spec: ArchitectureSpec) -> Architecture:
    """The family's architecture at small sizes."""
    return with_checkpoint_names(lay_out(spec, config_of(spec)), spec.bases[0], [])
