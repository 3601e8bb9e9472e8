"""A first architecture file for an unknown model, from its tensors' names and shapes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from mergekit.common import ModelReference
from mergekit.options import MergeOptions

from rotation_merge.architecture import find, resolve
from rotation_merge.architecture.registry import shipped
from rotation_merge.errors import ArchitectureError, RotationMergeError
from rotation_merge.model.open import check_shapes, read_stored
from rotation_merge.model.tensors import Shapes

Section = dict[str, Any]

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

ALWAYS = (
    "check: rotary embedding ('half' or 'interleaved'), and norms of queries and keys ('norm')",
    "check: 'reads' of each norm; leave it out where the norm's output goes back into the stream; LayerNorm: 'kind'",
    "then: rotation-merge inspect --prove FILE",
)
EXPERT_SIZES = ("moe_intermediate_size", "intermediate_size")
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Config keys of experts, the likeliest first."""

_LAYER = re.compile(r"^(?P<path>(?:[^.]+\.)*?)(?P<index>\d+)\.(?P<rest>.+)$")
_EACH, EXPERT = re.compile(r"experts\.\d+\."), "experts.{e}."
_HEAD_NORM = re.compile(r"(^|[._])([qk])(uery|ey)?_(layer)?norm\.weight$")
_AFTER = re.compile(r"post_(feedforward|mlp|ffn|self_attn)")
"""Norms whose output goes back into the stream."""


def draft_of(model: str) -> tuple[Section, list[str]]:
    """An architecture file as a dictionary, and the entries to check.

    Raises:
        RotationMergeError: the checkpoint cannot be read, or has no layers.
    """
    _, config, tensors = read_stored(ModelReference.parse(model), MergeOptions())
    content, doubts = draft_content(config, tensors.shapes, model)
    fits = matching_families(config, tensors.shapes) if len(doubts) > len(ALWAYS) else []
    if not fits:
        return content, doubts
    labels = {key: content[key] for key in ("family", "title", "classes", "model_types")}
    first = f"check: names and shapes are those of {fits[0]}; the file declares it as one more model of that family"
    notes = [f"check: names and shapes would also be those of {', '.join(fits[1:])}"] if fits[1:] else []
    return {**labels, "extends": fits[0]}, [first, *notes, *ALWAYS]


def matching_families(config: Mapping[str, Any], shapes: Shapes) -> list[str]:
    """Families whose files describe every tensor of a checkpoint, the detected one first."""
    known, families = find(config), []
    for spec in shipped().values():
        family_config = {**config, "architectures": spec.classes[:1], "model_type": (spec.model_types or [""])[0]}
        with suppress(RotationMergeError, TypeError, LookupError):  # entries of the config that another family needs
            architecture = resolve(config if spec is known else family_config, list(shapes), spec.family)
            check_shapes(architecture, shapes, spec.family)
            families.append(spec.family)
    return sorted(families, key=lambda family: known is None or family != known.family)


def draft_content(config: Mapping[str, Any], shapes: Shapes, model: str) -> tuple[Section, list[str]]:
    """See `draft_of`.

    Args:
        shapes: of all tensors, by name.
        model: name for errors.
    """
    draft = _Draft(config, shapes)
    if not draft.layers:
        raise ArchitectureError("has no numbered layers", where=model, remedy="see docs/add-architecture.md")
    layer = draft.layer()
    before, after = draft.outside()
    kind, name = str(config.get("model_type") or "mine"), (config.get("architectures") or ["MyModel"])[0]
    whole = {"layers": "num_hidden_layers", "layers_key": "num_hidden_layers"}
    within = {"path": f"{draft.stack}{{i}}.", "spaces": draft.spaces(layer), **layer}
    labels = {"family": kind, "title": name, "classes": [name], "model_types": [kind]}
    return {
        **labels,
        "variables": {"dim": "head_dim or hidden_size // num_attention_heads"},
        "streams": {"residual": {"size": "hidden_size"}},
        "modules": {"default": {**whole, "before": before, "layer": within, "after": after}},
    }, [*draft.doubts, *ALWAYS]


@dataclass(frozen=True)
class _Draft:
    """What names and shapes say of one model; `doubts` collects what is to be checked."""

    config: Mapping[str, Any]
    shapes: Shapes
    doubts: list[str] = field(default_factory=list)

    @cached_property
    def layers(self) -> list[re.Match[str]]:
        """The names of tensors in the largest stack of layers."""
        matches = [match for match in map(_LAYER.match, self.shapes) if match]
        stacks = Counter(match["path"] for match in matches).most_common(1)
        return [match for match in matches if match["path"] == stacks[0][0]]

    @property
    def stack(self) -> str:
        """The prefix of the layers' names."""
        return self.layers[0]["path"]

    @cached_property
    def inner(self) -> Shapes:
        """Shapes of a layer's tensors, by their names in it; experts stand for one another."""
        return {_EACH.sub(EXPERT, match["rest"]): self.shapes[match[0]] for match in self.layers}

    @cached_property
    def width(self) -> int:
        """Size of the stream."""
        usual = Counter(shape[-1] for shape in self.inner.values() if len(shape) > 1).most_common(1)
        return int(self.config.get("hidden_size") or usual[0][0])

    def doubt(self, name: str, reading: str) -> None:
        shape = self.shapes.get(name, self.inner.get(name, ()))
        self.doubts.append(f"check: '{name}' {list(shape)} is taken {reading}")

    def layer(self) -> Section:
        """Norms, linear maps and other tensors of a layer."""
        linear, norms, tensors = Section(), Section(), Section()
        for name, shape in sorted(self.inner.items()):
            stem = name.removesuffix(".weight")
            if name.endswith(".bias"):
                continue
            if len(shape) == 2 and stem != name:
                linear[stem] = _axes(stem) or self.by_shape(stem, shape)
            elif match := _HEAD_NORM.search(name):
                size = self.config.get("head_dim") or self.width // int(self.config.get("num_attention_heads") or 1)
                gain, words = ("norm", "each head") if shape[0] == size else ("gain", "all heads")
                tensors[name] = [f"attn.{match[2]}_{gain}"]
                self.doubt(name, f"for the gain of a norm over {words}")
            elif shape == (self.width,) and stem != name:
                norms[stem] = _norm(stem, self.inner)
            else:
                tensors[name] = ["fixed"] * len(shape)
                self.doubt(name, "to keep its coordinates")
        after = {stem for stem in norms if _AFTER.search(stem)}
        if after and (len(norms) == 2 or any("pre_feedforward" in stem for stem in norms)):
            after |= {stem for stem in norms if "post_attention" in stem}
        read = [stem for stem, axes in linear.items() if axes[-1] == "residual.read"]
        attention = [stem for stem in read if "attn." in str(linear[stem][0])]
        readers = (attention, [stem for stem in read if stem not in attention])
        for stem, names in zip([stem for stem in norms if stem not in after], readers, strict=False):
            norms[stem]["reads"] = names
        self.mark_optional(linear, norms, tensors)
        return {"norms": norms, "linear": linear, "tensors": tensors}

    def mark_optional(self, linear: Section, norms: Section, tensors: Section) -> None:
        """Tensors that not every layer has."""
        often, count = Counter(match["rest"] for match in self.layers), len({match["index"] for match in self.layers})
        optional = sorted({_EACH.sub(EXPERT, name) for name, number in often.items() if number < count})
        for name in optional:
            stem = name.removesuffix(".weight")
            if stem in norms:
                norms[stem]["optional"] = True
            for section, key in ((linear, stem), (tensors, name)):
                if key in section:
                    section[key] = {"axes": section[key], "optional": True}
        if optional:
            words = "check: tensors that only some layers have are optional ('when' selects those layers)"
            self.doubts.append(f"{words}: {', '.join(optional)}")

    def by_shape(self, stem: str, shape: tuple[int, ...]) -> list[str]:
        """Axes of a map with an unknown name: a router's, of neurons, or fixed."""
        neurons, experts = self.config.get("intermediate_size"), {self.config.get(key) for key in EXPERT_COUNTS}
        readings: dict[tuple[Any, ...], tuple[list[str], str]] = {
            (count, self.width): (["experts.index", "residual.read"], "for the router of experts") for count in experts
        }
        if neurons != self.width:
            readings[neurons, self.width] = ["ffn.in", "residual.read"], "for a map into neurons"
            readings[self.width, neurons] = ["residual.write", "ffn.out"], "for a map out of neurons"
        axes, reading = readings.get(shape, (["fixed", "fixed"], "to keep its coordinates"))
        self.doubt(f"{stem}.weight", reading)
        return axes

    def spaces(self, layer: Section) -> Section:
        text, config = str(layer), self.config
        heads: Section = {"kind": "attention", "heads": "num_attention_heads", "head_dim": "dim"}
        if config.get("num_key_value_heads"):
            heads["kv_heads"] = "num_key_value_heads"
        if config.get("rope_parameters") or config.get("rope_theta"):
            heads["rotary"] = {"layout": "half"}
        for mark, norm in (("attn.q_gain'", "rms_all"), ("attn.q_norm'", "rms_head")):
            if mark in text:
                heads["norm"] = norm
        neurons = {"gated": True} if "ffn.gate" in text else {"activation": "hidden_act"}
        spaces = {"attn": heads, "ffn": {"kind": "ffn", "size": "intermediate_size", **neurons}}
        if "experts.index" in text:
            sizes = {s[0] for n, s in self.inner.items() if re.search(r"experts\.\{e\}\..*(gate|up)_proj|\.w1", n)}
            size = next((key for key in EXPERT_SIZES if config.get(key) in sizes), EXPERT_SIZES[0])
            count = next(filter(config.get, EXPERT_COUNTS), EXPERT_COUNTS[0])
            spaces["experts"] = {"kind": "experts", "count": count, "size": size, "gated": "experts.gate" in text}
        return spaces

    def outside(self) -> tuple[Section, Section]:
        """The tensors before and after the layers."""
        before, norms, linear = Section(), Section(), Section()
        words, width = int(self.config.get("vocab_size") or 0), self.width
        outer = {name: shape for name, shape in self.shapes.items() if not name.startswith(self.stack)}
        embedding = next((n for n, shape in outer.items() if shape == (words, width) and "embed" in n), None)
        head = {"axes": ["vocabulary", "residual.read"], "optional": True, "tied": [embedding]}
        for name, shape in sorted(outer.items()):
            stem = name.removesuffix(".weight")
            if name == embedding or (len(shape) == 2 and shape[-1] == width and "embed" in name):
                before[name] = ["vocabulary" if shape[0] == words else "positions", "residual.write"]
            elif shape == (words, width):
                linear[stem] = head
            elif shape == (width,) and not name.endswith(".bias"):
                norms[stem] = _norm(stem, outer)
            elif not name.endswith(".bias"):
                linear[stem] = {"axes": ["classes", "residual.read"], "optional": True}
                self.doubt(name, "for a head that reads the stream")
        if embedding is not None and head not in linear.values():
            linear["lm_head"] = head
        for norm in list(norms)[-1:]:
            norms[norm]["reads"] = list(linear)
        return {"tensors": before}, {"norms": norms, "linear": linear}


def _norm(stem: str, shapes: Shapes) -> Section:
    return {"stream": "residual", "reads": [], **({"kind": "layer"} if f"{stem}.bias" in shapes else {})}


def _axes(stem: str) -> list[Any] | None:
    axes = next((list(axes) for rule, axes in RULES if re.search(rule, stem)), None)
    if axes is None or EXPERT not in stem:
        return axes
    return ["experts.index", *(axis.replace("ffn.", "experts.") for axis in map(str, axes))]
