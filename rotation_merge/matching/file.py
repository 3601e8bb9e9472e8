"""The alignment as a file: all transforms of a donor, and what they were made for, in one safetensors file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rotation_merge.architectures.model import Architecture
from rotation_merge.durable import replacing
from rotation_merge.errors import AlignmentError, short
from rotation_merge.groups import SpaceTransform, StreamTransform
from rotation_merge.groups.admitted import WIDEST, admitted
from rotation_merge.matching.model import Alignment, Transforms
from rotation_merge.matching.packed import packed, unpacked
from rotation_merge.matching.spanning import torn

FORMAT = "rotation_merge.alignment.3"


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
    dtype: torch.dtype = torch.float64,
) -> None:
    """Write an alignment.

    Args:
        anchor, donor: their fingerprints.
        made: anything worth keeping with it (models, options, versions), as JSON.
        dtype: storage of the maps. In float64 they come back bit for bit, so that a merge from the file has the bytes
            of the merge that wrote it; from a smaller one what is orthogonal is rebuilt orthogonal.
    """
    tensors, kinds = packed(alignment.transforms)
    for key, tensor in tensors.items():
        small = tensor.to(dtype) if tensor.is_floating_point() and tensor.ndim == 3 else tensor
        tensors[key] = small.cpu().contiguous().clone()
    meta = {
        "format": FORMAT,
        "family": architecture.family,
        "anchor": anchor,
        "donor": donor,
        "folded": json.dumps(alignment.folded),
        "kinds": json.dumps(kinds),
        "still": json.dumps(sorted(_asked(architecture) - alignment.transforms.keys())),
        "made": json.dumps(dict(made or {}), default=str),
    }
    with replacing(path) as temporary:
        save_file(tensors, temporary, metadata=meta)


def load_alignment(path: Path | str, architecture: Architecture) -> AlignmentFile:
    """Read an alignment. Nothing in it is believed: every transform is proven one of its space's group.

    Raises:
        AlignmentError: it cannot be read, is no alignment, is for another architecture, or would change functions.
    """
    where = str(path)
    try:
        with safe_open(where, framework="pt") as file:
            meta = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
    except (OSError, SafetensorError) as error:
        raise AlignmentError(
            f"cannot be read ({error})", where=where, remedy="write it with 'rotation-merge align'"
        ) from error
    if str(meta.get("format")).startswith(FORMAT[:-1]) and meta["format"] != FORMAT:
        raise AlignmentError(
            "was written by another version of rotation_merge",
            where=where,
            remedy="write it anew with 'rotation-merge align'",
        )
    if meta.get("format") != FORMAT:
        raise AlignmentError("is not an alignment file", where=where, remedy="write it with 'rotation-merge align'")
    try:
        header = _header(meta)
        if header.family != architecture.family:
            raise AlignmentError(
                f"was made for {header.family} models, not for {architecture.family}",
                where=where,
                remedy="use another file",
            )
        transforms = _transforms(tensors, header, architecture)
        _check_spaces(transforms, header, architecture)
    except AlignmentError as error:
        if error.where == where:
            raise
        raise AlignmentError(error.what, where=where, remedy="write it anew with 'rotation-merge align'") from error
    except (LookupError, ValueError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
        raise AlignmentError(
            f"is damaged ({short(error)})", where=where, remedy="write it anew with 'rotation-merge align'"
        ) from error
    return AlignmentFile(Alignment(transforms, header.folded), header.family, header.anchor, header.donor, header.made)


@dataclass(frozen=True)
class _Header:
    """What the metadata say, their types checked."""

    family: str
    anchor: str
    donor: str
    folded: tuple[str, ...]
    kinds: dict[str, str]
    still: tuple[str, ...]
    made: dict[str, Any]


def _header(meta: Mapping[str, str]) -> _Header:
    values: dict[str, Any] = {name: meta[name] for name in ("family", "anchor", "donor")}
    for name, kind in (("folded", list), ("kinds", dict), ("still", list), ("made", dict)):
        value = json.loads(meta[name])
        if not isinstance(value, kind) or (kind is list and not all(isinstance(word, str) for word in value)):
            raise ValueError(f"entry '{name}' of its header is {short(value)}")
        values[name] = tuple(value) if kind is list else value
    return _Header(**values)


def _transforms(tensors: Mapping[str, Tensor], header: _Header, architecture: Architecture) -> Transforms:
    found = unpacked(tensors, header.kinds)
    small = (key for key, x in tensors.items() if x.is_floating_point() and x.dtype != torch.float64)
    rounded = {key.partition("|")[0] for key in small}
    for space, transform in found.items():
        if space in rounded and isinstance(transform, StreamTransform) and space in architecture.streams:
            found[space] = architecture.stream_group(space, "rotation").restored(transform)
    return found


def _check_spaces(transforms: Transforms, header: _Header, architecture: Architecture) -> None:
    """Every space of the architecture is there or declared still, and no other; each transform is of its group; what
    is folded is what rotations need."""
    known, given = architecture.spaces(), (*transforms, *header.still)
    if odd := [name for name in given if name not in known]:
        raise AlignmentError(f"does not fit: the models have no space '{odd[0]}'")
    if absent := sorted(_asked(architecture) - set(given)):
        raise AlignmentError(f"says nothing of space '{absent[0]}'")
    if len(given) != len(set(given)):
        raise AlignmentError("names a space twice")
    for name, transform in transforms.items():
        space = known[name]
        stream = space.kind == "stream"
        refused = (
            _refused_stream(transform, name, architecture) if stream else admitted(space, WIDEST).refuses(transform)
        )
        if refused is not None:
            raise AlignmentError(f"would change what the models compute: space '{name}': {refused}")
    if apart := torn(architecture, transforms):
        raise AlignmentError(
            f"would change what the models compute: space '{apart}' moves apart from its keys and values"
        )
    turned = {name for name, transform in transforms.items() if _mixes(transform)}
    spare = {name for name in set(header.folded) - turned if name not in known or known[name].kind != "latent"}
    if spare or not turned <= set(header.folded):
        words = [", ".join(sorted(names)) or "none" for names in (header.folded, turned)]
        raise AlignmentError(f"would change what the models compute: gains are folded of {words[0]}, turned {words[1]}")


def needed_folds(transforms: Transforms, architecture: Architecture, folded: Sequence[str]) -> tuple[str, ...]:
    """Those of the folded spaces whose gains these transforms need folded, or may have folded."""
    known = architecture.spaces()
    return tuple(
        name for name in folded if name in transforms and (_mixes(transforms[name]) or known[name].kind == "latent")
    )


def _asked(architecture: Architecture) -> set[str]:
    """The spaces that a file says something of, be it that they stand still: all but those that only a recipe opens."""
    return {name for name, space in architecture.spaces().items() if not space.head}


def _mixes(transform: SpaceTransform) -> bool:
    """Whether gains of a stream do not follow, so that they have to be folded."""
    return isinstance(transform, StreamTransform) and not transform.moves_gains


def _refused_stream(transform: SpaceTransform, name: str, architecture: Architecture) -> str | None:
    """What keeps a transform from being of one of the groups that a stream admits; of several, the largest's words."""
    refused: str | None = "it has to keep its coordinates"
    for kind in architecture.stream_groups[name]:
        refused = architecture.stream_group(name, kind).refuses(transform)
        if refused is None:
            return None
    return refused


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
