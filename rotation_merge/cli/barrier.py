"""`rotation-merge barrier`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click

from rotation_merge.cli.options import match_options, matching_options
from rotation_merge.cli.show import Progress, json_option, on_terminal, print_json, say, shown, table
from rotation_merge.durable import write_text
from rotation_merge.errors import RotationMergeError
from rotation_merge.matching.model import Alignment
from rotation_merge.matching.options import NOTHING, MatchOptions
from rotation_merge.report.curves import FILE, Barrier, Curve
from rotation_merge.report.plots import save_barrier, text_plot
from rotation_merge.samples.data import KINDS, Data, read_batches
from rotation_merge.samples.evaluate import path
from rotation_merge.samples.functions import load

if TYPE_CHECKING:
    from rotation_merge.checking import RecipeDonor


@click.command(
    epilog="""Examples: rotation-merge barrier recipe.yml --data held-out.txt;
    rotation-merge barrier org/anchor org/donor --data images/ --residual rotation --plot path.png"""
)
@click.argument("models", nargs=-1, required=True, metavar="RECIPE | ANCHOR DONOR")
@click.option("--data", "sources", multiple=True, required=True, help=f"What to measure on, one or more: {KINDS}.")
@click.option("--points", default=11, show_default=True, type=click.IntRange(3, 101), help="Models on the path.")
@click.option("--limit", type=click.IntRange(min=1), help="Use at most so many examples.")
@click.option("--batch-size", default=32, show_default=True, type=click.IntRange(min=1))
@click.option(
    "--length", default=128, show_default=True, type=click.IntRange(min=2), help="Tokens in a window of text."
)
@click.option("--plot", metavar="FILE", help="Also draw a PNG, SVG or PDF (needs matplotlib).")
@click.option("--alignment", metavar="FILE", help="Transforms to apply instead of matching; for two models.")
@click.option("--save", metavar="DIR", help=f"Also write {FILE} there, for the report of the merge in DIR.")
@matching_options
@json_option
@shown
def command(
    models: tuple[str, ...],
    sources: tuple[str, ...],
    points: int,
    limit: int | None,
    batch_size: int,
    length: int,
    plot: str | None,
    alignment: str | None,
    save: str | None,
    untie: bool,
    as_json: bool,
    **values: Any,
) -> int:
    """Loss (and accuracy) on the straight path between two models, aligned and not.

    Give two models, or a recipe (the anchor and each donor, aligned as the recipe says). The barrier is the largest
    excess of the loss over the straight line between its ends, in nats. For a donor with 'finetuned_from' the path is
    the anchor plus 0 to 1 times the task vector, carried over and not. Give --data once for each task.
    """
    options = match_options(values)
    donors = _donors(models, options, untie, alignment)
    progress = Progress()
    reading = {"limit": limit, "batch_size": batch_size, "length": length}
    barriers = [
        barrier for donor in donors for barrier in measure(models[0], donor, sources, points, progress, reading)
    ]
    progress.close()
    if save is not None:
        _save(barriers, save)
    for number, barrier in enumerate(barriers):
        if plot is not None:
            stem, ending = os.path.splitext(plot)
            save_barrier(barrier, plot if number == 0 else f"{stem}-{number + 1}{ending}")
    if as_json:
        print_json([barrier.to_dict() for barrier in barriers])
        return 0
    for barrier in barriers:
        _show(barrier)
    return 0


def _donors(models: tuple[str, ...], options: MatchOptions, untie: bool, alignment: str | None) -> list[RecipeDonor]:
    from rotation_merge.checking import RecipeDonor, donors_of

    if len(models) == 2:
        return [RecipeDonor(models[0], models[1], options, untie, file=alignment)]
    if len(models) == 1 and os.path.isfile(models[0]):
        return donors_of(models[0])
    raise click.UsageError("give a recipe (a YAML file), or two models")


def measure(
    given: str, donor: RecipeDonor, sources: Sequence[str], points: int, progress: Progress, reading: dict[str, Any]
) -> list[Barrier]:
    """Both paths, on each of the data.

    Args:
        given: the recipe, or the anchor.
    """
    anchor = load(donor.anchor)
    data: list[Data] = [read_batches(source, donor.anchor, anchor, **reading) for source in sources]
    curves: list[list[Curve]] = [[] for _ in sources]
    ends = _ends(anchor, donor, progress) if donor.origin is None else _carried_ends(given, donor)
    for name, first, last in ends:
        for one, some in zip(data, curves, strict=True):
            some.append(path(first, last, one, points, name, progress))
    title = donor.name if donor.origin is None else donor.title
    return [
        Barrier(donor.anchor, title, source, one.task, one.examples, asdict(donor.options), some)
        for source, one, some in zip(sources, data, curves, strict=True)
    ]


def _ends(a: Any, donor: RecipeDonor, progress: Progress) -> Iterator[tuple[str, Any, Any]]:
    """The models at the ends of both paths between two checkpoints; the donor aligned by a file where one is given,
    else by matching."""
    from rotation_merge.checkpoints.aligned import Storage, empty_report, match_pair, write_aligned
    from rotation_merge.checkpoints.pair import open_pair, read_alignment

    anchor, untie = donor.anchor, donor.untie
    options = donor.options if donor.file is None else NOTHING
    pair = open_pair(anchor, donor.name, options, untie, unsupported=donor.unsupported)
    yield "plain", a, load(donor.name, like=anchor)
    if donor.file is None:
        alignment, report = match_pair(pair, progress)
    else:
        alignment, report = read_alignment(pair, donor.file, untie), empty_report(pair)
    with tempfile.TemporaryDirectory(prefix="rotation-merge-") as scratch:
        moved, still = os.path.join(scratch, "donor"), anchor
        write_aligned(pair, alignment, report, moved, Storage(dtype="float32", untie=untie))
        if alignment.folded:
            still = os.path.join(scratch, "anchor")
            itself = replace(pair, donor=pair.anchor)
            write_aligned(itself, Alignment({}, alignment.folded), report, still, Storage(dtype="float32", untie=untie))
        yield "aligned", load(still), load(moved)


def _carried_ends(recipe: str, donor: RecipeDonor) -> Iterator[tuple[str, Any, Any]]:
    """The anchor and the anchor with a task vector added: as it is, and carried over."""
    from rotation_merge.checking import carried_recipe
    from rotation_merge.seam.merging import merge_recipe

    with tempfile.TemporaryDirectory(prefix="rotation-merge-") as scratch:
        for name, aligned in (("plain", False), ("aligned", True)):
            ends = []
            for scale in (0.0, 1.0):
                ends.append(os.path.join(scratch, f"{name}-{scale:.0f}"))
                merge_recipe(carried_recipe(recipe, donor, scale, aligned), ends[-1])
            yield name, load(ends[0]), load(ends[1])


def _save(barriers: list[Barrier], directory: str) -> None:
    import json

    if not os.path.isdir(directory):
        raise RotationMergeError("no such directory", where=directory, remedy="name the merged model's directory")
    write_text(os.path.join(directory, FILE), json.dumps([barrier.to_dict() for barrier in barriers], indent=1) + "\n")


def _show(barrier: Barrier) -> None:
    plain, aligned = barrier.curves
    rows = [
        (
            f"{t:.3g}",
            f"{plain.loss[i]:.4f}",
            f"{aligned.loss[i]:.4f}",
            f"{plain.accuracy[i]:.1%}",
            f"{aligned.accuracy[i]:.1%}",
        )
        for i, t in enumerate(plain.t)
    ]
    title = f"{barrier.anchor} to {barrier.donor} on {barrier.data} ({barrier.task}, {barrier.examples} examples)"
    headers = ("position", "loss, plain", "loss, aligned", "accuracy, plain", "accuracy, aligned")
    table(title, headers, rows, numbers=(0, 1, 2, 3, 4))
    if on_terminal():
        say(text_plot(barrier))
    unit = "of 1 - Spearman" if barrier.task == "similarity" else "nats"
    say(f"Barrier: {plain.barrier():.4f} {unit} plain, {aligned.barrier():.4f} aligned.")
    for words in filter(None, (curve.verdict() for curve in barrier.curves)):
        say(f"{words[:1].upper()}{words[1:]}.")
