"""Alignments of whole models: streams of the residual, all models to their mean, activations.

They are found before mergekit's plan runs, one block of each model in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
import tqdm

from rotation_merge.architecture.model import Architecture
from rotation_merge.matching.alignment import Alignment
from rotation_merge.matching.block import named
from rotation_merge.matching.match import Match, match_model
from rotation_merge.matching.mean import match_to_mean
from rotation_merge.matching.options import AlignConfig
from rotation_merge.matching.pair import Pair
from rotation_merge.mergekit_plugin.session import Session
from rotation_merge.model.tensors import TensorSource, as_tensors
from rotation_merge.workers import Progress, in_threads, listener, listening, on_devices


def match_whole(session: Session, pair: Pair, architecture: Architecture, donor_name: str, match: Match) -> Alignment:
    """The alignment of one whole model to the anchor, on all devices where weights are matched.

    Args:
        architecture: what is compared of both.
        donor_name: in the report.
    """
    devices, base, run = session.devices, str(session.recipe.base), session.run
    together = len(devices) > 1 and match is match_model
    if together:
        match = partial(match_model, over=on_devices(devices))
    else:
        pair = replace(pair, device=devices[0])
    with progress_bar(f"Aligning {donor_name}", session.options.quiet) as progress, named(base, donor_name):
        ledger = run.ledger.under(donor_name)
        alignment = match(architecture, *pair.matched, pair.options, progress, ledger=ledger)
    if together:  # where every device finds it
        cpu = {name: transform.to(torch.device("cpu")) for name, transform in alignment.transforms.items()}
        alignment = replace(alignment, transforms=cpu)
    run.aligned(donor_name, alignment)
    return alignment


def match_mean(
    session: Session, architecture: Architecture, sources: Mapping[str, TensorSource], options: AlignConfig
) -> dict[str, Alignment]:
    """The alignments of all models but the base to their running mean, by name.

    Args:
        sources: the models by name, base included.
    """
    devices, base, run = session.devices, str(session.recipe.base), session.run
    sources = {name: as_tensors(source).on(devices[0]) for name, source in sources.items()}
    over = in_threads if len(devices) == 1 else on_devices(devices)
    with progress_bar("Aligning to the mean", session.options.quiet) as progress:
        alignments = match_to_mean(architecture, sources, base, options, progress, over, ledger=run.ledger)
    for name, alignment in alignments.items():
        run.aligned(name, alignment)
    rounds = max((int(str(alignment.summary["rounds"])) for alignment in alignments.values()), default=0)
    run.note(
        f"All {len(sources)} models were aligned to their running mean ('anchor: mean'), in {rounds} rounds, and are "
        f"expressed in the coordinates of `{base}`; distances are those to it."
    )
    return alignments


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
