"""`rotation-merge carry`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import rotation_merge as rm
from rotation_merge.carrying.config import TransferConfig
from rotation_merge.cli.command import Device, Model, ShardSize, Storage, cli_command, flags_used, refuse_idle
from rotation_merge.cli.paths import INPUT_FILE, MODEL, NEW_MODEL
from rotation_merge.cli.show import Answer
from rotation_merge.matching.options import WEIGHTS, AlignConfig, MatchConfig

WIDEST = TransferConfig().match


@cli_command("rotation-merge carry ./my-lora --from org/base-1 --to org/base-2 ./my-lora-2 --heads permutation")
def command(
    work: Model,
    out: Annotated[str, NEW_MODEL],
    *,
    from_: Annotated[str, MODEL, "OLD_BASE", "base that WORK was trained on"],
    to: Annotated[str, MODEL, "NEW_BASE", "base that OUT is for"],
    alignment: Annotated[str | None, INPUT_FILE, "alignment file to apply instead of matching"] = None,
    config: Annotated[TransferConfig, ("method", "scale", "steps", "data", "samples", "seed", "rank", "match_on")],
    shard_size: ShardSize = "5B",
    dtype: Storage = None,
    device: Device = "cpu",
    match: AlignConfig = WIDEST,
    opening: Annotated[MatchConfig, ("untie",)],
    force: bool,
) -> Answer:
    """Move a LoRA adapter or fine-tune WORK from OLD_BASE to NEW_BASE; only --carry distil trains.

    WORK is a LoRA in peft's format, which keeps its rank, or a fine-tuned model. OUT is the same for NEW_BASE. If
    NEW_BASE is OLD_BASE in other coordinates, the moved change has exactly the same effect. If the bases share their
    coordinates, the change is added as it is, unless options of matching or --data are given. --force also moves an
    adapter whose base is not OLD_BASE. Interrupted matching continues from OUT.matching.unfinished.
    """
    config = replace(config, alignment=alignment, match=match, untie=opening.untie)
    if flags_used("steps") and not flags_used("method"):
        config = replace(config, method="distil")
    by_weights, without = config.matched_on == WEIGHTS, not config.needs_samples
    refuse_idle(
        (without and by_weights, ("data", "samples"), "{} has no effect with --carry weights", "add --scale auto"),
        (alignment is not None, [*vars(match), "match_on"], "{} has no effect beside --alignment", "leave it out"),
    )
    written: dict[str, Any] = {"out": out, "dtype": dtype, "max_shard_size": shard_size, "force": force}
    report: Any = rm.transfer(work, from_, to, config, device=device, **written).report
    facts = {"work": work, "out": out, "lines": report.notes, "lift": report.lift}
    return Answer({"from": from_, "to": to, "written": [facts]}, [*report.notes, f"Written to {out}."])
