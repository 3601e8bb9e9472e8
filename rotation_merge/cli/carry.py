"""`rotation-merge carry`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import click

from rotation_merge.carrying.config import TransferConfig
from rotation_merge.cli.options import (
    config_of,
    config_options,
    device_option,
    given,
    matching_options,
    storage_options,
    usable_device,
)
from rotation_merge.cli.paths import ALIGNMENT, MODEL, NEW_MODEL, SAMPLE_SOURCE, writes
from rotation_merge.cli.show import Answer, Progress, say, shown
from rotation_merge.errors import RotationMergeError
from rotation_merge.matching.options import WEIGHTS, AlignConfig


@click.command(
    epilog="Example: rotation-merge carry ./my-lora --from org/base-1 --to org/base-2 ./my-lora-2 --heads permutation"
)
@click.argument("work", type=MODEL)
@click.argument("out", type=NEW_MODEL)
@click.option("--from", "old", type=MODEL, required=True, metavar="OLD_BASE", help="Base that WORK was trained on.")
@click.option("--to", "new", type=MODEL, required=True, metavar="NEW_BASE", help="Base that OUT is for.")
@click.option("--alignment", type=ALIGNMENT, metavar="FILE", help="Alignment file to apply instead of matching.")
@config_options(
    TransferConfig,
    *("method", "steps", "data", "samples", "seed", "scale", "rank"),
    "match_on",
    types={"data": SAMPLE_SOURCE},
)
@storage_options("the new base's")
@device_option(" to compute on")
@partial(matching_options, defaults=TransferConfig().match)
@shown
@writes
@click.pass_context
def command(
    context: click.Context, work: str, out: str, old: str, new: str, device: str, untie: bool, **values: Any
) -> Answer:
    """Move a LoRA adapter or fine-tune WORK from OLD_BASE to NEW_BASE; only --carry distil trains.

    WORK is a LoRA in peft's format, which keeps its rank, or a fine-tuned model. OUT is the same for NEW_BASE. If
    NEW_BASE is OLD_BASE in other coordinates, the moved change has exactly the same effect. If the bases share their
    coordinates, the change is added as it is, unless options of matching or --data are given. --force also moves an
    adapter whose base is not OLD_BASE. Interrupted matching continues from OUT.matching.unfinished.
    """
    from rotation_merge.carrying.transfer import carry
    from rotation_merge.model.open import open_model
    from rotation_merge.model.run_keys import mark_of
    from rotation_merge.model.writing import parse_size
    from rotation_merge.run.ledger import kept_beside

    size, device, progress = parse_size(values["shard_size"]), usable_device(device), Progress()
    match = config_of(AlignConfig, values)
    config = config_of(TransferConfig, values, alignment=values.pop("alignment"), match=match, untie=untie)
    if given(context, "steps") and not given(context, "method"):
        config = replace(config, method="distil")
    _check_use(context, config)
    samples = [config.matched_on, config.data, str(config.sample_count), str(config.seed)]
    on = [] if config.matched_on == WEIGHTS else samples

    def mark() -> str:
        shapes = {"lora": config.rank, "untie": untie}
        return mark_of(map(open_model, (new, old)), [*on, work], on=on, options=match, **shapes)

    with kept_beside(out, mark, device) as ledger:
        settings = {"device": device, "dtype": values["dtype"], "force": bool(context.params["force"])}
        report = carry(work, old, new, out, config, size, progress, ledger=ledger, **settings)
    progress.close()
    written = {"work": work, "out": out, "lines": report.notes, "lift": report.lift}
    return Answer({"from": old, "to": new, "written": [written]}, lambda: _show(report.notes, out))


def _show(notes: list[str], out: str) -> None:
    for line in notes:
        say(line)
    say(f"Written to {out}.", "green")


def _check_use(context: click.Context, config: TransferConfig) -> None:
    """Refuse options that would do nothing."""
    config.check_use()
    if given(context, "data", "samples") and not config.needs_samples and config.matched_on == WEIGHTS:
        raise RotationMergeError("--carry weights uses no samples", remedy="add --scale auto, or --carry refit")
    if config.alignment is not None and (flags := given(context, "match_on", *AlignConfig.options())):
        raise RotationMergeError("--alignment already gives the maps", remedy=f"leave out {flags[0]}")
