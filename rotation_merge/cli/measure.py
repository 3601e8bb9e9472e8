"""`rotation-merge measure`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from rotation_merge.cli.options import config_of, config_options, data_option, device_option, usable_device
from rotation_merge.cli.paths import MODEL, STATISTICS, hold_outputs, writes
from rotation_merge.cli.show import Answer, Progress, say, shown
from rotation_merge.run.measure import MeasureConfig
from rotation_merge.run.sample_kinds import SAMPLES, SOURCES


@click.command(
    epilog="""Examples: rotation-merge measure org/tuned --data self;
    rotation-merge measure ./classifier --data train.jsonl --kinds gram,fisher --samples 500"""
)
@click.argument("model", type=MODEL)
@data_option("{}; self: text the model writes; synthetic: images made of noise.", required=True)
@click.option(
    "--out", type=STATISTICS, metavar="FILE", help="File to write; if not given, beside the model or in this directory."
)
@config_options(MeasureConfig)
@click.option(
    "--by-layer/--whole",
    default=None,
    help="Write text by one layer in memory at a time, or the whole model. Not given: by layer if it does not fit.",
)
@device_option("")
@shown
@writes
def command(model: str, data: str, out: str | None, by_layer: bool | None, device: str, **values: Any) -> Answer:
    """Write statistics of MODEL on samples, for the delegates regmean and fisher.

    Publish the file beside the model: recipes find it there. MODEL may be BASE+ADAPTER. You need no data with
    '--data self' (language models) or '--data synthetic' (image models). Grams are measured layer by
    layer from the model's files; an interrupted run continues after its last finished layer. Fisher diagonals are
    measured of the whole model in memory, at once. A model that does not
    fit writes its text by layer, too, and reads its files for every token of '--data self'.
    """
    from rotation_merge.model.open import open_model
    from rotation_merge.run.checks import check_labels
    from rotation_merge.run.data import read_samples
    from rotation_merge.run.measure import default_statistics_path, measured, model_for

    config = config_of(MeasureConfig, values)
    checkpoint = open_model(model)
    place = Path(out) if out is not None else default_statistics_path(checkpoint.reference)
    if out is None:
        click.get_current_context().with_resource(hold_outputs(STATISTICS.outputs(str(place))))
    device = usable_device(device)
    loaded = model_for(checkpoint, config, data, device, by_layer)
    limit = config.samples or (SAMPLES if data in SOURCES else None)
    data_set = read_samples(model, data, limit, config.batch_size, config.length, config.seed, loaded)
    if config.labels == "data":
        check_labels(data_set.batches, loaded, data_set.task, data)
    progress = Progress()
    summary = measured(checkpoint, loaded, data_set, config, place, progress, device).metadata
    progress.close()

    def show() -> None:
        count = f"{summary['samples']} samples ({summary['tokens']} tokens)"
        say(f"Statistics of {model} on {count} written to {place}.", "green")
        if narrow := summary["narrow"]:
            singular = f"{len(narrow)} Grams are singular (fewer rows than coordinates)"
            say(f"{singular}, the first is that of {narrow[0]}: use a ridge, or measure on more samples.")

    return Answer({"file": str(place), **summary}, show)
