"""Opens two models side by side: their tensors, fingerprints and alignment files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch
from mergekit.common import ModelReference
from mergekit.options import MergeOptions
from torch import Tensor

from rotation_merge.architecture import Architecture, resolve
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
from rotation_merge.matching.report_rows import recorded
from rotation_merge.matching.run import Run
from rotation_merge.model.adapter_base import check_own_base
from rotation_merge.model.checkpoint import Model, Models, parse_reference, whole_path
from rotation_merge.model.fingerprint import Fingerprint
from rotation_merge.model.fold import folded_source
from rotation_merge.model.gguf import is_absent
from rotation_merge.model.held_model import HeldModel
from rotation_merge.model.hub import local_file
from rotation_merge.model.language_half import language_half
from rotation_merge.model.model_inputs import OpenedModel, check_names
from rotation_merge.model.origin import origins
from rotation_merge.model.source import TensorSource
from rotation_merge.model.sources import DeviceSource, VocabularySubset
from rotation_merge.model.view import View
from rotation_merge.model.vocabulary import matched_on, other_order, shared_rows
from rotation_merge.record import MergeReport, figures, versions


class TiedSource:
    """A source that also returns a tied tensor under its second name."""

    def __init__(self, source: TensorSource, architecture: Architecture) -> None:
        self.source = source
        self.tied = {name: info.tied for info in architecture.tensors() for name in info.names if info.tied}

    def __contains__(self, name: object) -> bool:
        return self._stored(str(name)) in self.source

    def __getitem__(self, name: str, /) -> Tensor:
        return self.source[self._stored(name)]

    def _stored(self, name: str) -> str:
        if name in self.source:
            return name
        return next((tied_name for tied_name in self.tied.get(name, ()) if tied_name in self.source), name)


@dataclass(frozen=True)
class PairArguments:
    """The arguments of `open_pair`, so that another process can open the pair again."""

    anchor: str
    donor: str
    options: AlignConfig
    untie: bool
    unsupported: str
    words: bool

    def for_other_process(self) -> PairArguments:
        """Return an opening for a process with another working directory, with the same tensors.

        Of the options, only those of streams are kept.
        """
        options = NOTHING.with_residual(self.options.residual)
        return replace(self, anchor=whole_path(self.anchor), donor=whole_path(self.donor), options=options)

    def open(self) -> Pair:
        return open_pair(**{name.name: getattr(self, name.name) for name in fields(self)})


class ReopenedSource:
    """One source of a pair for matching; after unpickling it opens the pair again on first access.

    Attributes:
        which: 0 the anchor's, 1 the donor's.
    """

    def __init__(self, opening: PairArguments, which: int, source: TensorSource | None = None) -> None:
        self.opening, self.which, self._source = opening, which, source

    def __reduce__(self) -> tuple[Any, ...]:
        return ReopenedSource, (self.opening.for_other_process(), self.which)

    @property
    def source(self) -> TensorSource:
        if self._source is None:
            self._source = _open_once(self.opening).matched[self.which]
        return self._source

    def __contains__(self, name: object) -> bool:
        return name in self.source

    def __getitem__(self, name: str, /) -> Tensor:
        return self.source[name]


_LATEST: list[tuple[PairArguments, Pair]] = []


def _open_once(opening: PairArguments) -> Pair:
    """Open a pair, with a cache for the latest one: both of its sources need it."""
    if not _LATEST or _LATEST[0][0] != opening:
        _LATEST[:] = [(opening, opening.open())]
    return _LATEST[0][1]


@dataclass(frozen=True)
class Pair:
    """Two models of one architecture, read lazily.

    Attributes:
        opening: how they were opened; None: another process cannot do that.
        untie: whether heads that share an embedding's tensor are given one of their own.
        device: where their tensors are put as they are read.
        marks: what is known of their fingerprints; every tensor read leaves its mark.
        checked: what may be done to the donor.
    """

    anchor: Model
    donor: Model
    architecture: Architecture
    checked: CheckedPair
    device: str = "cpu"
    marks: tuple[Fingerprint, Fingerprint] = field(default_factory=lambda: (Fingerprint(), Fingerprint()))
    opening: PairArguments | None = None
    untie: bool = False

    @property
    def sources(self) -> tuple[TensorSource, TensorSource]:
        return self._source(self.anchor, self.marks[0]), self._source(self.donor, self.marks[1])

    def _source(self, model: Model, mark: Fingerprint) -> TensorSource:
        source = TiedSource(model.watched(mark), self.architecture)
        return source if self.device == "cpu" else DeviceSource(source, torch.device(self.device))

    @cached_property
    def shared(self) -> tuple[Tensor, Tensor] | None:
        """Rows of the shared tokens for matching streams, the anchor's first.

        None if all tokens are the same, or no stream is matched.
        """
        if self.checked.options.residual == "none":
            return None
        rows = shared_rows([self.anchor, self.donor])
        return None if rows is None else (rows[0], rows[1])

    @property
    def matched(self) -> tuple[TensorSource, TensorSource]:
        """The tensors of both models to compare: rows of shared tokens in embeddings and heads."""
        anchor, donor = self.sources
        if self.shared is not None:
            anchor, donor = (
                VocabularySubset(self.architecture, *pair) for pair in zip(self.sources, self.shared, strict=True)
            )
        if self.opening is not None:
            return ReopenedSource(self.opening, 0, anchor), ReopenedSource(self.opening, 1, donor)
        return anchor, donor

    def aligned(self, alignment: Alignment, dtype: torch.dtype | None = None) -> View:
        """The donor in the anchor's coordinates, as from `Alignment.apply`, without another check.

        Args:
            dtype: of its tensors; None: as the donor's.
        """
        model, (anchor, donor) = self.donor, self.sources
        opened = OpenedModel(
            *(str(model.reference), model.config, donor, tuple(model.names), model.shapes, self.untie),
            checkpoint=model,
            layout=self.architecture,
        )
        biases = folded_source(self.architecture, anchor, alignment.folded)
        return alignment.view_of(opened, biases, dtype, unread=model.ignored)

    def notes(self) -> list[str]:
        """Notes for the report beside the warnings."""
        if self.shared is None:
            return self.checked.notes()
        return [*self.checked.notes(), matched_on(self.anchor, self.donor, len(self.shared[0]))]

    def fingerprints(self) -> tuple[str, str]:
        """Fingerprints of anchor and donor; reads only tensors not read yet."""
        for model, mark in zip((self.anchor, self.donor), self.marks, strict=True):
            mark.complete(model.architecture.named(), model.stored)
        return self.marks[0].hexdigest(self.anchor.config), self.marks[1].hexdigest(self.donor.config)

    def basis(self, folded: Sequence[str]) -> Basis:
        """Return the facts on both models that an alignment stores. Biases of folded streams are folded."""
        marks = zip((self.anchor, self.donor), self.fingerprints(), self.marks, strict=True)
        anchor, donor = (Identity(str(model.reference), mark, known.sums()) for model, mark, known in marks)
        biases, donor_biases = (hidden_biases(self.architecture, source, folded) for source in self.sources)
        config, shapes = self.anchor.config, self.anchor.shapes
        return Basis(config, shapes, self.untie, anchor, donor, biases, self.checked.rows, donor_biases)

    def report(self, run: Run, recipe: str = "", base: str | None = None) -> MergeReport:
        """The report on the donor's alignment; the output counts as a fine-tune of the donor, or of `base`."""
        names = str(self.anchor.reference), str(self.donor.reference)
        marks = dict(zip(names, self.fingerprints(), strict=True))
        for note in (*self.checked.warnings, *self.notes()):
            run.note(note)
        models = origins(model.reference for model in (self.anchor, self.donor) if model.has_files)
        return run.report(self.anchor.reference, "none", recipe, marks, models, "finetune", base or names[1])


def check_together(models: Models, anchor: ModelReference, donors: Iterable[ModelReference]) -> None:
    """Check that all models exist, are complete, and have the anchor's architecture and sizes.

    The meaning of their heads is checked elsewhere, when it is known which heads are merged.

    Raises:
        CheckpointError, ArchitectureError: name the model and what differs.
    """
    references = [anchor, *(reference for reference in donors if reference != anchor)]
    for reference in references:
        models[reference].check_files()
    for reference in references:
        models[reference].config  # noqa: B018  (loads and checks)
    for reference in references[1:]:
        first, model = models[anchor], models[reference]
        if find(model.config) and (half := language_half(first, model)):
            models[reference] = model.within(first, half)
        check_pair(models[anchor].member, models[reference].member, NOTHING, layers={}, excluded=lambda _: True)


def open_pair(
    anchor: str | OpenedModel,
    donor: str | OpenedModel,
    options: AlignConfig,
    untie: bool = False,
    device: str = "cpu",
    words: bool = True,
    unsupported: str = "error",
    excluded: Callable[[str], bool] | None = None,
    any_base: bool = False,
) -> Pair:
    """Open two models and check that they fit together under these options.

    Args:
        anchor, donor: names of checkpoints; or both models, open.
        any_base: take adapters of other bases: the caller has checked them, or was told to.
        words: whether their vocabularies must be of one size, too, and a warning tells of tokens at other ids.
        unsupported: as in a recipe: `error` refuses unknown tensors, `merge` keeps them.
        excluded: says of a tensor that it need not fit.

    Raises:
        RotationMergeError: one is missing, damaged or not supported, or they do not fit together.
    """
    opening = None
    if isinstance(anchor, str) and isinstance(donor, str) and excluded is None and not any_base:
        opening = PairArguments(anchor, donor, options, untie, unsupported, words)
    excluded = excluded or (lambda _: False)
    models = Models(MergeOptions(), unsupported)
    first, second = (_reference(models, model) for model in (anchor, donor))
    check_together(models, first, [second])
    for model in (a := models[first], d := models[second]):
        if not any_base:
            check_own_base(model)
    architecture = a.architecture if not untie else resolve(a.config, a.names, str(first), untie=True)
    checked = check_pair(
        replace(a.member, architecture=architecture), d.member, options, untie=untie, excluded=excluded
    )
    checked = replace(checked, warnings=(*checked.warnings, *other_order(a, d))) if words else checked
    d.rows = checked.rows
    for info in architecture.tensors():
        ours, donor_shape = a.shapes.get(info.name), d.shapes.get(info.name)
        if (
            ours is None
            or donor_shape is None
            or excluded(info.name)
            or (not words and info.vocabulary_axis is not None)
        ):
            continue
        if ours != donor_shape:
            raise CheckpointError(
                f"tensor '{info.name}' is {list(donor_shape)}, in {first} it is {list(ours)}",
                where=str(second),
                remedy="merge them with 'tokenizer', 'heads_of: each' or 'exclude' in a recipe; measure them with "
                "'evaluate' or 'barrier --heads-of each'",
            )
    if isinstance(a, HeldModel) and isinstance(d, HeldModel):
        check_names(a.opened, d.opened)
    return Pair(a, d, architecture, checked, device, opening=opening, untie=untie)


def _reference(models: Models, model: str | OpenedModel) -> ModelReference:
    """The name of a model among these, or the loaded model itself."""
    if isinstance(model, str):
        return parse_reference(model)
    model_in_memory = HeldModel(model)
    if model_in_memory.reference in models and model.source is not model.checkpoint:  # two views of one model
        model_in_memory = HeldModel(replace(model, name=f"{model.name} (donor)"))
    models[model_in_memory.reference] = model_in_memory
    return model_in_memory.reference


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
    if is_absent(first) or is_absent(second):
        return None
    models = Models(MergeOptions(), unsupported)
    check_together(models, first, [second])
    for model in (a := models[first], d := models[second]):
        if not any_base:
            check_own_base(model)
    checked = check_pair(a.member, d.member, options, untie=untie, excluded=excluded)
    return replace(checked, warnings=(*checked.warnings, *other_order(a, d))) if words else checked


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
