"""Modules of one base that several adapters name differently, by what stands before their names."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence

from rotation_merge.errors import CheckpointError, RotationMergeError
from rotation_merge.model.adapters import PEFT, Adapter, Change
from rotation_merge.model.open import open_model

COMPILED = "_orig_mod"
"""What torch.compile puts into names."""

WRAPPERS = frozenset({"backbone", "base_model", "language_model", "model", "module", "text_model", "transformer"})
"""First parts of names that say in which class a model stood, not which part of it a module is."""

PARTS = ("audio", "code", "image", "speech", "text", "vision", "visual")
"""Beginnings of the names of parts of one model whose modules may end alike; so may `encoder` and `decoder`."""


def by_module(adapters: Sequence[Adapter]) -> list[Mapping[str, Change]]:
    """The changes of each adapter by module, under one name where names differ in `WRAPPERS` alone.

    It is the base's, where the base is a folder; else that of the first adapter that has it without `COMPILED`.

    Raises:
        CheckpointError: names of two adapters end alike, and it cannot be told whether they are of one module.
    """
    plain = [{change.module: change for change in adapter.changes.values()} for adapter in adapters]
    if any(adapter.form != PEFT for adapter in adapters):
        return [*plain]
    names: dict[str, list[str]] = {}
    for module in (module for changes in plain for module in changes):
        names.setdefault(_stem(module), []).append(module)
    differing = {stem for stem, alike in names.items() if len({*alike}) > 1 or COMPILED in alike[0].split(".")}
    base = _base_names(adapters[0]) if differing else {}
    chosen = {stem: base.get(stem) or min(alike, key=lambda name: COMPILED in name) for stem, alike in names.items()}
    for adapter, changes in zip(adapters, plain, strict=True):
        stems = Counter(map(_stem, changes))
        for module in changes:
            twice = (stem := _stem(module)) in differing and stems[stem] > 1
            end = next((end for end in _ends(stem) if end in names and end not in stems), stem if twice else None)
            if end is not None:
                problem = f"names '{module}', which may be '{next(name for name in names[end] if name != module)}'"
                raise CheckpointError(problem, where=adapter.path, remedy="name one module alike in all adapters")
    return [
        {chosen[stem] if (stem := _stem(module)) in differing else module: change for module, change in changes.items()}
        for changes in plain
    ]


def _ends(stem: str) -> list[str]:
    """Ends of a stem behind words that are no parts of models."""
    words = stem.split(".")
    count = next((i for i, word in enumerate(words) if word.startswith((*PARTS, "encoder", "decoder"))), len(words))
    return [".".join(words[i:]) for i in range(1, count)] if count else []


def _base_names(adapter: Adapter) -> dict[str, str]:
    """Modules of the class of an adapter's base by stem, where the base is a folder; none whose stems are alike."""
    if not adapter.base or not os.path.isdir(adapter.base):
        return {}
    try:
        modules = [name for name, _ in open_model(adapter.base).module_without_weights().named_modules()]
    except RotationMergeError:
        return {}
    stems = [_stem(module) for module in modules]
    counts = Counter(stems)
    return {stem: module for stem, module in zip(stems, modules, strict=True) if counts[stem] == 1}


def _stem(module: str) -> str:
    """A module's name without what stands before it in a class or what torch.compile adds."""
    parts = [part for part in module.split(".") if part != COMPILED]
    while len(parts) > 1 and parts[0] in WRAPPERS:
        parts = parts[1:]
    return ".".join(parts)
