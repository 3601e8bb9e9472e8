"""`rotation-merge merge`."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from rotation_merge.cli.show import json_option, note, print_json, say, shown, table
from rotation_merge.errors import RotationMergeError, nearest
from rotation_merge.recipe.names import DTYPES
from rotation_merge.samples.data import KINDS

if TYPE_CHECKING:
    from rotation_merge.choosing.judge import Figures
    from rotation_merge.choosing.outcome import Outcome
    from rotation_merge.choosing.run import Choice

POLISHED = "-polished"
"""What is added to OUT for the trained model."""

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@click.command(
    epilog="""Examples: rotation-merge merge org/anchor org/donor ./merged;
    rotation-merge merge org/anchor org/donor ./merged --data samples.txt --budget 30m"""
)
@click.argument("models", nargs=-1, required=True, metavar="A B [C ...] OUT")
@click.option(
    "--data",
    multiple=True,
    help=f"Samples to merge with and to judge by: {KINDS}; once for all models or once for each. If not given: text "
    "that the models write themselves (self), or images made of noise (synthetic).",
)
@click.option("--samples", default=64, show_default=True, type=click.IntRange(min=8), help="To merge with, a set.")
@click.option("--budget", default="10m", show_default=True, help="Time for trying: 90s, 10m, 2h.")
@click.option("--seed", default=0, show_default=True)
@click.option("--batch-size", default=8, show_default=True, type=click.IntRange(min=1))
@click.option("--length", default=128, show_default=True, type=click.IntRange(min=2), help="Tokens in a text window.")
@click.option("--dtype", help="Store weights in this type (default: as the models).")
@click.option("--anyway", is_flag=True, help="Write the best merge even if one parent alone is better.")
@click.option("--polish", is_flag=True, help="Then train the merge for a few steps, into OUT-polished.")
@click.option("--force", is_flag=True, help="Overwrite OUT.")
@json_option
@shown
def command(
    models: tuple[str, ...],
    data: tuple[str, ...],
    samples: int,
    budget: str,
    seed: int,
    batch_size: int,
    length: int,
    dtype: str | None,
    anyway: bool,
    polish: bool,
    force: bool,
    as_json: bool,
) -> int:
    """Find the best merge of A, B, ... and write it to OUT with its recipe.

    Tries plain and aligned averages, refits and learned alignments, as far as the budget goes, judges each on samples
    that no merge has seen, and writes the best one with recipe.yml, which mergekit-yaml runs to the same weights.
    Says so when one parent alone is better than every merge, and then writes nothing (exit code 1) unless --anyway.
    An interrupted search goes on where it was. --polish distils the parents into the merge, as a step of its own.
    """
    from rotation_merge.choosing.making import Wish
    from rotation_merge.choosing.run import Choice

    if len(models) < 3:
        raise click.UsageError("name two or more models and the directory to write")
    *names, out = models
    names = list(map(_anywhere, names))
    _check_names(names)
    out = out.rstrip(os.sep) or os.sep  # what lies beside it has its name and more
    if dtype is not None and dtype not in DTYPES:
        raise RotationMergeError(f"--dtype is '{dtype}'", remedy=nearest(dtype, DTYPES))
    wish = Wish(
        tuple(names), out, data or (_made_up(names[0]),), samples, seconds(budget), seed, length, batch_size, dtype
    )
    choice = Choice(wish, note)
    for place in (out, *([f"{out}{POLISHED}"] if polish else [])):
        _check_place(place, names, force or choice.goes_on())
    with choice.begun():
        choice.prepare()
        found = choice.run()
    written = found.worth_it or anyway
    trained = None
    if written:
        choice.write()
        trained = _polished(choice, out) if polish else None
    choice.clean(written)
    if as_json:
        print_json({**found.to_dict(), "written": out if written else None, "polished": trained})
    else:
        _show(found, out if written else None)
        if trained is not None:
            say(f"Polished: {trained['verdict']}.")
            say(f"Written to {trained['out']}." if trained["out"] else "Nothing was written for it.")
    return 0 if written else 1


def _anywhere(model: str) -> str:
    """A model by a name that a recipe can be run with from any folder."""
    return "+".join(os.path.abspath(part) if os.path.isdir(part) else part for part in model.split("+"))


def _check_names(models: Sequence[str]) -> None:
    """Before anything is opened: no model is named twice.

    Raises:
        RotationMergeError: one is.
    """
    split = [model.split("+") for model in models]
    places = [[os.path.realpath(part) if os.path.exists(part) else part for part in parts] for parts in split]
    if twice := [model for model, place in zip(models, places, strict=True) if places.count(place) > 1]:
        raise RotationMergeError("is named twice", where=twice[-1], remedy="name models that differ")


def _check_place(place: str, models: Sequence[str], force: bool) -> None:
    """Before anything is tried: a directory may be written here.

    Raises:
        RotationMergeError: a file is there, one of the models, or something that is not to be written over.
    """
    if os.path.lexists(place) and not os.path.isdir(place):
        raise RotationMergeError("is a file", where=place, remedy="name a directory to write")
    if os.path.realpath(place) in [os.path.realpath(part) for model in models for part in model.split("+")]:
        raise RotationMergeError("is one of the models", where=place, remedy="write somewhere else")
    if os.path.isdir(place) and not os.access(place, os.W_OK):
        raise RotationMergeError("cannot be written into", where=place, remedy="write somewhere else")
    if os.path.isdir(place) and os.listdir(place) and not force:
        raise RotationMergeError("is not empty", where=place, remedy="write somewhere else, or --force")


def _polished(choice: Choice, out: str) -> dict[str, Any]:
    """Distil the parents into the merge that was written; what it is worth on the samples that only report."""
    from rotation_merge.cli.polish import Ways, polished

    wish, place = choice.wish, f"{out}{POLISHED}"
    note("polishing ...")
    try:
        ways = Ways(samples=wish.samples, length=wish.length, seed=wish.seed)
        report = polished(out, place, wish.models, [choice.data[model] for model in wish.models], ways)
    except RotationMergeError as error:
        return {"out": None, "verdict": f"not done, {error}"}
    figures = choice.worth(place) if report.gained else None
    words = "" if figures is None else f"; {figures.score:.4f} {choice.reporting.unit} on samples that nothing has seen"
    return {**report.to_dict(), "out": place if report.gained else None, "verdict": report.verdict() + words}


def seconds(text: str) -> float:
    """A time such as 90s, 10m or 2h in seconds.

    Raises:
        RotationMergeError: it is none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text.strip())
    if match is None or float(match[1]) == 0:
        raise RotationMergeError(f"'{text}' is no time", remedy="write 90s, 10m or 2h")
    return float(match[1]) * UNITS[match[2]]


def _made_up(model: str) -> str:
    """What stands in for data: text of the models' own, or made images."""
    from rotation_merge.samples.functions import local_path, read_config

    config = read_config(local_path(model))
    name = str((config.get("architectures") or [""])[0])
    if name.endswith(("ForCausalLM", "LMHeadModel")):
        return "self"
    if "image_size" in config or "vision_config" in config:
        return "synthetic"
    raise RotationMergeError(f"{name or 'the model'} cannot make up samples", where=model, remedy="give --data")


def _less_right(found: Outcome) -> str:
    """Where a merge of a lower loss gives fewer right answers than a model alone: which; else nothing."""
    shares = {name: figures.accuracy for name, figures in found.parents.items() if figures.accuracy is not None}
    best, own = max(shares, key=lambda name: shares[name], default=""), found.best.accuracy
    if own is None or not best or own >= shares[best]:
        return ""
    form = ".1%" if found.figure == "accuracy" else ".4f"
    return f"Its {found.figure} is lower than that of {best} ({own:{form}} against {shares[best]:{form}})."


def _show(found: Outcome, out: str | None) -> None:
    from rotation_merge.choosing.candidates import shortened

    headers = ["", found.unit, *([found.figure] if found.labelled else [])]

    def row(name: str, figures: Figures) -> list[Any]:
        form = ".1%" if found.figure == "accuracy" else ".4f"
        beside = [] if figures.accuracy is None else [f"{figures.accuracy:{form}}"]
        return [name, f"{figures.score:.4f}", *beside]

    best = found.tried[0]
    names = shortened(list(found.parents))
    rows = [row(f"{names[name]} alone", figures) for name, figures in found.parents.items()]
    rows += [row("ensemble of all", found.ensemble)] + ([row("plain average", found.plain)] if found.plain else [])
    table("On samples that no merge has seen:", headers, [*rows, row(f"best merge: {best.name}", found.best)], (1, 2))
    for name, why in found.left_out.items():
        note(f"not tried: {name} ({why})")
    parent = found.parents[found.best_parent]
    if found.worth_it:
        say(f"The merge '{best.name}' is better than every model alone ({found.best.score:.4f}, {parent.score:.4f}).")
        if words := _less_right(found):
            say(words, "yellow")
    else:
        say(
            f"{found.best_parent} alone is better than every merge that was tried ({parent.score:.4f} against "
            f"{found.best.score:.4f}): use it."
        )
        if found.ensemble.score < parent.score:
            scores = f"{found.ensemble.score:.4f}, {parent.score:.4f}"
            say(f"All of them side by side are better than each alone ({scores}): serve them so, or distil them:")
            say(f"rotation-merge polish {found.best_parent} OTHER --teachers {' '.join(found.parents)}")
    if out is not None:
        say(f"Written to {out}; mergekit-yaml {out}/recipe.yml OTHER gives the same weights.", "green")
    elif not found.worth_it:
        note("Nothing was written; --anyway writes the best merge.")
