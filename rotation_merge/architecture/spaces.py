"""The local spaces of an architecture file, with their sizes in one model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rotation_merge.architecture.expression import evaluate, word
from rotation_merge.architecture.model import Space
from rotation_merge.architecture.schema import (
    ArchitectureSpec,
    AttentionSpec,
    ExpertsSpec,
    Expression,
    FfnSpec,
    LocalSpace,
    TranslationSpec,
)
from rotation_merge.errors import ArchitectureError, CheckpointError
from rotation_merge.symmetry.admitted import QUERIES, VALUES

DEGREES = {"relu": 1, "leaky_relu": 1, "linear": 1, "relu2": 2, "relu_squared": 2}
"""Activations by name with f(c x) = c^degree f(x) for every c > 0; all others admit no rescaling."""


@dataclass(frozen=True)
class Scope:
    """Where a section stands: its name prefix, the spaces in sight, and the config (with the layer as `i`).

    Attributes:
        tensors: how many a checkpoint has, where one is looked at.
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
                f"its config says that there are {count} {items}, and it has {self.tensors} tensors",
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
        ArchitectureError: the expression does not give one; says for what.
    """
    value = evaluate(expression, scope.config)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise scope.error(f"{role}: '{expression}' is {value!r}, not a size", "check the keys in config.json")
    return value


def space_of(scope: Scope, name: str, spec: LocalSpace) -> Space:
    """A local space; one whose sizes the config does not give has none, and cannot be used."""
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
    scales = word(spec.scale, scope.config, ("free", "fixed")) != "fixed"
    return Space(name, spec.kind, sizes, gated=gated, degree=degree if scales else 0)


LAYOUTS = ("half", "interleaved")
"""RoPE pairs: (i, i + d/2), or neighbours (2i, 2i + 1)."""

_SIZES = ("size", "count", "groups", "per_group", "shared", "own")


def _attention(scope: Scope, name: str, spec: AttentionSpec) -> Space:
    heads = integer(scope, spec.heads, f"heads of {name}")
    groups = heads if spec.kv_heads is None else integer(scope, spec.kv_heads, f"KV heads of {name}")
    head_dim = integer(scope, spec.head_dim, f"head size of {name}")
    value_dim = head_dim if spec.value_dim is None else integer(scope, spec.value_dim, f"value size of {name}")
    if groups == 0 or heads % groups:
        raise scope.error(f"{name}: {heads} heads do not divide into {groups} KV groups", "check config.json")
    rotary = 0
    if spec.rotary and (spec.rotary.when is None or evaluate(spec.rotary.when, scope.config)):
        rotary = head_dim if spec.rotary.dims is None else int(evaluate(spec.rotary.dims, scope.config))
    parts = spec.rotary.parts if rotary and spec.rotary else 1
    if parts > 1 and (rotary != head_dim or head_dim % (2 * parts)):
        raise scope.error(
            f"{name}: {rotary} of {head_dim} dimensions do not divide into {parts} parts", "check config.json"
        )
    order = word(spec.order, scope.config, ("free", "fixed"))
    return Space(
        name,
        "attention",
        {"groups": groups, "per_group": heads // groups, "head_dim": head_dim, "value_dim": value_dim},
        rotary=rotary,
        interleaved=bool(rotary and spec.rotary and word(spec.rotary.layout, scope.config, LAYOUTS) == LAYOUTS[1]),
        rotary_parts=parts,
        norm=word(spec.norm, scope.config, tuple(filter(None, QUERIES))),
        values=word(spec.values, scope.config, tuple(VALUES)) or "free",
        visible_bias=spec.visible_bias,
        free_order=order != "fixed",
    )
