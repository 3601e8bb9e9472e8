"""Alignments of whole models: streams of the residual, all models to their mean, activations.

They are found when they are first asked for, before mergekit's plan runs, one block of each model in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
import tqdm
from mergekit import common
from mergekit.options import MergeOptions

from rotation_merge.architecture.model import Architecture
from rotation_merge.errors import RotationMergeError
from rotation_merge.matching.alignment import Alignment
from rotation_merge.matching.block import named
from rotation_merge.matching.match import Match, match_model
from rotation_merge.matching.mean import match_to_mean
from rotation_merge.matching.options import AlignConfig
from rotation_merge.matching.run import Run
from rotation_merge.model.tensors import Tensors, TensorSource, as_tensors
from rotation_merge.workers import Progress, in_threads, listener, listening, on_devices

CPU = torch.device("cpu")


def devices_of(options: MergeOptions) -> tuple[str, ...]:
    """Devices for matching whole models: the merge's, or all of `--multi-gpu`.

    Raises:
        RotationMergeError: it gives none.
    """
    if not options.multi_gpu:
        return (str(options.device or "cpu"),)
    try:
        count = common.get_torch_accelerator_count()
    except AttributeError:  # of the accelerator that is not there
        count = 0
    if not count:
        raise RotationMergeError("--multi-gpu: this machine has no GPU", remedy="leave it out")
    return tuple(f"{common.get_torch_accelerator_type()}:{number}" for number in range(count))


@dataclass(frozen=True)
class WholeMatch:
    """The alignment of one whole model to the anchor, matched when it is first asked for.

    Attributes:
        anchor, donor: tensors by the names of `architecture`.
        donor_name: in the report.
    """

    architecture: Architecture
    anchor: TensorSource
    donor: TensorSource
    anchor_name: str
    donor_name: str
    options: AlignConfig
    run: Run
    devices: tuple[str, ...] = ("cpu",)
    quiet: bool = False
    match: Match = match_model

    @cached_property
    def alignment(self) -> Alignment:
        match, alone = self.match, len(self.devices) == 1 or self.match is not match_model
        anchor, donor = (_on(source, self.devices[0] if alone else "cpu") for source in (self.anchor, self.donor))
        if not alone:
            match = partial(match_model, over=on_devices(self.devices))
        with (
            progress_bar(f"Aligning {self.donor_name}", self.quiet) as progress,
            named(self.anchor_name, self.donor_name),
        ):
            ledger = self.run.ledger.under(self.donor_name)
            found = match(self.architecture, anchor, donor, self.options, progress, ledger=ledger)
        if not alone:  # where every device finds it
            found = replace(found, transforms={name: t.to(CPU) for name, t in found.transforms.items()})
        self.run.aligned(self.donor_name, found)
        return found


@dataclass(frozen=True)
class MeanMatch:
    """The alignments of all models but the base to their running mean, by name."""

    architecture: Architecture
    sources: Mapping[str, TensorSource]
    base: str
    options: AlignConfig
    run: Run
    devices: tuple[str, ...] = ("cpu",)
    quiet: bool = False

    @cached_property
    def alignments(self) -> dict[str, Alignment]:
        sources = {name: _on(source, self.devices[0]) for name, source in self.sources.items()}
        over = in_threads if len(self.devices) == 1 else on_devices(self.devices)
        with progress_bar("Aligning to the mean", self.quiet) as progress:
            arguments = (self.architecture, sources, self.base, self.options, progress, over)
            alignments = match_to_mean(*arguments, ledger=self.run.ledger)
        for name, alignment in alignments.items():
            self.run.aligned(name, alignment)
        rounds = max((int(str(alignment.summary["rounds"])) for alignment in alignments.values()), default=0)
        self.run.note(
            f"All {len(sources)} models were aligned to their running mean ('anchor: mean'), in {rounds} rounds, and "
            f"are expressed in the coordinates of `{self.base}`; distances are those to it."
        )
        return alignments

    def alignment(self, name: str) -> Alignment:
        """That of one model."""
        return self.alignments[name]


Whole = Callable[[], Alignment]
"""Gives the alignment of a whole model, found once."""


def _on(source: TensorSource, device: str) -> Tensors:
    """A source with its tensors moved to a device on access."""
    tensors = as_tensors(source)
    return tensors if device == "cpu" else tensors.on(device)


@contextmanager
def progress_bar(title: str, quiet: bool) -> Iterator[Progress]:
    """A bar like mergekit's own, which starts anew with every pass over the model.

    Progress also goes to the thread's listener, and the bar shows progress within the block.
    """
    tell = listener()
    with tqdm.tqdm(desc=title, disable=quiet, leave=True) as bar:

        def show(step: str, done: float, total: float) -> None:
            tell(step, done, total)
            if getattr(bar, "desc", None) != f"{title} ({step})":
                bar.reset(total)
                bar.set_description(f"{title} ({step})", refresh=False)
            bar.update(done - bar.n)
            bar.n = done

        with listening(show):
            yield show
