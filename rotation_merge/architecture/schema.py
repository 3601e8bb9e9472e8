"""The schema of architecture files: one JSON file a family, under `data/`; see docs/add-architecture.md.

An axis is written `space.role` (`attn.q`, `ffn.in`, `residual.write`), or as a bare word (`vocabulary`, `classes`,
`positions`, `fixed`, ...: see OUTSIDE) if it lives in no space. `a * b` is an axis with an entry for each pair of
entries of `a` and `b`, that of `b` running fastest; `fixed(EXPRESSION)` stands for so many entries that keep their
place. A fused axis lists its pieces: `{"split": [...]}` where they follow one another, `{"interleave": [...]}` where
they alternate: for each entry of the first `depth` factors that they share (each KV group; each neuron). Where an entry
depends on the config, it may be a list of entries, of which the first one whose `when` holds is taken.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from rotation_merge.errors import nearest

Expression = str | int | float | bool | None

OUTSIDE = {
    "fixed": "a coordinate of no space that is matched: it keeps its place",
    "vocabulary": "tokens; mergekit's tokenizer options handle them",
    "positions": "positions, buckets of relative positions, distances",
    "types": "token types (segments)",
    "classes": "outputs of a task head",
    "pixels": "pixels, patches, colour channels, mel bins, convolution kernels",
    "states": "states of a state-space model that stay in their order",
}
"""Words for axes that live in no space."""


class StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _known_label(label: str) -> str:
    for factor in TIMES.split(label):
        if not _FACTOR.fullmatch(factor) and label not in OUTSIDE:
            raise ValueError(f"'{factor}' is neither space.role nor one of {', '.join(OUTSIDE)}, fixed(SIZE)")
    return label


TIMES = re.compile(r" \* (?![^(]*\))")
"""Between the factors of an axis label, not inside `fixed(...)`."""

FIXED = re.compile(r"fixed\((.+)\)")
"""So many coordinates that keep their place."""

_FACTOR = re.compile(r"\w+\.\w+|" + FIXED.pattern)

Label = Annotated[str, AfterValidator(_known_label)]


class FusedAxis(StrictModel):
    """An axis that several roles share. Exactly one of the two lists is given; `depth` belongs to `interleave`."""

    split: list[Label] | None = None
    interleave: list[Label] | None = None
    depth: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _one_of_two(self) -> FusedAxis:
        if (self.split is None) == (self.interleave is None):
            raise ValueError("write either 'split' or 'interleave'")
        return self


AxisLabel = Label | FusedAxis


class TensorSpec(StrictModel):
    """One tensor, a name with `{e}` standing for one tensor for each entry of the first axis.

    Attributes:
        axes: labels, outermost first.
        optional: whether a checkpoint may lack it.
        when: whether a model of this config has it (null: always).
        unless: a tensor that holds the same weights in another form; where the checkpoint has that, this is left out.
        tied: tensors whose weights it shares when it is not stored itself.
        tied_bias: of a linear map, the same of its bias.
        offset: 1 where it holds gains that are 1 + weight.
        common: a space of translations: its rows meet only in a softmax, so that one vector may be added to all.
        common_bias: of a linear map, the space (of size 1) of the number that may be added to all of its bias.
    """

    axes: list[AxisLabel]
    optional: bool = False
    when: Expression = None
    unless: str | None = None
    tied: list[str] = Field(default_factory=list)
    tied_bias: list[str] = Field(default_factory=list)
    offset: float = 0.0
    common: str | None = None
    common_bias: str | None = None


class NormSpec(StrictModel):
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


class ScaleSpec(StrictModel):
    """A layer scale: a gain on the output of a linear map (`writes`) before it is added to the stream."""

    stream: str
    writes: str
    when: Expression = None


def _entries(value: Any) -> Any:
    """One entry as a list of entries; a list of labels is that of a tensor's axes."""
    if not isinstance(value, list):
        return [value]
    axes = all(not isinstance(item, dict) or item.keys() & {"split", "interleave"} for item in value)
    return [{"axes": value}] if axes else value


Spec = TypeVar("Spec", TensorSpec, NormSpec, ScaleSpec)
Entries = dict[str, Annotated[list[Spec], BeforeValidator(_entries)]]
"""By name the entries of which the first one whose `when` holds is taken."""


class Section(StrictModel):
    """Tensors by name. `{base}` stands for the checkpoint's prefix; in a layer, names are relative to its path.

    Attributes:
        linear: [out, in]; stands for `NAME.weight` and, where the checkpoint has it, `NAME.bias`.
        conv1d: the same of [in, out].
    """

    linear: Entries[TensorSpec] = Field(default_factory=dict)
    conv1d: Entries[TensorSpec] = Field(default_factory=dict)
    norms: Entries[NormSpec] = Field(default_factory=dict)
    scales: Entries[ScaleSpec] = Field(default_factory=dict)
    tensors: Entries[TensorSpec] = Field(default_factory=dict)


class RotarySpec(StrictModel):
    """Rotary position embedding on the first `dims` dimensions of each query and key; `layout`: half or interleaved.

    `parts`: 2 where each half of a head is turned by positions of its own (rows and columns of an image), so that pairs
    lie inside a half.
    """

    layout: Expression = "half"
    dims: Expression = None
    parts: int = Field(default=1, ge=1, le=2)
    when: Expression = None


class AttentionSpec(StrictModel):
    """Heads of one attention layer.

    Attributes:
        norm: between projection and product: null, rms_head (RMSNorm a head), rms_turned (the same, after rotary
            embedding), layer_head (LayerNorm a head), affine_head (LayerNorm with a shift a head), rms_all (RMSNorm
            over all heads), rms_clipped (the same, its outputs clamped), l2_head (unit length, no gain).
        order: `fixed` where heads cannot change places (ALiBi, biases shared between layers).
        span: not null of layers that meet the keys and values of another one: KV heads and what is inside them stay,
            query heads change places inside KV groups.
        visible_bias: whether keys meet more than the queries of their own head's softmax (positions of their own), so
            that a key's bias changes the outputs.
        values: `fixed` where the value/output coordinates cannot be turned, `gated` where outputs are gated one by one,
            `normed` where values are brought to one length (no gain).
    """

    kind: Literal["attention"]
    heads: Expression
    kv_heads: Expression = None
    head_dim: Expression
    value_dim: Expression = None
    rotary: RotarySpec | None = None
    norm: Expression = None
    order: Expression = "free"
    visible_bias: bool = False
    values: Expression = "free"
    span: Expression = None


class FfnSpec(StrictModel):
    """Neurons of one FFN; `activation` names the config's function, which may admit rescaling (`DEGREES`).

    Attributes:
        scale: `fixed` where neurons cannot be rescaled although they are gated (clamps, offsets).
    """

    kind: Literal["ffn"]
    size: Expression
    gated: Expression = False
    activation: Expression = None
    scale: Expression = "free"


class ExpertsSpec(StrictModel):
    """Experts of one layer and the neurons of each; `groups` that a router picks first only move as a whole."""

    kind: Literal["experts"]
    count: Expression
    size: Expression
    groups: Expression = 1
    gated: Expression = True
    activation: Expression = None
    scale: Expression = "free"


class LatentSpec(StrictModel):
    """A stream inside one layer: its norm (RMSNorm) stands under `norms`, under its name."""

    kind: Literal["latent"]
    size: Expression


class MixerSpec(StrictModel):
    """Heads in groups that nothing moves, with coordinates that are `shared` in a group and `own` ones of a head."""

    kind: Literal["mixer"]
    groups: Expression
    per_group: Expression = 1
    shared: Expression = 1
    own: Expression = 1


class TranslationSpec(StrictModel):
    """A common vector that may be added to all rows of the tensors that name it under `common`.

    Attributes:
        head: the rows are those of a head: logits change, probabilities do not, and a recipe has to ask for it.
    """

    kind: Literal["translation"]
    size: Expression
    head: bool = False


LocalSpace = Annotated[
    AttentionSpec | FfnSpec | ExpertsSpec | LatentSpec | MixerSpec | TranslationSpec,
    Field(discriminator="kind"),
]


class StreamSpec(StrictModel):
    """A residual stream.

    Attributes:
        size: its width.
        when: whether a model of this config has it (null: always).
        limit: the largest group (none, permutation, signed_permutation), or an expression that gives it, where
            something that the norms do not show forbids a larger one.
        output: where forward hands the stream out, so that its limit is none: an expression for the output's name.
    """

    size: Expression
    when: Expression = None
    limit: Expression = None
    output: Expression = None


class LayerSection(Section):
    """The repeated layer: its path with `{i}`, the spaces inside it, and expressions named for each layer `i`.

    `dropped`: name beginnings of weights that a layer's model does not read, and when: they are not written.
    """

    path: str
    dropped: dict[str, Expression] = Field(default_factory=dict)
    variables: dict[str, Expression] = Field(default_factory=dict)
    spaces: dict[str, LocalSpace] = Field(default_factory=dict)


class ModuleSpec(StrictModel):
    """A stack of layers with the tensors before and after it; named as mergekit names modules.

    In a file, `"extends": "FAMILY.MODULE"` lays a module over one of another family.

    Attributes:
        when: whether a model of this config has the module (null: always).
        config: the part of the config (`text_config`) that the module's expressions are about, where there is one.
        layers: number of layers.
        layers_key: config key of that number.
        variables: named expressions, as the family's, about this part of the config.
        spaces: those of `before` and `after`.
    """

    when: Expression = None
    config: str | None = None
    variables: dict[str, Expression] = Field(default_factory=dict)
    layers: Expression
    layers_key: str
    before: Section = Field(default_factory=Section)
    layer: LayerSection
    after: Section = Field(default_factory=Section)
    spaces: dict[str, LocalSpace] = Field(default_factory=dict)


class ArchitectureSpec(StrictModel):
    """A family of models.

    Attributes:
        extends: a family whose file this one changes: objects are merged entry by entry, null removes an entry, and the
            entries that name a family (family, title, models, classes, bare, model_types, limits) are not inherited.
        models: names under which people know its models; none: the title.
        classes: names that stand under `architectures` in config.json.
        bare: those of them whose output is a residual stream itself, so that no stream may be moved.
        model_types: values of the config's `model_type`; decides where no class does, or several families name one.
        when: whether a model of this config belongs to the family (null: always).
        bases: prefixes that `{base}` may stand for, the likeliest first.
        spellings: ways in which tensor names may differ from this file: lists of [ours, theirs] substitutions.
        variables: named expressions for use in other expressions, beside the config's keys and `model_class`.
        tied_when: whether a model has the heads whose tensors are `tied`, where it does not store them.
        limits: parts that are not aligned, with the reason, as text for users.
        example: config keys of a small model that the usual sizes (`table.SIZES`) do not give.
        ignored: name endings of buffers that carry no weights (rotary tables, masks).
        dropped: name beginnings, `{key}` standing for a config's value, of weights that the models do not read (layers
            that predict further tokens): they are not matched.
    """

    family: str
    title: str
    models: list[str] = Field(default_factory=list)
    extends: str | None = None
    classes: list[str]
    bare: list[str] = Field(default_factory=list)
    model_types: list[str] = Field(default_factory=list)
    when: Expression = None
    bases: list[str] = Field(default_factory=lambda: [""])
    spellings: list[list[tuple[str, str]]] = [[]]
    variables: dict[str, Expression] = Field(default_factory=dict)
    tied_when: Expression = (
        "'LM' in model_class or 'PreTraining' in model_class or 'ConditionalGeneration' in model_class"
    )
    streams: dict[str, StreamSpec]
    modules: dict[str, ModuleSpec]
    limits: list[str] = Field(default_factory=list)
    example: dict[str, Any] = Field(default_factory=dict)
    ignored: list[str] = Field(default_factory=list)
    dropped: list[str] = Field(default_factory=list)
    vocab_size_key: str = "vocab_size"
    tagalong_files: list[str] = Field(default_factory=list)


def explain(error: ValidationError) -> tuple[str, str, str]:
    """The plainest fault of a file: its entry, the problem and the remedy."""
    plain = ("value_error", "extra_forbidden", "union_tag_invalid", "missing", "literal_error")
    faults = sorted(error.errors(), key=lambda e: plain.index(e["type"]) if e["type"] in plain else len(plain))
    fault = faults[0]
    models = {model.__name__: model for model in (*StrictModel.__subclasses__(), *Section.__subclasses__())}
    names = [step for step in fault["loc"] if isinstance(step, str)]
    steps = [name for name in names if "[" not in name and name not in models]
    if fault["type"] != "extra_forbidden":
        return ".".join(steps), fault["msg"].removeprefix("Value error, "), "see docs/add-architecture.md"
    known = {name for model in models.values() for name in model.model_fields}
    return ".".join(steps), "there is no such entry", nearest(steps[-1], known)
