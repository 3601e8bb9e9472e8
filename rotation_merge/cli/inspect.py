"""`rotation-merge inspect`."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

import click

from rotation_merge.cli.options import match_options, matching_options
from rotation_merge.cli.show import bytes_text, json_option, print_json, say, seconds_text, shown, table
from rotation_merge.matching.options import MatchOptions
from rotation_merge.report.estimate import Estimate, estimate

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
    if os.path.isfile(model_or_recipe):
        from rotation_merge.plugin.checking import donors_of

        given = donors_of(model_or_recipe)
    else:
        given = [(model_or_recipe, model_or_recipe, options, untie)]
    found = [(donor, chosen, _estimate(anchor, chosen, is_untied)) for anchor, donor, chosen, is_untied in given]
    if as_json:
        print_json([{"model": name, "options": asdict(chosen), **asdict(result)} for name, chosen, result in found])
        return 0
    for name, _, result in found:
        _show(name, result)
    if len(found) > 1:
        total = sum(result.seconds for _, _, result in found)
        most = max(result.memory for _, _, result in found)
        say(f"All {len(found)} donors: {seconds_text(total)}, {bytes_text(most)} of memory")
    return 0


def _estimate(path: str, options: MatchOptions, untie: bool) -> Estimate:
    from rotation_merge.plugin.aligning import open_pair

    pair = open_pair(path, path, untie)
    dtype = str(pair.anchor.config.get("dtype") or pair.anchor.config.get("torch_dtype") or "float32")
    size = ITEMSIZE.get(dtype.removeprefix("torch."), 4)
    if options.residual != "none":
        from rotation_merge.matching.stream import check_group

        check_group(pair.architecture, options.residual)
    return estimate(pair.architecture, pair.anchor.shapes, options, size, size)


def _show(name: str, result: Estimate) -> None:
    rows = [(x.space, x.kind, x.sizes, x.blocks, x.group) for x in result.lines]
    table(f"{name}: {result.family}, {result.parameters:,} weights", ("space", "kind", "size", "where", "group"), rows)
    share = result.matched / result.parameters if result.parameters else 0.0
    say(f"Matched: {share:.0%} of the weights. Unaligned:")
    for reason in result.unaligned:
        say(f"- {reason}")
    say(
        f"Estimate for one donor: {seconds_text(result.seconds)}, {bytes_text(result.memory)} of memory, "
        f"{bytes_text(result.disk)} on disk"
    )
