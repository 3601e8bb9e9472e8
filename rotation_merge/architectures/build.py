"""From an architecture file and a model's config to its spaces and labelled tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from rotation_merge.architectures.expression import evaluate, word
from rotation_merge.architectures.model import (
    ROLES,
    Architecture,
    Axis,
    Block,
    Norm,
    Part,
    Piece,
    Scale,
    Space,
    TensorInfo,
    factors_of,
    spell,
)
from rotation_merge.architectures.schema import (
    FIXED,
    TIMES,
    ArchitectureSpec,
    AttentionSpec,
    AxisLabel,
    Expression,
    FusedAxis,
    LinearSpec,
    LocalSpace,
    ModuleSpec,
    NormSpec,
    Section,
    TensorSpec,
)
from rotation_merge.architectures.streams import stream_groups
from rotation_merge.errors import ArchitectureError
from rotation_merge.groups.admitted import QUERIES, VALUES

T = TypeVar("T")

DEGREES = {"relu": 1, "leaky_relu": 1, "linear": 1, "relu2": 2, "relu_squared": 2}
"""Activations by name with f(c x) = c^degree f(x) for every c > 0; all others admit no rescaling."""


@dataclass(frozen=True)
class _Scope:
    """Where a section stands: its name prefix, the spaces in sight, and the config (with the layer as `i`)."""

    spec: ArchitectureSpec
    config: Mapping[str, Any]
    prefix: str
    spaces: Mapping[str, Space]

    def error(self, what: str, remedy: str) -> ArchitectureError:
        return ArchitectureError(what, where=f"architecture file '{self.spec.family}'", remedy=remedy)


def variables(spec: ArchitectureSpec, config: Mapping[str, Any]) -> dict[str, Any]:
    """What the file's expressions may name: the config's keys, `model_class`, and the file's own variables."""
    return _named({**config, "model_class": (config.get("architectures") or [""])[0]}, spec.variables)


def _named(values: dict[str, Any], expressions: Mapping[str, Expression]) -> dict[str, Any]:
    """The values with those of named expressions, each of which may use the ones before it."""
    for name, expression in expressions.items():
        values[name] = evaluate(expression, values)
    return values


def build(
    spec: ArchitectureSpec, config: Mapping[str, Any], base: str, spelling: list[tuple[str, str]]
) -> Architecture:
    """The whole model as the file and the config describe it, under one way of naming tensors (see `spelled`)."""
    return spelled(lay_out(spec, config), base, spelling)


def lay_out(spec: ArchitectureSpec, config: Mapping[str, Any]) -> Architecture:
    """The whole model as the file and the config describe it, its tensors named as in the file (`{base}`, `{e}`).

    Args:
        spec: the architecture file.
        config: the model's config as a dictionary.

    Raises:
        ArchitectureError: the file refers to spaces, roles or config keys that are not there.
    """
    values = variables(spec, config)
    root = _Scope(spec, values, "", {})
    streams = {
        name: Space(name, "stream", {"size": _integer(root, stream.size, f"size of stream {name}")})
        for name, stream in spec.streams.items()
        if _holds(root, stream.when)
    }
    blocks: list[Block] = []
    modules = {name: module for name, module in spec.modules.items() if _holds(root, module.when)}
    own = {name: (values.get(module.config) or {}) if module.config else {} for name, module in modules.items()}
    for module, definition in modules.items():
        inner = _named({**values, **own[module]}, definition.variables)
        scope = replace(root, config=inner, spaces=streams)
        blocks += _module_blocks(scope, module, definition)
    return Architecture(
        family=spec.family,
        streams=streams,
        stream_groups={name: stream_groups(spec, values, name, blocks) for name in streams},
        blocks=tuple(blocks),
        layers_key={
            module: f"{definition.config}.{definition.layers_key}" if own[module] else definition.layers_key
            for module, definition in modules.items()
        },
        limits=tuple(spec.limits),
    )


def spelled(architecture: Architecture, base: str, spelling: list[tuple[str, str]]) -> Architecture:
    """A laid-out model as one kind of checkpoint names its tensors.

    Args:
        base: what `{base}` stands for.
        spelling: [ours, theirs] substitutions in tensor names.
    """
    blocks = tuple(_rename(block, base, spelling) for block in architecture.blocks)
    return replace(architecture, blocks=blocks, base=base, spelling=tuple(spelling))


def _holds(scope: _Scope, when: Expression) -> bool:
    return when is None or bool(evaluate(when, scope.config))


def _integer(scope: _Scope, expression: Expression, what: str) -> int:
    value = evaluate(expression, scope.config)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise scope.error(f"{what}: '{expression}' is {value!r}, not a size", "check the keys in config.json")
    return value


def _module_blocks(scope: _Scope, module: str, definition: ModuleSpec) -> list[Block]:
    outer = {name: _space(scope, f"{module}.{name}", space) for name, space in definition.spaces.items()}
    outer_scope = replace(scope, spaces={**scope.spaces, **outer})
    blocks = [_block(outer_scope, definition.before, f"{module}.before", module, None, "before", outer)]
    for index in range(_integer(scope, definition.layers, f"number of layers of module {module}")):
        path = definition.layer.path.replace("{i}", str(index))
        config = _named({**scope.config, "i": index}, definition.layer.variables)
        inner = replace(scope, config=config)
        local = path.replace("{base}", "")
        spaces = {name: _space(inner, local + name, space) for name, space in definition.layer.spaces.items()}
        layer_scope = replace(inner, prefix=definition.layer.path, spaces={**scope.spaces, **spaces})
        blocks.append(_block(layer_scope, definition.layer, path.rstrip("."), module, index, "layer", spaces))
    blocks.append(_block(outer_scope, definition.after, f"{module}.after", module, None, "after", outer))
    return [block for block in blocks if block.tensors]


def _space(scope: _Scope, name: str, spec: LocalSpace) -> Space:
    config = scope.config
    if isinstance(spec, AttentionSpec):
        return _attention(scope, name, spec)
    sizes = {"size": _integer(scope, spec.size, f"size of space {name}") if evaluate(spec.size, config) else 0}
    if spec.kind == "experts":
        sizes["count"] = _integer(scope, spec.count, f"count of {name}") if evaluate(spec.count, config) else 0
    gated = bool(evaluate(spec.gated, config))
    degree = 1 if gated else DEGREES.get(evaluate(spec.activation, config), 0)
    return Space(name, spec.kind, sizes, gated=gated, degree=degree)


def _attention(scope: _Scope, name: str, spec: AttentionSpec) -> Space:
    heads = _integer(scope, spec.heads, f"heads of {name}")
    groups = heads if spec.kv_heads is None else _integer(scope, spec.kv_heads, f"KV heads of {name}")
    head_dim = _integer(scope, spec.head_dim, f"head size of {name}")
    value_dim = head_dim if spec.value_dim is None else _integer(scope, spec.value_dim, f"value size of {name}")
    if groups == 0 or heads % groups:
        raise scope.error(f"{name}: {heads} heads do not divide into {groups} KV groups", "check config.json")
    rotary = 0
    if spec.rotary and (spec.rotary.when is None or evaluate(spec.rotary.when, scope.config)):
        rotary = head_dim if spec.rotary.dims is None else int(evaluate(spec.rotary.dims, scope.config))
    return Space(
        name,
        "attention",
        {"groups": groups, "per_group": heads // groups, "head_dim": head_dim, "value_dim": value_dim},
        rotary=rotary,
        interleaved=bool(spec.rotary and spec.rotary.layout == "interleaved"),
        norm=word(spec.norm, scope.config, tuple(filter(None, QUERIES))),
        values=word(spec.values, scope.config, tuple(VALUES)) or "free",
        free_order=word(spec.order, scope.config, ("free", "fixed")) != "fixed",
    )


def _block(
    scope: _Scope, section: Section, name: str, module: str, index: int | None, place: str, spaces: dict[str, Space]
) -> Block:
    tensors: list[TensorInfo] = []
    for path, linear in section.linear.items():
        tensors += _linear(scope, path, _chosen(scope, linear), conv1d=False)
    for path, linear in section.conv1d.items():
        tensors += _linear(scope, path, _chosen(scope, linear), conv1d=True)
    for path, spec in section.tensors.items():
        tensors += _tensor(scope, path, _chosen(scope, spec))
    norms, scales = [], []
    for path, entry in section.norms.items():
        for norm in [n for n in _listed(entry) if _holds(scope, n.when)][:1]:
            tensors += _norm_tensors(scope, path, norm)
            norms.append(_norm(scope, path, norm, tensors))
    for path, choice in section.scales.items():
        for scale in [s for s in _listed(choice) if _holds(scope, s.when)][:1]:
            tensors += _tensor(scope, path, TensorSpec(axes=[f"{scale.stream}.gain"]))
            key = scope.prefix + scale.writes
            scales.append(Scale(scope.spaces[scale.stream].name, scope.prefix + path, (f"{key}.weight", f"{key}.bias")))
    used = {space.name for tensor in tensors for space in tensor.spaces()}
    present = {local: space for local, space in spaces.items() if space.name in used}
    for local, space in present.items():
        if 0 in space.sizes.values():
            raise scope.error(f"space '{local}' of {name} has no size in this config", "check the keys in config.json")
    return Block(name, module, index, place, tuple(tensors), present, tuple(norms), tuple(scales))


def _listed(entry: T | list[T]) -> list[T]:
    return entry if isinstance(entry, list) else [entry]


def _chosen(scope: _Scope, spec: LinearSpec) -> TensorSpec | None:
    """The entry in full; of several, the first whose `when` holds."""
    if isinstance(spec, TensorSpec):
        return spec if _holds(scope, spec.when) else None
    entries = [item for item in spec if isinstance(item, TensorSpec)]
    if not entries:
        return TensorSpec(axes=[item for item in spec if not isinstance(item, TensorSpec)])
    return next((entry for entry in entries if _holds(scope, entry.when)), None)


def _linear(scope: _Scope, path: str, spec: TensorSpec | None, conv1d: bool) -> list[TensorInfo]:
    if spec is None:
        return []
    stacked = "{e}" in path
    rows = spec.axes[1] if conv1d or stacked else spec.axes[0]
    bias = TensorSpec(axes=[spec.axes[0], rows] if stacked else [rows], optional=True)
    return [*_tensor(scope, f"{path}.weight", spec), *_tensor(scope, f"{path}.bias", bias)]


def _norm_tensors(scope: _Scope, path: str, norm: NormSpec) -> list[TensorInfo]:
    gain = TensorSpec(axes=[f"{norm.stream}.gain"], optional=norm.optional)
    shift = TensorSpec(axes=[f"{norm.stream}.shift"], optional=True)
    dot = "" if norm.gain == "" else f".{norm.gain}"
    return [*_tensor(scope, f"{path}{dot}", gain), *_tensor(scope, f"{path}.bias", shift)]


def _norm(scope: _Scope, path: str, norm: NormSpec, tensors: list[TensorInfo]) -> Norm:
    """The norm, without those of its readers that read something else in a model of this config."""
    kind = word(norm.kind, scope.config, ("rms", "layer"))
    if kind not in ("rms", "layer"):
        raise scope.error(f"norm '{path}' is of kind {kind!r}", "write rms or layer")
    dot = "" if norm.gain == "" else f".{norm.gain}"
    stream = scope.spaces[norm.stream].name
    wrong = {t.key for t in tensors if not any(p.space.name == stream for axis in t.axes for p in axis.parts)}
    named = (read if read.startswith("{base}") else scope.prefix + read for read in norm.reads)
    reads = tuple(read for read in named if read not in wrong and f"{read}.weight" not in wrong)
    return Norm(stream, f"{scope.prefix}{path}{dot}", f"{scope.prefix}{path}.bias", reads, kind == "layer", norm.offset)


def _tensor(scope: _Scope, path: str, spec: TensorSpec | None) -> list[TensorInfo]:
    if spec is None:
        return []
    axes = tuple(_axis(scope, path, label) for label in spec.axes)
    key = scope.prefix + path
    real = key.replace("{i}", str(scope.config.get("i", "")))
    other = (scope.prefix + spec.unless).replace("{i}", str(scope.config.get("i", ""))) if spec.unless else None
    if "{e}" in real and not axes[0].size:
        return []
    return [TensorInfo(key, (real,), axes, spec.optional, "{e}" in real, tuple(spec.tied), other)]


def _axis(scope: _Scope, path: str, label: AxisLabel) -> Axis:
    if not isinstance(label, FusedAxis):
        return Axis((_piece(scope, path, label),), label=label) if "." in label or "(" in label else Axis(label=label)
    pieces = tuple(_piece(scope, path, piece) for piece in label.split or label.interleave or [])
    depth = 0 if label.split else label.depth
    if len({factors_of(piece)[:depth] for piece in pieces}) != 1:
        what = (
            f"the pieces of a fused axis share no {depth} leading factors" if pieces else "a fused axis without pieces"
        )
        raise scope.error(f"'{path}': {what}", 'write {"split": [...]} or {"interleave": [...]}, and its "depth"')
    return Axis(pieces, depth, label="fused")


def _piece(scope: _Scope, path: str, label: str) -> Piece:
    return tuple(_part(scope, path, factor) for factor in TIMES.split(label))


def _part(scope: _Scope, path: str, label: str) -> Part:
    if fixed := FIXED.fullmatch(label):
        return Part(Space("", "fixed", {"size": _integer(scope, fixed[1], f"'{path}': {label}")}), "fixed")
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
