"""`rotation-merge barrier`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Literal

import click

from rotation_merge.cli.command import cli_command
from rotation_merge.cli.paths import (
    INPUT_FILE,
    MODELS_OR_RECIPE,
    NAMED_ALIGNMENTS,
    SAMPLES,
    Writes,
    checked_outputs,
    is_document,
)
from rotation_merge.cli.show import Answer, Table, sentence
from rotation_merge.errors import RecipeError, RotationMergeError
from rotation_merge.files import MATCHING_UNFINISHED, write_text
from rotation_merge.matching.options import WEIGHTS, AlignConfig, MatchConfig
from rotation_merge.record import with_margin
from rotation_merge.run.config import FILE, BarrierConfig
from rotation_merge.run.sample_kinds import KINDS

if TYPE_CHECKING:
    from rotation_merge.diagnose.donors import PairRecipe
    from rotation_merge.run.evaluate import Barrier


def _is_barrier(path: str) -> bool:
    """Whether a file holds a barrier."""
    from rotation_merge.run.evaluate import is_barrier

    return is_barrier(path)


NEW_PLOT = Writes("file", "file", work=(MATCHING_UNFINISHED,))
SAVED = Writes("file", "dir", within=FILE, work=(MATCHING_UNFINISHED,), wrote=_is_barrier, beside=True)


@cli_command(
    "rotation-merge barrier recipe.yml --data held-out.txt",
    "rotation-merge barrier org/anchor org/donor --data images/ --residual rotation --plot path.png",
    "rotation-merge barrier org/anchor org/donor --data images/ --compare local,residual --plot paths.png",
)
def command(
    models: Annotated[tuple[str, ...], MODELS_OR_RECIPE, "RECIPE | ANCHOR DONOR"],
    *,
    data: Annotated[tuple[str, ...], SAMPLES, f"samples to measure on, one or more: {KINDS}"],
    config: BarrierConfig,
    plot: Annotated[str | None, NEW_PLOT, "also draw a PNG, SVG or PDF (needs matplotlib)"] = None,
    alignment: Annotated[str | None, INPUT_FILE, "transforms to apply instead of matching; for two models"] = None,
    compare: Annotated[
        str | None,
        NAMED_ALIGNMENTS,
        "curves to draw beside the plain one, with commas between: neurons, rotation, paper, permutation, local, "
        "residual; activations, both (residual, chosen on samples); aligned (as the options or the recipe say); "
        "NAME=FILE for transforms in a file",
    ] = None,
    heads_of: Annotated[
        Literal["each"] | None,
        "each: every model keeps its own head, of any size. Give --data once for each model, in their order. A recipe "
        "has 'heads_of' instead",
    ] = None,
    save: Annotated[str | None, SAVED, f"also write {FILE} there, beside the merge in DIR"] = None,
    options: AlignConfig,
    match: Annotated[MatchConfig, ("match_on", "untie")],
) -> Answer:
    """Loss (and accuracy) on the straight path between two models, aligned and not.

    Give an anchor and a donor, or a recipe, of which every donor has a path from the anchor. The barrier is the largest
    excess of the loss over the straight line between the ends, in nats. For a donor with 'finetuned_from' the path is
    the anchor plus 0 to 1 times the task vector. --compare draws several alignments in one picture. With --save or
    --plot an interrupted run continues. Give --data once for each task. Matching on activations uses text that the
    models write, or, if they write none, the first --data.
    """
    from rotation_merge.diagnose.paths import ALIGNED, COMPARE, Paths, curves_of
    from rotation_merge.mergekit_plugin.recipe import numbered
    from rotation_merge.report.plots import check_plot, save_barrier
    from rotation_merge.run.ledger import kept_beside

    if plot is not None:
        check_plot(plot)
    curves = curves_of(compare)
    if ALIGNED not in curves and (options != AlignConfig() or alignment or match.match_on != WEIGHTS):
        remedy = "name it in --compare, too, or leave them out"
        raise RecipeError("matching options need the curve 'aligned'", where=COMPARE, remedy=remedy)
    donors = _donors(models, options, match, alignment, heads_of is not None)
    paths = Paths(models[0], donors, data, config, curves)
    with kept_beside(os.path.join(save, FILE) if save else plot, paths.mark) as ledger:
        paths = replace(paths, ledger=ledger)
        pictures = numbered(plot, len(paths.measured)) if plot else []
        click.get_current_context().with_resource(checked_outputs([NEW_PLOT.outputs(file)[0] for file in pictures[1:]]))
        barriers = paths.barriers()
    facts = [barrier.to_dict() for barrier in barriers]
    if save is not None:
        write_text(os.path.join(save, FILE), json.dumps(facts, indent=1) + "\n")
    for picture, barrier in zip(pictures, barriers, strict=False):
        save_barrier(barrier, picture)
    return Answer(facts, [line for barrier in barriers for line in _lines(barrier)])


def _donors(
    models: tuple[str, ...], options: AlignConfig, match: MatchConfig, alignment: str | None, each_head: bool
) -> list[PairRecipe]:
    """The donors whose paths are measured: of a recipe, or one of two models."""
    from rotation_merge.diagnose.donors import PairRecipe, donors_of
    from rotation_merge.model.open import parse_reference

    if len(models) == 1 and is_document(models[0]):
        if alignment or match.match_on != WEIGHTS or each_head:
            remedy = "leave out --alignment, --match-on and --heads-of"
            raise RotationMergeError("a recipe already gives the maps and heads", where=models[0], remedy=remedy)
        return list(map(PairRecipe.of, donors_of(models[0])))
    if len(models) != 2:
        raise click.UsageError("give a recipe (a YAML file), or two models; measure more of them two by two")
    if alignment and match.match_on != WEIGHTS:
        raise RotationMergeError("a file of maps already gives the maps", remedy="leave out --match-on")
    values = {"match_on": match.match_on, **asdict(options)} if alignment is None else {"alignment": alignment}
    heads, (anchor, donor) = {"heads_of": "each"} if each_head else {}, map(parse_reference, models)
    return [PairRecipe(anchor, donor, {**values, **heads, "untie": match.untie})]


def _lines(barrier: Barrier) -> Iterator[str | Table]:
    """The barrier of each curve, and the losses and accuracies on all of them."""
    curves, unit = barrier.curves, "of 1 - Spearman" if barrier.task == "similarity" else "nats"
    each = ", ".join(f"{with_margin(f'{curve.barrier():.4f}', curve.margin())} {curve.name}" for curve in curves)
    yield f"Barrier: {each} ({unit})."
    yield from map(sentence, barrier.words())
    title = f"{barrier.anchor} to {barrier.donor} on {barrier.data} ({barrier.task}, {barrier.examples} examples)"
    title += f", under the head of {barrier.head}" * bool(barrier.head)
    columns = {f"loss, {curve.name}": curve.loss for curve in curves}
    columns |= {f"{barrier.figure}, {curve.name}": curve.accuracy for curve in curves}
    names, cells = ("position", *columns), zip(curves[0].t, *columns.values(), strict=True)
    yield Table((dict(zip(names, row, strict=True)) for row in cells), title)
