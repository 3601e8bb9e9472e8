"""`rotation-merge doctor`."""

from __future__ import annotations

import os
from dataclasses import asdict

import click

from rotation_merge.cli.paths import MODEL, MODELS_OR_RECIPE
from rotation_merge.cli.show import Progress, json_option, note, print_json, say, shown


@click.command(
    epilog="""Examples: rotation-merge doctor ./merged; rotation-merge doctor recipe.yml;
    rotation-merge doctor ./merged org/parent-a org/parent-b"""
)
@click.argument("patient", type=MODELS_OR_RECIPE, metavar="MERGED | RECIPE")
@click.argument("parents", type=MODEL, nargs=-1)
@json_option
@shown
def command(patient: str, parents: tuple[str, ...], as_json: bool) -> int:
    """Why is this merge gibberish? What was found, the likeliest cause first, each with its remedy.

    Takes a merged model (of any merge method: what it was made of is read from mergekit_config.yml and
    rotation_merge.json beside it, or name PARENTS) or a recipe before it is run. Looks for parents that do not fit,
    tokens at other ids, another RoPE base or config, tied heads, NaN, what the dtype cannot hold, models in other
    coordinates or of another lineage, and weights and activations that vanish by layer. Exit code 1: a likely cause.
    """
    from rotation_merge.diagnose.doctor import diagnose, open_case
    from rotation_merge.diagnose.doctor.cause import LIKELY
    from rotation_merge.model.output import mend_interrupted

    if os.path.isdir(patient) and mend_interrupted(patient):
        note(f"{patient}: the exchange of its model was interrupted; it holds again what it held before.")
    case = open_case(patient, parents)
    progress = Progress()
    found = diagnose(case, progress)
    progress.close()
    likely = any(cause.likelihood >= LIKELY for cause in found)
    if as_json:
        facts = {"merged": case.merged, "parents": case.parents, "absent": case.absent, "method": case.method}
        print_json({**facts, "causes": [{**asdict(cause), "word": cause.word} for cause in found]})
        return 1 if likely else 0
    for name in case.absent:
        note(f"{name} is not here: what lies between it and the others was not looked at.")
    if not case.parents and case.merged is not None:
        note("What it was merged from is not known: only the merge itself was looked at. Name its parents behind it.")
    for number, cause in enumerate(found, 1):
        say(f"{number}. {cause.name} ({cause.word}): {cause.where}: {cause.what}", "red" if likely else "yellow")
        say(f"   {cause.remedy}")
    if not found:
        say(
            "Nothing was found that spoils a merge; 'rotation-merge merge' measures whether another is better.", "green"
        )
    return 1 if likely else 0
