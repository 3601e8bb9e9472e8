"""May these two models be aligned, or averaged? What decides is compared here, from configs, architectures and headers.

The Python API, all commands and recipes ask `check_pair`. A silent change of outputs is refused; what makes a merge
questionable is a warning. No weights are read before somebody asks a `Pair` for them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mergekit.common import ModelReference
from torch import Tensor

from rotation_merge.architecture.fields import differences
from rotation_merge.architecture.model import Architecture, Block
from rotation_merge.architecture.registry import find, shipped
from rotation_merge.errors import ArchitectureError, CheckpointError, RecipeError, short
from rotation_merge.errors import named as listed
from rotation_merge.matching.basis import Basis, Identity
from rotation_merge.matching.block import wanted_spaces
from rotation_merge.matching.options import NOTHING, AlignConfig
from rotation_merge.matching.stream import as_option, residual_groups
from rotation_merge.model.fold import Fold
from rotation_merge.model.folder import absent_parts
from rotation_merge.model.forms import named_as
from rotation_merge.model.labels import LabelRows, in_class_order, label_rows, rows_note, watched
from rotation_merge.model.language_half import within
from rotation_merge.model.open import ModelLike, as_reference, check_names, check_present, open_model, parse_reference
from rotation_merge.model.tensors import Tensors
from rotation_merge.model.view import View
from rotation_merge.model.vocabulary import TOGETHER, matched_on, on_shared_rows, other_ids, shared_rows
from rotation_merge.symmetry import Transform
from rotation_merge.symmetry.options import by_stream

LITTLE = "a change carried from a base of another width or depth brings only -3 to 16% of its gain"
UNLIKE = f"only models of equal sizes and symmetries can be averaged; {LITTLE}, so train on the new base instead"
SLICES = f"choose layers with 'slices' in a recipe, without 'residual'; {LITTLE}"
TOKENIZER = "add 'tokenizer: {source: base}' so that the vocabularies are brought together"
EQUAL = "only equal shapes can be merged; name it under 'exclude' to copy it from base_model; heads: 'heads_of: each'"
OUTSIDE_RECIPES = "merge them with 'tokenizer', 'heads_of: each' or 'exclude' in a recipe; measure them with 'evaluate'"
LIKE_IT = "align models with the same biases and heads, or name the tensor under 'exclude' of a recipe"

BIAS_FLAGS = {
    **dict.fromkeys(("attention_bias", "qkv_bias", "use_qkv_bias"), ("attention",)),
    "mlp_bias": ("ffn",),
    "use_bias": ("attention", "ffn", "mixer"),
    "bias": ("attention", "ffn"),
}
"""Config entries that give linear maps a bias, and the kinds of spaces that those maps have an axis of."""

Layers = Mapping[str, Sequence[tuple[int, int]]]
"""By module, which layer of the anchor meets which layer of the donor."""

Excluded = Callable[[str], bool]
"""Says of a tensor, by name, that it is copied from the anchor."""


def _none(name: str) -> bool:
    return False


@dataclass(frozen=True)
class Pair:
    """Two models of one architecture that may be matched, read lazily.

    Attributes:
        anchor: with heads of their own where they are to be untied.
        options: with the groups of streams that both models admit.
        streams: the residual group of each stream that is moved.
        folded: the streams among them whose norm gains are folded into their readers first.
        warnings: what makes a merge of the two questionable, one line each.
        notes: for the report beside them, such as on tensors that stay as they are because nothing is known of them.
        rows: what puts the donor's classes into the anchor's order; whoever reads the donor has to apply it.
        device: where their tensors are put as they are read.
        watched: whether every tensor that is read counts for their fingerprints, which a report or a file will hold.
        shared: rows of the shared tokens for matching streams, the anchor's first; None if all tokens are the same, or
            no stream is matched.
    """

    anchor: View
    donor: View
    options: AlignConfig
    streams: Mapping[str, str]
    folded: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    rows: LabelRows = field(default_factory=dict)
    device: str = "cpu"
    watched: bool = True
    shared: tuple[Tensor, ...] | None = None

    @property
    def architecture(self) -> Architecture:
        """The anchor's, by whose names and spaces both are known."""
        return self.anchor.architecture

    @property
    def sources(self) -> tuple[Tensors, Tensors]:
        """The tensors of both models by the anchor's names; what is read counts for the fingerprints."""
        return self._source(self.anchor), self._source(self.donor)

    def _source(self, model: View) -> Tensors:
        read = watched(model, model.as_filed.mark.add) if self.watched else model.tensors
        tensors = self.placed(replace(model, tensors=read)).tensors
        return named_as(self.architecture, tensors, model.architecture)

    def placed(self, model: View) -> View:
        """A model, its tensors on the device."""
        return model if self.device == "cpu" else replace(model, tensors=model.tensors.on(self.device))

    @property
    def matched(self) -> tuple[Tensors, Tensors]:
        """The tensors of both models to compare: rows of shared tokens in embeddings and heads."""
        if self.shared is None:
            return self.sources
        anchor, donor = on_shared_rows(self.architecture, self.sources, self.shared)
        return anchor, donor

    def basis(self) -> Basis:
        """The facts on both models that an alignment stores."""
        anchor, donor = Identity.of(self.anchor), Identity.of(self.donor)
        return Basis(self.anchor.config, self.anchor.shapes, self.anchor.untie, anchor, donor, self.rows)


def check_pair(
    anchor: View,
    donor: View,
    options: AlignConfig,
    *,
    layers: Layers | None = None,
    excluded: Excluded = _none,
    averaged: bool = False,
) -> Pair:
    """Check that the donor can be moved to the anchor under these options with unchanged outputs.

    Args:
        anchor: heads that share an embedding's tensor are given one of their own if it is untied.
        layers: which layers meet, where a recipe's slices say so; None: each meets the one at its own place.
        excluded: says of a tensor that it is copied from the anchor.
        averaged: refuse models whose forward passes differ for equal weights, too: the class of their average would not
            compute what the donor's weights were trained for.

    Raises:
        RotationMergeError: it cannot; says what stands against it, with both models' values.
    """
    check_same_kind(anchor, donor)
    warnings = tuple(_config_warnings(anchor, donor, averaged))
    rows = label_rows(anchor, donor, excluded)
    options.check_layers(anchor.architecture)
    streams = _streams(anchor, donor, options.residual)
    if streams or layers is None:
        check_depth(anchor, donor)
    blocks = _meeting(donor.architecture, anchor.architecture, None if streams else layers)
    for donor_block, anchor_block in blocks:
        _check_alike(anchor, donor, _facts(anchor_block), _facts(donor_block), place=f"{donor_block.name}, ")
    folded = anchor.architecture.folds(streams)
    for member in (anchor, donor):
        _check_head(member, folded, options.shift_head, anchor.untie)
    pair = Pair(anchor, donor, options, streams, folded, warnings, rows=rows)
    _check_missing(pair, blocks, excluded)
    notes = [*_remarks(anchor), *_remarks(donor), *rows_note(anchor.name, donor.name, rows)]
    notes += _unaligned(pair, excluded)
    if options.residual != "none":
        options = options.with_residual(as_option(streams, anchor.architecture.streams))
    return replace(pair, options=options, notes=tuple(dict.fromkeys(notes)))


# --- sizes and symmetries


Facts = Mapping[str, Mapping[str, object]]
"""By the name of a space or norm, what decides its group; two models have to agree in it."""


def check_same_kind(anchor: View, donor: View, remedy: str = UNLIKE) -> None:
    """Refuse models of different architectures, or with spaces of different sizes.

    Raises:
        CheckpointError, ArchitectureError: says what differs, with both models' values.
    """
    family, donor_family = anchor.architecture.family, donor.architecture.family
    if family != donor_family:
        problem = f"architecture is {donor_family}, that of {anchor.name} is {family}"
        raise ArchitectureError(problem, where=donor.name, remedy="only models of one architecture can be aligned")
    first, second = ({n: s.sizes for n, s in model.architecture.spaces().items()} for model in (anchor, donor))
    _check_alike(anchor, donor, first, second, remedy)


def check_depth(anchor: View, donor: View, remedy: str = SLICES) -> None:
    """Refuse models with different numbers of layers.

    Raises:
        CheckpointError: a module of the donor has other layers than the anchor's; says both numbers.
    """
    for module in anchor.architecture.layers_key:
        layers, anchor_layers = (len(model.architecture.layers(module)) for model in (donor, anchor))
        if layers != anchor_layers:
            problem = f"has {layers} layers, {anchor.name} has {anchor_layers}"
            raise CheckpointError(problem, where=donor.name, remedy=remedy)


def _facts(block: Block) -> Facts:
    spaces = {key: {**space.sizes, **vars(space), "name": "", "sizes": ""} for key, space in block.spaces.items()}
    return spaces | {f"norm {n.gain}": {"layer": n.layer, "offset": n.offset, "reads": n.reads} for n in block.norms}


def _check_alike(
    anchor: View, donor: View, anchor_facts: Facts, facts: Facts, remedy: str = UNLIKE, place: str = ""
) -> None:
    """Refuse parts of both models whose facts differ."""
    for name in (name for name in facts if name in anchor_facts):
        pairs = {word: (value, anchor_facts[name].get(word)) for word, value in facts[name].items()}
        if words := [f"{word} {value}, against {other}" for word, (value, other) in pairs.items() if value != other]:
            problem = f"'{place}{name}' has {', '.join(words)} in {anchor.name}"
            raise CheckpointError(problem, where=donor.name, remedy=remedy)


def _meeting(donor: Architecture, anchor: Architecture, layers: Layers | None = None) -> list[tuple[Block, Block]]:
    """The pairs of donor and anchor blocks that meet: at the same place, or as layers are paired."""

    def spot(block: Block, index: int | None) -> tuple[object, ...]:
        return block.module, block.place, index, block.name if block.index is None else ""

    donor_blocks, pairs = {spot(block, block.index): block for block in donor.blocks}, []
    for block in anchor.blocks:
        met = [block.index]
        if block.index is not None and layers is not None:
            met = [index for anchor_index, index in layers.get(block.module, ()) if anchor_index == block.index]
        pairs += [(donor_blocks[key], block) for key in (spot(block, i) for i in met) if key in donor_blocks]
    return pairs


# --- streams and heads


def _streams(anchor: View, donor: View, residual: str) -> dict[str, str]:
    """The residual group of each moving stream; both models admit it.

    `largest` excludes rotations if a head is tied to an embedding, because folding cannot serve both.
    """
    members = anchor, donor
    groups, donor_groups = (residual_groups(member.architecture, residual, member.name) for member in members)
    choices = by_stream(residual) or dict.fromkeys(groups, residual)
    for name, group in groups.items():
        if choices.get(name) == "largest":
            admitted, by_donor = (member.architecture.stream_groups[name] for member in members)
            tied = not anchor.untie and any(member.tied and member.tied[1] == name for member in members)
            groups[name] = [g for g in admitted if g in by_donor and not (tied and g == "rotation")][-1]
        elif donor_groups.get(name) != group:
            raise RecipeError(f"'residual: {residual}': there is no stream '{name}'", where=donor.name)
    return {name: group for name, group in groups.items() if group != "none"}


def options_of(transforms: Mapping[str, Transform], folded: Collection[str]) -> AlignConfig:
    """The options by which `check_pair` checks transforms that are known: nothing is matched, their streams move."""
    streams = [name for name, transform in transforms.items() if transform.kind == "stream"]
    return NOTHING.with_residual(as_option({s: "rotation" if s in folded else "permutation" for s in streams}))


def _check_head(member: View, folded: Sequence[str], shifted: bool, untie: bool) -> None:
    """Refuse to fold a stream that a tied head reads, and to shift a head's rows that is tied or not there."""
    head, stream = ("", "") if untie or member.tied is None else member.tied
    problem, remedy = "", "set 'untie: true'"
    if stream in folded:
        smaller = [group for group in member.architecture.stream_groups[stream] if group != "rotation"]
        problem = f"'residual: rotation' needs an untied head, '{head}' is tied to the embedding"
        remedy = f"set 'untie: true' (the output then stores its head), or use 'residual: {smaller[-1]}'"
    elif shifted and head:
        problem = f"'shift_head: true' needs a head of its own, '{head}' is tied to the embedding"
    elif shifted and not any(i.common is not None and i.common.head for i in member.architecture.tensors()):
        problem = "'shift_head: true' needs a head whose logits go through a softmax only; this model has none"
        remedy = "leave it out"
    if problem:
        raise RecipeError(problem, where=member.name, remedy=remedy)


# --- tensors


def _check_missing(pair: Pair, blocks: Iterable[tuple[Block, Block]], excluded: Excluded) -> None:
    """Refuse tensors that one model lacks, where a space of theirs moves or folding needs them."""
    anchor, donor, fold = pair.anchor, pair.donor, Fold(pair.architecture, pair.folded)
    copies = {anchor.tied[0]} if anchor.tied and donor.tied and anchor.tied[0] == donor.tied[0] else set()
    for donor_block, anchor_block in blocks:
        matched = wanted_spaces(anchor_block, pair.options.at(pair.architecture, anchor_block))
        keys = [key for key, space in anchor_block.spaces.items() if space in matched]
        sides = (donor, donor_block), (anchor, anchor_block)
        for (holder, block), (lacking, counterpart) in (sides, sides[::-1]):
            moved = {*pair.streams, *(block.spaces[key].name for key in keys if key in block.spaces)}
            for info in block.tensors:
                if counterpart.tensor(info.key) is not None or info.name in copies or excluded(info.name):
                    continue
                needed = fold.streams if fold.touches(block, info) else ()
                if moving := moved.intersection(space.name for space in info.spaces()).union(needed):
                    problem = f"is missing, {holder.name} has it: '{min(moving)}' would move without it"
                    remedy = f"set 'untie: true', or {LIKE_IT}" if info.tied else LIKE_IT
                    raise CheckpointError(f"tensor '{info.name}' {problem}", where=lacking.name, remedy=remedy)


def _config_warnings(anchor: View, donor: View, averaged: bool) -> list[str]:
    """Warnings for differing config entries that make a merge questionable.

    Raises:
        CheckpointError: an entry differs that decides a symmetry; or, of models that are averaged, of different kinds,
            one by which the forward pass computes otherwise.
    """
    known = anchor.architecture.family in shipped()
    warnings = []
    for difference in differences(anchor.config, donor.config, not known):
        words, why = f"{short(difference)} in {anchor.name}", difference.field.why
        computes = averaged and known and difference.kinds and difference.field.forward
        if computes or difference.field.verdict == "refused":
            remedy = "only models that agree in it can be merged; if they do, correct the config"
            raise CheckpointError(f"{words}: {why}", where=donor.name, remedy=remedy)
        warnings.append(f"{donor.name}: {words}; {why}.")
    return warnings


def _unaligned(pair: Pair, excluded: Excluded) -> list[str]:
    """A note on tensors that the architecture does not describe; they are copied unchanged.

    Raises:
        CheckpointError: one has an axis of the size of a stream that moves.
    """
    unknown: dict[str, None] = {}
    for member in (pair.anchor, pair.donor):
        family, streams = member.architecture.family, member.architecture.streams
        sizes = {streams[name].sizes["size"]: name for name in pair.streams}
        strange = [block for block in member.architecture.blocks if "unknown" in (block.name, family)]
        for name in (info.name for block in strange for info in block.tensors if not excluded(info.name)):
            unknown[name] = None
            if stream := next((sizes[size] for size in member.shapes.get(name, ()) if size in sizes), None):
                problem = f"tensor '{name}' is not part of the {family} architecture and would not move with '{stream}'"
                remedy = "use 'residual: none', or name it under 'exclude' to copy it from base_model"
                raise CheckpointError(problem, where=member.name, remedy=remedy)
    words = f"Not aligned, because the architecture does not list them: {len(unknown)} tensors ({listed(unknown)})."
    return [words] if unknown else []


def _remarks(view: View) -> list[str]:
    """Notes on a model for the report: those of opening it, and biases that its config has and its files lack."""
    spec, notes = find(view.config), list(view.remarks)
    for module, definition in {} if spec is None else spec.modules.items():
        settings = (view.config.get(definition.config) or {}) if definition.config else view.config
        blocks = [block for block in view.architecture.blocks if block.module == module and block.index is not None]
        for flag in (flag for flag in BIAS_FLAGS if settings.get(flag) is True):
            if lacking := next((block.name for block in blocks if not _biased(block, flag, view)), None):
                entry = f"{definition.config}.{flag}" if definition.config else flag
                words = f"'{entry}' is true, but no such bias is stored for {lacking}"
                notes.append(
                    f"`{view.name}`: {words}; transformers makes new ones (or set it to false in config.json)."
                )
    return notes


def _biased(block: Block, flag: str, view: View) -> bool:
    """Whether biases are stored beside all linear maps of a block that a config entry gives one."""
    maps = (info for info in block.tensors if info.name.endswith(".weight") and len(info.axes) == 2)
    names = [info.name for info in maps if any(space.kind in BIAS_FLAGS[flag] for space in info.spaces())]
    biases = [name for name in view.shapes if name.endswith(".bias")]
    return all(any(bias.startswith(f"{name.rsplit('.', 2)[0]}.") for bias in biases) for name in names)


def shape_faults(
    anchor: View, donor: View, excluded: Excluded = _none, resized: bool = False, remedy: str = ""
) -> Iterator[CheckpointError]:
    """Tensors of two models that differ in shape, as errors.

    Args:
        excluded: says of a tensor that it need not fit.
        resized: whether vocabularies may differ in size, because they are brought together, or not merged.
        remedy: of each; empty: what a recipe can do.
    """
    for donor_block, anchor_block in _meeting(donor.architecture, anchor.architecture):
        for info in donor_block.tensors:
            same = anchor_block.tensor(info.key)
            shape, anchor_shape = donor.shapes.get(info.name), anchor.shapes.get(same.name) if same else None
            if shape is None or anchor_shape is None or shape == anchor_shape or excluded(info.name):
                continue
            sizes = enumerate(itertools.zip_longest(shape, anchor_shape))
            words = [dim for dim, (size, anchor_size) in sizes if size != anchor_size] == [info.vocabulary_axis]
            if not (words and resized):
                problem = f"tensor '{info.name}' is {list(shape)}, in {anchor.name} it is {list(anchor_shape)}"
                yield CheckpointError(problem, where=donor.name, remedy=remedy or (TOKENIZER if words else EQUAL))


def check_shapes(
    anchor: View, donor: View, excluded: Excluded = _none, resized: bool = False, remedy: str = ""
) -> None:
    """Refuse models whose tensors differ in shape; arguments and error as of `shape_faults`."""
    for fault in shape_faults(anchor, donor, excluded, resized, remedy):
        raise fault


# --- opening


def as_donor(anchor: View, donor: View, averaged: bool = False) -> View:
    """A model checked against its anchor; a text-only one as the language half of the anchor's class.

    The meaning of its head is checked elsewhere, when it is known whether that is merged.

    Args:
        averaged: as of `check_pair`.

    Raises:
        CheckpointError, ArchitectureError: name the model and what differs.
    """
    donor = _in_class_of(anchor, donor)
    check_pair(anchor, donor, NOTHING, layers={}, excluded=lambda _: True, averaged=averaged)
    return donor


def _in_class_of(anchor: View, donor: View) -> View:
    """A text-only model as the language half of the anchor's class; any other as it is."""
    return (find(donor.config) and within(donor, anchor, complete=True)) or donor


def open_pair(
    anchor: ModelLike,
    donor: ModelLike,
    options: AlignConfig,
    untie: bool = False,
    device: str = "cpu",
    words: bool = True,
    excluded: Excluded = _none,
    any_base: bool = False,
    watched: bool = True,
    averaged: bool = False,
) -> Pair:
    """Open two models and check that they fit together under these options; both must be there before any is read.

    Args:
        words: whether their vocabularies must be of one size, too, and a warning tells of tokens at other ids.
        excluded: says of a tensor that it need not fit.
        any_base: take adapters of other bases: the caller has checked them, or was told to.
        watched: take fingerprints while tensors are read; they are read again where they are needed later.
        averaged: as of `check_pair`.

    Raises:
        RotationMergeError: one is missing, damaged or not supported, or they do not fit together.
    """
    models = [as_reference(model) for model in (anchor, donor)]
    for reference in (model for model in models if isinstance(model, ModelReference)):
        check_present(reference)
    first, second = (open_model(model, any_base=any_base) for model in models)
    second = _in_class_of(first, second)
    first = open_model(first, untie=True) if untie else first
    pair = check_pair(first, second, options, excluded=excluded, averaged=averaged)
    warnings, notes = list(pair.warnings), list(pair.notes)
    if words and (moved := other_ids(first, second)):
        warnings.append(f"{second.reference}: {moved}; a merge needs '{TOGETHER}'.")
    check_shapes(first, second, excluded, not words, OUTSIDE_RECIPES)
    if first.files is None and second.files is None:
        check_names(first, second)
    shared = None if pair.options.residual == "none" else shared_rows([first, second])
    if shared is not None:
        notes.append(matched_on(first, second, len(shared[0])))
    pair = replace(pair, warnings=tuple(warnings), notes=tuple(notes), shared=shared, device=device, watched=watched)
    return replace(pair, donor=in_class_order(second, pair.rows))


def are_here(*names: str) -> bool:
    """Whether models, as users name them, are stored here, none of them on the hub only."""
    return not any(absent_parts(parse_reference(name)) for name in names)
