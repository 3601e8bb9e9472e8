"""`rotation-merge inspect`."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click

from rotation_merge.architectures import resolve
from rotation_merge.checkpoints.glance import glance_all
from rotation_merge.cli.check import read
from rotation_merge.cli.options import match_options, matching_options
from rotation_merge.cli.show import bytes_text, json_option, print_json, say, seconds_text, shown, table
from rotation_merge.errors import RecipeError, RotationMergeError
from rotation_merge.matching.member import Member
from rotation_merge.matching.options import NOTHING, MatchOptions
from rotation_merge.matching.pair import check_pair
from rotation_merge.recipe.document import documents
from rotation_merge.recipe.donor import RecipeDonor
from rotation_merge.recipe.plainly import plain_donors
from rotation_merge.report.estimate import Estimate, carried, estimate

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
    options = match_options(values)
    found = []
    for donor in _donors(model_or_recipe, options, untie, as_json):
        found.append((donor, _estimate(donor)))
        if not as_json:
            _show(*found[-1])
    if as_json:
        facts = [
            {"model": d.name, "origin": d.origin, "alignment": d.file, "options": asdict(d.options)} for d, _ in found
        ]
        print_json([{**fact, **asdict(result)} for fact, (_, result) in zip(facts, found, strict=True)])
        return 0
    if len(found) > 1:
        total = sum(result.seconds for _, result in found)
        most = max(result.memory for _, result in found)
        say(f"All {len(found)} donors: {seconds_text(total)}, {bytes_text(most)} of memory")
    return 0


def _donors(given: str, options: MatchOptions, untie: bool, as_json: bool) -> list[RecipeDonor]:
    """The model as a donor of its own; of a recipe its donors, named as soon as the text is read."""
    if not os.path.isfile(given):
        return [RecipeDonor(given, given, options, untie)]
    text = read(Path(given))
    recipe = documents(text)[-1].value
    if not as_json and isinstance(recipe, dict):
        models = recipe.get("models")
        names = [str(m["model"]) for m in models if isinstance(m, dict) and "model" in m] if models is not None else []
        say(f"Donors of {given}: {', '.join(n for n in names if n != str(recipe.get('base_model')))}")
    plain = plain_donors(text)
    if plain is not None:
        return plain
    from rotation_merge.checking import donors_of

    return donors_of(given)


@dataclass(frozen=True)
class _Look:
    """What is seen of a donor without its weights.

    Attributes:
        warnings: what makes a merge questionable.
        anchor: config, architecture as it is matched and shapes.
        options: of matching, as they were settled.
    """

    warnings: list[str]
    anchor: Member
    options: MatchOptions


def _estimate(donor: RecipeDonor) -> Estimate:
    """What matching a donor (or the model it was tuned from) to the anchor costs; its files are looked at, too."""
    if donor.unlike:
        what = f"is carried from {donor.origin}, which may have other shapes than {donor.anchor}: there is no estimate"
        raise RecipeError(what, where=donor.name, remedy="'rotation-merge check' says whether the recipe is fit to run")
    seen = _glance(donor) or _look(donor)
    dtype = str(seen.anchor.config.get("dtype") or seen.anchor.config.get("torch_dtype") or "float32")
    size = ITEMSIZE.get(dtype.removeprefix("torch."), 4)
    options, shapes = seen.options if donor.file is None else NOTHING, dict(seen.anchor.shapes)
    found = estimate(seen.anchor.architecture, shapes, options, size, size)
    found = replace(found, warnings=seen.warnings)
    return found if donor.origin is None else carried(found, shapes, size)


def _glance(donor: RecipeDonor) -> _Look | None:
    """Anchor and donor without mergekit; None where it is needed."""
    if donor.file is not None or donor.unsupported != "error" or donor.unlike:
        return None
    members = glance_all(list(dict.fromkeys((donor.anchor, donor.matched, donor.name))), donor.words)
    if members is None:
        return None
    anchor, matched, name = (members[one] for one in (donor.anchor, donor.matched, donor.name))
    try:
        checked = check_pair(anchor, matched, donor.options, untie=donor.untie, excluded=donor.excluded)
        if name is not matched:
            check_pair(matched, name, NOTHING, excluded=donor.excluded)
        if donor.untie:
            untied = resolve(anchor.config, list(anchor.shapes), donor.anchor, untie=True)
            anchor = replace(anchor, architecture=untied)
        options = check_pair(anchor, members[donor.anchor], donor.options, untie=donor.untie).options
    except RotationMergeError:  # which is explained in full there
        return None
    return _Look([*checked.warnings, *checked.notes()], anchor, options)


def _look(donor: RecipeDonor) -> _Look:
    """Anchor and donor as a merge opens them."""
    from rotation_merge.checkpoints.pair import check_models, open_pair

    options, known = donor.options, donor.unsupported
    checked = check_models(
        donor.anchor, donor.matched, options, donor.untie, donor.excluded, donor.words, unsupported=known
    )
    if donor.matched != donor.name:
        check_models(donor.matched, donor.name, NOTHING, excluded=donor.excluded, unsupported=known)
    pair = open_pair(donor.anchor, donor.anchor, options, donor.untie, unsupported=known)
    warnings = [*checked.warnings, *checked.notes()] if checked is not None else []
    return _Look(warnings, replace(pair.anchor.member, architecture=pair.architecture), pair.checked.options)


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
