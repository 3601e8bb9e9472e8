"""The alignment of a donor to an anchor, as a value that can be applied, inverted, saved and loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar, overload, runtime_checkable

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rotation_merge.architecture import resolve
from rotation_merge.architecture.model import Architecture, Block, TensorInfo
from rotation_merge.errors import AlignmentError, RotationMergeError, StatisticsError, not_written, short
from rotation_merge.files import Output, check_output, replacing
from rotation_merge.linalg.finite import all_finite
from rotation_merge.matching.block import SpaceMatch
from rotation_merge.matching.check_pair import check_pair
from rotation_merge.matching.gauge import random_gauge
from rotation_merge.matching.layer_spans import inconsistent_space
from rotation_merge.matching.model_pair import Transforms
from rotation_merge.matching.options import AlignConfig
from rotation_merge.matching.serialisation import packed, unpacked
from rotation_merge.matching.statistics import StatisticsMover
from rotation_merge.model.biases import holders, in_coordinates
from rotation_merge.model.blocks import read_tensor, unstack
from rotation_merge.model.fingerprint import Fingerprint, checksum
from rotation_merge.model.fold import folded_tensors
from rotation_merge.model.forms import names_in, translated
from rotation_merge.model.hub import local_file
from rotation_merge.model.labels import LabelRows, in_class_order
from rotation_merge.model.language_half import within
from rotation_merge.model.open import ModelLike, open_model
from rotation_merge.model.rows import in_slices, views
from rotation_merge.model.run_keys import stamps_of
from rotation_merge.model.tensors import Names, Tensors, TensorSource, as_tensors
from rotation_merge.model.view import View, check_storage, described, stored_dtype
from rotation_merge.record import MergeReport
from rotation_merge.run.statistics import Statistics, has_format
from rotation_merge.symmetry import SpaceTransform, StreamTransform
from rotation_merge.symmetry.admitted import WIDEST, admitted


class Identity:
    """The model that an alignment was made for: its fingerprint, and a checksum of every tensor.

    Those of a stored model are taken from its files when they are asked for.

    Args:
        name: as the model was called.
        fingerprint: of config and weights; empty: any model.
        tensors: by name, dtype, shape and checksum of each.
        view: the stored model, where the others are still to be taken.
    """

    def __init__(
        self, name: str, fingerprint: str = "", tensors: Mapping[str, str] | None = None, view: View | None = None
    ) -> None:
        self.name, self._marks, self._view = name, (fingerprint, tensors or {}), view
        self._stamps = None if view is None else stamps_of(view)

    @staticmethod
    def of(model: View) -> Identity:
        """A model's identity; one that is not as it is stored is read once."""
        if not model.as_filed.is_stored:
            return Identity(model.name, model.fingerprint, model.mark.sums())
        return Identity(model.name, view=model)

    def is_view(self, model: View) -> bool:
        """Whether a model is surely this one: what is stored in the same files, which have not changed."""
        return self._stamps is not None and model.is_stored and stamps_of(model) == self._stamps

    @property
    def fingerprint(self) -> str:
        """Of config and weights."""
        return self._taken()[0]

    @property
    def tensors(self) -> Mapping[str, str]:
        """Dtype, shape and checksum of every tensor, by name."""
        return self._taken()[1]

    @property
    def any_model(self) -> bool:
        """Whether nothing is known of the model but its name."""
        return self._view is None and not self._marks[1]

    def _taken(self) -> tuple[str, Mapping[str, str]]:
        if self._view is not None:
            if stamps_of(self._view) != self._stamps:
                problem = "was changed after it was aligned"
                raise AlignmentError(problem, where=self.name, remedy="align it again")
            self._marks, self._view = (self._view.fingerprint, self._view.mark.sums()), None
        return self._marks

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and (self.name, self._taken()) == (other.name, other._taken())

    def __hash__(self) -> int:
        return hash(self.name)

    def __getstate__(self) -> dict[str, Any]:
        return {"name": self.name, "_marks": self._taken(), "_view": None, "_stamps": None}


@dataclass(frozen=True)
class Basis:
    """Facts on both models, with which an alignment can be applied to either model alone.

    Attributes:
        config: the anchor's.
        shapes: of the anchor's tensors, by name.
        untie: whether heads that share an embedding's tensor are given one of their own.
        anchor, donor: which models they are.
        biases: of the anchor by name, folded where the alignment folds: those that softmax cannot see, which a moved
            donor is given (`model/biases.py`); empty: it keeps its own.
        rows: what puts the donor's classes into the anchor's order (`model/labels.py`).
        donor_biases: the donor's biases that `biases` replaces, by the same names; statistics are moved by both.
    """

    config: Mapping[str, Any] = field(repr=False)
    shapes: Mapping[str, tuple[int, ...]] = field(repr=False)
    untie: bool
    anchor: Identity
    donor: Identity
    biases: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    rows: LabelRows = field(default_factory=dict, repr=False)
    donor_biases: Mapping[str, Tensor] = field(default_factory=dict, repr=False)

    @cached_property
    def architecture(self) -> Architecture:
        return resolve(dict(self.config), list(self.shapes), self.anchor.name, keep_unknown=True, untie=self.untie)

    @cached_property
    def with_head(self) -> Architecture:
        """The architecture in which a tied head is a map of its own, as in statistics."""
        return resolve(dict(self.config), list(self.shapes), self.anchor.name, keep_unknown=True, untie=True)

    @cached_property
    def described_anchor(self) -> View:
        """The anchor without its tensors."""
        return described(self.anchor.name, self.config, self.architecture, self.shapes)

    @staticmethod
    def of(anchor: View, donor: View, streams: Sequence[str], rows: LabelRows) -> Basis:
        """The basis of an alignment of one model to another; both are read once, for their checksums.

        Args:
            streams: that the alignment folds.
        """
        biases, donor_biases = (hidden_biases(anchor.architecture, model.tensors, streams) for model in (anchor, donor))
        identities = Identity.of(anchor), Identity.of(donor)
        return Basis(anchor.config, anchor.shapes, anchor.untie, *identities, biases, rows, donor_biases)


def hidden_biases(architecture: Architecture, source: TensorSource, streams: Sequence[str]) -> dict[str, Tensor]:
    """A model's biases that softmax ignores, by name, with the gains of some streams folded."""
    source = folded_tensors(architecture, source, streams)
    biases: dict[str, Tensor] = {}
    for block in architecture.blocks:
        for info in holders(block):
            if (bias := read_tensor(info, source)) is not None:
                biases.update({name: piece.clone() for name, piece in unstack(info, bias).items()})
    return biases


def verified(model: View, identity: Identity, names: Mapping[str, str]) -> Tensors:
    """A model's tensors, each compared with its checksum in an alignment when it is read for the first time.

    Args:
        names: what the alignment calls tensors that have other names here.
    """
    seen: set[str] = set()

    def check(name: str, tensor: Tensor) -> Tensor:
        known = identity.tensors.get(names.get(name, name))
        if known is not None and name not in seen and checksum(tensor) != known:
            raise AlignmentError(
                f"tensor '{name}' is not that of {identity.name}, which the alignment was made for",
                where="the given model" if model.name == identity.name else model.name,
                remedy="give that model, or apply(..., strict=False) to move a fine-tune of it by the same maps",
            )
        seen.add(name)
        return tensor

    return model.tensors.map(check)


M = TypeVar("M", bound="Movable")


@runtime_checkable
class Movable(Protocol):
    """A value that an alignment can move, such as a `Delta`."""

    def moved_by(self: M, alignment: Alignment, dtype: torch.dtype | None, strict: bool) -> M:
        """The value in the anchor's coordinates; arguments and errors as for `Alignment.apply`."""
        ...


@dataclass(frozen=True)
class Alignment:
    """The transforms that bring one donor to one anchor.

    Attributes:
        transforms: by space name.
        folded: streams whose norm gains were folded into the readers first (anchor and donor alike), which a
            rotation of the stream needs.
        records: what matching did to each space, block by block.
        summary: iterations, objective and the like, for the report.
        notes: what the user should know.
        samples: where it was matched on samples: what they are called, and how many.
        report: what was done, where `rotation_merge.align` made it.
        basis: of the two models what applying it needs; None where only a merge that has both at hand uses it.
    """

    transforms: Transforms
    folded: tuple[str, ...] = ()
    records: list[tuple[Block, list[SpaceMatch]]] = field(default_factory=list)
    summary: dict[str, object] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    samples: tuple[str, int] | None = None
    basis: Basis | None = field(default=None, compare=False)
    report: MergeReport | None = field(default=None, repr=False, compare=False)

    def __repr__(self) -> str:
        models = "" if self.basis is None else f"{self.basis.donor.name} to {self.basis.anchor.name}, "
        folded = f", folded: {', '.join(self.folded)}" if self.folded else ""
        return f"Alignment({models}{len(self.transforms)} spaces{folded})"

    @classmethod
    def random(
        cls,
        model: ModelLike,
        config: AlignConfig | None = None,
        *,
        seed: int = 0,
        untie: bool = False,
        **options: Any,
    ) -> Alignment:
        """Draw a random element of every group that the config admits.

        `apply(model)` then gives a twin of the model: other weights with the same outputs.

        Args:
            model: in any form (`ModelLike`); not modified. It is both anchor and donor of the alignment.
            config: which groups to draw from, as of `rotation_merge.align`; or name its fields as options.
            seed: of the random numbers.
            untie: give a head that shares the embedding's tensor one of its own.

        Raises:
            RotationMergeError: unknown options, a seed that is no whole number, an unsupported architecture, or a group
                that the model does not admit.
        """
        if type(seed) is not int:
            raise AlignmentError(f"the seed {seed!r} is no whole number", remedy="give a whole number")
        opened = open_model(model, "model", untie=untie)
        checked = check_pair(opened, opened, AlignConfig.of(config, options), untie=untie)
        generator = torch.Generator().manual_seed(seed)
        transforms = random_gauge(opened.architecture, checked.options, generator)
        basis = Basis.of(opened, opened, checked.folded, {})
        return cls(transforms, checked.folded, notes=tuple(checked.notes()), basis=basis).without_biases()

    def moves_streams(self, architecture: Architecture) -> bool:
        """Whether a stream moves that is read by layers which are not moved.

        These are layers that predict tokens further ahead (MTP).
        """
        streams = (self.transforms[name] for name in architecture.streams if name in self.transforms)
        return bool(self.folded) or any(not stream.is_identity() for stream in streams)

    @overload
    def apply(self, donor: Statistics, dtype: torch.dtype | None = None, strict: bool = True) -> Statistics: ...
    @overload
    def apply(self, donor: M, dtype: torch.dtype | None = None, strict: bool = True) -> M: ...
    @overload
    def apply(self, donor: ModelLike, dtype: torch.dtype | None = None, strict: bool = True) -> View: ...

    def apply(self, donor: ModelLike, dtype: torch.dtype | None = None, strict: bool = True) -> Any:
        """The donor in the anchor's coordinates, with unchanged outputs.

        Args:
            donor: the model that the alignment was made for, in any form (`ModelLike`); or its `Statistics`; or a
                `Delta`, what fine-tuning changed in it. Not modified.
            dtype: of the result; None: as the donor's.
            strict: refuse tensors that are not those the alignment was made for, when they are read. False: also a
                fine-tune of the donor is moved, by the same maps.

        Returns:
            Of a model a lazy view; its classes stand in the anchor's order, where the models' configs name the same
            ones. Of statistics what would be measured on that view. Of a delta the change of the moved donor, moved by
            the maps alone: its `applied()` is the moved fine-tune.

        Raises:
            AlignmentError: the donor is another model, or the alignment has no basis.
            CheckpointError: it cannot be read, or its sizes differ.
            StatisticsError: the statistics are of another model, or do not survive the maps (when they are read).
        """
        check_storage(dtype)
        if isinstance(donor, Statistics):
            return self._statistics(donor, self._known().donor, dtype, strict)
        if isinstance(donor, Movable):
            return donor.moved_by(self, dtype, strict)
        opened = self.opened_donor(donor, strict)
        basis = self._known()
        biases = translated(basis.biases, basis.architecture, opened.architecture) if basis.biases else None
        return self.view_of(opened, biases, dtype, self._known().donor if strict else None)

    def opened_donor(self, donor: ModelLike, strict: bool) -> View:
        """The donor in the anchor's sizes, its classes in the anchor's order. Errors as for `apply`."""
        basis = self._known()
        opened = self._opened(donor, basis.donor, strict)
        names = names_in(basis.architecture, opened.architecture)
        rows = {name: basis.rows[known] for name, known in names.items() if known in basis.rows}
        return in_class_order(opened, rows)

    def check_donor(self, donor: ModelLike) -> None:
        """Refuse another model than the one the alignment was made for; every tensor is read once.

        Raises:
            AlignmentError: it is another; names a tensor.
        """
        opened = self._opened(donor, self._known().donor, strict=True)
        for name in opened:
            opened[name]

    @overload
    def apply_anchor(self, anchor: Statistics, dtype: torch.dtype | None = None, strict: bool = True) -> Statistics: ...
    @overload
    def apply_anchor(self, anchor: ModelLike, dtype: torch.dtype | None = None, strict: bool = True) -> View: ...

    def apply_anchor(self, anchor: ModelLike, dtype: torch.dtype | None = None, strict: bool = True) -> Any:
        """The anchor to average with the moved donor; its norms are folded if the alignment needs it.

        Also moves the anchor's statistics. Arguments and errors as for `apply`.
        """
        check_storage(dtype)
        still, identity = replace(self, transforms={}).without_biases(), self._known().anchor
        if isinstance(anchor, Statistics):
            return still._statistics(anchor, identity, dtype, strict)
        return still.view_of(self._opened(anchor, identity, strict), None, dtype, identity if strict else None)

    def without_biases(self) -> Alignment:
        """The same alignment without the anchor's biases: a moved donor keeps its own."""
        return replace(self, basis=replace(self._known(), biases={}, donor_biases={}))

    def _statistics(
        self, statistics: Statistics, identity: Identity, dtype: torch.dtype | None, strict: bool
    ) -> Statistics:
        """Statistics of a model, moved as the alignment moves the model."""
        basis, fingerprint = self._known(), statistics.metadata.get("fingerprint")
        if strict and identity.fingerprint and fingerprint != identity.fingerprint:
            raise StatisticsError(
                f"are of other weights than {identity.name}, which the alignment was made for",
                where=statistics.path,
                remedy="measure that model, or apply(..., strict=False) to move those of a fine-tune by the same maps",
            )
        rows = basis.rows if self.transforms else {}
        mover = StatisticsMover(basis.with_head, self.transforms, self.folded, basis.biases, basis.donor_biases, rows)
        moved = mover.moved(statistics, dtype)
        mark = self._moved_fingerprint(str(fingerprint)) if strict else ""
        return replace(moved, metadata={**statistics.metadata, "fingerprint": mark})

    def _moved_fingerprint(self, fingerprint: str) -> str:
        """Fingerprint of a moved model, derived from the model's fingerprint.

        Unchanged if nothing moves.
        """
        if not self.transforms and not self.folded:
            return fingerprint
        tensors = {**packed(self.transforms)[0], **self._known().biases}
        mark = Fingerprint()
        mark.complete(tensors, tensors)
        return mark.hexdigest({"of": fingerprint, "folded": self.folded, "rows": self._known().rows})

    def view_of(
        self,
        model: View,
        biases: TensorSource | None,
        dtype: torch.dtype | None,
        identity: Identity | None = None,
        unread: Sequence[str] | None = None,
    ) -> View:
        """A view of a checked model: folded, transformed, with the anchor's biases, rounded once.

        Args:
            biases: gives the anchor's biases, by the model's names, folded where the alignment folds; None: the model
                keeps its own.
            dtype: as of `apply`.
            identity: of the model that it is known to be.
            unread: tensors that the model does not read, and that a moving stream invalidates; None: `model.unread`.
        """
        mover = Mover(model.architecture, model.tensors, self, biases)
        whole = model.text or model
        left_out = (whole.unread if unread is None else unread) if self.moves_streams(model.architecture) else ()
        changes = {
            "left_out": frozenset(left_out),
            "notes": (not_written(left_out),) if left_out else (),
            "report": self.report,
            "folded": self.folded,
        }
        if model.text is None:

            def moved() -> str | None:
                mark = identity.fingerprint if identity else ""
                return self._moved_fingerprint(mark) if mark else None

            return model.blockwise(mover.tensor, dtype, identity=moved, **changes)
        places = model.architecture.places()
        by_text_name = {text_name: places[name][:2] for name, text_name in model.text_names.items() if name in places}

        def of_half(block: Block, info: TensorInfo, rounded: torch.dtype | None) -> Tensor | None:
            return mover.tensor(*by_text_name[info.names[0]], rounded) if info.names[0] in by_text_name else None

        return model.text.blockwise(of_half, dtype, **changes)

    def inverse(self) -> Alignment:
        """The alignment that moves the moved donor back, with unchanged outputs.

        Folded gains and the anchor's biases remain: `irreversible_notes` names them. The result is for the output of
        `apply`, so its basis has no fingerprint of a donor.
        """
        basis = self._known()
        turned = {name: transform.inverse() for name, transform in self.transforms.items()}
        orders = {
            name: (dim, tuple(sorted(range(len(order)), key=order.__getitem__)))
            for name, (dim, order) in basis.rows.items()
        }
        unknown = Identity(basis.donor.name)
        back = replace(basis, donor=unknown, anchor=unknown, biases={}, donor_biases={}, rows=orders)
        return Alignment(turned, self.folded, notes=tuple(self.irreversible_notes()), basis=back)

    def irreversible_notes(self) -> list[str]:
        """Lines on what `inverse` cannot restore; empty if it restores everything up to rounding."""
        lines = [f"The norms' gains of '{name}' stay folded into the maps that read them." for name in self.folded]
        if self.basis is not None and self.basis.biases:
            lines.append("Biases that have no effect under softmax are the anchor's.")
        return lines

    def save(self, path: Path | str, metadata: Mapping[str, Any] | None = None, half: bool = False) -> None:
        """Write the alignment to one safetensors file.

        Args:
            metadata: anything worth keeping with it (models, options, versions, figures), as JSON.
            half: store the maps in float16: what is orthogonal is rebuilt orthogonal when it is read. In float64, the
                default, they come back bit for bit.

        Raises:
            AlignmentError: the alignment has no basis.
            RotationMergeError: there is a file at that place that holds no alignment; it stays as it is.
        """
        check_output(Output(str(path), "path", wrote=holds_alignment, remedy="name another file, or move it away"))
        save_alignment(path, self, metadata, torch.float16 if half else torch.float64)

    @classmethod
    def load(cls, path: Path | str) -> Alignment:
        """Read an alignment without a model, and check that every transform is in its space's group.

        Args:
            path: a file, or one of the hub (`org/name/file.safetensors`).

        Raises:
            AlignmentError: it cannot be read, is no alignment, or would change functions.
        """
        return load_alignment(local_file(str(path))).alignment

    def _known(self) -> Basis:
        if self.basis is None:
            remedy = "make it with rotation_merge.align, or load it from its file"
            raise AlignmentError("the alignment has no facts on its models", remedy=remedy)
        return self.basis

    def _opened(self, model: ModelLike, identity: Identity, strict: bool) -> View:
        """Open a model to move, and check its architecture; strict: also its weights."""
        basis = self._known()
        opened = open_model(model, identity.name, untie=basis.untie)
        opened = within(opened, basis.described_anchor) or opened
        family = basis.architecture.family
        if opened.architecture.family != family:
            raise AlignmentError(
                f"the alignment was made for {family} models, '{opened.name}' is {opened.architecture.family}",
                where=opened.name,
                remedy=f"give {identity.name}, which it was made for",
            )
        spaces, opened_spaces = basis.architecture.spaces(), opened.architecture.spaces()
        for name in self.transforms:
            if name not in opened_spaces or opened_spaces[name].sizes != spaces[name].sizes:
                sizes = f"{opened_spaces[name].sizes}" if name in opened_spaces else "absent"
                raise AlignmentError(
                    f"space '{name}' is {sizes}, in the alignment {spaces[name].sizes}",
                    where=opened.name,
                    remedy=f"give {identity.name}, which it was made for",
                )
        if not strict or identity.any_model or identity.is_view(opened):
            return opened
        names = names_in(basis.architecture, opened.architecture)
        return replace(opened, tensors=verified(opened, identity, names))


class Mover:
    """Moves a model's tensors one by one: folds, transforms, gives the anchor's biases, and rounds once.

    Args:
        architecture: by whose names the source's tensors are known.
        biases: gives the anchor's biases that softmax cannot see, folded where the alignment folds; None: the model
            keeps its own.
        least: the least precise type that results are rounded to in the end, which folding has to survive; None: that
            of each tensor.
    """

    def __init__(
        self,
        architecture: Architecture,
        source: TensorSource,
        alignment: Alignment,
        biases: TensorSource | None = None,
        least: torch.dtype | None = None,
    ) -> None:
        stored, self._read = as_tensors(source), dict[Names, Tensor]()
        self.architecture, self.alignment, self.biases, self.least = architecture, alignment, biases, least
        self.source = Tensors(
            stored.shapes, stored.dtypes, lambda n: self._read[n] if n in self._read else stored.read(n)
        )
        self._whole: dict[torch.dtype | None, Tensors] = {}

    def tensor(self, block: Block, info: TensorInfo, dtype: torch.dtype | None = None) -> Tensor | None:
        """A tensor in the anchor's coordinates, long vocabularies in slices; None if the source lacks it.

        Args:
            dtype: that it is rounded to, which folding has to survive, too; None: what it is stored in.
        """
        stored = read_tensor(info, self.source)
        if stored is None:
            return None
        key: Names = info.names if info.stacked else info.names[0]
        self._read[key] = stored  # which is read once
        try:
            return self._moved(block, info, stored, dtype)
        finally:
            self._read.pop(key, None)

    def _moved(self, block: Block, info: TensorInfo, stored: Tensor, dtype: torch.dtype | None) -> Tensor:
        rounded = stored_dtype(stored, dtype)
        part_of = views(block, [self.source] if info.vocabulary_axis is not None else [])

        def moved(part: slice | None) -> Tensor:
            aligned = self._aligned(dtype) if part is None else self._of(part_of(part)[0], None, dtype)
            tensor = read_tensor(info, aligned)
            assert tensor is not None
            return tensor

        return in_slices(info, [stored], rounded, moved).to(rounded).contiguous()

    def _aligned(self, dtype: torch.dtype | None) -> Tensors:
        """The whole aligned source, cached for each dtype."""
        if dtype not in self._whole:
            self._whole[dtype] = self._of(self.source, self.biases, dtype)
        return self._whole[dtype]

    def _of(self, source: TensorSource, biases: TensorSource | None, dtype: torch.dtype | None) -> Tensors:
        stored = folded_tensors(self.architecture, source, self.alignment.folded, self.least or dtype)
        return in_coordinates(self.architecture, stored, self.alignment.transforms, biases)


def moved_tensors(
    architecture: Architecture,
    source: TensorSource,
    alignment: Alignment,
    anchor: TensorSource | None = None,
    dtype: torch.dtype | None = None,
) -> Tensors:
    """A donor in the anchor's coordinates, folded where the alignment needs it, in float32 at least.

    For the anchor itself, folded where the alignment needs it, give ``Alignment({}, alignment.folded)``.

    Args:
        anchor: as it is stored: whose biases the donor is given where softmax cannot see them; None: it keeps its own.
    """
    source = folded_tensors(architecture, source, alignment.folded, dtype)
    anchor = None if anchor is None else folded_tensors(architecture, anchor, alignment.folded)
    return in_coordinates(architecture, source, alignment.transforms, anchor)


FORMAT = "rotation_merge.alignment.5"
BIAS, DONOR_BIAS = BIASES = "bias of the anchor|", "bias of the donor|"
"""What the names of the two models' biases begin with in a file."""


@dataclass(frozen=True)
class AlignmentFile:
    """Content of an alignment file: the alignment, its models' identities, and its options."""

    alignment: Alignment
    basis: Basis
    metadata: dict[str, Any]


def save_alignment(
    path: Path | str,
    alignment: Alignment,
    metadata: Mapping[str, Any] | None,
    dtype: torch.dtype,
) -> None:
    """Write an alignment; see `Alignment.save`.

    Args:
        dtype: storage of the maps.
    """
    basis = alignment._known()
    tensors, kinds = packed(alignment.transforms)
    for key, tensor in tensors.items():
        small = tensor.to(dtype) if tensor.is_floating_point() and tensor.ndim == 3 else tensor
        tensors[key] = small.cpu().contiguous().clone()
    for prefix, biases in zip(BIASES, (basis.biases, basis.donor_biases), strict=True):
        tensors |= {f"{prefix}{name}": bias.cpu().contiguous().clone() for name, bias in biases.items()}
    meta = {
        "format": FORMAT,
        "family": basis.architecture.family,
        "anchor": basis.anchor.fingerprint,
        "donor": basis.donor.fingerprint,
        "folded": json.dumps(alignment.folded),
        "kinds": json.dumps(kinds),
        "still": json.dumps(sorted(_asked(basis.architecture) - alignment.transforms.keys())),
        "made": json.dumps(dict(metadata or {}), default=str),
        "basis": json.dumps(
            {
                "config": dict(basis.config),
                "shapes": {name: list(shape) for name, shape in basis.shapes.items()},
                "untie": basis.untie,
                "rows": basis.rows,
                "models": [basis.anchor.name, basis.donor.name],
                "tensors": [dict(basis.anchor.tensors), dict(basis.donor.tensors)],
            },
            default=str,
        ),
    }
    with replacing(path) as temporary:
        save_file(tensors, temporary, metadata=meta)


def holds_alignment(path: str) -> bool:
    """Whether a file holds an alignment, of this format or an older one."""
    return has_format(path, FORMAT)


def load_alignment(path: Path | str, architecture: Architecture | None = None) -> AlignmentFile:
    """Read an alignment and check that every transform is in its space's group.

    Args:
        architecture: of the anchor that it is wanted for; None: that of the anchor that it was made for.

    Raises:
        AlignmentError: it cannot be read, is no alignment, is for another architecture, or would change functions.
    """
    name = str(path)
    try:
        with safe_open(name, framework="pt") as file:
            meta = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
    except (OSError, SafetensorError) as error:
        raise AlignmentError(
            f"cannot be read ({error})", where=name, remedy="write it with 'rotation-merge align'"
        ) from error
    if str(meta.get("format")).startswith(FORMAT[:-1]) and meta["format"] != FORMAT:
        raise AlignmentError(
            "was written by another version of rotation_merge",
            where=name,
            remedy="write it again with 'rotation-merge align'",
        )
    if meta.get("format") != FORMAT:
        raise AlignmentError("is not an alignment file", where=name, remedy="write it with 'rotation-merge align'")
    try:
        header = _header(meta)
        biases = (
            {key.removeprefix(prefix): x for key, x in tensors.items() if key.startswith(prefix)} for prefix in BIASES
        )
        basis = _basis(meta, *biases)
        tensors = {key: tensor for key, tensor in tensors.items() if not key.startswith(BIASES)}
        if architecture is None:  # nothing but the file says what its models are
            architecture = basis.architecture
            _check_basis(basis)
        if header.family != architecture.family:
            raise AlignmentError(
                f"was made for {header.family} models, not for {architecture.family}",
                where=name,
                remedy="use another file",
            )
        transforms = _transforms(tensors, header, architecture)
        _check_spaces(transforms, header, architecture)
    except RotationMergeError as error:
        if error.where == name:
            raise
        raise AlignmentError(error.what, where=name, remedy="write it again with 'rotation-merge align'") from error
    except (LookupError, ValueError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
        raise AlignmentError(
            f"is damaged ({short(error)})", where=name, remedy="write it again with 'rotation-merge align'"
        ) from error
    return AlignmentFile(Alignment(transforms, header.folded, basis=basis), basis, header.metadata)


@dataclass(frozen=True)
class _Header:
    """The metadata of an alignment file, their types checked."""

    family: str
    folded: tuple[str, ...]
    kinds: dict[str, str]
    still: tuple[str, ...]
    metadata: dict[str, Any]


def _header(meta: Mapping[str, str]) -> _Header:
    values: dict[str, Any] = {"family": meta["family"]}
    for name, kind in (("folded", list), ("kinds", dict), ("still", list), ("made", dict)):
        value = json.loads(meta[name])
        if not isinstance(value, kind) or (kind is list and not all(isinstance(word, str) for word in value)):
            raise ValueError(f"entry '{name}' of its header is {short(value)}")
        values[name] = tuple(value) if kind is list else value
    return _Header(metadata=values.pop("made"), **values)


def _basis(meta: Mapping[str, str], biases: Mapping[str, Tensor], donor_biases: Mapping[str, Tensor]) -> Basis:
    """Read the file's facts on its models, with types checked."""
    values = json.loads(meta["basis"])
    shapes = {str(name): tuple(map(int, shape)) for name, shape in dict(values["shapes"]).items()}
    rows = {}
    for name, (dim, order) in dict(values["rows"]).items():
        rows[str(name)] = int(dim), tuple(map(int, order))
    anchor, donor = (
        Identity(str(name), meta[side], {str(key): str(sums) for key, sums in tensors.items()})
        for side, name, tensors in zip(("anchor", "donor"), values["models"], values["tensors"], strict=True)
    )
    return Basis(dict(values["config"]), shapes, bool(values["untie"]), anchor, donor, biases, rows, donor_biases)


def _check_basis(basis: Basis) -> None:
    """Check the class order (a permutation) and the biases (the anchor's, finite)."""
    for name, (_, order) in basis.rows.items():
        if sorted(order) != list(range(len(order))):
            raise AlignmentError(f"would change the models' outputs: '{name}' loses classes")
    blocks = basis.architecture.blocks
    infos = (info for block in blocks for info in holders(block))
    known = {name for info in infos for name in info.names if name in basis.shapes}
    if basis.biases and (odd := sorted(known ^ basis.biases.keys())):
        raise AlignmentError(f"is damaged: the anchor's bias '{odd[0]}' is missing in its header or among its tensors")
    if odd := sorted(basis.donor_biases.keys() - basis.biases.keys()):  # a language half has fewer than its anchor
        raise AlignmentError(f"does not fit: it has a bias '{odd[0]}' of the donor, but none of the anchor")
    for side, biases in (("anchor", basis.biases), ("donor", basis.donor_biases)):
        for name, bias in biases.items():
            if tuple(bias.shape) != basis.shapes[name] or not all_finite([bias]):
                raise AlignmentError(f"would change the models' outputs: the {side}'s bias '{name}' is damaged")


def _transforms(tensors: Mapping[str, Tensor], header: _Header, architecture: Architecture) -> Transforms:
    transforms = unpacked(tensors, header.kinds)
    small = (key for key, x in tensors.items() if x.is_floating_point() and x.dtype != torch.float64)
    rounded = {key.partition("|")[0] for key in small}
    for space, transform in transforms.items():
        if space in rounded and isinstance(transform, StreamTransform) and space in architecture.streams:
            transforms[space] = architecture.stream_group(space, "rotation").restored(transform)
    return transforms


def _check_spaces(transforms: Transforms, header: _Header, architecture: Architecture) -> None:
    """Check that each space has a transform of its group or is declared still, and that folding fits the rotations."""
    known, space_names = architecture.spaces(), (*transforms, *header.still)
    if odd := [name for name in space_names if name not in known]:
        raise AlignmentError(f"does not fit: the models have no space '{odd[0]}'")
    if absent := sorted(_asked(architecture) - set(space_names)):
        raise AlignmentError(f"has no entry for space '{absent[0]}'")
    if len(space_names) != len(set(space_names)):
        raise AlignmentError("names a space twice")
    for name, transform in transforms.items():
        space = known[name]
        stream = space.kind == "stream"
        refused = (
            _refused_stream(transform, name, architecture) if stream else admitted(space, WIDEST).refuses(transform)
        )
        if refused is not None:
            raise AlignmentError(f"would change the models' outputs: space '{name}': {refused}")
    if apart := inconsistent_space(architecture, transforms):
        raise AlignmentError(
            f"would change the models' outputs: space '{apart}' does not move with its keys and values"
        )
    turned = {name for name, transform in transforms.items() if _mixes(transform)}
    spare = {name for name in set(header.folded) - turned if name not in known or known[name].kind != "latent"}
    if spare or not turned <= set(header.folded):
        words = [", ".join(sorted(names)) or "none" for names in (header.folded, turned)]
        raise AlignmentError(
            f"would change the models' outputs: folded streams: {words[0]}; rotated streams: {words[1]}"
        )


def needed_folds(transforms: Transforms, architecture: Architecture, folded: Sequence[str]) -> tuple[str, ...]:
    """The folded spaces with gains that these transforms require, or allow, to be folded."""
    known = architecture.spaces()
    return tuple(
        name for name in folded if name in transforms and (_mixes(transforms[name]) or known[name].kind == "latent")
    )


def _asked(architecture: Architecture) -> set[str]:
    """The spaces that a file must cover: all except those that only a recipe enables."""
    return {name for name, space in architecture.spaces().items() if not space.head}


def _mixes(transform: SpaceTransform) -> bool:
    """Whether a transform mixes coordinates, so that the stream's gains must be folded."""
    return isinstance(transform, StreamTransform) and not transform.moves_gains


def _refused_stream(transform: SpaceTransform, name: str, architecture: Architecture) -> str | None:
    """The reason why no group of a stream admits a transform, or None.

    The reason is the largest group's.
    """
    refused: str | None = "it has to keep its coordinates"
    for kind in architecture.stream_groups[name]:
        refused = architecture.stream_group(name, kind).refuses(transform)
        if refused is None:
            return None
    return refused


def check_fingerprints(file: AlignmentFile, path: str, anchor: str, donor: str, names: tuple[str, str]) -> None:
    """Refuse an alignment made for other weights.

    Raises:
        AlignmentError: names the model that differs.
    """
    identities = file.basis.anchor, file.basis.donor
    for identity, fingerprint, model in zip(identities, (anchor, donor), names, strict=True):
        if identity.fingerprint != fingerprint:
            raise AlignmentError(
                f"was made for other weights than those of {model}",
                where=path,
                remedy="write a new one with 'rotation-merge align', or use the models it was made for",
            )
