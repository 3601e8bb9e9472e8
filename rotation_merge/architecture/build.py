"""Builds the spaces and labelled tensors of a model from its architecture file and config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from keyword import iskeyword
from typing import Any

from rotation_merge.architecture.expression import evaluate
from rotation_merge.architecture.model import (
    Architecture,
    Axis,
    AxisPiece,
    Block,
    Norm,
    Part,
    Scale,
    Space,
    TensorInfo,
    factors_of,
    spell,
    stem_of,
)
from rotation_merge.architecture.schema import (
    FIXED,
    TIMES,
    ArchitectureSpec,
    AttentionSpec,
    AxisLabel,
    ExpertsSpec,
    Expression,
    FfnSpec,
    FusedAxis,
    LocalSpace,
    ModuleSpec,
    NormSpec,
    RotarySpec,
    Section,
    Spec,
    TensorSpec,
    TranslationSpec,
)
from rotation_merge.errors import ArchitectureError, CheckpointError, nearest
from rotation_merge.symmetry.admitted import QUERIES, STREAM_GROUPS, VALUES
from rotation_merge.symmetry.transform import ROLES, STILL


def variables(spec: ArchitectureSpec, config: Mapping[str, Any]) -> dict[str, Any]:
    """Variables for expressions of the file: the config's keys, `model_class` and the file's own variables."""
    return _named({**config, "model_class": (config.get("architectures") or [""])[0]}, spec.variables)


def _named(values: dict[str, Any], expressions: Mapping[str, Expression]) -> dict[str, Any]:
    """Add the values of named expressions, in order. Each may use the ones before it."""
    for name, expression in expressions.items():
        values[name] = evaluate(expression, values)
    return values


FEW_LAYERS, FEW_EXPERTS = 200, 4096
"""So many are laid out however few tensors a checkpoint has: layers to say which are missing, experts as they may be
stored together."""


def lay_out(spec: ArchitectureSpec, config: Mapping[str, Any], tensors: int | None = None) -> Architecture:
    """The whole model as the file and the config describe it, its tensors named as in the file (`{base}`, `{e}`).

    Args:
        spec: the architecture file.
        config: the model's config as a dictionary.
        tensors: number of tensors in the checkpoint, if one is given.

    Raises:
        ArchitectureError: the file refers to spaces, roles or config keys that are not there.
        CheckpointError: the config counts more layers or experts than so many tensors can be.
    """
    values = variables(spec, config)
    root = Scope(spec, values, "", {}, tensors)
    streams = {
        name: Space(name, "stream", {"size": integer(root, stream.size, f"size of stream {name}")})
        for name, stream in spec.streams.items()
        if holds(root, stream.when)
    }
    blocks: list[Block] = []
    modules = {name: module for name, module in spec.modules.items() if holds(root, module.when)}
    nested = {name: (values.get(module.config) or {}) if module.config else {} for name, module in modules.items()}
    for module, definition in modules.items():
        inner = _named({**values, **nested[module]}, definition.variables)
        scope = replace(root, config=inner, spaces=streams)
        blocks += _module_blocks(scope, module, definition)
    groups = {name: stream_groups(root, name, blocks) for name in streams}
    still = {name: spec.streams[name].output for name, admitted in groups.items() if admitted == ("none",)}
    outputs = {name: evaluate(output, values) if output else "last_hidden_state" for name, output in still.items()}
    return Architecture(
        family=spec.family,
        streams=streams,
        stream_groups=groups,
        handed_out={name: output for name, output in outputs.items() if output},
        blocks=tuple(blocks),
        layers_key={
            module: f"{definition.config}.{definition.layers_key}" if nested[module] else definition.layers_key
            for module, definition in modules.items()
        },
        limits=tuple(spec.limits),
    )


def with_checkpoint_names(architecture: Architecture, base: str, spelling: list[tuple[str, str]]) -> Architecture:
    """A laid-out model as one kind of checkpoint names its tensors.

    Args:
        base: value of `{base}`.
        spelling: [ours, theirs] substitutions in tensor names.
    """
    blocks = tuple(_rename(block, base, spelling) for block in architecture.blocks)
    return replace(architecture, blocks=blocks, base=base, spelling=tuple(spelling))


def _module_blocks(scope: Scope, module: str, definition: ModuleSpec) -> list[Block]:
    outer = {name: space_of(scope, f"{module}.{name}", space) for name, space in definition.spaces.items()}
    outer_scope = replace(scope, spaces={**scope.spaces, **outer})
    blocks = [_block(outer_scope, definition.before, f"{module}.before", module, None, "before", outer)]
    count = integer(scope, definition.layers, f"number of layers of module {module}")
    scope.check_count(count, f"layers of module {module}", FEW_LAYERS)
    for index in range(count):
        path = definition.layer.path.replace("{i}", str(index))
        config = _named({**scope.config, "i": index}, definition.layer.variables)
        inner = replace(scope, config=config)
        local = path.replace("{base}", "")
        spaces = {name: space_of(inner, local + name, space) for name, space in definition.layer.spaces.items()}
        layer_scope = replace(inner, prefix=definition.layer.path, spaces={**scope.spaces, **spaces})
        block = _block(layer_scope, definition.layer, path.rstrip("."), module, index, "layer", spaces)
        unread = tuple(path + name for name, when in definition.layer.dropped.items() if holds(layer_scope, when))
        blocks.append(replace(block, dropped=unread))
    blocks.append(_block(outer_scope, definition.after, f"{module}.after", module, None, "after", outer))
    return [block for block in blocks if block.tensors]


def _block(
    scope: Scope, section: Section, name: str, module: str, index: int | None, place: str, spaces: dict[str, Space]
) -> Block:
    tensors: list[TensorInfo] = []
    for path, linear in _chosen(scope, section.linear):
        tensors += _linear(scope, path, linear, conv1d=False)
    for path, linear in _chosen(scope, section.conv1d):
        tensors += _linear(scope, path, linear, conv1d=True)
    for path, spec in _chosen(scope, section.tensors):
        tensors += _tensor(scope, path, spec)
    norms, scales = [], []
    for path, norm in _chosen(scope, section.norms):
        gains, described = _norm(scope, path, norm, tensors)
        tensors += gains
        norms.append(described)
    for path, scale in _chosen(scope, section.scales):
        tensors += _tensor(scope, path, TensorSpec(axes=[f"{scale.stream}.gain"]))
        key = scope.prefix + scale.writes
        scales.append(Scale(scope.spaces[scale.stream].name, scope.prefix + path, (f"{key}.weight", f"{key}.bias")))
    used = {space.name for tensor in tensors for space in tensor.spaces()}
    present = {local: s for local, s in spaces.items() if s.name in used and s.kind not in STILL}
    for local, space in present.items():
        if 0 in space.sizes.values():
            raise scope.error(f"space '{local}' of {name} has no size in this config", "check the keys in config.json")
    return Block(name, module, index, place, tuple(tensors), present, tuple(norms), tuple(scales))


def _chosen(scope: Scope, entries: Mapping[str, list[Spec]]) -> Iterator[tuple[str, Spec]]:
    """By name the first of the entries whose `when` holds, where one does."""
    for path, specs in entries.items():
        yield from islice(((path, spec) for spec in specs if holds(scope, spec.when)), 1)


def _linear(scope: Scope, path: str, spec: TensorSpec, conv1d: bool) -> list[TensorInfo]:
    stacked = "{e}" in path
    place = int(conv1d or stacked)
    if len(spec.axes) <= place:
        raise scope.error(f"map '{path}' has too few axes", "name its outputs and its inputs")
    rows = spec.axes[place]
    axes = [spec.axes[0], rows] if stacked else [rows]
    bias = TensorSpec(axes=axes, optional=True, tied=spec.tied_bias, common=spec.common_bias)
    return [*_tensor(scope, f"{path}.weight", spec), *_tensor(scope, f"{path}.bias", bias)]


def _norm(scope: Scope, path: str, norm: NormSpec, tensors: list[TensorInfo]) -> tuple[list[TensorInfo], Norm]:
    """A norm's gain and shift, and the norm without the readers that, by the section's tensors, read something else."""
    weight, bias = f"{path}.{norm.gain}" if norm.gain else path, f"{path}.bias"
    gain = _tensor(scope, weight, TensorSpec(axes=[f"{norm.stream}.gain"], optional=norm.optional))
    shift = _tensor(scope, bias, TensorSpec(axes=[f"{norm.stream}.shift"], optional=True))
    stream, kind = scope.spaces[norm.stream].name, word(scope, norm.kind, ("rms", "layer"))
    if kind is None:
        raise scope.error(f"norm '{path}' has no kind in this config", "write rms or layer")
    wrong = {t.key for t in tensors if not any(p.space.name == stream for axis in t.axes for p in axis.parts)}
    named = (read if read.startswith("{base}") else scope.prefix + read for read in norm.reads)
    reads = tuple(read for read in named if read not in wrong and f"{read}.weight" not in wrong)
    layer = kind == "layer"
    return [*gain, *shift], Norm(stream, scope.prefix + weight, scope.prefix + bias, reads, layer, norm.offset)


def _tensor(scope: Scope, path: str, spec: TensorSpec) -> list[TensorInfo]:
    axes = tuple(_axis(scope, path, label) for label in spec.axes)
    key = scope.prefix + path
    real = key.replace("{i}", str(scope.config.get("i", "")))
    unless = (scope.prefix + spec.unless).replace("{i}", str(scope.config.get("i", ""))) if spec.unless else None
    if "{e}" in real and not axes[0].size:
        return []
    if "{e}" in real:
        scope.check_count(axes[0].size or 0, "experts", FEW_EXPERTS)
    common = _translation(scope, path, spec.common) if spec.common else None
    return [TensorInfo(key, (real,), axes, spec.optional, "{e}" in real, tuple(spec.tied), unless, spec.offset, common)]


def _translation(scope: Scope, path: str, name: str) -> Space:
    space = scope.spaces.get(name)
    if space is None or space.kind != "translation":
        known = ", ".join(name for name, space in scope.spaces.items() if space.kind == "translation")
        raise scope.error(f"'{path}': no space of translations is called '{name}'", f"known here: {known or 'none'}")
    return space


def _axis(scope: Scope, path: str, label: AxisLabel) -> Axis:
    if not isinstance(label, FusedAxis):
        return Axis((_piece(scope, path, label),), label=label) if "." in label or "(" in label else Axis(label=label)
    pieces = tuple(_piece(scope, path, piece) for piece in label.split or label.interleave or [])
    depth = 0 if label.split else label.depth
    if len({factors_of(piece)[:depth] for piece in pieces}) != 1:
        problem = (
            f"the pieces of a fused axis share no {depth} leading factors" if pieces else "a fused axis without pieces"
        )
        raise scope.error(f"'{path}': {problem}", 'write {"split": [...]} or {"interleave": [...]}, and its "depth"')
    return Axis(pieces, depth, label="fused")


def _piece(scope: Scope, path: str, label: str) -> AxisPiece:
    return tuple(_part(scope, path, factor) for factor in TIMES.split(label))


def _part(scope: Scope, path: str, label: str) -> Part:
    if fixed := FIXED.fullmatch(label):
        return Part(Space("", "fixed", {"size": integer(scope, fixed[1], f"'{path}': {label}")}), "fixed")
    space_name, _, role = label.partition(".")
    space = scope.spaces.get(space_name)
    if space is None:
        raise scope.error(f"'{path}': no space is called '{space_name}'", f"known here: {', '.join(scope.spaces)}")
    if role not in ROLES[space.kind]:
        raise scope.error(
            f"'{path}': a {space.kind} space has no role '{role}'", f"known: {', '.join(ROLES[space.kind])}"
        )
    return Part(space, role)


def _rename(block: Block, base: str, spelling: list[tuple[str, str]]) -> Block:
    def rename(name: str) -> str:
        return spell(name, base, spelling)

    def names(tensor: TensorInfo) -> tuple[str, ...]:
        head, entry, tail = rename(tensor.name).partition("{e}")
        return tuple(f"{head}{e}{tail}" for e in range(tensor.axes[0].size or 0)) if entry else (head,)

    tensors = tuple(
        replace(t, names=names(t), tied=tuple(map(rename, t.tied)), unless=rename(t.unless) if t.unless else None)
        for t in block.tensors
    )
    return replace(block, name=rename(block.name), tensors=tensors)


def stream_groups(root: Scope, stream: str, blocks: Sequence[Block]) -> tuple[str, ...]:
    """The residual groups, smallest first: none, permutation, signed_permutation, rotation (DESIGN section 2).

    A bare model gives out its stream, which therefore keeps its coordinates. Subtracting a mean forbids signs. A
    rotation needs every gain folded into its readers; with means subtracted, nothing may read the stream before its
    norm.
    """
    classes = root.config.get("architectures") or []
    if not classes or set(classes) & set(root.spec.bare):
        return ("none",)
    norms = [norm for block in blocks for norm in block.norms if norm.stream == stream]
    layer = any(norm.layer for norm in norms)
    groups = ["none", "permutation"] if layer else ["none", "permutation", "signed_permutation"]
    folds = all(norm.reads for norm in norms) and _read_in_their_blocks(stream, blocks)
    normed = {stem_of(key) for norm in norms for key in norm.reads}
    if folds and (not layer or _readers(stream, blocks) <= normed):
        groups.append("rotation")
    limit = word(root, root.spec.streams[stream].limit, tuple(STREAM_GROUPS))
    return tuple(groups[: groups.index(limit) + 1] if limit in groups else groups)


def _readers(stream: str, blocks: Sequence[Block]) -> set[str]:
    return {
        stem_of(tensor.key)
        for block in blocks
        for tensor in block.tensors
        for axis in tensor.axes
        if any(part.space.name == stream and part.role == "read" for part in axis.parts)
    }


def _read_in_their_blocks(stream: str, blocks: Sequence[Block]) -> bool:
    """Whether all readers of a block's stream norms are in the same block, which folding block by block requires.

    A layer's reader named with its layer is in that layer, or a model of this config has none.
    """
    readers = [{stem_of(tensor.key) for tensor in block.tensors} for block in blocks]
    everywhere = {stem for stems in readers for stem in stems}
    for block, own_readers in zip(blocks, readers, strict=True):
        reads = {stem_of(key) for norm in block.norms if norm.stream == stream for key in norm.reads}
        elsewhere = (reads & everywhere) - own_readers
        if any(block.index is None or "{i}" not in stem for stem in elsewhere):
            return False
    return True


DEGREES = {"relu": 1, "leaky_relu": 1, "linear": 1, "relu2": 2, "relu_squared": 2}
"""Activations by name with f(c x) = c^degree f(x) for every c > 0; all others admit no rescaling."""


@dataclass(frozen=True)
class Scope:
    """Name prefix, visible spaces and config of a section of an architecture file.

    Attributes:
        tensors: number of tensors in the checkpoint, if one is given.
    """

    spec: ArchitectureSpec
    config: Mapping[str, Any]
    prefix: str
    spaces: Mapping[str, Space]
    tensors: int | None = None

    def check_count(self, count: int, items: str, least: int) -> None:
        """Refuse more of something than a checkpoint's tensors can be, before as many are made.

        Args:
            least: a count that is taken however few tensors there are.

        Raises:
            CheckpointError: says both numbers.
        """
        if self.tensors is not None and count > max(self.tensors, least):
            raise CheckpointError(
                f"its config says {count} {items}, but it has {self.tensors} tensors",
                remedy="config.json is damaged, or that of another model",
            )

    def error(self, problem: str, remedy: str) -> ArchitectureError:
        return ArchitectureError(problem, where=f"architecture file '{self.spec.family}'", remedy=remedy)


def holds(scope: Scope, when: Expression) -> bool:
    """Whether a condition of the file holds for this config; none always does."""
    return when is None or bool(evaluate(when, scope.config))


def integer(scope: Scope, expression: Expression, role: str) -> int:
    """A size.

    Raises:
        ArchitectureError: the expression gives none; names the size.
    """
    value = evaluate(expression, scope.config)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise scope.error(f"{role}: '{expression}' is {value!r}, not a size", "check the keys in config.json")
    return value


def word(scope: Scope, expression: Expression, words: tuple[str, ...]) -> str | None:
    """The word itself, or the one that an expression gives; None without.

    Raises:
        ArchitectureError: it is not known; names it.
    """
    text = str(expression)
    bare = text in words or (text.isidentifier() and not iskeyword(text) and text not in scope.config)
    value = text if bare else evaluate(expression, scope.config) or None
    if value is not None and value not in words:
        raise scope.error(f"'{value}' is not a known word", nearest(str(value), words))
    return value


def space_of(scope: Scope, name: str, spec: LocalSpace) -> Space:
    """Build a local space; its sizes are 0 where the config lacks them."""
    if isinstance(spec, AttentionSpec):
        return _attention(scope, name, spec)
    expressions = {key: getattr(spec, key) for key in _SIZES if hasattr(spec, key)}
    sizes = {
        key: integer(scope, size, f"{key} of space {name}") if evaluate(size, scope.config) else 0
        for key, size in expressions.items()
    }
    if not isinstance(spec, FfnSpec | ExpertsSpec):
        return Space(name, spec.kind, sizes, head=isinstance(spec, TranslationSpec) and spec.head)
    if isinstance(spec, ExpertsSpec) and sizes["groups"] and sizes["count"] % sizes["groups"]:
        raise scope.error(f"{name}: {sizes['count']} experts do not divide into groups", "check config.json")
    gated = bool(evaluate(spec.gated, scope.config))
    degree = 1 if gated else DEGREES.get(evaluate(spec.activation, scope.config), 0)
    scales = word(scope, spec.scale, ("free", "fixed")) != "fixed"
    return Space(name, spec.kind, sizes, gated=gated, degree=degree if scales else 0)


_SIZES = ("size", "count", "groups", "per_group", "shared", "own")


def _attention(scope: Scope, name: str, spec: AttentionSpec) -> Space:
    heads = integer(scope, spec.heads, f"heads of {name}")
    groups = heads if spec.kv_heads is None else integer(scope, spec.kv_heads, f"KV heads of {name}")
    head_dim = integer(scope, spec.head_dim, f"head size of {name}")
    value_dim = head_dim if spec.value_dim is None else integer(scope, spec.value_dim, f"value size of {name}")
    if groups == 0 or heads % groups:
        raise scope.error(f"{name}: {heads} heads do not divide into {groups} KV groups", "check config.json")
    turned = spec.rotary if spec.rotary and holds(scope, spec.rotary.when) else RotarySpec(dims=0)
    rotary = head_dim if turned.dims is None else int(evaluate(turned.dims, scope.config))
    parts = turned.parts if rotary else 1
    if parts > 1 and (rotary != head_dim or head_dim % (2 * parts)):
        raise scope.error(
            f"{name}: {rotary} of {head_dim} dimensions do not divide into {parts} parts", "check config.json"
        )
    shares = bool(evaluate(spec.span, scope.config))
    return Space(
        name,
        "attention",
        {"groups": groups, "per_group": heads // groups, "head_dim": head_dim, "value_dim": value_dim},
        rotary=rotary,
        interleaved=bool(rotary) and word(scope, turned.layout, ("half", "interleaved")) == "interleaved",
        rotary_parts=parts,
        norm="shared" if shares else word(scope, spec.norm, tuple(filter(None, QUERIES))),
        values="fixed" if shares else word(scope, spec.values, tuple(VALUES)) or "free",
        visible_bias=spec.visible_bias,
        free_order=word(scope, spec.order, ("free", "fixed")) != "fixed",
        free_groups=not shares,
    )
