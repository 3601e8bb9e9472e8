"""Two bases, an old and a new one: how they lie to each other, what is carried from one to the other and written."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cached_property

import yaml
from mergekit.common import dtype_from_name

from rotation_merge.architectures import Architecture
from rotation_merge.checkpoints.models import Model
from rotation_merge.checkpoints.pair import Pair, WithTied, open_pair, read_file
from rotation_merge.checkpoints.vocabulary import shared_rows
from rotation_merge.matching.carry import Carrier, Rows
from rotation_merge.matching.labels import label_rows
from rotation_merge.matching.member import Member
from rotation_merge.matching.model import Alignment, Progress, match_model
from rotation_merge.matching.options import NOTHING, MatchOptions
from rotation_merge.matching.pair import check_pair
from rotation_merge.matching.sources import Respelled, other_form
from rotation_merge.matching.sources import Rows as SharedRows
from rotation_merge.matching.state import TensorSource
from rotation_merge.report.record import MergeReport
from rotation_merge.report.run import GivenFile, Run


@dataclass(frozen=True)
class Bases:
    """The base that something was trained on, and the one it is to be carried to."""

    pair: Pair

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
    def rows(self) -> Rows | None:
        """Rows of the tokens that both have, the new base's first; None where the vocabularies are one."""
        rows = shared_rows([self.new, self.old])
        return None if rows is None else (rows[0], rows[1])

    @property
    def sources(self) -> tuple[TensorSource, TensorSource]:
        """New and old, under the new base's tensor names."""
        new, old = self.pair.sources
        return new, self._named(old, self.old)

    def _named(self, source: TensorSource, model: Model) -> TensorSource:
        """A model's tensors under the new base's names."""
        named = Respelled(source, model.architecture, self.architecture)
        if not named.made and all(name == own for name, own in named.names.items()):
            return source
        return WithTied(named, self.architecture)

    def tuned(self, path: str) -> TensorSource:
        """A fine-tune of the old base.

        Raises:
            RotationMergeError: it is missing, damaged, or no fine-tune of that base.
        """
        pair = open_pair(str(self.old.reference), path, NOTHING, True, self.pair.device)
        if self.old.sizes:
            new, untie = str(self.new.reference), self.old.untie
            pair = open_pair(new, path, NOTHING, untie, self.pair.device, words=False, widths=True)
        pair.donor.rows = label_rows(self.new.member, pair.donor.member)
        return self._named(pair.sources[1], pair.donor)

    def match(self, options: MatchOptions, progress: Progress | None = None) -> tuple[Alignment, MergeReport]:
        """What brings the old base to the new one, and the report on it."""
        new, old = self.sources
        options = check_pair(self.pair.checked.anchor, self.pair.checked.donor, options, untie=True).options
        if self.rows is not None:
            new, old = (
                SharedRows(self.architecture, source, rows) for source, rows in zip((new, old), self.rows, strict=True)
            )
        run = Run()
        alignment = match_model(self.architecture, new, old, options, progress)
        run.aligned(str(self.old.reference), alignment)
        if self.rows is not None:
            run.note(f"The bases share {len(self.rows[0])} tokens: embeddings and heads were matched on these.")
        return alignment, self.pair.report(
            run, yaml.safe_dump(asdict(options), sort_keys=False), str(self.new.reference)
        )

    def given(self, path: str) -> tuple[Alignment, MergeReport]:
        """The alignment in a file, made for these two."""
        run = Run()
        run.note(f"The bases were aligned by the file {path}; nothing was matched.")
        file, name = read_file(self.pair, path, untie=True), str(self.old.reference)
        run.moved_by(name, GivenFile(path, name, file.made))
        return file.alignment, self.pair.report(run, base=str(self.new.reference))

    def carrier(self, alignment: Alignment, dtype: str | None = None) -> Carrier:
        """What carries changes of the old base to the new one.

        Args:
            dtype: that a carried model is stored in, if another than the new base's.
        """
        new, old = self.sources
        return Carrier(self.architecture, old, new, alignment, self.rows, dtype_from_name(dtype))


def open_bases(new: str, old: str, device: str = "cpu", untie: bool = True, widths: bool = False) -> Bases:
    """Two bases of one architecture and size; their vocabularies may differ, and the form that their files have:
    experts apart or in one tensor.

    Args:
        widths: bring a smaller old base, and what was trained on it, to the new one's sizes.

    Raises:
        RotationMergeError: one is missing, damaged, quantised or not supported, or they do not fit together.
    """
    pair = open_pair(new, old, NOTHING, untie, device, words=False, widths=widths)
    donor = _in_form_of(pair.architecture, pair.checked.donor)
    return Bases(replace(pair, checked=replace(pair.checked, donor=donor)))


def _in_form_of(wanted: Architecture, member: Member) -> Member:
    """A model as it would be if its file had its weights in the form that another one's has."""
    place = {(block.module, block.place, block.index): block for block in wanted.blocks}
    blocks = []
    for own in member.architecture.blocks:
        theirs = place.get((own.module, own.place, own.index))
        if theirs is not None and (gained := other_form(own, theirs)):
            spent = other_form(theirs, own)
            kept = (info for info in own.tensors if info.key not in spent)
            own = replace(own, tensors=(*kept, *(info for info in theirs.tensors if info.key in gained)))
        blocks.append(own)
    return replace(member, architecture=replace(member.architecture, blocks=tuple(blocks)))
