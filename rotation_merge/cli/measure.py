"""`rotation-merge measure`."""

from __future__ import annotations

from typing import Annotated

import click

import rotation_merge as rm
from rotation_merge.cli.command import Device, Model, cli_command
from rotation_merge.cli.paths import SAMPLES, STATISTICS, checked_outputs
from rotation_merge.cli.show import Answer
from rotation_merge.run.config import MeasureConfig
from rotation_merge.run.sample_kinds import KINDS


@cli_command(
    "rotation-merge measure org/tuned --data self",
    "rotation-merge measure ./classifier --data train.jsonl --kinds gram,fisher --samples 500",
)
def command(
    model: Model,
    *,
    data: Annotated[str, SAMPLES, f"samples: {KINDS}; self: text the model writes; synthetic: images made of noise"],
    out: Annotated[str | None, STATISTICS, "file to write; if not given, beside the model or in this directory"] = None,
    config: MeasureConfig,
    by_layer: Annotated[
        bool | None,
        "--by-layer/--whole",
        "write text by one layer in memory at a time, or the whole model. Not given: by layer if it does not fit",
    ] = None,
    device: Device = "cpu",
    force: bool,
) -> Answer:
    """Write statistics of MODEL on samples, for the delegates regmean and fisher.

    Publish the file beside the model: recipes find it there. MODEL may be BASE+ADAPTER. You need no data with
    '--data self' (language models) or '--data synthetic' (image models). Grams are measured layer by layer from the
    model's files; an interrupted run continues after its last finished layer. Fisher diagonals are measured of the
    whole model in memory, at once. A model that does not fit writes its text by layer, too, and reads its files for
    every token of '--data self'.
    """
    from rotation_merge.model.open import parse_reference
    from rotation_merge.run.measure import default_statistics_path

    place = out or str(default_statistics_path(parse_reference(model)))
    if out is None:
        click.get_current_context().with_resource(checked_outputs(STATISTICS.outputs(place)))
    facts = rm.measure(model, data, config, out=place, by_layer=by_layer, device=device, force=force).metadata
    singular = f"{len(facts['narrow'])} Grams are singular (fewer rows than coordinates): use a ridge, or more samples"
    lines = (
        f"Statistics of {model} on {facts['samples']} samples ({facts['tokens']} tokens) written to {place}.",
        f"{singular}. The first is that of {facts['narrow'][0]}." if facts["narrow"] else "",
    )
    return Answer({"file": place, **facts}, lines)
