"""What an architecture file may say. One JSON file a family, under `data/`; see docs/add-architecture.md.

An axis is written `space.role` (`attn.q`, `ffn.in`, `residual.write`), or as a bare word (`vocabulary`, `classes`,
`positions`, `fixed`, ...) if it lives in no space. A fused axis lists its parts: `{"split": [...]}` where they
follow one another, `{"interleave": [...]}` where they alternate for each KV group.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Expression = str | int | bool | None


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FusedAxis(Strict):
    """An axis that several roles share. Exactly one of the two lists is given."""

    split: list[str] | None = None
    interleave: list[str] | None = None


AxisLabel = str | FusedAxis


class TensorSpec(Strict):
    """One tensor: its axes, outermost first. A name with `{e}` stands for one tensor an entry of the first axis."""

    axes: list[AxisLabel]
    optional: bool = False
    when: Expression = None
    tied: list[str] = Field(default_factory=list)


class NormSpec(Strict):
    """A normalisation of a residual stream, with its gain (`.weight`) and, if any, shift (`.bias`).

    Attributes:
        stream: the stream it normalises.
        reads: the linear maps (or whole tensor names) that read its output, and nothing else does; empty where the
            output goes elsewhere (back into the stream, into a head of unknown kind), so that it cannot be folded.
        kind: rms, or layer (which also subtracts the mean).
        offset: 1 where the gain is 1 + weight.
    """

    stream: str
    reads: list[str] = Field(default_factory=list)
    kind: Expression = "rms"
    offset: float = 0.0
    when: Expression = None
    optional: bool = False
    gain: str = "weight"


class ScaleSpec(Strict):
    """A layer scale: a gain on what a linear map (`writes`) adds to the stream."""

    stream: str
    writes: str
    when: Expression = None


LinearSpec = list[AxisLabel] | TensorSpec
"""[out, in]; stands for `NAME.weight` and, where the checkpoint has it, `NAME.bias`."""


class Section(Strict):
    """Tensors by name. `{base}` stands for the checkpoint's prefix; in a layer, names are relative to its path."""

    linear: dict[str, LinearSpec] = Field(default_factory=dict)
    conv1d: dict[str, LinearSpec] = Field(default_factory=dict)
    norms: dict[str, NormSpec] = Field(default_factory=dict)
    scales: dict[str, ScaleSpec] = Field(default_factory=dict)
    tensors: dict[str, LinearSpec] = Field(default_factory=dict)


class RotarySpec(Strict):
    """Rotary position embedding on the first `dims` dimensions of each query and key."""

    layout: Literal["half", "interleaved"] = "half"
    dims: Expression = None
    when: Expression = None


class AttentionSpec(Strict):
    """Heads of one attention layer.

    Attributes:
        norm: what stands between projection and product: null, rms_head (RMSNorm a head), layer_head (LayerNorm a
            head), rms_all (RMSNorm over all heads), l2_head (unit length, no gain).
        order: `fixed` where heads cannot change places (ALiBi, biases shared between layers).
        values: `fixed` where the value/output coordinates cannot be turned.
    """

    kind: Literal["attention"]
    heads: Expression
    kv_heads: Expression = None
    head_dim: Expression
    value_dim: Expression = None
    rotary: RotarySpec | None = None
    norm: Expression = None
    order: Expression = "free"
    values: Expression = "free"


class FfnSpec(Strict):
    """Neurons of one FFN; `activation` names the config's function, of which ReLU admits positive rescaling."""

    kind: Literal["ffn"]
    size: Expression
    gated: Expression = False
    activation: Expression = None


class ExpertsSpec(Strict):
    """Experts of one layer and the neurons of each."""

    kind: Literal["experts"]
    count: Expression
    size: Expression
    gated: Expression = True
    activation: Expression = None


LocalSpace = AttentionSpec | FfnSpec | ExpertsSpec


class StreamSpec(Strict):
    """A residual stream. `limit` caps its group where something the norms do not show forbids a larger one."""

    size: Expression
    limit: Literal["permutation", "signed_permutation", "none"] | None = None


class LayerSection(Section):
    """The repeated layer: its path with `{i}`, and the spaces inside it."""

    path: str
    spaces: dict[str, LocalSpace] = Field(default_factory=dict)


class ModuleSpec(Strict):
    """A stack of layers with what stands before and after it; named as mergekit names modules."""

    layers: Expression
    layers_key: str
    before: Section = Field(default_factory=Section)
    layer: LayerSection
    after: Section = Field(default_factory=Section)
    spaces: dict[str, LocalSpace] = Field(default_factory=dict)


class ArchitectureSpec(Strict):
    """A family of models.

    Attributes:
        classes: names that stand under `architectures` in config.json.
        model_types: where given, the config's model_type must be one of them.
        bases: prefixes that `{base}` may stand for, the likeliest first.
        spellings: ways in which tensor names may differ from this file: lists of [ours, theirs] substitutions.
        variables: named expressions for use in other expressions.
        limits: what is not aligned and why, in words, for people.
        ignored: name endings of buffers that carry no weights (rotary tables, masks).
    """

    family: str
    title: str
    classes: list[str]
    model_types: list[str] = Field(default_factory=list)
    bases: list[str] = Field(default_factory=lambda: [""])
    spellings: list[list[tuple[str, str]]] = Field(default_factory=lambda: [[]])
    variables: dict[str, Expression] = Field(default_factory=dict)
    streams: dict[str, StreamSpec]
    modules: dict[str, ModuleSpec]
    limits: list[str] = Field(default_factory=list)
    ignored: list[str] = Field(default_factory=list)
    vocab_size_key: str = "vocab_size"
    tagalong_files: list[str] = Field(default_factory=list)
