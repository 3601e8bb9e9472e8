"""The file of an alignment: written, and read with everything in it checked."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rotation_merge.architecture.model import Architecture
from rotation_merge.errors import AlignmentError, RotationMergeError, short
from rotation_merge.files import replacing
from rotation_merge.linalg.finite import all_finite
from rotation_merge.matching.basis import Basis, Identity
from rotation_merge.matching.serialisation import packed, unpacked
from rotation_merge.matching.stream import Transforms
from rotation_merge.model.biases import holders
from rotation_merge.run.statistics import has_format

FORMAT = "rotation_merge.alignment.6"
BIASES = "bias of the anchor|", "bias of the donor|"
"""What the names of the two models' biases begin with in a file."""

WRITE, AGAIN = "write it with 'rotation-merge align'", "write it again with 'rotation-merge align'"
"""Remedies for what is no alignment file, and for one that is of no use."""


@dataclass(frozen=True)
class AlignmentFile:
    """The content of an alignment file.

    Attributes:
        transforms: by space name.
        folded: streams whose norm gains are folded.
        basis: what applying it needs of its models.
        metadata: anything worth keeping with it, such as options and figures.
    """

    transforms: Transforms
    folded: tuple[str, ...]
    basis: Basis
    metadata: Mapping[str, Any] = field(default_factory=dict)


def write_file(path: Path | str, content: AlignmentFile, dtype: torch.dtype) -> None:
    """Write an alignment file atomically.

    Args:
        dtype: storage of the maps.
    """
    basis = content.basis
    tensors, kinds = packed(content.transforms)
    for key, tensor in tensors.items():
        small = tensor.to(dtype) if tensor.is_floating_point() and tensor.ndim == 3 else tensor
        tensors[key] = small.cpu().contiguous().clone()
    for prefix, biases in zip(BIASES, (basis.biases, basis.donor_biases), strict=True):
        tensors |= {f"{prefix}{name}": bias.cpu().contiguous().clone() for name, bias in biases.items()}
    meta = {
        "format": FORMAT,
        "family": basis.architecture.family,
        "anchor": basis.anchor.fingerprint,
        "donor": basis.donor.fingerprint,
        "folded": json.dumps(content.folded),
        "kinds": json.dumps(kinds),
        "still": json.dumps(sorted(_asked(basis.architecture) - content.transforms.keys())),
        "made": json.dumps(dict(content.metadata), default=str),
        "basis": json.dumps(
            {
                "config": dict(basis.config),
                "shapes": {name: list(shape) for name, shape in basis.shapes.items()},
                "untie": basis.untie,
                "rows": basis.rows,
                "models": [basis.anchor.name, basis.donor.name],
                "tensors": [dict(basis.anchor.tensors), dict(basis.donor.tensors)],
            },
            default=str,
        ),
    }
    with replacing(path) as temporary:
        save_file(tensors, temporary, metadata=meta)


def holds_alignment(path: str) -> bool:
    """Whether a file holds an alignment, of this format or an older one."""
    return has_format(path, FORMAT)


def load_file(path: Path | str, architecture: Architecture | None = None) -> AlignmentFile:
    """Read an alignment file and check that every transform is in its space's group.

    Args:
        architecture: of the anchor that it is wanted for; None: that of the anchor that it was made for.

    Raises:
        AlignmentError: it cannot be read, is no alignment, is for another architecture, or would change functions.
    """
    name = str(path)
    meta, tensors = _stored(name)
    try:
        header = _header(meta)
        basis = _basis(meta, *({k[len(p) :]: x for k, x in tensors.items() if k.startswith(p)} for p in BIASES))
        tensors = {key: tensor for key, tensor in tensors.items() if not key.startswith(BIASES)}
        if architecture is None:  # nothing but the file says what its models are
            architecture = basis.architecture
            _check_basis(basis)
        if header.family != architecture.family:
            problem = f"was made for {header.family} models, not for {architecture.family}"
            raise AlignmentError(problem, where=name, remedy="use another file")
        transforms = _transforms(tensors, header, architecture)
        _check_spaces(transforms, header, architecture)
    except RotationMergeError as error:
        if error.where == name:
            raise
        raise AlignmentError(error.what, where=name, remedy=AGAIN) from error
    except (LookupError, ValueError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
        raise AlignmentError(f"is damaged ({short(error)})", where=name, remedy=AGAIN) from error
    return AlignmentFile(transforms, header.folded, basis, header.metadata)


def _stored(name: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The metadata and tensors of a file of this format."""
    try:
        with safe_open(name, framework="pt") as file:
            meta = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
    except (OSError, SafetensorError) as error:
        raise AlignmentError(f"cannot be read ({error})", where=name, remedy=WRITE) from error
    if str(meta.get("format")).startswith(FORMAT[:-1]) and meta["format"] != FORMAT:
        raise AlignmentError("was written by another version of rotation_merge", where=name, remedy=AGAIN)
    if meta.get("format") != FORMAT:
        raise AlignmentError("is not an alignment file", where=name, remedy=WRITE)
    return meta, tensors


@dataclass(frozen=True)
class _Header:
    """The metadata of an alignment file, their types checked."""

    family: str
    folded: tuple[str, ...]
    kinds: dict[str, str]
    still: tuple[str, ...]
    metadata: dict[str, Any]


def _header(meta: Mapping[str, str]) -> _Header:
    values: dict[str, Any] = {"family": meta["family"]}
    for name, kind in (("folded", list), ("kinds", dict), ("still", list), ("made", dict)):
        value = json.loads(meta[name])
        if not isinstance(value, kind) or (kind is list and not all(isinstance(word, str) for word in value)):
            raise ValueError(f"entry '{name}' of its header is {short(value)}")
        values[name] = tuple(value) if kind is list else value
    return _Header(metadata=values.pop("made"), **values)


def _basis(meta: Mapping[str, str], biases: Mapping[str, Tensor], donor_biases: Mapping[str, Tensor]) -> Basis:
    """Read the file's facts on its models, with types checked."""
    values = json.loads(meta["basis"])
    shapes = {str(name): tuple(map(int, shape)) for name, shape in dict(values["shapes"]).items()}
    rows = {}
    for name, (dim, order) in dict(values["rows"]).items():
        rows[str(name)] = int(dim), tuple(map(int, order))
    anchor, donor = (
        Identity(str(name), meta[side], {str(key): str(sums) for key, sums in tensors.items()})
        for side, name, tensors in zip(("anchor", "donor"), values["models"], values["tensors"], strict=True)
    )
    return Basis(dict(values["config"]), shapes, bool(values["untie"]), anchor, donor, biases, rows, donor_biases)


def _check_basis(basis: Basis) -> None:
    """Check the class order (a permutation) and the biases (the anchor's, finite)."""
    for name, (_, order) in basis.rows.items():
        if sorted(order) != list(range(len(order))):
            raise AlignmentError(f"would change the models' outputs: '{name}' loses classes")
    blocks = basis.architecture.blocks
    infos = (info for block in blocks for info in holders(block))
    known = {name for info in infos for name in info.names if name in basis.shapes}
    if basis.biases and (odd := sorted(known ^ basis.biases.keys())):
        raise AlignmentError(f"is damaged: the anchor's bias '{odd[0]}' is missing in its header or among its tensors")
    if odd := sorted(basis.donor_biases.keys() - basis.biases.keys()):  # a language half has fewer than its anchor
        raise AlignmentError(f"does not fit: it has a bias '{odd[0]}' of the donor, but none of the anchor")
    for side, biases in (("anchor", basis.biases), ("donor", basis.donor_biases)):
        for name, bias in biases.items():
            if tuple(bias.shape) != basis.shapes[name] or not all_finite([bias]):
                raise AlignmentError(f"would change the models' outputs: the {side}'s bias '{name}' is damaged")


def _transforms(tensors: Mapping[str, Tensor], header: _Header, architecture: Architecture) -> Transforms:
    """The transforms, those of rounded maps put back into their groups."""
    transforms = unpacked(tensors, header.kinds)
    small = (key for key, x in tensors.items() if x.is_floating_point() and x.dtype != torch.float64)
    known = architecture.spaces()
    for name in {key.partition("|")[0] for key in small} & known.keys():
        transforms[name] = architecture.widest_group(known[name], transforms[name]).restored(transforms[name])
    return transforms


def _check_spaces(transforms: Transforms, header: _Header, architecture: Architecture) -> None:
    """Check that each space has a transform of its group or is declared still, and that folding fits the rotations."""
    known, space_names = architecture.spaces(), (*transforms, *header.still)
    if odd := [name for name in space_names if name not in known]:
        raise AlignmentError(f"does not fit: the models have no space '{odd[0]}'")
    if absent := sorted(_asked(architecture) - set(space_names)):
        raise AlignmentError(f"has no entry for space '{absent[0]}'")
    if len(space_names) != len(set(space_names)):
        raise AlignmentError("names a space twice")
    for name, transform in transforms.items():
        group = architecture.widest_group(known[name], transform)
        if not group.admits(transform):
            problem = f"the transform of space '{name}' does not belong to the group: {group.words}"
            raise AlignmentError(f"would change the models' outputs: {problem}")
    turned = {name for name, transform in transforms.items() if transform.turns_stream}
    spare = {name for name in set(header.folded) - turned if name not in known or known[name].kind != "latent"}
    if spare or not turned <= set(header.folded):
        words = [", ".join(sorted(names)) or "none" for names in (header.folded, turned)]
        raise AlignmentError(
            f"would change the models' outputs: folded streams: {words[0]}; rotated streams: {words[1]}"
        )


def needed_folds(transforms: Transforms, architecture: Architecture, folded: Sequence[str]) -> tuple[str, ...]:
    """The folded spaces with gains that these transforms require, or allow, to be folded."""
    known = architecture.spaces()
    moved = [name for name in folded if name in transforms]
    return tuple(name for name in moved if transforms[name].turns_stream or known[name].kind == "latent")


def _asked(architecture: Architecture) -> set[str]:
    """The spaces that a file must cover: all except those that only a recipe enables."""
    return {name for name, space in architecture.spaces().items() if not space.head}


def check_fingerprints(file: AlignmentFile, path: str, anchor: str, donor: str, names: tuple[str, str]) -> None:
    """Refuse an alignment made for other weights.

    Raises:
        AlignmentError: names the model that differs.
    """
    identities = file.basis.anchor, file.basis.donor
    for identity, fingerprint, model in zip(identities, (anchor, donor), names, strict=True):
        if identity.fingerprint != fingerprint:
            raise AlignmentError(
                f"was made for other weights than those of {model}",
                where=path,
                remedy="write a new one with 'rotation-merge align', or use the models it was made for",
            )
