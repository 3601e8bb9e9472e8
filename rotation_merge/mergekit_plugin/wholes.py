"""Alignments of whole models: streams of the residual, all models to their mean, activations.

They are found before mergekit's plan runs, one block of each model in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial

import torch
import tqdm

from rotation_merge.architecture.model import Architecture
from rotation_merge.matching.alignment import Alignment
from rotation_merge.matching.block import named
from rotation_merge.matching.match import Match, match_model
from rotation_merge.matching.mean import match_to_mean
from rotation_merge.matching.options import NOTHING, AlignConfig
from rotation_merge.matching.pair import Pair
from rotation_merge.mergekit_plugin.session import Session
from rotation_merge.model.heads import compared
from rotation_merge.model.tensors import Tensors
from rotation_merge.model.vocabulary import on_shared_rows, shared_rows
from rotation_merge.workers import Progress, in_threads, listener, listening, on_devices


def match_whole(session: Session, pair: Pair, name: str, match: Match) -> Alignment:
    """The alignment of one whole model to the anchor, on all devices where weights are matched."""
    devices, recipe, run = session.devices, session.recipe, session.run
    architecture = compared(session.base, [pair.donor], recipe.own_heads, recipe.excluded)
    together = len(devices) > 1 and match is match_model
    if together:
        match = partial(match_model, over=on_devices(devices))
    else:
        pair = replace(pair, device=devices[0])
    with progress_bar(f"Aligning {name}", session.options.quiet) as progress, named(str(recipe.base), name):
        alignment = match(architecture, *pair.matched, pair.options, progress, ledger=run.ledger.under(name))
    if together:  # where every device finds it
        cpu = {space: transform.to(torch.device("cpu")) for space, transform in alignment.transforms.items()}
        alignment = replace(alignment, transforms=cpu)
    run.aligned(name, alignment)
    return alignment


def mean_matcher(session: Session, pairs: Mapping[str, Pair]) -> Callable[[], dict[str, Alignment]]:
    """Gives the alignments of all models but the base to their running mean, by name, found once.

    Args:
        pairs: of the base and each donor, with the same options.

    Raises:
        CheckpointError: their vocabularies have next to nothing in common.
    """
    recipe, base, donors = session.recipe, session.base, [pair.donor for pair in pairs.values()]
    sources = {str(recipe.base): base.tensors, **{name: pair.sources[1] for name, pair in pairs.items()}}
    options = next((pair.options for pair in pairs.values()), NOTHING)
    if options.residual != "none" and (rows := shared_rows([base, *donors])) is not None:
        shared = on_shared_rows(base.architecture, list(sources.values()), rows)
        sources = dict(zip(sources, shared, strict=True))
    architecture = compared(base, donors, recipe.own_heads, recipe.excluded)
    return cache(partial(_match_mean, session, architecture, sources, options))


def _match_mean(
    session: Session, architecture: Architecture, sources: Mapping[str, Tensors], options: AlignConfig
) -> dict[str, Alignment]:
    devices, base, run = session.devices, str(session.recipe.base), session.run
    sources = {name: source.on(devices[0]) for name, source in sources.items()}
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
