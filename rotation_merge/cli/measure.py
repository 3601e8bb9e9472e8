"""`rotation-merge measure`."""

from __future__ import annotations

from pathlib import Path

import click

from rotation_merge.cli.options import device_option, devices, ray_option, writes
from rotation_merge.cli.show import Progress, json_option, print_json, say, shown
from rotation_merge.errors import RotationMergeError, nearest
from rotation_merge.samples.data import KINDS, SAMPLES
from rotation_merge.samples.written import SOURCES

WORDS = ("gram", "fisher", "moments", "kfac")


@click.command(
    epilog="""Examples: rotation-merge measure org/tuned --data self;
    rotation-merge measure ./classifier --data train.jsonl --kinds gram,fisher --samples 500"""
)
@click.argument("model")
@click.option("--data", required=True, help=f"{KINDS}; self: text the model writes; synthetic: images made of noise.")
@click.option("--kinds", default="gram", show_default=True, help=f"What to measure, of {', '.join(WORDS)}.")
@click.option("--out", metavar="FILE", help="Where to write; beside the model if not given, else here.")
@click.option(
    "--samples", type=click.IntRange(min=1), help=f"Use at most so many; of self and synthetic {SAMPLES} if not given."
)
@click.option("--seed", default=0, show_default=True, help="Of samples that are made and of labels that are drawn.")
@click.option("--rank", type=click.IntRange(min=1), help="Keep Grams of neurons as a diagonal plus this rank.")
@click.option(
    "--labels",
    type=click.Choice(["sampled", "data"]),
    default="sampled",
    show_default=True,
    help="Whose labels gradients are of: the model's own (exact for classifiers), or the data's.",
)
@click.option("--batch-size", default=16, show_default=True, type=click.IntRange(min=1))
@click.option("--length", default=128, show_default=True, type=click.IntRange(min=2), help="Tokens in a text window.")
@click.option(
    "--by-layer/--whole",
    default=None,
    help="One layer in memory at a time, or the whole model; by layer where it does not fit, if not given.",
)
@device_option("")
@ray_option
@json_option
@shown
@writes(files="out")
def command(
    model: str,
    data: str,
    kinds: str,
    out: str | None,
    samples: int | None,
    seed: int,
    rank: int | None,
    labels: str,
    batch_size: int,
    length: int,
    by_layer: bool | None,
    device: str,
    ray: str | None,
    as_json: bool,
) -> int:
    """Write the statistics of MODEL on samples, which the delegates regmean, fisher and kfac average by.

    Publish the file beside the model: recipes find it there. MODEL may be BASE+ADAPTER. No data are needed with
    '--data self' (language models) and '--data synthetic' (image models). An interrupted run goes on where it was.
    A model that does not fit in memory is run layer by layer from its files, which are read once for gram and moments,
    and again for every batch where gradients are asked for and for every token of '--data self'.
    """
    from rotation_merge.averaging.layers import in_layers
    from rotation_merge.averaging.measure import MeasureOptions
    from rotation_merge.averaging.passes import fits
    from rotation_merge.averaging.record import checkpoint_of, place_beside, record
    from rotation_merge.samples.checked import check_labels
    from rotation_merge.samples.data import read_batches
    from rotation_merge.samples.functions import load
    from rotation_merge.spread.cluster import spread

    options = MeasureOptions(_kinds(kinds), rank, labels, seed)
    checkpoint = checkpoint_of(model)
    place = Path(out) if out is not None else place_beside(checkpoint.reference)
    used, there = devices(device, ray)
    apart = not fits(checkpoint.shapes, used) if by_layer is None else by_layer
    loaded, runs = (
        in_layers(checkpoint, options, data, used, ray is not None) if apart else (load(model).to(used), True)
    )
    limit = samples or (SAMPLES if data in SOURCES else None)
    found = read_batches(data, model, loaded, limit, batch_size, length, seed)
    if labels == "data":
        check_labels(found.batches, loaded, found.task, data)
    progress = Progress()
    with spread(ray, there) as over:
        made = record(checkpoint, loaded if runs else None, found, data, options, place, progress, used, over, apart)
    progress.close()
    if as_json:
        print_json({"file": str(place), **made})
        return 0
    say(f"Statistics of {model} on {made['samples']} samples ({made['tokens']} tokens) written to {place}.", "green")
    if made["narrow"]:
        say(
            f"{len(made['narrow'])} Grams have fewer rows than coordinates and are singular by themselves, the first "
            f"is that of {made['narrow'][0]}: average with a ridge, or measure on more samples."
        )
    return 0


def _kinds(text: str) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    for word in found:
        if word not in WORDS:
            raise RotationMergeError(f"there is no kind of statistics '{word}'", remedy=nearest(word, WORDS))
    if not found:
        raise RotationMergeError("no kind of statistics is named", remedy=f"--kinds takes {', '.join(WORDS)}")
    return found
