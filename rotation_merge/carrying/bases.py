"""An old and a new base, their relation, and the transfer of changes between them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property

import torch
import yaml
from mergekit.common import dtype_from_name
from mergekit.options import MergeOptions
from torch import Tensor

from rotation_merge.architecture import Architecture, find, resolve
from rotation_merge.architecture.model import Block, TensorInfo
from rotation_merge.architecture.sizes import config_of_sizes
from rotation_merge.carrying.carrier import Carrier, RowPair
from rotation_merge.carrying.frame import AUTO, WIDTHS, Frame, ResizeOptions, frame_of
from rotation_merge.errors import CheckpointError
from rotation_merge.files.ledger import NOWHERE, Ledger
from rotation_merge.matching.alignment import Alignment
from rotation_merge.matching.check_pair import check_pair
from rotation_merge.matching.match import Match, match_model
from rotation_merge.matching.open_pair import Pair, TiedSource, open_pair, read_file
from rotation_merge.matching.options import NOTHING, AlignConfig
from rotation_merge.matching.run import AppliedAlignment, Run
from rotation_merge.model.adapters import Adapter, is_adapter
from rotation_merge.model.checkpoint import Model, Models, parse_reference
from rotation_merge.model.fold import folded_source
from rotation_merge.model.labels import label_rows
from rotation_merge.model.lora import parse
from rotation_merge.model.nearness import Nearness, nearness
from rotation_merge.model.paired_model import PairedModel
from rotation_merge.model.source import Progress, TensorSource, read_tensor
from rotation_merge.model.sources import ResizedVocabulary, RestructuredSource, VocabularySubset, other_form
from rotation_merge.model.vocabulary import check_tuned_ids, shared_rows, vocabulary_size
from rotation_merge.record import MergeReport
from rotation_merge.symmetry import SpaceTransform

ROUNDS = 4
"""Layers are compared so often at most, each time under the alignment of those found before."""


@dataclass(frozen=True)
class Bases:
    """The old base of a fine-tune or adapter, and the new base.

    Attributes:
        frame: common shapes of the two, if theirs differ.
        alike: whether layers are to meet by similarity, which is not known before the two are aligned (`settled`).
    """

    pair: Pair
    frame: Frame | None = None
    alike: bool = False

    @property
    def old(self) -> Model:
        return self.pair.donor

    @property
    def new(self) -> Model:
        return self.pair.anchor

    @property
    def architecture(self) -> Architecture:
        return self.pair.architecture

    @cached_property
    def rows(self) -> RowPair | None:
        """Rows of the shared tokens, the new base's first; None if the vocabularies are equal."""
        rows = shared_rows([self.new, self.old])
        return None if rows is None else (rows[0], rows[1])

    @property
    def sources(self) -> tuple[TensorSource, TensorSource]:
        """New and old tensors under the new base's names; with unequal shapes the old ones in the common shapes."""
        new, old = self.pair.sources
        return new, self._named(old, self.old)

    @cached_property
    def nearness(self) -> Nearness:
        """The nearness of the two bases by a few matrices, cached; no cosines for unequal shapes."""
        return Nearness({}) if self.frame is not None else nearness(self.architecture, *self.sources)

    def _named(self, source: TensorSource, model: Model) -> TensorSource:
        """The tensors of the old base or of its fine-tune, under the new base's names."""
        if self.frame is not None:
            return self.frame.of_old(source, self._untied(model))
        named = RestructuredSource(source, model.architecture, self.architecture)
        if not named.made and all(name == stored_name for name, stored_name in named.names.items()):
            return source
        return TiedSource(named, self.architecture)

    def tuned(self, path: str, length: int | None = None) -> TensorSource:
        """A fine-tune of the old base.

        Args:
            length: rows that its vocabulary is brought to, those that it lacks the base's; None: the base's.

        Raises:
            RotationMergeError: it is missing, damaged, or no fine-tune of that base.
        """
        pair = open_pair(str(self.old.reference), path, NOTHING, True, self.pair.device, words=False, any_base=True)
        check_tuned_ids(pair.anchor, pair.donor)
        pair.donor.rows = label_rows(self.new.member, pair.donor.member)
        base, source = pair.sources
        ends = [size or 0 for size in (vocabulary_size(pair.anchor), vocabulary_size(pair.donor))]
        if (length := length or ends[0]) != ends[1]:
            absent = torch.arange(min(ends), ends[0])
            source = ResizedVocabulary(pair.architecture, source, length, base, (absent, absent))
        return self._named(source, pair.donor)

    def _untied(self, model: Model) -> Architecture:
        """A model's architecture, with a separate head if the new base has one."""
        untie = any(info.tied for info in self.architecture.tensors())
        return resolve(model.config, model.names, str(model.reference), untie=True) if untie else model.architecture

    def match(
        self,
        options: AlignConfig,
        progress: Progress | None = None,
        match: Match = match_model,
        ledger: Ledger = NOWHERE,
    ) -> tuple[Alignment, MergeReport]:
        """Match the old base to the new one: the alignment and its report."""
        new, old = self.sources
        architecture = self.architecture
        if self.frame is not None and match is not match_model:
            problem = "its shape differs from the new base's, so activations cannot be compared"
            raise CheckpointError(
                problem, where=str(self.old.reference), remedy="leave out 'match_on', and carry by weights"
            )
        if self.frame is not None:
            new, architecture = self.frame.of_new(new), self.frame.common
        options = check_pair(self.pair.checked.anchor, self.pair.checked.donor, options, untie=True).options
        if self.rows is not None:
            new, old = (
                VocabularySubset(architecture, source, rows) for source, rows in zip((new, old), self.rows, strict=True)
            )
        run = Run()
        alignment = match(architecture, new, old, options, progress, ledger=ledger)
        run.aligned(str(self.old.reference), alignment)
        if self.rows is not None:
            run.note(f"The bases share {len(self.rows[0])} tokens: embeddings and heads were matched on them.")
        for line in self.frame.notes(self.names) if self.frame else ():
            run.note(line)
        return alignment, self.pair.report(
            run, yaml.safe_dump(asdict(options), sort_keys=False), str(self.new.reference)
        )

    def with_layer_pairs(self, options: AlignConfig, progress: Progress | None) -> Bases:
        """Pair the layers by similarity if asked to, alternating with matching until the pairs are stable."""
        if not self.alike or self.frame is None:
            return self
        best, total, tried, current = self, -math.inf, set[str](), self
        for _ in range(ROUNDS):
            layers, likeness = alike(current, current.match(options, progress)[0])
            assert current.frame is not None
            frame = frame_of(self.frame.new, self.frame.old, layers, current.frame.tied, current.names)
            current = replace(self, frame=replace(frame, likeness=likeness), alike=False)
            if sum(likeness.values()) > total:
                best, total = current, sum(likeness.values())
            if str(layers) in tried:
                break
            tried.add(str(layers))
        return best

    @property
    def names(self) -> tuple[str, str]:
        """Names of the new base and of the old one."""
        return str(self.new.reference), str(self.old.reference)

    def given(self, path: str) -> tuple[Alignment, MergeReport]:
        """Read the alignment file for these two bases.

        Raises:
            RotationMergeError: it cannot be read, or was made for other weights; or the bases are of unlike shapes.
        """
        if self.frame is not None:
            problem, remedy = f"has another shape than {self.new.reference}", "leave out the alignment file"
            raise CheckpointError(
                f"{problem}, which alignment files do not support", where=str(self.old.reference), remedy=remedy
            )
        run = Run()
        run.note(f"The bases were aligned by the file {path}; nothing was matched.")
        file, name = read_file(self.pair, path, untie=True), str(self.old.reference)
        run.moved_by(name, AppliedAlignment(path, name, file.metadata))
        return file.alignment, self.pair.report(run, base=str(self.new.reference))

    def carrier(self, alignment: Alignment, dtype: str | None = None) -> Carrier:
        """The carrier of changes from the old base to the new one.

        Args:
            dtype: that a carried model is stored in, if another than the new base's.
        """
        new, old = self.sources
        return Carrier(self.architecture, old, new, alignment, self.rows, dtype_from_name(dtype), self.frame)


def open_bases(
    new: str, old: str, device: str = "cpu", untie: bool = True, unlike: ResizeOptions | None = None
) -> Bases:
    """Open two bases of one architecture.

    Their vocabularies may differ, and so may the form of their files: experts apart or stacked.

    Args:
        unlike: how different shapes are brought together; None: they must be equal.

    Raises:
        RotationMergeError: one is missing, damaged, quantised or not supported, or they do not fit together.
    """
    if unlike is not None and unlike.is_set:
        return _framed(new, old, device, untie, unlike)
    pair = open_pair(new, old, NOTHING, untie, device, words=False)
    donor = _in_form_of(pair.architecture, pair.checked.donor)
    return Bases(replace(pair, checked=replace(pair.checked, donor=donor)))


def _framed(new: str, old: str, device: str, untie: bool, unlike: ResizeOptions) -> Bases:
    """Open two bases with different shapes."""
    models = Models(MergeOptions(), "error", untie)
    a, d = (models[parse_reference(name)] for name in (new, old))
    for model in (a, d):
        model.check_files()
    if a.architecture.family != d.architecture.family:
        problem = f"is of another architecture than {new}"
        raise CheckpointError(problem, where=old, remedy="carry between models of one family")
    tied, stream = next((model.tied for model in (a, d) if model.tied), ("", ""))
    if untie and stream and a.architecture.layer_normed(stream):
        tied = ""
    frame = frame_of(a.architecture, d.architecture, unlike.layer_pairs(a, d), tied or None, (new, old))
    if not unlike.widths and (grows := frame.grow_new.growth or frame.grow_old.growth):
        raise CheckpointError(f"has other sizes than {new} ({grows})", where=old, remedy=WIDTHS)
    spec = find(d.config)
    config = d.config if spec is None else {**d.config, **config_of_sizes(spec, d.config, a.config)}
    donor = _in_form_of(frame.common, replace(d.member, architecture=frame.paired_architecture, config=config))
    anchor = replace(a.member, architecture=frame.common)
    checked = check_pair(anchor, donor, NOTHING, untie=untie)
    return Bases(Pair(a, d, a.architecture, checked, device), frame, unlike.layers == AUTO)


def alike(bases: Bases, alignment: Alignment) -> tuple[dict[str, list[tuple[int, int]]], dict[str, float]]:
    r"""Pairs of the most similar layers under an alignment (new, old), by module, and their mean similarity.

    The part of a stream that a layer's maps W read (or write) is given by the Gram ``G = W^T W`` (``W W^T``) up to the
    gauge of heads and neurons. With the stream's map R, a layer of the one resembles a layer of the other by the cosine
    of ``R G R^T`` and ``G'``, less their multiples of the identity. Layers meet in order, all of the shallower model's,
    with the greatest sum (dynamic programming).
    """
    frame = bases.frame
    assert frame is not None
    probe_vectors = probes({name: space.sizes["size"] for name, space in frame.common.streams.items()})
    new, old = bases.pair.sources
    layers, likeness = {}, {}
    for module in frame.layers:
        layer_marks = []
        for architecture, source, maps in ((frame.new, new, None), (frame.old, old, alignment.transforms)):
            source = folded_source(architecture, source, alignment.folded)
            layer_marks.append(
                [probe_products(block, source, probe_vectors, maps) for block in architecture.layers(module)]
            )
        table = torch.tensor([[mean_cosine(a, b) for b in layer_marks[1]] for a in layer_marks[0]], dtype=torch.float64)
        layers[module] = in_order(table.reshape(len(layer_marks[0]), len(layer_marks[1])))
        likeness[module] = float(table[tuple(zip(*layers[module], strict=True))].mean()) if layers[module] else 0.0
    return layers, likeness


def _in_form_of(reference: Architecture, member: PairedModel) -> PairedModel:
    """A model with its weights in the file form of another one."""
    place = {(block.module, block.place, block.index): block for block in reference.blocks}
    blocks = []
    for block in member.architecture.blocks:
        reference_block = place.get((block.module, block.place, block.index))
        if reference_block is not None and (gained := other_form(block, reference_block)):
            spent = other_form(reference_block, block)
            remaining = (info for info in block.tensors if info.key not in spent)
            block = replace(
                block, tensors=(*remaining, *(info for info in reference_block.tensors if info.key in gained))
            )
        blocks.append(block)
    return replace(member, architecture=replace(member.architecture, blocks=tuple(blocks)))


def usable_as_it_is(works: Mapping[str, str], bases: Bases) -> dict[str, list[str]] | None:
    """Lines on work that needs no carrying, by output directory; None if it must be carried.

    Raises:
        RotationMergeError: work cannot be read, or is not of the old base.
    """
    near = bases.nearness
    if not near.shared or bases.old.rows:
        return None
    if bases.rows is not None and any(_by_token(work, bases) for work in works.values()):
        return None
    old, new = bases.old.reference, bases.new.reference
    lines = {}
    for out, work in works.items():
        subject = f"{old} and {new} share their coordinates ({near.words})"
        if is_adapter(work):
            parsed = parse(Adapter(work), bases.old.config)
            lines[out] = [f"{subject}: {work} can be used on {new} as it is."]
            if parsed.saved:
                lines[out].append(f"It replaces {len(parsed.saved)} whole tensors of the new base.")
        else:
            bases.tuned(work)  # opened, so that what is no fine-tune of the old base is refused
            recipe = f"merge_method: task_arithmetic, base_model: {new}, weight 1 for {work} and -1 for {old}"
            merge = f"merge_method: rotation_merge, delegate: wudi, base_model: {old}, models {new} and {work}"
            lines[out] = [
                f"{subject}: the change of {work} can be added to {new} as it is ({recipe}).",
                f"A merge of {new} and {work} as two fine-tunes of {old} keeps more of what {new} knows ({merge}).",
            ]
        judging = "--scale auto --data FILE judges the change on samples"
        lines[out].append(f"Nothing was written. {judging}, --force carries it anyway.")
    return lines


def _by_token(work: str, bases: Bases) -> bool:
    """Whether work changes rows of a vocabulary, which may mean other tokens in another base."""
    if not is_adapter(work):
        return True
    parsed = parse(Adapter(work), bases.old.config)
    spots = [*(entry.spot for entry in parsed.entries), *parsed.saved.values()]
    return any(spot.info.vocabulary_axis is not None for spot in spots)


PROBES = 128
"""Grams of larger streams are compared by their products with so many random vectors."""

Marks = dict[tuple[str, str], Tensor]
"""By stream and role, products of the Grams of a layer's maps with probe vectors, (size, probes)."""


def probes(sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Vectors that Grams are compared by, for streams of these sizes: (size, probes), float64."""
    draw = torch.Generator().manual_seed(0)
    vectors = {}
    for name, size in sizes.items():
        few = size > PROBES
        vectors[name] = (
            torch.randn(size, PROBES, generator=draw, dtype=torch.float64) if few else torch.eye(size).double()
        )
    return vectors


def probe_products(
    block: Block,
    source: TensorSource,
    probe_vectors: Mapping[str, Tensor],
    maps: Mapping[str, SpaceTransform] | None,
) -> Marks:
    """Products of the Grams of a layer's maps with probe vectors.

    Args:
        source: its tensors, folded where streams are turned.
        probe_vectors: the probes by stream.
        maps: of the streams to where the probes are; None: they are there.
    """
    products: Marks = {}
    stream_maps: dict[tuple[str, str], list[Tensor]] = {}
    for info in block.tensors:
        place = _on_stream(info)
        if place is None or (tensor := read_tensor(info, source)) is None:
            continue
        dim, stream, role = place
        stream_maps.setdefault((stream, role), []).append(tensor.movedim(dim, 0).flatten(1).double())
    for (stream, role), maps_there in stream_maps.items():
        wide, transform = probe_vectors[stream], (maps or {}).get(stream)
        local_probes = wide if transform is None else transform.inverse().act(wide, role, 0)
        size = len(maps_there[0])
        local_probes = local_probes[:size]
        product = sum((w @ (w.mT @ local_probes) for w in maps_there), torch.zeros_like(local_probes))
        product = product - sum(float(w.square().sum()) for w in maps_there) / size * local_probes
        padded = torch.zeros_like(wide)
        padded[:size] = product
        products[stream, role] = padded if transform is None else transform.act(padded, role, 0)
    return products


def _on_stream(info: TensorInfo) -> tuple[int, str, str] | None:
    """The dimension of a map that lives in a stream, the stream, and whether the map reads or writes it."""
    stream_axes = [
        (dim, part.space.name, part.role)
        for dim, axis in enumerate(info.axes)
        for part in axis.parts
        if part.space.kind == "stream" and axis.size == part.size
    ]
    return (
        stream_axes[0]
        if len(info.axes) > 1 and len(stream_axes) == 1 and stream_axes[0][2] in ("read", "write")
        else None
    )


def mean_cosine(new: Marks, old: Marks) -> float:
    """The mean cosine of two layers' marks."""
    shared = [(new[key], old[key]) for key in new.keys() & old.keys()]
    cosines = [float((a * b).sum() / (a.norm() * b.norm()).clamp_min(1e-300)) for a, b in shared]
    return sum(cosines) / len(cosines) if cosines else 0.0


def in_order(table: Tensor) -> list[tuple[int, int]]:
    """The pairs (row, column) in rising order, as many as the shorter side, with the greatest sum.

    Args:
        table: similarity of each row and column, (rows, columns).
    """
    if table.shape[0] > table.shape[1]:
        return [(row, column) for column, row in in_order(table.mT)]
    rows, columns = table.shape
    best = torch.full((rows + 1, columns + 1), -torch.inf, dtype=torch.float64)
    best[0] = 0.0
    for i in range(1, rows + 1):
        for j in range(i, columns + 1):
            best[i, j] = torch.maximum(best[i, j - 1], best[i - 1, j - 1] + table[i - 1, j - 1])
    pairs, j = [], columns
    for i in range(rows, 0, -1):
        while j > i and best[i, j] == best[i, j - 1]:
            j -= 1
        pairs.append((i - 1, j - 1))
        j -= 1
    return pairs[::-1]
