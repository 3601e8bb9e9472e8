"""Tasks on whole models: residual alignment, alignment to the mean, alignment from a file.

They stream through the models themselves instead of depending on mergekit's loads, which would keep every tensor
of both models alive until the last has been read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import cast

import torch
import tqdm
from mergekit import common
from mergekit.options import MergeOptions
from pydantic import Field

from rotation_merge.architecture.model import Architecture
from rotation_merge.errors import RotationMergeError
from rotation_merge.matching.alignment import Alignment
from rotation_merge.matching.block import named
from rotation_merge.matching.match import Match, match_model
from rotation_merge.matching.mean import match_to_mean
from rotation_merge.matching.options import AlignConfig
from rotation_merge.matching.run import Run
from rotation_merge.mergekit_plugin.planning.tasks import KeyedTask
from rotation_merge.model.tensors import TensorSource, as_tensors
from rotation_merge.workers import Progress, in_threads, listener, listening, on_devices

CPU = torch.device("cpu")


class WholeModelTask(KeyedTask):
    """Runs once, before everything that depends on it, on the main thread."""

    def arguments(self) -> dict[str, KeyedTask]:
        return {}

    def priority(self) -> int:
        return 2000

    def uses_accelerator(self) -> bool:
        return False

    def main_thread_only(self) -> bool:
        return True


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


class KnownAlignment(WholeModelTask):
    """An alignment that is known already."""

    alignment: Alignment = Field(repr=False)
    donor_name: str
    run: Run = Field(repr=False)

    def execute(self) -> Alignment:
        self.run.keep(self.donor_name, self.alignment.transforms)
        return self.alignment


class MatchWhole(WholeModelTask):
    """Matches one donor to the anchor across the whole model."""

    architecture: Architecture = Field(repr=False)
    anchor: object = Field(repr=False)
    donor: object = Field(repr=False)
    anchor_name: str
    donor_name: str
    options: AlignConfig
    run: Run = Field(repr=False)
    devices: tuple[str, ...] = ("cpu",)
    quiet: bool = False
    match: Match = match_model

    def execute(self) -> Alignment:
        match, alone = self.match, len(self.devices) == 1 or self.match is not match_model
        anchor, donor = (_on(source, self.devices[0] if alone else "cpu") for source in (self.anchor, self.donor))
        if not alone:
            match = partial(match_model, over=on_devices(self.devices))
        with (
            progress_bar(f"Aligning {self.donor_name}", self.quiet) as progress,
            named(self.anchor_name, self.donor_name),
        ):
            ledger = self.run.ledger.under(self.donor_name)
            alignment = match(self.architecture, anchor, donor, self.options, progress, ledger=ledger)
        if not alone:  # where every device finds it
            alignment = replace(alignment, transforms={n: t.to(CPU) for n, t in alignment.transforms.items()})
        self.run.aligned(self.donor_name, alignment)
        return alignment


class MatchMean(WholeModelTask):
    """Matches all models to their running mean; gives an alignment for every model but the base."""

    architecture: Architecture = Field(repr=False)
    sources: Mapping[str, object] = Field(repr=False)
    base: str
    options: AlignConfig
    run: Run = Field(repr=False)
    devices: tuple[str, ...] = ("cpu",)
    quiet: bool = False

    def execute(self) -> dict[str, Alignment]:
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


class MeanAlignment(WholeModelTask):
    """One model's alignment to the mean."""

    all: MatchMean = Field(repr=False)
    name: str

    def arguments(self) -> dict[str, KeyedTask]:
        return {"all": self.all}

    def execute(self, all: dict[str, Alignment]) -> Alignment:
        return all[self.name]


def _on(source: object, device: str) -> TensorSource:
    """A task's source with its tensors moved to a device on access."""
    tensors = cast(TensorSource, source)
    return tensors if device == "cpu" else as_tensors(tensors).to(device)


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
