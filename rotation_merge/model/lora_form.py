"""An adapter in the form that its new base has: what it changes in one piece, and its base holds apart, taken apart."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from rotation_merge.architecture.model import Architecture
from rotation_merge.errors import CheckpointError
from rotation_merge.model.factors import stacks
from rotation_merge.model.lora import WHOLE, AdapterWeights, Entry, Parsed
from rotation_merge.model.sources import Made, other_form


def taken_apart(written: AdapterWeights, parsed: Parsed, stored: Architecture, where: str) -> AdapterWeights:
    """The adapter with what its base holds apart (queries, keys and values; gates and values) taken apart, its modules
    by the names that they have there; as it is, where there is nothing of the kind.

    Experts stay as they are: peft and transformers take them in either form.

    Args:
        written: carried to the new base.
        parsed: what it changes.
        stored: of the new base.

    Raises:
        CheckpointError: it also holds whole modules.
    """
    made = [_apart(entry, stored) for entry in parsed.entries]
    if not any(made):
        return written
    if parsed.saved:
        what = f"stores '{next(iter(parsed.saved))}' whole, and in one piece modules that the new base splits"
        raise CheckpointError(what, where=where, remedy=WHOLE)
    tensors = dict(written.tensors)
    modules: list[str] = []
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for entry, apart in zip(parsed.entries, made, strict=True):
        held = [key for key in (entry.a, entry.b, entry.bias_key, entry.change.magnitude) if key in tensors]
        parts = {str(key): tensors.pop(str(key)) for key in held}
        rank = parts[entry.a].shape[0]
        for module, start, length in _places(entry, apart, stored):
            for key, tensor in parts.items():
                cut = tensor if length is None or key == entry.a else tensor.narrow(0, start, length)
                tensors[key.replace(entry.module, module, 1)] = cut.clone()
            modules.append(module)
            ranks[re.escape(module)] = rank
            alphas[re.escape(module)] = entry.scale * (rank**0.5 if written.config.get("use_rslora") else rank)
    targets = {"target_modules": modules, "rank_pattern": ranks, "alpha_pattern": alphas}
    return AdapterWeights({**written.config, **targets}, tensors)


def _apart(entry: Entry, stored: Architecture) -> Made | None:
    """The tensors that the new base has instead of the one that is changed; None where it has that one."""
    info = entry.spot.info
    if stacks(info):
        return None
    for block in stored.blocks:
        if entry.spot.in_block(block) and block.tensor(info.key) is None:
            found = other_form(block, replace(block, tensors=(*block.tensors, info))).get(info.key)
            return found if found is not None and len(found.cuts) > 1 else None
    return None


def _places(entry: Entry, made: Made | None, stored: Architecture) -> Iterator[tuple[str, int, int | None]]:
    """The new base's modules that an entry is for, with the outputs of it that are theirs: first and number."""
    info, start = entry.spot.info, 0
    for cut in made.cuts if made is not None else ():
        yield cut.info.name.removesuffix(".weight"), start, cut.length
        start += cut.length
    if made is None:
        blocks = [block for block in stored.blocks if entry.spot.in_block(block) and not stacks(info)]
        own = next((found.name for block in blocks if (found := block.tensor(info.key)) is not None), entry.module)
        yield own.removesuffix(".weight"), 0, None
