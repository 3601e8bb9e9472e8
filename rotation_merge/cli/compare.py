"""`rotation-merge compare`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from rotation_merge.cli.options import config_of, matching_options
from rotation_merge.cli.paths import MODEL
from rotation_merge.cli.show import Progress, json_option, print_json, say, shown, table
from rotation_merge.matching.options import AlignConfig


@click.command(epilog="Example: rotation-merge compare org/anchor org/donor --residual rotation")
@click.argument("anchor", type=MODEL)
@click.argument("donor", type=MODEL)
@matching_options
@click.option(
    "--by", type=click.Choice(["space", "layer"]), default="space", show_default=True, help="Rows of the table."
)
@json_option
@shown
def command(anchor: str, donor: str, untie: bool, by: str, as_json: bool, **values: Any) -> int:
    """Distances and angles between two models, before and after the best alignment; writes no model.

    Use it to see whether two models share their coordinates, and where they differ. Distances are relative to the
    anchor's norm. Angles are in degrees between tensors as vectors; 90 means unrelated.
    """
    from rotation_merge.matching.aligned_output import match_pair
    from rotation_merge.matching.pair import open_pair
    from rotation_merge.report.compare import APART, coordinates_verdict, gaps

    options = config_of(AlignConfig, values)
    pair = open_pair(anchor, donor, options, untie, watched=False)
    progress = Progress()
    alignment = match_pair(pair, progress)
    measured_gaps = list(gaps(pair.architecture, *pair.matched, alignment))
    progress.close()
    if as_json:
        facts = {
            "anchor": anchor,
            "donor": donor,
            "summary": coordinates_verdict(measured_gaps),
            "warnings": pair.warnings,
        }
        print_json({**facts, "gaps": [asdict(gap) for gap in measured_gaps]})
        return 0
    shown_gaps = [g for g in measured_gaps if g.kind in ("block", "model") or by == "space"]
    rows = [
        (
            g.block,
            g.space,
            f"{g.distance_before:.4g}",
            f"{g.distance_after:.4g}",
            f"{g.angle_before:.3g}",
            f"{g.angle_after:.3g}",
            ", ".join(f"{part} {value:.2g}" for part, value in g.from_identity.items()),
        )
        for g in shown_gaps
    ]
    summary = coordinates_verdict(measured_gaps)
    say(f"{summary[:1].upper()}{summary[1:]}.")
    if pair.options.residual == "none" and measured_gaps[-1].angle_before >= APART:
        say("The residual stream was not aligned: '--residual largest' aligns it, too.")
    headers = ("block", "space", "distance", "aligned", "angle", "aligned", "map: distance from the identity")
    table("", headers, rows, numbers=(2, 3, 4, 5))
    for warning in pair.warnings:
        say(f"Warning: {warning}", "yellow")
    for note in pair.notes:
        say(note)
    return 0
