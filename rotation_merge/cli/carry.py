"""`rotation-merge carry`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from rotation_merge.carrying.config import TransferConfig
from rotation_merge.carrying.transfer import carry
from rotation_merge.cli.command import (
    Device,
    Model,
    ShardSize,
    Storage,
    cli_command,
    flags_used,
    refuse_idle,
    usable_device,
)
from rotation_merge.cli.paths import ALIGNMENT, MODEL, NEW_MODEL
from rotation_merge.cli.show import Answer, Progress
from rotation_merge.matching.options import WEIGHTS, AlignConfig, MatchConfig
from rotation_merge.model.checkpoint import mark_of
from rotation_merge.model.open import open_model
from rotation_merge.model.writing import parse_size
from rotation_merge.run.ledger import kept_beside

WIDEST = TransferConfig().match


@cli_command("rotation-merge carry ./my-lora --from org/base-1 --to org/base-2 ./my-lora-2 --heads permutation")
def command(
    work: Model,
    out: Annotated[str, NEW_MODEL],
    *,
    from_: Annotated[str, MODEL, "OLD_BASE", "base that WORK was trained on"],
    to: Annotated[str, MODEL, "NEW_BASE", "base that OUT is for"],
    alignment: Annotated[str | None, ALIGNMENT, "alignment file to apply instead of matching"] = None,
    config: Annotated[TransferConfig, ("method", "scale", "steps", "data", "samples", "seed", "rank", "match_on")],
    shard_size: ShardSize = "5B",
    dtype: Storage = None,
    device: Device = "cpu",
    match: AlignConfig = WIDEST,
    opening: Annotated[MatchConfig, ("untie",)],
    force: bool,
    progress: Progress,
) -> Answer:
    """Move a LoRA adapter or fine-tune WORK from OLD_BASE to NEW_BASE; only --carry distil trains.

    WORK is a LoRA in peft's format, which keeps its rank, or a fine-tuned model. OUT is the same for NEW_BASE. If
    NEW_BASE is OLD_BASE in other coordinates, the moved change has exactly the same effect. If the bases share their
    coordinates, the change is added as it is, unless options of matching or --data are given. --force also moves an
    adapter whose base is not OLD_BASE. Interrupted matching continues from OUT.matching.unfinished.
    """
    size, device = parse_size(shard_size), usable_device(device)
    config = replace(config, alignment=alignment, match=match, untie=opening.untie)
    if flags_used("steps") and not flags_used("method"):
        config = replace(config, method="distil")
    config.check_use()
    by_weights, without = config.matched_on == WEIGHTS, not config.needs_samples
    matching = (*AlignConfig.options(), "match_on")
    refuse_idle(
        (without and by_weights, ("data", "samples"), "{} has no effect with --carry weights", "add --scale auto"),
        (alignment is not None, matching, "{} has no effect beside --alignment", "leave it out"),
    )

    def mark() -> str:
        on = [] if by_weights else [config.matched_on, config.data, str(config.sample_count), str(config.seed)]
        shapes = {"lora": config.rank, "untie": config.untie}
        return mark_of(map(open_model, (to, from_)), [*on, work], on=on, options=match, **shapes)

    with kept_beside(out, mark, device) as ledger:
        settings = {"device": device, "dtype": dtype, "force": force, "ledger": ledger}
        report = carry(work, from_, to, out, config, size, progress, **settings)
    written = {"work": work, "out": out, "lines": report.notes, "lift": report.lift}
    return Answer({"from": from_, "to": to, "written": [written]}, [*report.notes, f"Written to {out}."])
