"""Splits an adapter's fused maps if its new base stores them separately."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from rotation_merge.architecture.model import Architecture
from rotation_merge.errors import CheckpointError
from rotation_merge.model.factors import stacks
from rotation_merge.model.lora import WHOLE, AdapterEntry, AdapterWeights, ParsedAdapter
from rotation_merge.model.sources import ComposedTensor, other_form


def separated_adapter(
    written: AdapterWeights, parsed: ParsedAdapter, stored: Architecture, label: str
) -> AdapterWeights:
    """Split an adapter's fused modules if its base stores their parts separately.

    These are queries, keys and values, or gates and values. Without fused modules the adapter is unchanged.

    Experts stay as they are: peft and transformers take them in either form.

    Args:
        written: carried to the new base.
        parsed: its changes.
        stored: of the new base.

    Raises:
        CheckpointError: it also holds whole modules.
    """
    forms = [_apart(entry, stored) for entry in parsed.entries]
    if not any(forms):
        return written
    if parsed.saved:
        problem = f"stores '{next(iter(parsed.saved))}' whole, and in one piece modules that the new base splits"
        raise CheckpointError(problem, where=label, remedy=WHOLE)
    tensors = dict(written.tensors)
    modules: list[str] = []
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for entry, apart in zip(parsed.entries, forms, strict=True):
        module_keys = [key for key in (entry.a, entry.b, entry.bias_key, entry.change.magnitude) if key in tensors]
        parts = {str(key): tensors.pop(str(key)) for key in module_keys}
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


def _apart(entry: AdapterEntry, stored: Architecture) -> ComposedTensor | None:
    """The tensors that the new base stores instead of the changed one; None if it stores the same one."""
    info = entry.spot.info
    if stacks(info):
        return None
    for block in stored.blocks:
        if entry.spot.in_block(block) and block.tensor(info.key) is None:
            form = other_form(block, replace(block, tensors=(*block.tensors, info))).get(info.key)
            return form if form is not None and len(form.cuts) > 1 else None
    return None


def _places(
    entry: AdapterEntry, form: ComposedTensor | None, stored: Architecture
) -> Iterator[tuple[str, int, int | None]]:
    """The new base's modules that an entry is for, with the outputs of it that are theirs: first and number."""
    info, start = entry.spot.info, 0
    for cut in form.cuts if form is not None else ():
        yield cut.info.name.removesuffix(".weight"), start, cut.length
        start += cut.length
    if form is None:
        blocks = [block for block in stored.blocks if entry.spot.in_block(block) and not stacks(info)]
        stored_name = next(
            (same.name for block in blocks if (same := block.tensor(info.key)) is not None), entry.module
        )
        yield stored_name.removesuffix(".weight"), 0, None
