"""A model from its config.json and the heads of its safetensors files alone, without mergekit and transformers."""

from __future__ import annotations

import logging
import os
from typing import Any

from rotation_merge.architectures import Architecture, resolve
from rotation_merge.architectures.needed import needed
from rotation_merge.architectures.registry import find, tied_head
from rotation_merge.checkpoints.defaults import with_defaults
from rotation_merge.checkpoints.headers import Shapes, check_folder, check_local, file_shapes, read_json, safetensors_in
from rotation_merge.checkpoints.hub import in_cache, is_hub_name
from rotation_merge.checkpoints.sentence import is_sentence
from rotation_merge.errors import RotationMergeError
from rotation_merge.matching.member import Member
from rotation_merge.matching.state import check_shapes

LOG = logging.getLogger(__name__)


def glance(path: str) -> Member | None:
    """A model in a directory, or of the hub and downloaded, as `Model.member` gives it.

    None where that takes more: defaults that only transformers knows, an adapter, pickles, modules behind an encoder,
    a fault that is to be explained.
    """
    folder = path if os.path.isdir(path) else _downloaded(path)
    try:
        found = None if folder is None or is_sentence(folder) else _member(path, folder)
    except (RotationMergeError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        LOG.debug("%s: %s", path, error)
        found = None
    if found is None:
        LOG.info("%s: config.json and headers alone do not say all; loading transformers and mergekit", path)
    return found


def tell(architecture: Architecture, where: str) -> None:
    """Log what a model was found to be."""
    streams = ", ".join(f"{name} up to {groups[-1]}" for name, groups in architecture.stream_groups.items())
    LOG.info("%s: %s, %d blocks; %s", where, architecture.family, len(architecture.blocks), streams or "no stream")
    LOG.debug("%s: tensors are named with base %r and %s", where, architecture.base, architecture.spelling)


def _downloaded(path: str) -> str | None:
    plain = is_hub_name(path) and not os.path.exists(path) and not set(path) & set("+@:")
    return in_cache(path, None) if plain else None


def _member(path: str, folder: str) -> Member | None:
    config = _config(read_json(os.path.join(folder, "config.json")))
    if config is None or config.get("quantization_config"):
        return None
    check_local(folder)
    shapes = _shapes(folder)
    if shapes is None:
        return None
    check_folder(folder)
    architecture = resolve(config, list(shapes), path)
    check_shapes(architecture, shapes, path)
    tell(architecture, path)
    return Member(path, config, architecture, shapes, tied_head(config, list(shapes), path, architecture))


def _config(raw: dict[str, Any]) -> dict[str, Any] | None:
    """The config with what an architecture file asks for as transformers would have it; None where that is unsure."""
    spec = find(raw) if raw.get("architectures") else None
    return None if spec is None else with_defaults(raw, needed(spec))


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
