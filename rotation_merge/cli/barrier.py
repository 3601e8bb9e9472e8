"""`rotation-merge barrier`."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from rotation_merge.cli.options import config_of, config_options, data_option, matching_options
from rotation_merge.cli.paths import (
    ALIGNMENT,
    MODELS_OR_RECIPE,
    NAMED_ALIGNMENTS,
    Writes,
    hold_outputs,
    is_document,
    writes,
)
from rotation_merge.cli.show import Answer, Progress, say, shown, table
from rotation_merge.errors import RecipeError, RotationMergeError
from rotation_merge.files import MATCHING_UNFINISHED, Output, write_text
from rotation_merge.matching.options import WEIGHTS, AlignConfig, MatchConfig
from rotation_merge.report.plots import check_plot, save_barrier
from rotation_merge.run.curves import FILE, Barrier, is_barrier
from rotation_merge.run.evaluate import BarrierConfig

if TYPE_CHECKING:
    from rotation_merge.diagnose.donors import RecipeDonor

NEW_PLOT = Writes(work=(MATCHING_UNFINISHED,))


SAVED = Writes(within=FILE, work=(MATCHING_UNFINISHED,), wrote=is_barrier, beside=True)

NARROW = 2
"""Curves whose losses and accuracies stand side by side in one table."""


@click.command(
    epilog="""Examples: rotation-merge barrier recipe.yml --data held-out.txt;
    rotation-merge barrier org/anchor org/donor --data images/ --residual rotation --plot path.png;
    rotation-merge barrier org/anchor org/donor --data images/ --compare local,residual --plot paths.png"""
)
@click.argument("models", type=MODELS_OR_RECIPE, nargs=-1, required=True, metavar="RECIPE | ANCHOR DONOR")
@data_option("Samples to measure on, one or more: {}.", "sources", multiple=True, required=True)
@config_options(BarrierConfig)
@click.option("--plot", type=NEW_PLOT, metavar="FILE", help="Also draw a PNG, SVG or PDF (needs matplotlib).")
@click.option(
    "--alignment", type=ALIGNMENT, metavar="FILE", help="Transforms to apply instead of matching; for two models."
)
@click.option(
    "--compare",
    type=NAMED_ALIGNMENTS,
    metavar="NAMES",
    help="Curves to draw beside the plain one, with commas between: neurons, rotation, paper, permutation, local, "
    "residual; activations, both (residual, chosen on samples); aligned (as the options or the recipe say); NAME=FILE "
    "for transforms in a file.",
)
@click.option(
    "--heads-of",
    type=click.Choice(["each"]),
    help="each: every model keeps its own head, of any size. Give --data once for each model, in their order. A recipe "
    "has 'heads_of' instead.",
)
@click.option("--save", type=SAVED, metavar="DIR", help=f"Also write {FILE} there, beside the merge in DIR.")
@matching_options
@config_options(MatchConfig, "match_on")
@shown
@writes
def command(
    models: tuple[str, ...],
    sources: tuple[str, ...],
    plot: str | None,
    alignment: str | None,
    compare: str | None,
    heads_of: str | None,
    save: str | None,
    untie: bool,
    match_on: str,
    **values: Any,
) -> Answer:
    """Loss (and accuracy) on the straight path between two models, aligned and not.

    Give an anchor and a donor, or a recipe, of which every donor has a path from the anchor. The barrier is the largest
    excess of the loss over the straight line between the ends, in nats. For a donor with 'finetuned_from' the path is
    the anchor plus 0 to 1 times the task vector. --compare draws several alignments in one picture. With --save or
    --plot an interrupted run continues. Give --data once for each task. Alignments that need samples (--match-on,
    activations, both) use text that the models write, or, if they write none, the first --data.
    """
    from rotation_merge.diagnose.donors import measurement_key
    from rotation_merge.diagnose.matchings import Paths, matchings
    from rotation_merge.run.ledger import kept_beside

    config, options = config_of(BarrierConfig, values), config_of(AlignConfig, values)
    chosen = matchings(compare)
    if plot is not None:
        check_plot(plot)
    described = options != AlignConfig() or alignment or match_on != WEIGHTS
    if described and "aligned" not in [matching.name for matching in chosen]:
        remedy = "name it in --compare, too, or leave them out"
        raise RecipeError("matching options need the curve 'aligned'", where="--compare", remedy=remedy)
    donors = _donors(models, options, untie, alignment, match_on)
    if heads_of is not None:
        donors = _with_heads(models, donors)
    progress = Progress()
    read = [*sources, *(matching.file for matching in chosen if matching.file)]
    mark = partial(measurement_key, models, donors, read, wanted=chosen, config=config)
    with kept_beside(os.path.join(save, FILE) if save else plot, mark) as ledger:
        paths = Paths(models[0], donors, sources, config, progress, ledger)
        pictures = _pictures(plot, len(paths.measured)) if plot else []
        click.get_current_context().with_resource(hold_outputs([Output(picture) for picture in pictures]))
        barriers = paths.barriers(chosen)
    progress.close()
    facts = [barrier.to_dict() for barrier in barriers]
    if save is not None:
        write_text(os.path.join(save, FILE), json.dumps(facts, indent=1) + "\n")
    for picture, barrier in zip(pictures, barriers, strict=False):
        save_barrier(barrier, picture)

    def show() -> None:
        for barrier in barriers:
            _show(barrier)

    return Answer(facts, show)


def _donors(
    models: tuple[str, ...], options: AlignConfig, untie: bool, alignment: str | None, match_on: str
) -> list[RecipeDonor]:
    from rotation_merge.diagnose.donors import RecipeDonor, donors_of

    if alignment is not None and len(models) != 2:
        raise click.UsageError("--alignment is for two models; a recipe names the file under its donor")
    if match_on != WEIGHTS and (alignment is not None or len(models) == 1):
        origin = "a file of maps" if alignment is not None else "a recipe"
        raise RotationMergeError(f"{origin} already gives the maps", remedy="leave out --match-on")
    if len(models) == 2:
        return [RecipeDonor(*models, options, untie, file=alignment, match_on=match_on)]
    if len(models) == 1 and is_document(models[0]):
        return donors_of(models[0])
    raise click.UsageError("give a recipe (a YAML file), or two models; measure more of them two by two")


def _with_heads(models: tuple[str, ...], donors: list[RecipeDonor]) -> list[RecipeDonor]:
    """Donors that keep heads of their own."""
    from rotation_merge.diagnose.donors import kept_head_names
    from rotation_merge.model.open import open_model

    if len(models) == 1:
        raise RotationMergeError(
            "--heads-of is for models, a recipe has its own 'heads_of'", remedy="leave out --heads-of"
        )
    heads = kept_head_names(map(open_model, models))
    return [replace(donor, own_heads=heads) for donor in donors]


def _pictures(plot: str, count: int) -> list[str]:
    """A file for each path: PLOT, PLOT-2, PLOT-3."""
    stem, ending = os.path.splitext(plot)
    return [plot, *(f"{stem}-{number}{ending}" for number in range(2, count + 1))]


def _show(barrier: Barrier) -> None:
    curves, unit = barrier.curves, "of 1 - Spearman" if barrier.task == "similarity" else "nats"
    words = [f"{curve.barrier():.4f} {unit if curve is curves[0] else ''} {curve.name}" for curve in curves]
    say(f"Barrier: {', '.join(' '.join(word.split()) for word in words)}.")
    for sentence in barrier.words():
        say(f"{sentence[:1].upper()}{sentence[1:]}.")
    few = len(curves) <= NARROW
    shares, form = curves if few else [], ".1%" if barrier.figure == "accuracy" else ".4f"
    rows = [
        (f"{t:.3g}", *(f"{c.loss[i]:.4f}" for c in curves), *(f"{c.accuracy[i]:{form}}" for c in shares))
        for i, t in enumerate(curves[0].t)
    ]
    title = f"{barrier.anchor} to {barrier.donor} on {barrier.data} ({barrier.task}, {barrier.examples} examples)"
    title += f", under the head of {barrier.head}" * bool(barrier.head)
    headers = ("position", *(f"loss, {c.name}" for c in curves), *(f"{barrier.figure}, {c.name}" for c in shares))
    table(title, headers, rows, numbers=range(len(headers)))
    if not few:
        middle = curves[0].middle()
        headers = ("matching", "barrier", "loss in the middle", barrier.figure)
        figures = ((c, f"{c.barrier():.4f}", f"{c.loss[middle]:.4f}", f"{c.accuracy[middle]:{form}}") for c in curves)
        table("", headers, [(curve.name, *cells) for curve, *cells in figures], numbers=(1, 2, 3))
