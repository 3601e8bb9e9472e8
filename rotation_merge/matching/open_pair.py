"""Opens two models side by side: their tensors, fingerprints and alignment files."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from mergekit.common import ModelReference
from torch import Tensor

from rotation_merge.architecture import Architecture, resolve
from rotation_merge.architecture.model import TensorInfo
from rotation_merge.architecture.registry import find
from rotation_merge.errors import CheckpointError
from rotation_merge.matching.alignment import (
    Alignment,
    AlignmentFile,
    Basis,
    Identity,
    check_fingerprints,
    hidden_biases,
    load_alignment,
    save_alignment,
)
from rotation_merge.matching.check_pair import CheckedPair, check_pair, residual_of
from rotation_merge.matching.options import NOTHING, AlignConfig
from rotation_merge.matching.report_rows import figures, recorded
from rotation_merge.matching.run import Run
from rotation_merge.model.blocks import with_tied
from rotation_merge.model.fingerprint import Fingerprint
from rotation_merge.model.fold import folded_tensors
from rotation_merge.model.folder import absent_parts
from rotation_merge.model.hub import local_file
from rotation_merge.model.labels import in_class_order, watched
from rotation_merge.model.language_half import within
from rotation_merge.model.open import ModelLike, as_reference, check_names, check_present, open_model, parse_reference
from rotation_merge.model.origin import origins
from rotation_merge.model.rows import vocabulary_subset
from rotation_merge.model.tensors import Tensors
from rotation_merge.model.view import View
from rotation_merge.model.vocabulary import TOGETHER, matched_on, other_ids, row_pair
from rotation_merge.record import MergeReport, versions


@dataclass(frozen=True)
class Pair:
    """Two models of one architecture, read lazily.

    Attributes:
        untie: whether heads that share an embedding's tensor are given one of their own.
        device: where their tensors are put as they are read.
        watched: whether every tensor that is read counts for their fingerprints, which a report or a file will hold.
        marks: what is known of the fingerprints.
        checked: what may be done to the donor.
    """

    anchor: View
    donor: View
    architecture: Architecture
    checked: CheckedPair
    device: str = "cpu"
    marks: tuple[Fingerprint, Fingerprint] = field(default_factory=lambda: (Fingerprint(), Fingerprint()))
    untie: bool = False
    watched: bool = True

    @property
    def sources(self) -> tuple[Tensors, Tensors]:
        """The tensors of both models by the anchor's names; what is read counts for the fingerprints."""
        return self._source(self.anchor, self.marks[0]), self._source(self.donor, self.marks[1])

    def _source(self, model: View, mark: Fingerprint) -> Tensors:
        tensors = with_tied(self.architecture, watched(model, mark.add) if self.watched else model.tensors)
        return tensors if self.device == "cpu" else tensors.to(self.device)

    @cached_property
    def shared(self) -> tuple[Tensor, Tensor] | None:
        """Rows of the shared tokens for matching streams, the anchor's first.

        None if all tokens are the same, or no stream is matched.
        """
        if self.checked.options.residual == "none":
            return None
        return row_pair(self.anchor, self.donor)

    @property
    def matched(self) -> tuple[Tensors, Tensors]:
        """The tensors of both models to compare: rows of shared tokens in embeddings and heads."""
        anchor, donor = self.sources
        if self.shared is None:
            return anchor, donor
        subsets = zip((anchor, donor), self.shared, strict=True)
        first, second = (vocabulary_subset(self.architecture, source, rows) for source, rows in subsets)
        return first, second

    def aligned(self, alignment: Alignment, dtype: torch.dtype | None = None) -> View:
        """The donor in the anchor's coordinates, as from `Alignment.apply`, without another check.

        Args:
            dtype: of its tensors; None: as the donor's.
        """
        anchor, donor = self.sources
        biases = folded_tensors(self.architecture, anchor, alignment.folded)
        view = replace(self.donor, tensors=donor, architecture=self.architecture, untie=self.untie)
        return alignment.view_of(view, biases, dtype, unread=self.donor.ignored)

    def notes(self) -> list[str]:
        """Notes for the report beside the warnings."""
        if self.shared is None:
            return self.checked.notes()
        return [*self.checked.notes(), matched_on(self.anchor, self.donor, len(self.shared[0]))]

    def fingerprints(self) -> tuple[str, str]:
        """Fingerprints of anchor and donor; reads only tensors not read yet."""
        for model, mark in zip((self.anchor, self.donor), self.marks, strict=True):
            mark.complete(model.architecture.named(), model.as_filed.tensors)
        anchor, donor = self.anchor.as_filed, self.donor.as_filed
        return self.marks[0].hexdigest(anchor.config), self.marks[1].hexdigest(donor.config)

    def basis(self, streams: Sequence[str]) -> Basis:
        """Return the facts on both models that an alignment stores. Biases of folded streams are folded."""
        if self.watched:
            marks = zip((self.anchor, self.donor), self.fingerprints(), self.marks, strict=True)
            anchor, donor = (Identity(model.name, mark, known.sums()) for model, mark, known in marks)
        else:
            anchor, donor = Identity.of(self.anchor), Identity.of(self.donor)
        biases, donor_biases = (hidden_biases(self.architecture, source, streams) for source in self.sources)
        config, shapes = self.anchor.config, self.anchor.shapes
        return Basis(config, shapes, self.untie, anchor, donor, biases, self.checked.rows, donor_biases)

    def report(self, run: Run, recipe: str = "", base: str | None = None) -> MergeReport:
        """The report on the donor's alignment; the output counts as a fine-tune of the donor, or of `base`."""
        names = str(self.anchor.reference), str(self.donor.reference)
        marks = dict(zip(names, self.fingerprints(), strict=True)) if self.watched else {}
        for note in (*self.checked.warnings, *self.notes()):
            run.note(note)
        models = origins(model.reference for model in (self.anchor, self.donor) if model.files)
        return run.report(self.anchor.reference, "none", recipe, marks, models, "finetune", base or names[1])


def open_together(
    models: Sequence[ModelLike], untie: bool = False, unsupported: str = "error", any_base: bool = False
) -> list[View]:
    """Open models that are to be merged, the anchor first, and check that they have its architecture and sizes.

    All must be there before any is read. The meaning of their heads is checked elsewhere, when it is known which heads
    are merged.

    Raises:
        CheckpointError, ArchitectureError: name the model and what differs.
    """
    references = [model if isinstance(model, View) else as_reference(model) for model in models]
    for reference in references:
        if isinstance(reference, ModelReference):
            check_present(reference)
    views = [open_model(model, untie=untie, unsupported=unsupported, any_base=any_base) for model in references]
    return [views[0], *(as_donor(views[0], view) for view in views[1:])]


def as_donor(anchor: View, donor: View) -> View:
    """A model checked against its anchor; a text-only one as the language half of the anchor's class.

    Raises:
        CheckpointError, ArchitectureError: name the model and what differs.
    """
    half = within(donor, anchor, complete=True) if find(donor.config) else None
    donor = half or donor
    check_pair(anchor, donor, NOTHING, layers={}, excluded=lambda _: True)
    return donor


def open_pair(
    anchor: ModelLike,
    donor: ModelLike,
    options: AlignConfig,
    untie: bool = False,
    device: str = "cpu",
    words: bool = True,
    unsupported: str = "error",
    excluded: Callable[[str], bool] = lambda _: False,
    any_base: bool = False,
    watched: bool = True,
) -> Pair:
    """Open two models and check that they fit together under these options.

    Args:
        any_base: take adapters of other bases: the caller has checked them, or was told to.
        words: whether their vocabularies must be of one size, too, and a warning tells of tokens at other ids.
        unsupported: as in a recipe: `error` refuses unknown tensors, `merge` keeps them.
        excluded: says of a tensor that it need not fit.
        watched: take fingerprints while tensors are read; they are read again where they are needed later.

    Raises:
        RotationMergeError: one is missing, damaged or not supported, or they do not fit together.
    """
    first, second = open_together([anchor, donor], unsupported=unsupported, any_base=any_base)
    architecture = resolve(dict(first.config), first.names, first.name, untie=True) if untie else first.architecture
    described_anchor = replace(first, architecture=architecture)
    checked = check_pair(described_anchor, second, options, untie=untie, excluded=excluded)
    checked = _with_words(checked, first, second) if words else checked
    _check_shapes(first, second, architecture, lambda info: excluded(info.name) or _spared(info, words))
    if first.files is None and second.files is None:
        check_names(first, second)
    donor_in_order = in_class_order(second, checked.rows)
    return Pair(first, donor_in_order, architecture, checked, device, untie=untie, watched=watched)


def _with_words(checked: CheckedPair, anchor: View, donor: View) -> CheckedPair:
    """The same with a warning of tokens at other ids."""
    if not (words := other_ids(anchor, donor)):
        return checked
    return replace(checked, warnings=(*checked.warnings, f"{donor.reference}: {words}; a merge needs '{TOGETHER}'."))


def _spared(info: TensorInfo, words: bool) -> bool:
    """Whether a tensor may have another number of rows: the words of a vocabulary."""
    return not words and info.vocabulary_axis is not None


def _check_shapes(anchor: View, donor: View, architecture: Architecture, spared: Callable[[TensorInfo], bool]) -> None:
    """Refuse models whose tensors differ in shape."""
    for info in architecture.tensors():
        shape, donor_shape = anchor.shapes.get(info.name), donor.shapes.get(info.name)
        if shape is not None and donor_shape is not None and shape != donor_shape and not spared(info):
            raise CheckpointError(
                f"tensor '{info.name}' is {list(donor_shape)}, in {anchor.name} it is {list(shape)}",
                where=donor.name,
                remedy="merge them with 'tokenizer', 'heads_of: each' or 'exclude' in a recipe; measure them with "
                "'evaluate' or 'barrier --heads-of each'",
            )


def check_models(
    anchor: str,
    donor: str,
    options: AlignConfig,
    untie: bool = False,
    excluded: Callable[[str], bool] = lambda _: False,
    words: bool = True,
    unsupported: str = "error",
    any_base: bool = False,
) -> CheckedPair | None:
    """Check that both models exist, are complete, and fit together; their vocabularies may differ.

    Args:
        excluded: says of a tensor that it is copied from the anchor.
        words: whether to warn of tokens at other ids, which nobody brings together.
        unsupported: as in a recipe: `error` refuses unknown tensors, `merge` keeps them.

    Returns:
        What may be done to the donor; None where one is a model of the hub that has not been downloaded.

    Raises:
        RotationMergeError: names the model and what is wrong with it.
    """
    first, second = parse_reference(anchor), parse_reference(donor)
    if absent_parts(first) or absent_parts(second):
        return None
    a, d = open_together([first, second], unsupported=unsupported, any_base=any_base)
    checked = check_pair(a, d, options, untie=untie, excluded=excluded)
    return _with_words(checked, a, d) if words else checked


def read_alignment(pair: Pair, path: str, untie: bool = False) -> Alignment:
    """Read the alignment of this pair from a file; see `read_file`."""
    return read_file(pair, path, untie).alignment


def read_file(pair: Pair, path: str, untie: bool) -> AlignmentFile:
    """Read an alignment file of this pair.

    Raises:
        AlignmentError: it cannot be read, or was made for other weights.
    """
    file = load_alignment(local_file(path), pair.architecture)
    anchor, donor = pair.fingerprints()
    check_fingerprints(file, path, anchor, donor, (str(pair.anchor.reference), str(pair.donor.reference)))
    options = NOTHING.with_residual(residual_of(file.alignment.transforms, file.alignment.folded))
    check_pair(pair.checked.anchor, pair.checked.donor, options, untie=untie)
    return file


def write_alignment(
    pair: Pair,
    alignment: Alignment,
    path: str,
    options: AlignConfig,
    half: bool = False,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Write all transforms to one file, with both fingerprints, options and figures.

    Args:
        facts: what else is to be kept at its head.
    """
    name = str(pair.donor.reference)
    with_records = alignment if alignment.records else recorded(pair.architecture, *pair.sources, alignment)
    run = Run()
    run.aligned(name, with_records)
    metadata = alignment_metadata(pair.anchor.reference, pair.donor.reference, asdict(options))
    metadata |= {"figures": figures(run.rows(), run.whole.get(name)), **(facts or {})}
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    whole = replace(alignment, basis=pair.basis(alignment.folded))
    save_alignment(path, whole, metadata, torch.float16 if half else torch.float64)


def alignment_metadata(anchor: ModelReference, donor: ModelReference, options: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of an alignment file: both models, the options, the versions."""
    return {
        "anchor": str(anchor),
        "donor": str(donor),
        "models": origins([anchor, donor]),
        "options": dict(options),
        "versions": versions(),
    }
