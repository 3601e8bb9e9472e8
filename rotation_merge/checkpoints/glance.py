"""Models from their config.json and the heads of their safetensors files alone: without mergekit, and without
transformers where its source plainly says what it would make of the config."""

from __future__ import annotations

import filecmp
import logging
import os
from collections.abc import Sequence
from typing import Any

from rotation_merge.architectures import Architecture, resolve
from rotation_merge.architectures.needed import needed, needed_within
from rotation_merge.architectures.registry import find, tied_head
from rotation_merge.checkpoints.defaults import with_defaults
from rotation_merge.checkpoints.headers import (
    TOKENIZER,
    Shapes,
    check_folder,
    check_local,
    file_shapes,
    read_json,
    safetensors_in,
)
from rotation_merge.checkpoints.hub import in_cache, is_hub_name
from rotation_merge.checkpoints.sentence import is_sentence
from rotation_merge.errors import RotationMergeError
from rotation_merge.matching.member import Member
from rotation_merge.matching.state import check_shapes

LOG = logging.getLogger(__name__)

HARMLESS = frozenset({"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"})
"""Entries of config.json that say nothing of what a model computes."""


def glance(path: str, exact: bool = False) -> Member | None:
    """A model in a directory, or of the hub and downloaded, as `Model.member` gives it.

    None where that takes more: an adapter, pickles, modules behind an encoder, a fault that is to be explained.

    Args:
        exact: the whole config as transformers has it; else entries that the architecture does not ask for may be
            those of config.json.
    """
    folder = _folder(path)
    try:
        found = None if folder is None or is_sentence(folder) else _member(path, folder, exact)
    except Exception as error:  # transformers raises errors of many classes
        LOG.debug("%s: %s", path, error)
        found = None
    if found is None:
        LOG.info("%s: configs and headers alone do not say all; loading mergekit", path)
    return found


def glance_all(paths: Sequence[str], words: bool) -> dict[str, Member] | None:
    """Models that are to be compared, the first with each of the others; None where one takes more than a glance.

    Args:
        words: whether it matters that tokens stand at the same ids.
    """
    folders = [_folder(path) for path in paths]
    if None in folders or (words and not all(_same_tokens(str(folders[0]), str(other)) for other in folders[1:])):
        return None
    said = [_said(str(folder)) for folder in folders]
    found = {path: glance(path, exact=any(one != said[0] for one in said)) for path in paths}
    return None if None in found.values() else {path: one for path, one in found.items() if one is not None}


def _folder(path: str) -> str | None:
    return path if os.path.isdir(path) else _downloaded(path)


def _said(folder: str) -> dict[str, Any] | None:
    """What config.json says of the function."""
    try:
        raw = read_json(os.path.join(folder, "config.json"))
    except RotationMergeError:
        return None
    return {name: value for name, value in raw.items() if name not in HARMLESS}


def _same_tokens(one: str, other: str) -> bool:
    """Whether two folders hold the same tokenizer files, byte by byte, or none."""
    names = [sorted(filter(TOKENIZER.fullmatch, os.listdir(folder))) for folder in (one, other)]
    same = names[0] == names[1]
    return same and all(filecmp.cmp(os.path.join(one, n), os.path.join(other, n), shallow=False) for n in names[0])


def tell(architecture: Architecture, where: str) -> None:
    """Log what a model was found to be."""
    streams = ", ".join(f"{name} up to {groups[-1]}" for name, groups in architecture.stream_groups.items())
    LOG.info("%s: %s, %d blocks; %s", where, architecture.family, len(architecture.blocks), streams or "no stream")
    LOG.debug("%s: tensors are named with base %r and %s", where, architecture.base, architecture.spelling)


def _downloaded(path: str) -> str | None:
    plain = is_hub_name(path) and not os.path.exists(path) and not set(path) & set("+@:")
    return in_cache(path, None) if plain else None


def _member(path: str, folder: str, exact: bool) -> Member | None:
    raw = read_json(os.path.join(folder, "config.json"))
    check_local(folder)
    shapes = _shapes(folder)
    if shapes is None or raw.get("quantization_config"):
        return None
    check_folder(folder)
    config = (None if exact else _config(raw)) or _by_transformers(path, folder)
    architecture = resolve(config, list(shapes), path)
    check_shapes(architecture, shapes, path)
    tell(architecture, path)
    return Member(path, config, architecture, shapes, tied_head(config, list(shapes), path, architecture))


def _config(raw: dict[str, Any]) -> dict[str, Any] | None:
    """The config with what an architecture file asks for as transformers would have it; None where that is unsure."""
    spec = find(raw) if raw.get("architectures") else None
    return None if spec is None else with_defaults(raw, needed(spec), needed_within(spec))


def _by_transformers(path: str, folder: str) -> dict[str, Any]:
    """The config as mergekit would have it: transformers reads it, and runs no code of the model's own."""
    LOG.info("%s: config.json alone does not say all; loading transformers", path)
    from transformers import AutoConfig

    found: dict[str, Any] = AutoConfig.from_pretrained(folder, trust_remote_code=False).to_dict()
    return found


def _shapes(folder: str) -> Shapes | None:
    """Of all tensors, in the order in which `Model.shapes` has them; None for pickles."""
    files = safetensors_in(folder)
    if files is None:
        return None
    shapes: Shapes = {}
    for file, names in files.items():
        found = file_shapes(os.path.join(folder, file))
        if names is not None and set(names) != set(found):
            return None
        shapes.update(found)
    return shapes
