"""`check_pair` decides whether a donor keeps its function under the requested matching.

It reads configs, architectures and shapes, no weights. The Python API, all commands and recipes use it. A silent change
of outputs is refused; a questionable merge gives a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from rotation_merge.architecture.fields import differences
from rotation_merge.architecture.model import Architecture, Block, Norm, Space, TensorInfo
from rotation_merge.architecture.registry import find, shipped
from rotation_merge.errors import ArchitectureError, CheckpointError, RecipeError, short
from rotation_merge.matching.block import wanted_spaces
from rotation_merge.matching.options import AlignConfig
from rotation_merge.matching.stream import residual_groups
from rotation_merge.model.fold import Fold
from rotation_merge.model.labels import LabelRows, label_rows, rows_note
from rotation_merge.model.view import View
from rotation_merge.symmetry import SpaceTransform, StreamTransform
from rotation_merge.symmetry.admitted import by_stream

LITTLE = "a change carried from a base of another width or depth brings only -3 to 16% of its gain"
UNLIKE = f"only models of equal sizes and symmetries can be averaged; {LITTLE}, so train on the new base instead"

FLAGS = {
    "attention_bias": ("attention",),
    "qkv_bias": ("attention",),
    "use_qkv_bias": ("attention",),
    "mlp_bias": ("ffn",),
    "use_bias": ("attention", "ffn", "mixer"),
    "bias": ("attention", "ffn"),
}
"""Config entries that give linear maps a bias, and the kinds of spaces that those maps have an axis of."""

NEW_BIASES = "transformers makes new ones (set it to false in config.json if the model has none)"

Layers = Mapping[str, Sequence[tuple[int, int]]]
"""By module, which layer of the anchor meets which layer of the donor."""


@dataclass(frozen=True)
class CheckedPair:
    """A pair of models that may be matched.

    Attributes:
        streams: the residual group of each stream that is moved.
        folded: the streams among them whose norm gains are folded into their readers first.
        warnings: what makes a merge of the two questionable, one line each.
        unaligned: tensors that stay as they are, because nothing is known of them.
        rows: what puts the donor's classes into the anchor's order; whoever reads the donor has to apply it.
    """

    anchor: View
    donor: View
    options: AlignConfig
    streams: dict[str, str]
    folded: tuple[str, ...]
    warnings: tuple[str, ...]
    unaligned: tuple[str, ...]
    rows: LabelRows = field(default_factory=dict)

    def notes(self) -> list[str]:
        """Notes for the report beside the warnings."""
        notes = list(dict.fromkeys(note for member in (self.anchor, self.donor) for note in _remarks(member)))
        notes += rows_note(self.anchor.name, self.donor.name, self.rows)
        if self.unaligned:
            names = ", ".join(self.unaligned[:6]) + (", ..." if len(self.unaligned) > 6 else "")
            unknown = f"{len(self.unaligned)} tensors ({names})"
            notes.append(f"Not aligned, because the architecture does not list them: {unknown}.")
        return notes


def check_pair(
    anchor: View,
    donor: View,
    options: AlignConfig,
    *,
    untie: bool = False,
    layers: Layers | None = None,
    excluded: Callable[[str], bool] = lambda _: False,
) -> CheckedPair:
    """Check that the donor can be moved to the anchor under these options with unchanged outputs.

    Args:
        untie: heads that share an embedding's tensor are given one of their own.
        layers: which layers meet, where a recipe's slices say so; None: each meets the one at its own place.
        excluded: says of a tensor that it is copied from the anchor.

    Raises:
        RotationMergeError: it cannot; says what stands against it, with both models' values.
    """
    if anchor.architecture.family != donor.architecture.family:
        raise ArchitectureError(
            f"architecture is {donor.architecture.family}, that of {anchor.name} is {anchor.architecture.family}",
            where=donor.name,
            remedy="only models of one architecture can be aligned",
        )
    _check_sizes(anchor, donor)
    rows = label_rows(anchor, donor, excluded)
    options.check_layers(anchor.architecture)
    streams = _streams(anchor, donor, options.residual, untie)
    if streams or layers is None:
        _check_depth(anchor, donor)
    blocks = paired_blocks(anchor.architecture, donor.architecture, None if streams else layers)
    for anchor_block, donor_block in blocks:
        _check_block(anchor_block, donor_block, anchor, donor)
    folded = anchor.architecture.folds(streams)
    for member in (anchor, donor):
        _check_tied(member, folded, untie)
        if options.shift_head:
            _check_head(member, untie)
    moving = _Moving(anchor, donor, options, streams, Fold(anchor.architecture, folded), excluded)
    for anchor_block, donor_block in blocks:
        moving.check(anchor_block, donor_block)
    return CheckedPair(
        anchor,
        donor,
        options.with_residual(_words(streams, anchor)) if options.residual != "none" else options,
        streams,
        folded,
        tuple(_config_warnings(anchor, donor)),
        tuple(dict.fromkeys(_unaligned(anchor, donor, streams, excluded))),
        rows,
    )


def _streams(anchor: View, donor: View, residual: str, untie: bool) -> dict[str, str]:
    """The residual group of each moving stream; both models admit it.

    `largest` excludes rotations if a head is tied to an embedding, because folding cannot serve both.
    """
    groups = residual_groups(anchor.architecture, residual, anchor.name)
    donor_groups = residual_groups(donor.architecture, residual, donor.name)
    choices = by_stream(residual) or dict.fromkeys(groups, residual)
    for name, group in groups.items():
        if choices.get(name) == "largest":
            admitted = anchor.architecture.stream_groups[name]
            admitted = tuple(g for g in admitted if g in donor.architecture.stream_groups[name])
            tied = not untie and any(member.tied and member.tied[1] == name for member in (anchor, donor))
            groups[name] = [g for g in admitted if not (tied and g == "rotation")][-1]
        elif donor_groups.get(name) != group:
            raise RecipeError(f"'residual: {residual}': there is no stream '{name}'", where=donor.name)
    return {name: group for name, group in groups.items() if group != "none"}


def residual_of(transforms: Mapping[str, SpaceTransform], folded: Collection[str]) -> str:
    """The groups of an alignment's streams, as values of `residual`."""
    streams = [name for name, transform in transforms.items() if transform.space_kind == StreamTransform.space_kind]
    choices = {name: "rotation" if name in folded else "permutation" for name in streams}
    return ",".join(f"{name}={group}" for name, group in choices.items()) or "none"


def _words(streams: Mapping[str, str], member: View) -> str:
    """Groups by stream as one option."""
    groups = set(streams.values())
    if len(groups) == 1 and set(streams) == set(member.architecture.streams):
        return groups.pop()
    return ",".join(f"{name}={group}" for name, group in streams.items()) or "none"


def _check_depth(anchor: View, donor: View) -> None:
    for module in anchor.architecture.layers_key:
        ours, donor_layers = (len(m.architecture.layers(module)) for m in (anchor, donor))
        if ours != donor_layers:
            raise CheckpointError(
                f"has {donor_layers} layers, {anchor.name} has {ours}",
                where=donor.name,
                remedy=f"choose layers with 'slices' in a recipe, without 'residual'; {LITTLE}",
            )


def paired_blocks(anchor: Architecture, donor: Architecture, layers: Layers | None) -> list[tuple[Block, Block]]:
    """The pairs of anchor and donor blocks that are matched."""
    donor_blocks = {(b.module, b.place, b.index, b.name if b.index is None else ""): b for b in donor.blocks}
    pairs = []
    for block in anchor.blocks:
        if block.index is None or layers is None:
            places = [block.index]
        else:
            places = [
                donor_index for anchor_index, donor_index in layers.get(block.module, ()) if anchor_index == block.index
            ]
        for place in places:
            same = donor_blocks.get((block.module, block.place, place, block.name if block.index is None else ""))
            if same is not None:
                pairs.append((block, same))
    return pairs


_WORDS = {
    "groups": "KV heads",
    "per_group": "query heads for each KV head",
    "head_dim": "dimensions of a head",
    "rotary": "rotary dimensions",
    "interleaved": "neighbours as rotary pairs",
    "rotary_parts": "parts that rotary embedding turns apart",
    "norm": "norm of queries and keys",
    "degree": "degree of the activation",
    "free_order": "heads that may change places",
    "free_groups": "KV heads that may change places",
    "span": "keys and values of",
}


def _facts(space: Space) -> dict[str, Any]:
    """The properties that decide a space's group."""
    properties = {f.name: getattr(space, f.name) for f in fields(space) if f.name not in ("name", "sizes")}
    return {_WORDS.get(name, name): value for name, value in {**space.sizes, **properties}.items()}


def _check_block(anchor_block: Block, donor_block: Block, anchor: View, donor: View) -> None:
    """Check that sizes, rotary dimensions, norms and degrees of two blocks agree: they decide the groups."""
    for local, space in donor_block.spaces.items():
        anchor_space = anchor_block.spaces.get(local)
        if anchor_space is None:
            continue
        _refuse_differing(space.name, _facts(anchor_space), _facts(space), anchor, donor)
    for norm in donor_block.norms:
        anchor_norm = next((n for n in anchor_block.norms if n.gain == norm.gain), None)
        if anchor_norm is not None:
            _refuse_differing(
                f"{donor_block.name}, norm {norm.gain}", _norm_facts(anchor_norm), _norm_facts(norm), anchor, donor
            )


def _norm_facts(norm: Norm) -> dict[str, Any]:
    return {"kind": "layer" if norm.layer else "rms", "offset of the gain": norm.offset, "readers": norm.reads}


def _check_sizes(anchor: View, donor: View) -> None:
    """Check that streams, and the first local space of each name, have the same sizes in both models."""
    ours, donor_spaces = _first_spaces(anchor.architecture), _first_spaces(donor.architecture)
    for name in donor_spaces:
        if name in ours:
            anchor_sizes, its = ({_WORDS.get(n, n): v for n, v in s[name].sizes.items()} for s in (ours, donor_spaces))
            _refuse_differing(donor_spaces[name].name, anchor_sizes, its, anchor, donor)


def _first_spaces(architecture: Architecture) -> dict[str, Space]:
    spaces = dict(architecture.streams)
    for block in architecture.blocks:
        for local, space in block.spaces.items():
            spaces.setdefault(f"{block.module}.{local}", space)
    return spaces


def _refuse_differing(
    name_of_part: str, ours: Mapping[str, Any], donor_facts: Mapping[str, Any], anchor: View, donor: View
) -> None:
    differing = [name for name in donor_facts if donor_facts[name] != ours.get(name)]
    if differing:
        words = ", ".join(f"{name} {donor_facts[name]}, against {ours.get(name)}" for name in differing)
        raise CheckpointError(
            f"'{name_of_part}' has {words} in {anchor.name}",
            where=donor.name,
            remedy=UNLIKE,
        )


def _check_tied(member: View, folded: Sequence[str], untie: bool) -> None:
    head, stream = member.tied or ("", "")
    if stream in folded and not untie:
        smaller = [group for group in member.architecture.stream_groups[stream] if group != "rotation"]
        raise RecipeError(
            f"'residual: rotation' needs an untied head, '{head}' is tied to the embedding",
            where=member.name,
            remedy=f"set 'untie: true' (the output then stores its head), or use 'residual: {smaller[-1]}'",
        )


def _check_head(member: View, untie: bool) -> None:
    """Check that a head with shifted rows exists, and that no embedding is moved with it."""
    if member.tied is not None and not untie:
        problem, remedy = f"needs a head of its own, '{member.tied[0]}' is tied to the embedding", "set 'untie: true'"
    elif any(info.common is not None and info.common.head for info in member.architecture.tensors()):
        return
    else:
        problem, remedy = "needs a head whose logits go through a softmax only; this model has none", "leave it out"
    raise RecipeError(f"'shift_head: true' {problem}", where=member.name, remedy=remedy)


@dataclass(frozen=True)
class _Moving:
    """The spaces that move: streams by name, local spaces by the names in anchor and donor."""

    anchor: View
    donor: View
    options: AlignConfig
    streams: Mapping[str, str]
    fold: Fold
    excluded: Callable[[str], bool]

    def check(self, anchor_block: Block, donor_block: Block) -> None:
        """Check that tensors missing in one model neither belong to a moved space nor are needed by folding.

        Raises:
            CheckpointError: names the tensor.
        """
        matched = {
            space.name for space in wanted_spaces(anchor_block, self.options.at(self.anchor.architecture, anchor_block))
        }
        local = [key for key, space in anchor_block.spaces.items() if space.name in matched]
        for holder, block, counterpart, lacking in (
            (self.donor, donor_block, anchor_block, self.anchor),
            (self.anchor, anchor_block, donor_block, self.donor),
        ):
            names = {block.spaces[key].name for key in local if key in block.spaces} | set(self.streams)
            known = {info.key for info in counterpart.tensors}
            for info in block.tensors:
                if info.key in known or self.excluded(info.name) or self._spare(info, holder, lacking):
                    continue
                moves = {space.name for space in info.spaces()} & names
                if holder is self.anchor:
                    moves -= set(self.streams)
                    moves |= set(self.fold.streams) if self.fold.touches(block, info) else set()
                if moves:
                    self._refuse(info, holder, lacking, sorted(moves)[0])

    @staticmethod
    def _spare(info: TensorInfo, holder: View, lacking: View) -> bool:
        """Whether a head is a stored copy of the embedding that both models tie it to."""
        return all(member.tied is not None and member.tied[0] == info.name for member in (holder, lacking))

    def _refuse(self, info: TensorInfo, holder: View, lacking: View, space: str) -> None:
        remedy = "set 'untie: true'" if info.tied else "align models with the same biases and heads"
        raise CheckpointError(
            f"tensor '{info.name}' is missing, {holder.name} has it: '{space}' would move without it",
            where=lacking.name,
            remedy=f"{remedy}, or name the tensor under 'exclude' of a recipe",
        )


def _unaligned(anchor: View, donor: View, streams: Mapping[str, str], excluded: Callable[[str], bool]) -> Iterator[str]:
    """Tensors that the architecture does not describe; they are copied unchanged.

    Raises:
        CheckpointError: one has an axis of the size of a stream that moves.
    """
    for member in (anchor, donor):
        sizes = {member.architecture.streams[name].sizes["size"]: name for name in streams}
        strange = [b for b in member.architecture.blocks if "unknown" in (b.name, member.architecture.family)]
        unknown = [i.name for block in strange for i in block.tensors if not excluded(i.name)]
        for name in unknown:
            for size in member.shapes.get(name, ()):
                if size in sizes:
                    raise CheckpointError(
                        f"tensor '{name}' is not part of the {member.architecture.family} architecture and would not "
                        f"move with '{sizes[size]}'",
                        where=member.name,
                        remedy="use 'residual: none', or name it under 'exclude' to copy it from base_model",
                    )
        yield from unknown


def check_forward(anchor: View, donor: View) -> None:
    """Refuse to average models of different kinds whose forward passes differ for equal weights.

    The merge's class would not compute what the other model's weights were trained for.

    Raises:
        CheckpointError: names what differs, with both values.
    """
    if anchor.architecture.family not in shipped():
        return
    differing = [d for d in differences(anchor.config, donor.config) if d.kinds and d.field.forward]
    if differing:
        words = "; ".join(
            f"{short(difference)} in {anchor.name} ({difference.field.why})" for difference in differing[:3]
        )
        more = f", and {len(differing) - 3} entries more" if len(differing) > 3 else ""
        remedy = "merge models that agree in this; if they do, correct the config"
        raise CheckpointError(f"{words}{more}", where=donor.name, remedy=remedy)


def _config_warnings(anchor: View, donor: View) -> list[str]:
    """Warnings for differing config entries that make a merge questionable.

    Raises:
        CheckpointError: an entry differs that decides a symmetry.
    """
    warnings = []
    for difference in differences(anchor.config, donor.config, anchor.architecture.family not in shipped()):
        if difference.field.verdict == "refused":
            raise CheckpointError(
                f"{short(difference)} in {anchor.name}: {difference.field.why}",
                where=donor.name,
                remedy="only models that agree in it can be aligned",
            )
        warnings.append(f"{donor.name}: {short(difference)} in {anchor.name}; {difference.field.why}.")
    return warnings


def _missing_biases(config: Mapping[str, Any], architecture: Architecture, names: Collection[str]) -> Iterator[str]:
    """Entries of a config that are true although some layer stores no such bias, as words for a note.

    Args:
        names: of all tensors that the checkpoint stores.
    """
    spec = find(config)
    modules = {} if spec is None else spec.modules
    holders = {
        name[: at + 1] for name in names if name.endswith(".bias") for at, mark in enumerate(name) if mark == "."
    }
    for module, definition in modules.items():
        settings = (config.get(definition.config) or {}) if definition.config else config
        blocks = [block for block in architecture.blocks if block.module == module and block.index is not None]
        for flag in (flag for flag in FLAGS if settings.get(flag) is True):
            lacking = [block for block in blocks if not _linear_maps(block, FLAGS[flag]) <= holders]
            if lacking:
                entry = f"{definition.config}.{flag}" if definition.config else flag
                yield f"'{entry}' is true, but no such bias is stored for {lacking[0].name}"


def _linear_maps(block: Block, kinds: Collection[str]) -> set[str]:
    """Weight names of the linear maps of a block with an axis in some kinds of spaces."""
    return {
        info.name.rsplit(".", 2)[0] + "."
        for info in block.tensors
        if info.name.endswith(".weight") and len(info.axes) == 2 and any(s.kind in kinds for s in info.spaces())
    }


def _remarks(view: View) -> list[str]:
    """Notes on a model for the report, one line each."""
    missing = _missing_biases(view.config, view.architecture, view.shapes)
    return [*view.remarks, *(f"`{view.name}`: {words}; {NEW_BIASES}." for words in missing)]
