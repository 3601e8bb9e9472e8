"""The kinds of spaces, and what acts on an axis of each role.

A role is the function of an axis in its space (the queries or the keys of an attention space, the rows that write into
a residual stream or its norm gains). A new kind of space is a row of `ROLES`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Role:
    """What acts on the axes of one role.

    Attributes:
        element: name of the element, whose coordinates are the last dimension of the axis; None: orders alone act.
        levels: levels of order, a dimension each, in front: groups (or experts: 1), and the heads in each group (2).
        dual: the element acts by its inverse transpose.
        follows: only the order of the coordinates is followed, not signs, factors or turns.
        stacked: dimension 0 of the tensor counts the elements, whatever the axis (experts).
    """

    element: str | None
    levels: int = 0
    dual: bool = False
    follows: bool = False
    stacked: bool = False


_STREAM = {"write": Role("map"), "read": Role("map"), "shift": Role("map"), "gain": Role("map", follows=True)}

ORDERS = ("order0", "order1")
"""The elements that order groups (or experts), (1, G), and the heads inside each group, (G, r), by their level."""

STILL = ("fixed", "mixer")
"""Kinds of spaces that nothing moves: numbers of coordinates, and state-space mixers or gated convolutions. No block
lists them; their axes say which tensors are linear maps, and how fused ones are split."""

ROLES: dict[str, dict[str, Role]] = {
    "stream": _STREAM,
    "latent": _STREAM,
    "ffn": {"in": Role("neurons"), "gate": Role("neurons", follows=True), "out": Role("neurons", dual=True)},
    "experts": {
        "index": Role(None, levels=1),
        "in": Role("neurons", stacked=True),
        "gate": Role("neurons", follows=True, stacked=True),
        "out": Role("neurons", dual=True, stacked=True),
    },
    "attention": {
        "k": Role("qk", levels=1),
        "q": Role("qk", levels=2, dual=True),
        "v": Role("vo", levels=1),
        "o": Role("vo", levels=2, dual=True),
        "gate": Role("vo", levels=2, follows=True),
        "k_gain": Role("gains", levels=1),
        "q_gain": Role("gains", levels=2, dual=True),
        "k_norm": Role("gains"),
        "q_norm": Role("gains", dual=True),
        "kv_head": Role(None, levels=1),
        "head": Role(None, levels=2),
    },
    "translation": {},
    "mixer": {
        "group": Role(None, levels=1),
        "head": Role(None, levels=2),
        "shared": Role("shared", levels=1),
        "own": Role("own", levels=2),
    },
    "fixed": {"fixed": Role("fixed")},
}
"""By the kind of a space, what acts on the axes of each role, those of an element's primal side first. Attention: keys
and values have an entry for each KV group, queries and outputs one for each query head of it; gains of norms of queries
and keys are those of all heads together (`k_gain`, `q_gain`) or shared by them (`k_norm`, `q_norm`); `kv_head` and
`head` are one number a head, `gate` is a gate of the outputs. FFN neurons: `in` (up, where gated), `gate`, `out`.
Mixers: `shared` states of a group, `own` channels of a head."""

_SIZES = {"qk": "head_dim", "gains": "head_dim", "vo": "value_dim", "shared": "shared", "own": "own"}
"""The size of a space that an element's coordinates are, where it is not `size`."""


@dataclass(frozen=True)
class Space:
    """A coordinate system.

    Attributes:
        name: unique in the model: `residual`, or `model.layers.3.attn`.
        kind: a key of `ROLES`; those of `STILL` are never transformed.
        sizes: by kind: size; groups, per_group, head_dim, value_dim; count; shared, own.
        rotary: number of leading query/key dimensions that rotary embedding turns (0: none).
        interleaved: whether RoPE pairs are neighbours.
        rotary_parts: number of equal parts of a head that rotary embedding turns separately.
        norm: norm between query/key projection and product, as in the architecture file.
        values: constraint on values and outputs, as in the architecture file.
        free_order: whether heads may change places.
        free_groups: whether KV groups may, too.
        visible_bias: whether softmax sees a key's bias although there is no rotary.
        gated: whether the neurons' activations are multiplied by a second, linear map.
        degree: a neuron scaled by c on its way in is scaled by 1 / c^degree on its way out; 0: it cannot be scaled.
        head: of a translation: that of a head's rows, which changes logits.
    """

    name: str
    kind: str
    sizes: dict[str, int]
    rotary: int = 0
    interleaved: bool = False
    rotary_parts: int = 1
    norm: str | None = None
    values: str = "free"
    free_order: bool = True
    free_groups: bool = True
    visible_bias: bool = False
    gated: bool = False
    degree: int = 0
    head: bool = False

    @property
    def hides_key_bias(self) -> bool:
        """Whether softmax does not see biases of keys, which then add the same to all logits of a query."""
        return self.kind == "attention" and not (self.visible_bias or self.rotary or self.norm)

    def factors(self, role: str) -> tuple[int, ...]:
        """Dimensions an axis of this role splits into."""
        rule = ROLES[self.kind][role]
        counts = ("count",) if self.kind == "experts" else ("groups", "per_group")
        inner = () if rule.element is None else (_SIZES.get(rule.element, "size"),)
        return tuple(self.sizes[name] for name in (*counts[: rule.levels], *inner))
