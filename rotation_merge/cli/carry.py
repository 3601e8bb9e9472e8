"""`rotation-merge carry`."""

from __future__ import annotations

import math
import os
from dataclasses import asdict, replace
from typing import Any

import click
from click.core import ParameterSource

from rotation_merge.cli.options import (
    device_option,
    match_on_option,
    match_options,
    matcher,
    matching_options,
    usable_device,
)
from rotation_merge.cli.paths import ALIGNMENT, MODEL, NEW_MODEL, SAMPLE_SOURCE, WORD, inputs_of, writes
from rotation_merge.cli.show import Progress, json_option, print_json, say, shown
from rotation_merge.errors import RotationMergeError
from rotation_merge.files.outputs import FOLDER, Output, check_outputs
from rotation_merge.matching.options import WEIGHTS


@click.command(
    epilog="Example: rotation-merge carry ./my-lora --from org/base-1 --to org/base-2 ./my-lora-2 --heads permutation"
)
@click.argument("work", type=MODEL, nargs=-1, required=True)
@click.argument("out", type=NEW_MODEL)
@click.option("--from", "old", type=MODEL, required=True, metavar="OLD_BASE", help="The base that it was trained on.")
@click.option("--to", "new", type=MODEL, required=True, metavar="NEW_BASE", help="The base that it is to work on.")
@click.option(
    "--alignment", "alignment_file", type=ALIGNMENT, metavar="FILE", help="Apply this file's maps instead of matching."
)
@click.option(
    "--carry",
    "way",
    type=click.Choice(["weights", "activations", "refit", "distil"]),
    default="weights",
    show_default=True,
    help="weights: move the change; activations: and move it on at every map's inputs, by samples; refit: solve the "
    "new base's maps to make it, on samples; distil: train on from it.",
)
@click.option("--steps", type=click.IntRange(min=1), help="Of distil, which they choose; 50 if not given.")
@click.option(
    "--data",
    type=SAMPLE_SOURCE,
    default="self",
    show_default=True,
    help="Samples; self: text that WORK writes.",
)
@click.option("--samples", default=64, show_default=True, type=click.IntRange(min=32), help="How many.")
@click.option("--seed", default=0, show_default=True)
@click.option(
    "--scale",
    type=WORD,
    default="",
    help="Of the change: a number; auto: by samples held out, for weights in each block.",
)
@click.option(
    "--lora",
    default=0,
    metavar="RANK",
    type=click.IntRange(min=0),
    help="Write a whole fine-tune's change as an adapter; 0: as a model.",
)
@click.option("--widths", is_flag=True, help="OLD_BASE may be wider or narrower, with more or fewer heads and neurons.")
@click.option(
    "--layers-map",
    "layers_map",
    type=WORD,
    default="",
    metavar="OLD:NEW,...",
    help="OLD_BASE may be deeper or shallower: which layers meet (0-3:0-3,4:6), or auto: by similarity.",
)
@click.option(
    "--shard-size", type=WORD, default="5B", show_default=True, help="Largest weight file of a model, e.g. 500M."
)
@click.option("--dtype", type=WORD, help="Storage of a carried model; the new base's if not given.")
@device_option(" to compute on")
@matching_options
@match_on_option
@json_option
@shown
@writes
@click.pass_context
def command(
    context: click.Context,
    work: tuple[str, ...],
    out: str,
    old: str,
    new: str,
    alignment_file: str | None,
    way: str,
    steps: int | None,
    data: str,
    samples: int,
    seed: int,
    scale: str,
    lora: int,
    widths: bool,
    layers_map: str,
    shard_size: str,
    dtype: str | None,
    device: str,
    untie: bool,
    as_json: bool,
    match_on: str,
    **values: Any,
) -> int:
    """Carry adapters or fine-tunes WORK of OLD_BASE to NEW_BASE; nothing is trained but with --carry distil.

    WORK is a LoRA as peft writes it, which stays one of the same rank, or a fine-tuned model. OUT is the same thing for
    NEW_BASE; with several, a directory with one for each. Where NEW_BASE is OLD_BASE in other coordinates, it computes
    there what it computed at home. Where the two share their coordinates (by a few of their matrices), WORK can be used
    on NEW_BASE as it is: that is said, and nothing is written, unless --data lets samples judge or --force asks.
    --force also carries an adapter whose base is not OLD_BASE. Without --residual the largest group that the models
    admit is matched. Matching that was interrupted after minutes goes on from what it had found
    (OUT.matching.unfinished).
    """
    from rotation_merge.carrying.by_weights import Settings, carry_all, check_places
    from rotation_merge.carrying.unlike import Unlike
    from rotation_merge.files.ledger import kept_beside
    from rotation_merge.model.checkpoint import open_model
    from rotation_merge.model.stamps import mark_of
    from rotation_merge.model.writing import Storage, check_dtype, parse_size

    places = [out] if len(work) == 1 else [os.path.join(out, os.path.basename(os.path.abspath(w))) for w in work]
    if len(work) > 1:
        check_outputs([Output(place, "OUT", FOLDER) for place in places], inputs_of(context))
    named = context.get_parameter_source("residual") is not ParameterSource.DEFAULT
    check_dtype(dtype)
    storage = Storage(parse_size(shard_size), dtype, untie)
    device = usable_device(device)
    options = match_options(values)
    options = options if named else replace(options, residual="largest")
    if steps is not None and context.get_parameter_source("way") is ParameterSource.DEFAULT:
        way = "distil"
    if steps is not None and way != "distil":
        raise RotationMergeError(f"--carry {way} takes no steps", remedy="add --carry distil, or leave --steps out")
    factor = _factor(scale, way)
    given = {
        n for n in ("data", "samples", "match_on") if context.get_parameter_source(n) is not ParameterSource.DEFAULT
    }
    if way == "activations" and "match_on" not in given:
        match_on = "both"
    if given & {"data", "samples"} and way == "weights" and factor is not None and match_on == WEIGHTS:
        raise RotationMergeError("weights are carried without samples", remedy="add --scale auto, or --carry refit")
    if alignment_file and "match_on" in given:
        raise RotationMergeError("the file under --alignment says the maps", remedy="leave out --match-on")
    unlike, find = Unlike(widths, layers_map), matcher(match_on, new, old, data, samples, seed, device)
    scaled = 1.0 if factor is None else factor
    progress = Progress()
    check_places(work, places)
    jobs = dict(zip(places, work, strict=True))
    on = [] if match_on == WEIGHTS else [match_on, data, str(samples), str(seed)]
    shapes = {"lora": lora, "untie": untie, "widths": widths, "layers": layers_map}

    def mark() -> str:
        return mark_of(map(open_model, (new, old)), [*on, *work], on=on, options=options, **shapes)

    force = bool(context.params["force"])
    always = force or "data" in given
    with kept_beside(out, mark, device) as ledger:
        how = (options, alignment_file, scaled, device, lora, storage, unlike, find, ledger)
        settings = Settings(*how, force=force, even_if_near=always)
        if factor is None or way != "weights":
            from rotation_merge.carrying.by_samples import Samples, carry_with_samples

            run = Samples(data, samples, seed=seed, scale=factor, steps=steps or 50, way=way)
            done = carry_with_samples(jobs, old, new, settings, run, progress)
        else:
            done = carry_all(jobs, old, new, settings, progress)
    progress.close()
    if as_json:
        written, unmoved = ([asdict(item) for item in done if (item.out is None) is near] for near in (False, True))
        print_json({"from": old, "to": new, "written": written, "usable_as_they_are": unmoved})
        return 0
    for item in done:
        for line in item.lines:
            say(line)
        if item.out is not None:
            say(f"Written to {item.out}.", "green")
    return 0


def _factor(text: str, way: str) -> float | None:
    """What the change is multiplied by; None: what samples say.

    Raises:
        RotationMergeError: it is no number.
    """
    if text in ("", "auto"):
        return 1.0 if text == "" and way == "weights" else None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise RotationMergeError(f"--scale is '{text}'", remedy="write a number, or auto")
    return number
