"""The alignment as a file: all transforms of a donor, and what they were made for, in one safetensors file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rotation_merge.architectures.model import Architecture
from rotation_merge.errors import AlignmentError
from rotation_merge.groups import TRANSFORMS, SpaceTransform, StreamTransform
from rotation_merge.matching.model import Alignment, Transforms

FORMAT = "rotation_merge.alignment.2"


@dataclass(frozen=True)
class AlignmentFile:
    """What a file holds: the alignment, and the fingerprints of the models it was made for."""

    alignment: Alignment
    family: str
    anchor: str
    donor: str
    made: dict[str, Any]


def save_alignment(
    path: Path | str,
    alignment: Alignment,
    architecture: Architecture,
    anchor: str,
    donor: str,
    made: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write an alignment.

    Args:
        anchor, donor: their fingerprints.
        made: anything worth keeping with it (models, options, versions), as JSON.
        dtype: storage of the maps; what is orthogonal is rebuilt orthogonal from any of them.
    """
    tensors: dict[str, Tensor] = {}
    kinds = {}
    for space, transform in alignment.transforms.items():
        kinds[space] = transform.space_kind
        for key, tensor in transform.tensors().items():
            small = tensor.to(dtype) if tensor.is_floating_point() and tensor.ndim == 3 else tensor
            tensors[f"{space}|{key}"] = small.cpu().contiguous().clone()
    meta = {
        "format": FORMAT,
        "family": architecture.family,
        "anchor": anchor,
        "donor": donor,
        "folded": json.dumps(alignment.folded),
        "kinds": json.dumps(kinds),
        "made": json.dumps(dict(made or {}), default=str),
    }
    temporary = Path(f"{path}.partial")
    save_file(tensors, temporary, metadata=meta)
    temporary.replace(path)


def load_alignment(path: Path | str, architecture: Architecture) -> AlignmentFile:
    """Read an alignment.

    Raises:
        AlignmentError: it cannot be read, is no alignment, or is for another architecture.
    """
    try:
        with safe_open(str(path), framework="pt") as file:
            meta = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
    except (OSError, SafetensorError) as error:
        raise AlignmentError(
            f"cannot be read ({error})", where=str(path), remedy="write it with 'rotation-merge align'"
        ) from error
    if str(meta.get("format")).startswith(FORMAT[:-1]) and meta["format"] != FORMAT:
        raise AlignmentError(
            "was written by another version of rotation_merge",
            where=str(path),
            remedy="write it anew with 'rotation-merge align'",
        )
    if meta.get("format") != FORMAT:
        raise AlignmentError("is not an alignment file", where=str(path), remedy="write it with 'rotation-merge align'")
    if meta["family"] != architecture.family:
        raise AlignmentError(
            f"was made for {meta['family']} models, not for {architecture.family}",
            where=str(path),
            remedy="use another file",
        )
    spaces: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        space, _, name = key.partition("|")
        spaces.setdefault(space, {})[name] = tensor
    try:
        kinds = json.loads(meta["kinds"])
        transforms: Transforms = {
            space: _whole(TRANSFORMS[kinds[space]].from_tensors(parts), space, architecture)
            for space, parts in spaces.items()
        }
    except (KeyError, IndexError, ValueError, RuntimeError, AlignmentError) as error:
        raise AlignmentError(
            f"is damaged ({error})", where=str(path), remedy="write it anew with 'rotation-merge align'"
        ) from error
    _check_spaces(transforms, architecture, str(path))
    alignment = Alignment(transforms, tuple(json.loads(meta["folded"])))
    return AlignmentFile(alignment, meta["family"], meta["anchor"], meta["donor"], json.loads(meta["made"]))


def _check_spaces(transforms: Transforms, architecture: Architecture, path: str) -> None:
    """Every space is one of the architecture's; streams have their size."""
    known = {space.name for block in architecture.blocks for space in block.spaces.values()}
    for name, transform in transforms.items():
        stream = architecture.streams.get(name)
        fits = name in known or stream is not None
        if stream is not None:
            element = transform.element if isinstance(transform, StreamTransform) else None
            fits = element is not None and element.size == stream.sizes["size"]
        if not fits:
            raise AlignmentError(
                f"does not fit: the models have no space '{name}' of that size", where=path, remedy="use another file"
            )


def _whole(transform: SpaceTransform, space: str, architecture: Architecture) -> SpaceTransform:
    """A stream rotation under LayerNorm fixes the all-ones vector exactly, whatever storage did to it."""
    if not (isinstance(transform, StreamTransform) and space in architecture.streams):
        return transform
    return architecture.stream_group(space, "rotation").restored(transform)


def check_fingerprints(file: AlignmentFile, path: str, anchor: str, donor: str, names: tuple[str, str]) -> None:
    """Refuse an alignment made for other weights.

    Raises:
        AlignmentError: names the model that differs.
    """
    for wanted, given, model in ((file.anchor, anchor, names[0]), (file.donor, donor, names[1])):
        if wanted != given:
            raise AlignmentError(
                f"was made for other weights than those of {model}",
                where=path,
                remedy="write a new one with 'rotation-merge align', or use the models it was made for",
            )
