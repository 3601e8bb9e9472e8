"""`rotation-merge inspect`."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click

from rotation_merge.cli.options import match_options, matching_options
from rotation_merge.cli.show import bytes_text, json_option, print_json, say, seconds_text, shown, table
from rotation_merge.matching.options import NOTHING
from rotation_merge.report.estimate import Estimate, carried, estimate

if TYPE_CHECKING:
    from rotation_merge.checking import RecipeDonor

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@click.command(
    epilog="Examples: rotation-merge inspect org/model --residual rotation;  rotation-merge inspect recipe.yml"
)
@click.argument("model_or_recipe")
@matching_options
@json_option
@shown
def command(model_or_recipe: str, untie: bool, as_json: bool, **values: Any) -> int:
    """Spaces, sizes and groups of a model, what stays unaligned and why, and what aligning costs.

    For a model, as a donor aligned under these options; for a recipe, each of its donors under the recipe's. Only
    configs and headers are read. Time is estimated for this machine, memory beyond Python and its libraries.
    """
    from rotation_merge.checking import RecipeDonor, donors_of

    options = match_options(values)
    if os.path.isfile(model_or_recipe):
        given = donors_of(model_or_recipe)
    else:
        given = [RecipeDonor(model_or_recipe, model_or_recipe, options, untie)]
    found = [(donor, _estimate(donor)) for donor in given]
    if as_json:
        facts = [
            {"model": d.name, "origin": d.origin, "alignment": d.file, "options": asdict(d.options)} for d, _ in found
        ]
        print_json([{**fact, **asdict(result)} for fact, (_, result) in zip(facts, found, strict=True)])
        return 0
    for donor, result in found:
        _show(donor, result)
    if len(found) > 1:
        total = sum(result.seconds for _, result in found)
        most = max(result.memory for _, result in found)
        say(f"All {len(found)} donors: {seconds_text(total)}, {bytes_text(most)} of memory")
    return 0


def _estimate(donor: RecipeDonor) -> Estimate:
    """What matching a donor (or the model it was tuned from) to the anchor costs; its files are looked at, too."""
    from rotation_merge.checkpoints.pair import check_models, open_pair

    options = donor.options
    known = donor.unsupported
    checked = check_models(
        donor.anchor, donor.matched, options, donor.untie, donor.excluded, donor.words, unsupported=known
    )
    if donor.matched != donor.name:
        check_models(donor.matched, donor.name, NOTHING, excluded=donor.excluded, unsupported=known)
    pair = open_pair(donor.anchor, donor.anchor, options, donor.untie, unsupported=known)
    warnings = [*checked.warnings, *checked.notes()] if checked is not None else []
    dtype = str(pair.anchor.config.get("dtype") or pair.anchor.config.get("torch_dtype") or "float32")
    size = ITEMSIZE.get(dtype.removeprefix("torch."), 4)
    options = pair.checked.options if donor.file is None else NOTHING
    found = replace(estimate(pair.architecture, pair.anchor.shapes, options, size, size), warnings=warnings)
    return found if donor.origin is None else carried(found, pair.anchor.shapes, size)


def _show(donor: RecipeDonor, result: Estimate) -> None:
    rows = [(x.space, x.kind, x.sizes, x.blocks, x.group) for x in result.lines]
    table(
        f"{donor.title}: {result.family}, {result.parameters:,} weights",
        ("space", "kind", "size", "where", "group"),
        rows,
    )
    if donor.origin is not None:
        say(f"{donor.origin} is matched to {donor.anchor}; that map carries {donor.name} minus {donor.origin} over.")
    if donor.file is not None:
        say(f"Nothing is matched: the transforms are those of {donor.file}.")
    for warning in result.warnings:
        say(f"Warning: {warning}", "yellow")
    share = result.matched / result.parameters if result.parameters else 0.0
    say(f"Matched: {share:.0%} of the weights. Unaligned:")
    for reason in result.unaligned:
        say(f"- {reason}")
    say(
        f"Estimate for one donor: {seconds_text(result.near_seconds)} between near fine-tunes, "
        f"{seconds_text(result.seconds)} between others, {bytes_text(result.memory)} of memory, "
        f"{bytes_text(result.disk)} on disk"
    )
