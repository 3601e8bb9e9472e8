"""Work that need not be carried: its base and the new one share their coordinates."""

from __future__ import annotations

from collections.abc import Mapping

from rotation_merge.carrying.bases import Bases
from rotation_merge.model.adapters import Adapter, is_adapter
from rotation_merge.model.lora import parse
from rotation_merge.model.nearness import Nearness, nearness


def how_near(bases: Bases) -> Nearness:
    """How near two bases lie, by a few matrices; no cosines where their shapes differ."""
    return Nearness({}) if bases.frame is not None else nearness(bases.architecture, *bases.sources)


def usable_as_it_is(works: Mapping[str, str], bases: Bases) -> dict[str, list[str]] | None:
    """What to say of work that needs no carrying, by the directory it was to be written to; None: it has to be carried.

    Raises:
        RotationMergeError: work cannot be read, or is not of the old base.
    """
    near = how_near(bases)
    if not near.shared or bases.old.rows:
        return None
    if bases.rows is not None and any(_by_token(work, bases) for work in works.values()):
        return None
    old, new = bases.old.reference, bases.new.reference
    said = {}
    for out, work in works.items():
        where = f"{old} and {new} share their coordinates ({near.words})"
        if is_adapter(work):
            parsed = parse(Adapter(work), bases.old.config)
            said[out] = [f"{where}: {work} can be used on {new} as it is."]
            if parsed.saved:
                said[out].append(
                    f"The tensors that it holds whole ({len(parsed.saved)}) then stand for the new base's."
                )
        else:
            bases.tuned(work)  # opened, so that what is no fine-tune of the old base is refused
            recipe = f"merge_method: task_arithmetic, base_model: {new}, weight 1 for {work} and -1 for {old}"
            said[out] = [f"{where}: what {work} changed can be added to {new} as it is ({recipe})."]
        said[out].append("Nothing was written; --data FILE lets samples judge, --force carries it all the same.")
    return said


def _by_token(work: str, bases: Bases) -> bool:
    """Whether work changes rows of a vocabulary, which need not mean the same tokens at another base."""
    if not is_adapter(work):
        return True
    parsed = parse(Adapter(work), bases.old.config)
    spots = [*(entry.spot for entry in parsed.entries), *parsed.saved.values()]
    return any(spot.info.vocabulary_axis is not None for spot in spots)
