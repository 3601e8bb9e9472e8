"""The alignment of a donor to an anchor, as a value that can be applied, inverted, saved and loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar, overload, runtime_checkable

import torch
from torch import Tensor

from rotation_merge.architecture.model import Architecture, Block, TensorInfo
from rotation_merge.errors import AlignmentError, StatisticsError, not_written
from rotation_merge.files import Output, check_output
from rotation_merge.matching.alignment_file import AlignmentFile, holds_alignment, load_file, write_file
from rotation_merge.matching.basis import Basis, Identity, verified
from rotation_merge.matching.block import SpaceMatch
from rotation_merge.matching.gauge import random_gauge
from rotation_merge.matching.moving import Mover
from rotation_merge.matching.options import AlignConfig
from rotation_merge.matching.pair import check_pair
from rotation_merge.matching.serialisation import packed
from rotation_merge.matching.statistics import StatisticsMover
from rotation_merge.matching.stream import Transforms
from rotation_merge.model.fingerprint import Fingerprint
from rotation_merge.model.forms import names_in, translated
from rotation_merge.model.hub import local_file
from rotation_merge.model.labels import in_class_order
from rotation_merge.model.language_half import within
from rotation_merge.model.open import ModelLike, open_model
from rotation_merge.model.tensors import TensorSource
from rotation_merge.model.view import View, check_storage
from rotation_merge.record import MergeReport
from rotation_merge.run.statistics import Statistics

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
        return cls(transforms, checked.folded, notes=checked.notes, basis=basis).without_biases()

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
        mover = Mover(model.architecture, model.tensors, self.transforms, self.folded, biases)
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
        content = AlignmentFile(self.transforms, self.folded, self._known(), metadata or {})
        write_file(path, content, torch.float16 if half else torch.float64)

    @classmethod
    def load(cls, path: Path | str) -> Alignment:
        """Read an alignment without a model, and check that every transform is in its space's group.

        Args:
            path: a file, or one of the hub (`org/name/file.safetensors`).

        Raises:
            AlignmentError: it cannot be read, is no alignment, or would change functions.
        """
        return cls.of(load_file(local_file(str(path))))

    @classmethod
    def of(cls, file: AlignmentFile) -> Alignment:
        """The alignment in a file."""
        return cls(file.transforms, file.folded, basis=file.basis)

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
