"""More than two models: all of them aligned to their running mean, expressed in the base's coordinates.

Generalised Procrustes analysis (Gower, 1975); for permutations it is MergeMany of Git Re-Basin (2023). Because every
model gets one transform into one common frame, maps between any two of them compose around every cycle to the identity.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from rotation_merge.architecture.model import Architecture
from rotation_merge.matching.alignment import Alignment, Transforms
from rotation_merge.matching.block import named
from rotation_merge.matching.match import match_model, recorded
from rotation_merge.matching.moving import moved_tensors, relative
from rotation_merge.matching.options import AlignConfig
from rotation_merge.model.fold import folded_tensors
from rotation_merge.model.tensors import TensorSource, as_tensors, mean_of
from rotation_merge.run.ledger import NOWHERE, Ledger
from rotation_merge.workers import Progress, Spread, in_threads

MOST_ROUNDS = 10
LEAST_GAIN = 1e-2
"""Rounds stop when the spread around the mean falls by less than this fraction."""


def match_to_mean(
    architecture: Architecture,
    sources: Mapping[str, TensorSource],
    base: str,
    options: AlignConfig,
    progress: Progress | None = None,
    over: Spread = in_threads,
    ledger: Ledger = NOWHERE,
) -> dict[str, Alignment]:
    """Align every model in turn to the mean of the others, until their spread stops falling.

    Args:
        architecture: all sources go by its tensor names.
        sources: the models by name, base included.
        base: the model whose coordinates the result is expressed in; it does not move.
        over: who matches the blocks.
        ledger: store of intermediate results, to resume from.

    Returns:
        An alignment for every model but the base.
    """
    matching = partial(match_model, architecture, options=options, progress=progress, over=over)
    alignments = {}
    for name in (name for name in sources if name != base):
        with named(base, name):
            alignments[name] = matching(sources[base], sources[name], ledger=ledger.under(f"to the base/{name}"))
    folded = next((a.folded for a in alignments.values()), ())
    stored = {
        name: as_tensors(folded_tensors(architecture, source, folded)).cached() for name, source in sources.items()
    }
    frames: dict[str, Transforms] = {base: {}, **{name: a.transforms for name, a in alignments.items()}}
    spread = [_spread(architecture, stored, frames)]
    for turn in range(MOST_ROUNDS if len(sources) > 2 else 0):
        proposed = dict(frames)
        for name, source in stored.items():
            other_models = [moved_tensors(architecture, stored[n], proposed[n]) for n in stored if n != name]
            streams = {stream: t for stream, t in proposed[name].items() if stream in architecture.streams}
            starts = {"where it stands": streams} if streams else None
            within = ledger.under(f"round {turn}/{name}")
            match = matching(mean_of(other_models), source, starts=starts, fold=False, ledger=within)
            proposed[name] = match.transforms
        now = _spread(architecture, stored, proposed)
        if now < spread[-1]:
            frames = proposed
        spread.append(min(now, spread[-1]))
        if now > spread[-2] * (1 - LEAST_GAIN):
            break
    result = {}
    for name, alone in alignments.items():
        summary = {**alone.summary, "rounds": len(spread) - 1, "spread": spread}
        alignment = Alignment(relative(architecture, frames[base], frames[name]), summary=summary)
        result[name] = replace(recorded(architecture, stored[base], stored[name], alignment), folded=folded)
    return result


def _spread(architecture: Architecture, sources: Mapping[str, TensorSource], frames: Mapping[str, Transforms]) -> float:
    """Sum over models of the squared distance from their mean."""
    moved = [moved_tensors(architecture, source, frames[name]) for name, source in sources.items()]
    total = 0.0
    for name in architecture.named():
        if all(name in source for source in moved):
            tensors = [{name: source[name]} for source in moved]
            middle = mean_of(tensors)[name]
            total += sum(float((tensor[name].float() - middle).square().sum()) for tensor in tensors)
    return total
