"""The page docs/architectures.md, from the architecture files: `python -m rotation_merge.architecture.table`."""

from __future__ import annotations

from typing import Any

from rotation_merge.architecture.build import build
from rotation_merge.architecture.model import Architecture, Space
from rotation_merge.architecture.registry import shipped
from rotation_merge.architecture.schema import ArchitectureSpec
from rotation_merge.symmetry.admitted import STREAM_GROUPS, heads

INTRO = """\
# Architectures

Models that can be aligned, and the groups that each admits. The page is generated from the architecture files by
`python -m rotation_merge.architecture.table > docs/architectures.md`. The tests prove for each family, on transformers
models, that every group listed leaves the outputs unchanged. [Add an architecture](add-architecture.md) says how to
add one.

Listed is the largest group of each space; the notes name configs that make it smaller. A model without a head
(`...Model`) returns its residual stream, so its stream stays where it is. The delegate merges task heads like any other
tensor.

| word | meaning |
|---|---|
| planar | a rotation and a scale for each RoPE pair |
| O(d) | an orthogonal map and one scale |
| sign | plus or minus one |
| gain exchange | what the query norm gains, the key norm loses |
| scaled | a positive scale for each neuron; of either sign in a gated FFN |
| free, fixed | heads may change places (query heads within their KV group, and KV groups), or may not |
| rows shifted | one vector is added to all rows of a router |

"""

GROUPS = """
## Groups of each family

| Family | Residual stream | Queries and keys | Values and outputs | Order of heads | Neurons, latents, channels |
|---|---|---|---|---|---|
"""

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
    return build(spec, config_of(spec), spec.bases[0], [])


def page() -> str:
    """The whole page."""
    specs = sorted(shipped().values(), key=lambda spec: spec.title.lower())
    rows = "".join(_row(spec) for spec in specs)
    return (
        f"{INTRO}{_models(specs)}{GROUPS}{rows}\n## What is not aligned, and why\n\n{''.join(map(_notes, specs))}"
        "## Classes\n\n"
        + "".join(f"- {spec.title}: {', '.join(f'`{name}`' for name in spec.classes)}\n" for spec in specs)
    )


def _models(specs: list[ArchitectureSpec]) -> str:
    """The names of known models and their families."""
    models = sorted(
        ((name, spec) for spec in specs for name in spec.models or [spec.title]), key=lambda x: x[0].lower()
    )
    return "## Models\n\n| Model | Family |\n|---|---|\n" + "".join(f"| {n} | {spec.title} |\n" for n, spec in models)


def _row(spec: ArchitectureSpec) -> str:
    architecture = sample(spec)
    spaces: dict[str, Space] = {}
    for block in architecture.blocks:
        module = f"{block.module} " if len(architecture.layers_key) > 1 else ""
        spaces.update({module + name: space for name, space in block.spaces.items()})
    attention = {name: space for name, space in spaces.items() if space.kind == "attention"}
    neurons = {name: space for name, space in spaces.items() if space.kind != "attention" and not space.head}
    cells = [
        _joined({name: STREAM_GROUPS[groups[-1]] for name, groups in architecture.stream_groups.items()}),
        _joined({name: _queries(space) for name, space in attention.items()}),
        _joined({name: heads(space).groups["vo"][0].symbol for name, space in attention.items()}),
        _joined({name: "free" if space.free_order else "fixed" for name, space in attention.items()}),
        _joined({name: _neurons(space) for name, space in neurons.items()}),
    ]
    return f"| {spec.title} | {' | '.join(cells)} |\n"


def _queries(space: Space) -> str:
    groups = {name: group.symbol for name, (group, *_) in heads(space).groups.items()}
    return groups["qk"] if groups.get("gains", "none") == "none" else f"{groups['qk']}, {groups['gains']}"


def _neurons(space: Space) -> str:
    if space.kind == "latent":
        return "signed permutations; O(d) with residual: rotation"
    if space.kind == "translation":
        return "rows shifted"
    if space.gated and space.degree == 0:
        return "experts permuted, neurons of each permuted" if space.kind == "experts" else "permuted"
    group = "permuted, scaled" if space.gated else "permuted; scaled with ReLU"
    return f"experts permuted, neurons of each {group}" if space.kind == "experts" else group


def _joined(words: dict[str, str]) -> str:
    """One word for all, or each with the name of its space."""
    if len(set(words.values())) == 1:
        return next(iter(words.values()))
    return "; ".join(f"{name}: {word}" for name, word in words.items())


def _notes(spec: ArchitectureSpec) -> str:
    return "".join([f"**{spec.title}**\n\n", *(f"- {limit}\n" for limit in spec.limits), "\n"]) if spec.limits else ""


if __name__ == "__main__":
    print(page(), end="")
