"""`rotation-merge merge`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from rotation_merge.cli.options import config_of, config_options, data_option, device_option, usable_device
from rotation_merge.cli.paths import MODEL, MODELS_AND_OUT, hold_outputs, outputs_of
from rotation_merge.cli.show import Answer, Progress, note, say, shown, table
from rotation_merge.search.config import MergeConfig

if TYPE_CHECKING:
    from rotation_merge.search.outcome import Outcome


@click.command(
    epilog="""Examples: rotation-merge merge org/anchor org/donor ./merged;
    rotation-merge merge org/anchor org/donor ./merged --data samples.txt --budget 30m"""
)
@click.argument("models", type=MODELS_AND_OUT, nargs=-1, required=True, metavar="A B [C ...] OUT")
@data_option(
    "Samples to merge with and to judge by: {}; once for all models or once for each. If not given: text that the "
    "models write themselves (self), or images made of noise (synthetic).",
    multiple=True,
)
@config_options(MergeConfig, types={"base": MODEL})
@device_option(" to compute on")
@click.option("--anyway", is_flag=True, help="Write the best merge even if one parent alone is better.")
@click.option("--force", is_flag=True, help="Overwrite OUT.")
@shown
def command(
    models: tuple[str, ...], data: tuple[str, ...], device: str, anyway: bool, force: bool, **values: Any
) -> Answer:
    """Find the best merge of A, B, ... and write it to OUT with its recipe.

    Tries plain and aligned averages, averages of task vectors (from --base, or a base found from adapters, cards or
    weights), refits and learned alignments, the cheap ones first, until the budget is spent. Judges each on held-out
    samples, and by its forgetting of the base. Writes the best one with recipe.yml, from which mergekit-yaml makes the
    same weights. If one parent alone is better than every merge, the command says so, writes nothing without --anyway,
    and exits with code 1. An interrupted search continues.
    """
    names, out = _models_and_out(models)
    config, context, progress = config_of(MergeConfig, values), click.get_current_context(), Progress()
    context.with_resource(hold_outputs(outputs_of(context), os.path.isdir(f"{out}.unfinished")))
    note("loading libraries ...")

    from rotation_merge.api import merge
    from rotation_merge.workers import listening

    more: dict[str, Any] = {"force": force, "anyway": anyway, "watch": progress.note}
    with listening(progress):
        outcome = merge(names, out, data, config, device=usable_device(device), **more)
    progress.close()
    place = out if outcome.written else None
    return Answer({**outcome.to_dict(), "written": place}, lambda: _show(outcome, place), 0 if outcome.written else 1)


def _models_and_out(arguments: tuple[str, ...]) -> tuple[list[str], str]:
    """The models, and the directory to write, which comes last."""
    if len(arguments) < 3:
        raise click.UsageError("name two or more models and the directory to write")
    *names, out = arguments
    if names[0].startswith((".", os.sep)) and not os.path.exists(names[0]) and os.path.exists(out):
        raise click.UsageError(f"{names[0]} does not exist, but {out} does: the directory to write comes last")
    return names, out.rstrip(os.sep) or os.sep  # files beside it begin with its name


def _show(outcome: Outcome, out: str | None) -> None:
    from rotation_merge.model.naming import shortened
    from rotation_merge.model.verdict import sentences, tables

    verdict = outcome.verdict
    parents = [parent.name for parent in verdict.parents]
    first, *details = sentences(verdict)
    say(first)
    for caption, (headers, *rows) in tables(verdict, shortened(parents)).items():
        table(caption, headers, rows, range(1, len(headers)))
    for name, why in verdict.left_out.items():
        note(f"not tried: {name} ({why})")
    for words in details:
        say(words, "yellow")
    parent = verdict.best_parent
    if not verdict.worth_it and verdict.ensemble is not None and verdict.ensemble.score < parent.score:
        scores = f"{verdict.ensemble.score:.4f}, {parent.score:.4f}"
        say(f"The ensemble is better than each model alone ({scores}). Serve the ensemble, or distil it:")
        say(f"rotation-merge polish {parent.name} OTHER --teachers {' '.join(parents)}")
    if out is not None:
        say(f"Written to {out}; mergekit-yaml {out}/recipe.yml OTHER gives the same weights.", "green")
    elif not verdict.worth_it:
        note("Nothing was written; --anyway writes the best merge.")
