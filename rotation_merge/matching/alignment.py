"""The alignment of a donor to an anchor, as a value that can be applied, inverted, saved and loaded; and its file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar, overload, runtime_checkable

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rotation_merge.architecture.model import Architecture, Block, TensorInfo
from rotation_merge.errors import AlignmentError, RotationMergeError, StatisticsError, not_written, short
from rotation_merge.files import Output, check_output, replacing
from rotation_merge.matching.basis import Basis, Identity, IdentityFacts
from rotation_merge.matching.moving import moved_statistics, mover, relative
from rotation_merge.matching.options import AlignConfig
from rotation_merge.matching.pair import check_depth, check_pair, check_same_kind
from rotation_merge.matching.stream import Transforms, random_gauge
from rotation_merge.model.forms import names_in
from rotation_merge.model.hub import local_file
from rotation_merge.model.labels import in_class_order
from rotation_merge.model.language_half import within
from rotation_merge.model.open import ModelLike, open_model
from rotation_merge.model.tensors import Fingerprint
from rotation_merge.model.view import View, check_storage, described
from rotation_merge.record import MergeReport, SpaceRow, read_as
from rotation_merge.run.statistics import Statistics, has_format
from rotation_merge.symmetry.transform import packed, unpacked

FORMAT = "rotation_merge.alignment.8"

WRITE = "write it (again) with 'rotation-merge align'"
"""The remedy for what is no alignment file, or one of no use."""

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
        rows: what matching did to each space, for the report.
        summary: iterations, objective and the like, for the report.
        notes: what the user should know.
        samples: where it was matched on samples: what they are called, and how many.
        report: what was done, where it was matched outside a merge.
        basis: of the two models what applying it needs; None where only a merge that has both at hand uses it.
        metadata: what its file keeps beside it, such as options and figures.
    """

    transforms: Transforms
    folded: tuple[str, ...] = ()
    rows: list[SpaceRow] = field(default_factory=list)
    summary: dict[str, object] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    samples: tuple[str, int] | None = None
    basis: Basis | None = field(default=None, compare=False)
    report: MergeReport | None = field(default=None, repr=False, compare=False)
    metadata: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

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
        pair = check_pair(opened, opened, AlignConfig.of(config, options))
        transforms = random_gauge(opened.architecture, pair.options, torch.Generator().manual_seed(seed))
        return cls(transforms, pair.folded, notes=pair.notes, basis=pair.basis())

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
            AlignmentError, ArchitectureError: the donor is another model, or the alignment has no basis.
            CheckpointError: it cannot be read, or its sizes differ.
            StatisticsError: the statistics are of another model, or do not survive the maps (when they are read).
        """
        if isinstance(donor, Movable):
            return donor.moved_by(self, dtype, strict)
        return self._moved(donor, dtype, strict)

    def check_donor(self, donor: ModelLike) -> None:
        """Refuse another donor than that the alignment was made for. Errors as for `apply`."""
        opened, identity = self.opened_donor(donor, strict=True), self.known_basis.donor
        for _ in () if identity.any_model or identity.is_view(opened.as_filed) else opened.values():
            pass  # every tensor is compared with its checksum when it is read

    def opened_donor(self, donor: ModelLike, strict: bool) -> View:
        """The donor in the anchor's sizes, its classes in the anchor's order. Errors as for `apply`."""
        basis, identity = self.known_basis, self.known_basis.donor
        architecture, opened = basis.architecture, open_model(donor, identity.name, untie=basis.untie)
        anchor = described(basis.anchor.name, basis.config, architecture, basis.shapes)
        opened = within(opened, anchor) or opened
        remedy = f"give {identity.name}, which the alignment was made for"
        check_same_kind(anchor, opened, remedy)
        check_depth(anchor, opened, remedy)
        names = names_in(architecture, opened.architecture)
        if strict and not identity.any_model and not identity.is_view(opened):
            opened = replace(opened, tensors=identity.verified(opened, names))
        return in_class_order(opened, {name: basis.rows[k] for name, k in names.items() if k in basis.rows})

    @overload
    def apply_anchor(self, anchor: Statistics, dtype: torch.dtype | None = None, strict: bool = True) -> Statistics: ...
    @overload
    def apply_anchor(self, anchor: ModelLike, dtype: torch.dtype | None = None, strict: bool = True) -> View: ...

    def apply_anchor(self, anchor: ModelLike, dtype: torch.dtype | None = None, strict: bool = True) -> Any:
        """The anchor to average with the moved donor; its norms are folded if the alignment needs it.

        Also moves the anchor's statistics. Arguments and errors as for `apply`.
        """
        basis = self.known_basis
        still = replace(basis, donor=basis.anchor, rows={})
        return replace(self, transforms={}, basis=still)._moved(anchor, dtype, strict)

    def _moved(self, donor: ModelLike, dtype: torch.dtype | None, strict: bool) -> Any:
        """A view of a model, or the statistics of one, moved; arguments and errors as for `apply`."""
        check_storage(dtype)
        if isinstance(donor, Statistics):
            return self._statistics(donor, dtype, strict)
        return self._view(self.opened_donor(donor, strict), dtype, strict)

    def _statistics(self, statistics: Statistics, dtype: torch.dtype | None, strict: bool) -> Statistics:
        """Statistics of the donor, moved as the alignment moves the model."""
        basis, fingerprint = self.known_basis, statistics.metadata.get("fingerprint")
        if strict and basis.donor.fingerprint and fingerprint != basis.donor.fingerprint:
            raise StatisticsError(
                f"are of other weights than {basis.donor.name}, which the alignment was made for",
                where=statistics.path,
                remedy="measure that model, or apply(..., strict=False) to move those of a fine-tune by the same maps",
            )
        moved = moved_statistics(statistics, basis.with_head, self.transforms, self.folded, basis.rows, dtype)
        mark = self._moved_fingerprint(str(fingerprint)) if strict else ""
        return replace(moved, metadata={**statistics.metadata, "fingerprint": mark})

    def _moved_fingerprint(self, fingerprint: str) -> str:
        """Fingerprint of a moved model, derived from the model's fingerprint.

        Unchanged if nothing moves.
        """
        if not self.transforms and not self.folded:
            return fingerprint
        tensors = packed(self.transforms)[0]
        mark = Fingerprint()
        mark.complete(tensors, tensors)
        return mark.hexdigest({"of": fingerprint, "folded": self.folded, "rows": self.known_basis.rows})

    def _view(self, donor: View, dtype: torch.dtype | None, strict: bool) -> View:
        """A view of the opened donor: folded, transformed, rounded once."""
        architecture, basis = donor.architecture, self.known_basis
        tensor = mover(architecture, donor.tensors, self.transforms, self.folded)
        left_out = frozenset((donor.text or donor).unread if self.moves_streams(architecture) else ())
        notes = (not_written(sorted(left_out)),) if left_out else ()
        changes: dict[str, Any] = {"left_out": left_out, "notes": notes, "report": self.report, "folded": self.folded}

        def identity() -> str | None:
            mark = basis.donor.fingerprint if strict else ""
            return self._moved_fingerprint(mark) if mark else None

        if donor.text is None:
            return donor.blockwise(tensor, dtype, identity=identity, **changes)
        places = architecture.places()
        by_text_name = {text_name: places[name][:2] for name, text_name in donor.text_names.items() if name in places}

        def of_half(block: Block, info: TensorInfo, rounded: torch.dtype | None) -> Tensor | None:
            return tensor(*by_text_name[info.names[0]], rounded) if info.names[0] in by_text_name else None

        return donor.text.blockwise(of_half, dtype, **changes)

    def inverse(self) -> Alignment:
        """The alignment that moves the moved donor back, with unchanged outputs.

        Folded gains remain: `irreversible_notes` names them. The result is for the output of
        `apply`, so its basis has no fingerprint of a donor.
        """
        basis = self.known_basis
        rows = {name: (dim, tuple(torch.tensor(row).argsort().tolist())) for name, (dim, row) in basis.rows.items()}
        unknown = Identity(basis.donor.name)
        back = replace(basis, donor=unknown, anchor=unknown, rows=rows)
        turned = relative(basis.architecture, self.transforms)
        return Alignment(turned, self.folded, notes=tuple(self.irreversible_notes()), basis=back)

    def irreversible_notes(self) -> list[str]:
        """Lines on what `inverse` cannot restore; empty if it restores everything up to rounding."""
        return [f"The norms' gains of '{name}' stay folded into the maps that read them." for name in self.folded]

    @property
    def known_basis(self) -> Basis:
        """The basis.

        Raises:
            AlignmentError: there is none.
        """
        if self.basis is None:
            remedy = "make it with rotation_merge.align, or load it from its file"
            raise AlignmentError("the alignment has no facts on its models", remedy=remedy)
        return self.basis

    @property
    def known_report(self) -> MergeReport:
        """The report of an alignment that has one."""
        assert self.report is not None
        return self.report

    # The file.

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
        remedy = "name another file, or move it away"
        check_output(Output(str(path), wrote=lambda file: has_format(file, FORMAT), remedy=remedy))
        replace(self, metadata={**self.metadata, **(metadata or {})}).write(path, half)

    def write(self, path: Path | str, half: bool = False) -> None:
        """Write the file, whatever is at its place; arguments as of `save`."""
        basis = self.known_basis
        tensors, kinds = packed(self.transforms)
        dtype = torch.float16 if half else torch.float64
        tensors |= {key: x.to(dtype) for key, x in tensors.items() if x.is_floating_point() and x.ndim == 3}
        still = {name: "" for name in _asked(basis.architecture) if name not in kinds}
        head = Head(
            family=basis.architecture.family,
            kinds={**kinds, **still},
            folded=self.folded,
            config=dict(basis.config),
            shapes=dict(basis.shapes),
            untie=basis.untie,
            rows=dict(basis.rows),
            models=(basis.anchor.facts, basis.donor.facts),
            figures=(self.rows, self.summary),
            made=dict(self.metadata),
        )
        meta = {"format": FORMAT, "head": json.dumps(asdict(head), default=str)}
        with replacing(path) as temporary:
            save_file({key: x.cpu().contiguous().clone() for key, x in tensors.items()}, temporary, metadata=meta)

    @classmethod
    def load(cls, path: Path | str) -> Alignment:
        """Read an alignment without a model, and check that every transform is in its space's group.

        Args:
            path: a file, or one of the hub (`org/name/file.safetensors`).

        Raises:
            AlignmentError: it cannot be read, is no alignment, or would change functions.
        """
        return load_file(local_file(str(path)))


@dataclass(frozen=True)
class Head:
    """The head of an alignment file, as JSON in the metadata of its tensors: fields of `Alignment` and of `Basis`.

    Attributes:
        family: of the architecture.
        kinds: of the transform of each space; empty: the space keeps its coordinates.
        models: facts on the anchor and on the donor, see `Identity`.
        figures: rows and summary of the alignment.
        made: its metadata.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"allow_inf_nan": False}

    family: str
    kinds: dict[str, str]
    folded: tuple[str, ...]
    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    untie: bool
    rows: dict[str, tuple[int, tuple[int, ...]]]
    models: tuple[IdentityFacts, IdentityFacts]
    figures: tuple[list[SpaceRow], dict[str, object]]
    made: dict[str, Any]


def load_file(path: Path | str, architecture: Architecture | None = None) -> Alignment:
    """Read an alignment file and check that every transform is in its space's group.

    Args:
        architecture: of the anchor that it is wanted for; None: that of the anchor that it was made for.

    Raises:
        AlignmentError: it cannot be read, is no alignment, is for another architecture, or would change functions.
    """
    with opened_file(str(path)) as (head, file):
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
        anchor, donor = (Identity(*facts) for facts in head.models)
        basis = Basis(head.config, head.shapes, head.untie, anchor, donor, head.rows)
        architecture = architecture or basis.architecture
        if head.family != architecture.family:
            problem = f"was made for {head.family} models, not for {architecture.family}"
            raise AlignmentError(problem, remedy="use another file")
        transforms = _transforms(tensors, head, architecture)
    return Alignment(transforms, head.folded, *head.figures, basis=basis, metadata=head.made)


def load_for(path: str, anchor: View, donor: View, cache: str | None = None) -> Alignment:
    """Read the alignment of two models.

    Args:
        cache: where files of the hub are kept, if not in the usual place.

    Raises:
        AlignmentError: it cannot be read (see `load_file`), or was made for other weights; names the model.
    """
    alignment = load_file(local_file(path, cache), anchor.architecture)
    basis = alignment.known_basis
    for identity, model in ((basis.anchor, anchor), (basis.donor, donor)):
        if identity.fingerprint != model.fingerprint:
            problem = f"was made for other weights than those of {model.reference}"
            remedy = "write a new one with 'rotation-merge align', or use the models it was made for"
            raise AlignmentError(problem, where=path, remedy=remedy)
    return alignment


@contextmanager
def opened_file(name: str) -> Iterator[tuple[Head, Any]]:
    """The head of an alignment file, and the open file.

    Raises:
        AlignmentError: it cannot be read, is no alignment, or something in the block finds it damaged.
    """
    try:
        with safe_open(name, framework="pt") as file:
            meta = file.metadata() or {}
            if (kind := str(meta.get("format"))) != FORMAT:
                older = kind.startswith(FORMAT[:-1])
                problem = "was written by another version of rotation_merge" if older else "is not an alignment file"
                raise AlignmentError(problem, remedy=WRITE)
            yield read_as(Head, json.loads(meta["head"])), file
    except RotationMergeError as error:
        raise AlignmentError(error.what, where=name, remedy=error.remedy or WRITE) from error
    except (OSError, SafetensorError) as error:
        raise AlignmentError(f"cannot be read ({error})", where=name, remedy=WRITE) from error
    except (LookupError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise AlignmentError(f"is damaged ({short(error)})", where=name, remedy=WRITE) from error


def _transforms(tensors: Mapping[str, Tensor], head: Head, architecture: Architecture) -> Transforms:
    """The transforms of a file; those of rounded maps put back into their groups.

    Raises:
        AlignmentError: they would change outputs: spaces do not fit, classes get lost, a transform is outside its
            group, or other streams are folded.
    """
    known, wrong = architecture.spaces(), "would change the models' outputs: {}"
    if odd := (head.kinds.keys() - known.keys()) | (set(_asked(architecture)) - head.kinds.keys()):
        raise AlignmentError(f"does not fit: space '{min(odd)}' is only in the file, or only in the models")
    for name, (_, order) in head.rows.items():
        if sorted(order) != list(range(len(order))):
            raise AlignmentError(wrong.format(f"'{name}' loses classes"))
    transforms = unpacked(tensors, {name: kind for name, kind in head.kinds.items() if kind})
    rounded = {key.partition("|")[0] for key, x in tensors.items() if x.is_floating_point() and x.itemsize < 8}
    for name, transform in transforms.items():
        group = architecture.widest_group(known[name], transform)
        transforms[name] = group.restored(transform) if name in rounded else transform
        if not group.admits(transforms[name]):
            fault = f"the transform of space '{name}' does not belong to the group: {group.words}"
            raise AlignmentError(wrong.format(fault))
    turned, folded = {name for name, transform in transforms.items() if transform.turns_stream}, set(head.folded)
    spare = {name for name in folded - turned if name not in known or known[name].kind != "latent"}
    if spare or not turned <= folded:
        folded_words, turned_words = (", ".join(sorted(names)) or "none" for names in (folded, turned))
        raise AlignmentError(wrong.format(f"folded streams: {folded_words}; rotated streams: {turned_words}"))
    return transforms


def _asked(architecture: Architecture) -> list[str]:
    """The spaces that a file must cover: all except those that only a recipe enables."""
    return [name for name, space in architecture.spaces().items() if not space.head]
