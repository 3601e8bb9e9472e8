"""The group that a local space admits; matching, gauges, learning, estimates and tables use it.

An architecture file's facts of a space (rotary dimensions, norm of queries and keys, gate, activation) select a row of
these tables; a recipe's options restrict it. To add a group is to write it in a file of this folder and to name it
here, in the row of the norm (or of the values) that leaves it. Residual streams: `stream.StreamGroup`, which an
architecture makes from its norms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, Protocol

from annotated_types import Predicate
from pydantic.dataclasses import dataclass as config_dataclass

from rotation_merge.config import BLOCK, WHOLE, Config, Kind, option
from rotation_merge.errors import ArchitectureError, nearest
from rotation_merge.symmetry.convolution import ConvolutionGroup
from rotation_merge.symmetry.direct_sum import SplitGroup
from rotation_merge.symmetry.experts import ExpertGroup
from rotation_merge.symmetry.gains import CoordinateExchange, PairExchange
from rotation_merge.symmetry.group import Group
from rotation_merge.symmetry.heads import HeadGroup
from rotation_merge.symmetry.latent import LatentGroup
from rotation_merge.symmetry.mixer import MixerGroup
from rotation_merge.symmetry.monomial import CoordinateOrder, GatedOrder
from rotation_merge.symmetry.neurons import NeuronGroup
from rotation_merge.symmetry.ordered import OrderedExchange, OrderedSigns
from rotation_merge.symmetry.planar import PlanarGroup
from rotation_merge.symmetry.scaled import OrthogonalGroup
from rotation_merge.symmetry.signs import CoordinateSigns, HeadSign, IdentityGroup, PairSigns
from rotation_merge.symmetry.space import SpaceGroup
from rotation_merge.symmetry.stream import STREAM_GROUPS
from rotation_merge.symmetry.translation import TranslationGroup

RESIDUAL = (*STREAM_GROUPS, "largest")
"""Options for a residual stream."""


def by_stream(text: Any) -> dict[str, str] | None:
    """Parse residual groups by stream, `decoder=rotation,encoder=permutation`; None for other texts."""
    pairs = [piece.partition("=") for piece in text.split(",")] if isinstance(text, str) and "=" in text else []
    by_stream = {stream.strip(): group.strip() for stream, _, group in pairs}
    return by_stream if by_stream and all(by_stream) and set(by_stream.values()) <= set(RESIDUAL) else None


Residual = Literal[RESIDUAL]  # type: ignore[valid-type]
Streams = Annotated[str, Predicate(by_stream), Kind("groups by stream (decoder=rotation,encoder=permutation)")]


@config_dataclass(frozen=True)
class GroupOptions(Config):
    """Options that admit groups, by the names and values of recipes and of the command line."""

    attention: Literal["rotation", "none", "permutation"] = option(
        "rotation",
        "maps inside attention heads. `permutation`: orders of coordinates; `rotation`: the largest compact group that "
        "the layer admits",
        scope=BLOCK,
    )
    heads: Literal["none", "permutation", "spectral"] = option(
        "none",
        "order of the attention heads. `permutation`: the best order together with the maps inside heads; `spectral`: "
        "by singular values, as TransFusion does, for comparison",
        scope=BLOCK,
    )
    ffn: Literal["permutation", "none"] = option(
        "permutation", "order of the FFN neurons and of the experts", scope=BLOCK
    )
    scaling: Literal[True, False, "sequential"] = option(
        True,
        "scaling of heads and neurons, with a sign where the layer admits it. `sequential`: after the rotation, as "
        "in the ICML 2025 paper, instead of jointly",
        scope=BLOCK,
    )
    residual: Residual | Streams = option(
        "none",
        "group of the residual stream, one map for the whole model; or one group for each stream, as "
        "`decoder=rotation,encoder=permutation`",
        scope=WHOLE,
    )
    shift_head: Literal[False, True] = option(
        False,
        "shift all rows of an untied output head by one vector; this changes logits, but no probabilities",
        scope=BLOCK,
    )


LARGEST = GroupOptions(heads="permutation")
"""The largest compact groups, with scaling."""


WIDEST = GroupOptions(heads="permutation", shift_head=True)
"""Everything that any recipe may ask for, or a file hold."""


class SpaceFacts(Protocol):
    """Facts of a local space (`architectures.model.Space`) that decide its group."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def sizes(self) -> dict[str, int]: ...
    @property
    def rotary(self) -> int: ...
    @property
    def interleaved(self) -> bool: ...
    @property
    def rotary_parts(self) -> int: ...
    @property
    def norm(self) -> str | None: ...
    @property
    def values(self) -> str: ...
    @property
    def free_order(self) -> bool: ...
    @property
    def free_groups(self) -> bool: ...
    @property
    def gated(self) -> bool: ...
    @property
    def degree(self) -> int: ...
    @property
    def head(self) -> bool: ...


def _maps(space: SpaceFacts, options: GroupOptions) -> Group:
    """Maps that nothing but the pairing of two coordinate systems restricts."""
    return OrthogonalGroup(options.scaling)


def _turns(space: SpaceFacts, options: GroupOptions) -> Group:
    """Maps that commute with rotary embedding."""
    planar = PlanarGroup(options.scaling, space.interleaved)
    return _beside_rotary(space, planar, _maps(space, options))


def _signs(space: SpaceFacts, options: GroupOptions) -> Group:
    """Maps that commute with a gained RMSNorm and rotary embedding."""
    return _beside_rotary(space, PairSigns(space.interleaved), CoordinateSigns())


def _ordered(space: SpaceFacts, options: GroupOptions) -> Group:
    """The same where gains may change places with the coordinates that rotary embedding leaves alone."""
    return _beside_rotary(space, PairSigns(space.interleaved), OrderedSigns())


def _turns_alone(space: SpaceFacts, options: GroupOptions) -> Group:
    """Norm-preserving maps that commute with rotary embedding and a norm without a gain."""
    return _beside_rotary(space, PlanarGroup(False, space.interleaved), OrthogonalGroup(False))


def _beside_rotary(space: SpaceFacts, turned: Group, unrotated: Group) -> Group:
    if space.rotary == 0:
        return unrotated
    if space.rotary_parts == 2:
        return SplitGroup(turned, turned, space.rotary // 2)
    return turned if space.rotary == space.sizes["head_dim"] else SplitGroup(turned, unrotated, space.rotary)


Choose = Callable[[SpaceFacts, GroupOptions], Group]

QUERIES: dict[str | None, Choose] = {
    None: _turns,
    "rms_head": _ordered,
    "rms_all": _ordered,
    "rms_turned": _signs,
    "rms_clipped": _signs,
    "l2_head": _turns_alone,
    "layer_head": lambda space, options: HeadSign(),
    "affine_head": lambda space, options: IdentityGroup(),
    "shared": lambda space, options: IdentityGroup(),
}
"""The group of query and key coordinates, by the norm between their projection and their product."""


def _exchanged(space: SpaceFacts, options: GroupOptions) -> Group:
    """The group of gain exchanges of norms before rotary embedding."""
    return _beside_rotary(space, PairExchange(space.interleaved), CoordinateExchange())


def _ordered_gains(space: SpaceFacts, options: GroupOptions) -> Group:
    """The same of gains that change places with their coordinates."""
    pairs = PairExchange(space.interleaved) if options.scaling else IdentityGroup()
    return _beside_rotary(space, pairs, OrderedExchange(bool(options.scaling)))


GAINS: dict[str | None, Choose] = {
    "rms_head": _ordered_gains,
    "rms_all": _ordered_gains,
    "rms_turned": lambda space, options: CoordinateExchange() if options.scaling else IdentityGroup(),
    "affine_head": lambda space, options: _exchanged(space, options) if options.scaling else IdentityGroup(),
}
"""The group of the gains of that norm; none where it has no gains, or others for each head. Of a norm over all heads,
each KV group exchanges its own."""

VALUES: dict[str, Choose] = {
    "free": _maps,
    "normed": lambda space, options: OrthogonalGroup(False),
    "gated": lambda space, options: GatedOrder(options.scaling),
    "fixed": lambda space, options: IdentityGroup(),
}
"""The group of value and output coordinates, by the architecture file's entry."""


def admitted(space: SpaceFacts, options: GroupOptions = LARGEST) -> SpaceGroup:
    """The group of a local space that a recipe's wishes leave.

    Raises:
        ArchitectureError: nothing is known of the space's kind, norm or values; names it.
    """
    if space.kind not in _KINDS:
        raise _unknown(space, "kind", space.kind, _KINDS)
    return _KINDS[space.kind](space, options)


def heads(space: SpaceFacts, options: GroupOptions = LARGEST) -> HeadGroup:
    """`admitted` for an attention space."""
    for property_name, value, known in (("norm", space.norm, QUERIES), ("values", space.values, VALUES)):
        if value not in known:
            raise _unknown(space, property_name, value, [word for word in known if word])
    qk, vo = QUERIES[space.norm](space, options), VALUES[space.values](space, options)
    gains = GAINS[space.norm](space, options) if space.norm in GAINS else IdentityGroup()
    if options.attention == "none":
        qk, vo, gains = IdentityGroup(), IdentityGroup(), IdentityGroup()
    if options.attention == "permutation" or options.heads == "spectral":
        qk, vo, gains = _orders(qk), _orders(vo), _orders(gains)
    sizes = {name: space.sizes[name] for name in ("groups", "per_group", "head_dim", "value_dim")}
    order = options.heads if options.heads == "none" or space.free_order else "fixed"
    shared = space.norm != "rms_all"
    exchanged = None if isinstance(gains, IdentityGroup) else gains
    return HeadGroup(**sizes, order=order, qk=qk, vo=vo, gains=exchanged, shared=shared, inside=not space.free_groups)


def _orders(group: Group) -> Group:
    """The permutations in a group: none where rotary embedding or a norm ties coordinates to their places.

    Git Re-Basin (2023) and TransFusion (2025) permute the coordinates of a head.
    """
    if isinstance(group, GatedOrder):
        return type(group)(False)
    if isinstance(group, OrderedSigns):
        return OrderedSigns(signs=False)
    if isinstance(group, SplitGroup):
        parts = _orders(group.first), _orders(group.second)
        return IdentityGroup() if parts == (IdentityGroup(), IdentityGroup()) else SplitGroup(*parts, group.at)
    return CoordinateOrder() if isinstance(group, OrthogonalGroup) else IdentityGroup()


def neurons(space: SpaceFacts, options: GroupOptions = LARGEST) -> NeuronGroup:
    """`admitted` for an FFN; for experts, the group of the neurons of each."""
    degree = space.degree if options.scaling else 0
    return NeuronGroup(space.sizes["size"], options.ffn != "none", degree, space.gated, space.sizes.get("count", 1))


def latent(space: SpaceFacts, options: GroupOptions = LARGEST) -> LatentGroup:
    """`admitted` for a latent, whose gains are folded where those of the residual streams are."""
    kind = "rotation" if options.residual == "rotation" else "signed_permutation"
    kind = {"none": "none", "permutation": "permutation"}.get(options.attention, kind)
    return LatentGroup(kind, space.sizes["size"], fixes_ones=False)


def mixer(space: SpaceFacts, options: GroupOptions = LARGEST) -> MixerGroup:
    """`admitted` for a mixer."""
    sizes = {name: space.sizes[name] for name in ("groups", "per_group", "shared", "own")}
    return MixerGroup(**sizes, order=options.heads != "none", channels=options.attention != "none")


def convolution(space: SpaceFacts, options: GroupOptions = LARGEST) -> ConvolutionGroup:
    """`admitted` for the channels of a gated convolution, which count as neurons."""
    return ConvolutionGroup(space.sizes["size"], options.ffn != "none", bool(options.scaling))


def translation(space: SpaceFacts, options: GroupOptions = LARGEST) -> TranslationGroup:
    """`admitted` for rows that only a softmax sees: of routers with the experts, of heads where asked for."""
    return TranslationGroup(space.sizes["size"], options.shift_head if space.head else options.ffn != "none")


_KINDS: dict[str, Callable[[SpaceFacts, GroupOptions], SpaceGroup]] = {
    "attention": heads,
    "ffn": neurons,
    "experts": lambda space, options: ExpertGroup(neurons(space, options), space.sizes.get("groups", 1)),
    "latent": latent,
    "mixer": mixer,
    "convolution": convolution,
    "translation": translation,
}


def asks(space: SpaceFacts, options: GroupOptions) -> bool:
    """Whether a recipe asks to match a local space."""
    if space.kind in ("attention", "mixer"):
        return options.attention != "none" or options.heads != "none"
    if space.kind == "latent":
        return options.attention != "none"
    if space.kind == "translation":
        return translation(space, options).moves
    if space.kind == "convolution":
        return convolution(space, options).words != "none"
    group = neurons(space, options)
    return group.permute or group.degree > 0


def _unknown(space: SpaceFacts, property_name: str, word: object, known: Iterable[str]) -> ArchitectureError:
    return ArchitectureError(
        f"no group is known for the {property_name} '{word}'",
        where=f"space '{space.name}'",
        remedy=nearest(str(word), known),
    )
