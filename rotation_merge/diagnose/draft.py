"""A first architecture file for an unknown model, from its tensors' names and shapes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from mergekit.common import ModelReference
from mergekit.options import MergeOptions

from rotation_merge.architecture import find, resolve
from rotation_merge.architecture.registry import shipped
from rotation_merge.errors import ArchitectureError, RotationMergeError
from rotation_merge.model.open import check_shape, read_stored

_LAYER = re.compile(r"^(?P<path>(?:[^.]+\.)*?)(?P<index>\d+)\.(?P<rest>.+)$")

RULES: tuple[tuple[str, list[Any]], ...] = (
    (r"(qkv|query_key_value|Wqkv|c_attn)[^.]*$", [{"split": ["attn.q", "attn.k", "attn.v"]}, "residual.read"]),
    (r"gate_up_proj$", [{"split": ["ffn.gate", "ffn.in"]}, "residual.read"]),
    (r"(^|[._])(q_proj|query|q_lin|wq|to_q)$", ["attn.q", "residual.read"]),
    (r"(^|[._])(k_proj|key|k_lin|wk|to_k)$", ["attn.k", "residual.read"]),
    (r"(^|[._])(v_proj|value|v_lin|wv|to_v)$", ["attn.v", "residual.read"]),
    (r"(attn|attention)[^.]*\..*(o_proj|out_proj|dense|wo|proj|out_lin)$", ["residual.write", "attn.o"]),
    (r"(^|[._])(gate_proj|w1)$", ["ffn.gate", "residual.read"]),
    (r"(^|[._])(up_proj|w3|fc1|c_fc|fc_in|lin1|dense_h_to_4h)$", ["ffn.in", "residual.read"]),
    (r"(^|[._])(down_proj|w2|fc2|fc_out|lin2|dense_4h_to_h)$", ["residual.write", "ffn.out"]),
)
"""Usual names of linear maps in layers, with their axes, [out, in]; fused ones first."""


def draft_of(model: str) -> tuple[dict[str, Any], list[str]]:
    """An architecture file as a dictionary, and the entries to check.

    Raises:
        RotationMergeError: the checkpoint cannot be read, or has no layers.
    """
    _, config, tensors = read_stored(ModelReference.parse(model), MergeOptions())
    shapes = tensors.shapes
    content, doubts = draft_content(config, shapes, model)
    fits = matching_families(config, shapes) if len(doubts) > len(_ALWAYS) else []
    if not fits:
        return content, doubts
    labels = {key: content[key] for key in ("family", "title", "classes", "model_types")}
    notes = [f"check: names and shapes would also be those of {', '.join(fits[1:])}"] if fits[1:] else []
    first = f"check: names and shapes are those of {fits[0]}; the file declares it as one more model of that family"
    return {**labels, "extends": fits[0]}, [first, *notes, *_ALWAYS]


def matching_families(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Families whose files describe every tensor of a checkpoint, the detected one first."""
    known, families = find(config), []
    for spec in shipped().values():
        family_config = {**config, "architectures": spec.classes[:1], "model_type": (spec.model_types or [""])[0]}
        try:
            architecture = resolve(config if spec is known else family_config, list(shapes), spec.family)
            for info in architecture.tensors():
                if (shape := shapes.get(info.name)) is not None:
                    check_shape(info, (len(info.names), *shape) if info.stacked else shape)
        except (RotationMergeError, TypeError, LookupError):  # entries of the config that another family needs
            continue
        families.append(spec.family)
    return sorted(families, key=lambda family: known is None or family != known.family)


def draft_content(
    config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], model: str
) -> tuple[dict[str, Any], list[str]]:
    """See `draft_of`.

    Args:
        shapes: of all tensors, by name.
        model: name for errors.
    """
    layers = [match for match in map(_LAYER.match, shapes) if match]
    if not layers:
        raise ArchitectureError("has no numbered layers", where=model, remedy="see docs/add-architecture.md")
    stack = Counter(match["path"] for match in layers).most_common(1)[0][0]
    inner = {match["rest"]: shapes[match[0]] for match in layers if match["path"] == stack}
    outer = {name: shape for name, shape in shapes.items() if not name.startswith(stack)}
    width = int(config.get("hidden_size") or Counter(s[-1] for s in inner.values() if len(s) > 1).most_common(1)[0][0])
    doubts: list[str] = []
    often = Counter(match["rest"] for match in layers if match["path"] == stack)
    optional = {
        name for name, count in often.items() if count < len({m["index"] for m in layers if m["path"] == stack})
    }
    layer = _layer(inner, config, width, doubts, optional)
    before, after = _outside(outer, width, int(config.get("vocab_size") or 0), doubts)
    kind = str(config.get("model_type") or "mine")
    name = (config.get("architectures") or ["MyModel"])[0]
    return {
        "family": kind,
        "title": name,
        "classes": [name],
        "model_types": [kind],
        "variables": {"dim": "head_dim or hidden_size // num_attention_heads"},
        "streams": {"residual": {"size": "hidden_size"}},
        "modules": {
            "default": {
                "layers": "num_hidden_layers",
                "layers_key": "num_hidden_layers",
                "before": before,
                "layer": {"path": stack + "{i}.", "spaces": _spaces(config, layer, inner), **layer},
                "after": after,
            }
        },
    }, [*doubts, *_ALWAYS]


_ALWAYS = (
    "check: rotary embedding ('half' or 'interleaved'), and norms of queries and keys ('norm')",
    "check: 'reads' of each norm; leave it out where the norm's output goes back into the stream; LayerNorm: 'kind'",
    "then: rotation-merge inspect --prove FILE",
)


def _spaces(
    config: Mapping[str, Any], layer: Mapping[str, Any], inner: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    heads: dict[str, Any] = {"kind": "attention", "heads": "num_attention_heads", "head_dim": "dim"}
    if config.get("num_key_value_heads"):
        heads["kv_heads"] = "num_key_value_heads"
    if config.get("rope_parameters") or config.get("rope_theta"):
        heads["rotary"] = {"layout": "half"}
    layer_text = str(layer)
    if "attn.q_norm" in layer_text or "attn.q_gain" in layer_text:
        heads["norm"] = "rms_head" if "attn.q_norm" in layer_text else "rms_all"
    neurons = {"gated": True} if "ffn.gate" in layer_text else {"activation": "hidden_act"}
    spaces = {"attn": heads, "ffn": {"kind": "ffn", "size": "intermediate_size", **neurons}}
    if "experts.index" in layer_text:
        sizes = {shape[0] for name, shape in inner.items() if re.search(r"experts\.\d+\..*(gate|up)_proj|\.w1", name)}
        size = next((key for key in _EXPERT_SIZES if config.get(key) in sizes), _EXPERT_SIZES[0])
        count = next((key for key in _EXPERT_COUNTS if config.get(key)), _EXPERT_COUNTS[0])
        spaces["experts"] = {"kind": "experts", "count": count, "size": size, "gated": "experts.gate" in layer_text}
    return spaces


_EXPERT_SIZES = ("moe_intermediate_size", "intermediate_size")
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Config keys of experts, the likeliest first."""

_EACH = re.compile(r"experts\.\d+\.")
_HEAD_NORM = re.compile(r"(^|[._])([qk])(uery|ey)?_(layer)?norm\.weight$")
_AFTER = re.compile(r"post_(feedforward|mlp|ffn|self_attn)")
"""Norms whose output goes back into the stream."""


def _layer(
    inner: Mapping[str, tuple[int, ...]],
    config: Mapping[str, Any],
    width: int,
    doubts: list[str],
    optional: Collection[str] = (),
) -> dict[str, Any]:
    """Norms, linear maps and other tensors of a layer.

    Args:
        optional: tensors that not every layer has.
    """
    linear: dict[str, Any] = {}
    norms: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    for name, shape in sorted({_EACH.sub("experts.{e}.", name): shape for name, shape in inner.items()}.items()):
        stem = name.removesuffix(".weight")
        if name.endswith(".bias"):
            continue
        if len(shape) == 2 and stem != name:
            linear[stem] = _axes(stem) or _by_shape(stem, shape, config, width, doubts)
        elif normed := _HEAD_NORM.search(name):
            whole = shape[0] != (config.get("head_dim") or width // int(config.get("num_attention_heads") or 1))
            tensors[name] = [f"attn.{normed[2]}_{'gain' if whole else 'norm'}"]
            doubts.append(
                f"check: '{name}' is taken for the gain of a norm over {'all heads' if whole else 'each head'}"
            )
        elif shape == (width,) and stem != name:
            layered = {"kind": "layer"} if f"{stem}.bias" in inner else {}
            norms[stem] = {"stream": "residual", "reads": [], **layered}
        else:
            tensors[name] = ["fixed"] * len(shape)
            doubts.append(f"check: '{name}' {list(shape)} is taken to keep its coordinates")
    after = {stem for stem in norms if _AFTER.search(stem)}
    if after and (len(norms) == 2 or any("pre_feedforward" in stem for stem in norms)):
        after |= {stem for stem in norms if "post_attention" in stem}
    for stem, reader in zip([stem for stem in norms if stem not in after], _readers(linear), strict=False):
        norms[stem]["reads"] = reader
    for name in sorted({_EACH.sub("experts.{e}.", name) for name in optional}):
        stem = name.removesuffix(".weight")
        if stem in norms:
            norms[stem]["optional"] = True
        for section, key in ((linear, stem), (tensors, name)):
            if key in section:
                section[key] = {"axes": section[key], "optional": True}
    if optional:
        names = ", ".join(sorted({_EACH.sub("experts.{e}.", name) for name in optional}))
        doubts.append(f"check: tensors that only some layers have are optional ('when' selects those layers): {names}")
    return {"norms": norms, "linear": linear, "tensors": tensors}


def _by_shape(stem: str, shape: tuple[int, ...], config: Mapping[str, Any], width: int, doubts: list[str]) -> list[str]:
    """Axes of a map with an unknown name: a router's, of neurons, or fixed."""
    counts = {config.get(key) for key in _EXPERT_COUNTS}
    neurons = config.get("intermediate_size")
    axes, reading = ["fixed", "fixed"], "to keep its coordinates"
    if shape[1] == width and shape[0] in counts:
        axes, reading = ["experts.index", "residual.read"], "for the router of experts"
    elif neurons != width and shape == (neurons, width):
        axes, reading = ["ffn.in", "residual.read"], "for a map into neurons"
    elif neurons != width and shape == (width, neurons):
        axes, reading = ["residual.write", "ffn.out"], "for a map out of neurons"
    doubts.append(f"check: '{stem}.weight' {list(shape)} is taken {reading}")
    return axes


def _axes(stem: str) -> list[Any] | None:
    axes = next((list(axes) for rule, axes in RULES if re.search(rule, stem)), None)
    if axes is None or "experts.{e}." not in stem:
        return axes
    return ["experts.index", *(axis.replace("ffn.", "experts.") for axis in map(str, axes))]


def _readers(linear: Mapping[str, list[Any]]) -> list[list[str]]:
    """Maps that read the stream: those of attention, then those of the FFN."""
    read = [stem for stem, axes in linear.items() if axes[-1] == "residual.read"]
    attention = [stem for stem in read if "attn." in str(linear[stem][0])]
    return [attention, [stem for stem in read if stem not in attention]]


def _outside(
    outer: Mapping[str, tuple[int, ...]], width: int, vocabulary: int, doubts: list[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors before and after the layers."""
    before: dict[str, Any] = {}
    norms: dict[str, Any] = {}
    linear: dict[str, Any] = {}
    embedding = next((n for n, shape in outer.items() if shape == (vocabulary, width) and "embed" in n), None)
    for name, shape in sorted(outer.items()):
        stem = name.removesuffix(".weight")
        if name == embedding or (len(shape) == 2 and shape[-1] == width and "embed" in name):
            before[name] = ["vocabulary" if shape[0] == vocabulary else "positions", "residual.write"]
        elif shape == (vocabulary, width):
            linear[stem] = {"axes": ["vocabulary", "residual.read"], "optional": True, "tied": [embedding]}
        elif shape == (width,) and not name.endswith(".bias"):
            layered = {"kind": "layer"} if f"{stem}.bias" in outer else {}
            norms[stem] = {"stream": "residual", "reads": [], **layered}
        elif not name.endswith(".bias"):
            linear[stem] = {"axes": ["classes", "residual.read"], "optional": True}
            doubts.append(f"check: '{name}' {list(shape)} is taken for a head that reads the stream")
    if embedding is not None and not any(entry.get("tied") for entry in linear.values()):
        linear["lm_head"] = {"axes": ["vocabulary", "residual.read"], "optional": True, "tied": [embedding]}
    for norm in list(norms)[-1:]:
        norms[norm]["reads"] = list(linear)
    return {"tensors": before}, {"norms": norms, "linear": linear}
