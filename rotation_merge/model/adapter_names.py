"""Modules of one base that several adapters name differently, by what stands before their names."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mergekit.common import ModelPath

from rotation_merge.architecture.registry import every_name, families
from rotation_merge.errors import CheckpointError, RotationMergeError
from rotation_merge.model.adapters import PEFT, Adapter, Change
from rotation_merge.model.folder import place_of
from rotation_merge.model.open import open_model
from rotation_merge.model.view import View

COMPILED = "_orig_mod"
"""What torch.compile puts into names."""

WRAPPERS = frozenset({"backbone", "base_model", "language_model", "model", "module", "text_model", "transformer"})
"""First parts of names that say in which class a model stood, not which part of it a module is."""

PARTS = ("audio", "code", "image", "speech", "text", "vision", "visual")
"""Beginnings of the names of parts of one model whose modules may end alike; so may `encoder` and `decoder`."""


def by_module(adapters: Sequence[Adapter]) -> tuple[list[Mapping[str, Change]], list[str]]:
    """The changes of each adapter by module, under one name where names differ in `WRAPPERS` alone.

    It is the base's, where the base is on this machine; else that of the first adapter that has it without `COMPILED`.

    Returns:
        The changes, and a line where adapters differ and the base does not say which name is right.

    Raises:
        CheckpointError: names of two adapters end alike, and it cannot be told whether they are of one module.
    """
    plain = [{change.module: change for change in adapter.changes.values()} for adapter in adapters]
    if any(adapter.form != PEFT for adapter in adapters):
        return [*plain], []
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
    renamed: list[Mapping[str, Change]] = [
        {chosen[stem] if (stem := _stem(module)) in differing else module: change for module, change in changes.items()}
        for changes in plain
    ]
    unsure = sorted(chosen[stem] for stem in differing - base.keys() if len({*names[stem]}) > 1)
    problem = f"The adapters name {len(unsure)} modules differently, and no base on this machine says which is right"
    return renamed, [f"{problem}; OUT has names such as '{unsure[0]}'."] if unsure else []


def named_for(adapter: Adapter, base: View) -> Adapter:
    """An adapter under a base's names: kohya writes '_' for '.', and both forms of single files a prefix of their own.

    Names that fit none of the base's parameters stay; adapters of peft are unchanged.
    """
    if adapter.form == PEFT:
        return adapter
    flat = {name.replace(".", "_"): name for name in every_name(base.config)} | {
        name.replace(".", "_"): name for name in base
    }
    names = {}
    for name in adapter.changes:
        short = name.replace(".", "_")
        if fits := [ending for ending in flat if f"_{short}".endswith(f"_{ending}")]:
            names[name] = flat[max(fits, key=len)]
    return replace(adapter, names=names)


def is_vocabulary_head(module: str) -> bool:
    """Whether a module of this name maps onto a vocabulary in a known family."""
    after = (part.after.linear for spec in families().values() for part in spec.modules.values())
    return any("vocabulary" in kind.axes for linear in after for kind in linear.get(_stem(module), ()))


def _ends(stem: str) -> list[str]:
    """Ends of a stem behind words that are no parts of models."""
    words = stem.split(".")
    count = next((i for i, word in enumerate(words) if word.startswith((*PARTS, "encoder", "decoder"))), len(words))
    return [".".join(words[i:]) for i in range(1, count)] if count else []


def _base_names(adapter: Adapter) -> dict[str, str]:
    """Modules of the class of an adapter's base, if it is on this machine, by stem; none whose stems are alike."""
    place = place_of(ModelPath(path=adapter.base)) if adapter.base else None
    if place is None or not os.path.isdir(place):
        return {}
    try:
        modules = [name for name, _ in open_model(place).module_without_weights().named_modules()]
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
