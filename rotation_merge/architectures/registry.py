"""The architectures there are, and the one that fits a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rotation_merge.architectures.build import build, required
from rotation_merge.architectures.model import Architecture
from rotation_merge.architectures.schema import ArchitectureSpec
from rotation_merge.errors import ArchitectureError, CheckpointError, nearest

DATA = Path(__file__).parent / "data"

_extra: dict[str, ArchitectureSpec] = {}


def load_file(path: Path) -> ArchitectureSpec:
    """Read and check one architecture file.

    Raises:
        ArchitectureError: names the file, the entry and what it should be.
    """
    try:
        return ArchitectureSpec.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, json.JSONDecodeError) as error:
        raise ArchitectureError(
            f"cannot be read ({error})", where=str(path), remedy="it must be one JSON object"
        ) from error
    except ValidationError as error:
        first = error.errors()[0]
        entry = ".".join(str(step) for step in first["loc"])
        known = ArchitectureSpec.model_fields
        remedy = (
            nearest(str(first["loc"][0]), known)
            if first["type"] == "extra_forbidden"
            else "see docs/add-architecture.md"
        )
        raise ArchitectureError(f"entry '{entry}': {first['msg']}", where=str(path), remedy=remedy) from error


@cache
def shipped() -> dict[str, ArchitectureSpec]:
    """The families that come with the package, by name."""
    return {spec.family: spec for spec in map(load_file, sorted(DATA.glob("*.json")))}


def families() -> dict[str, ArchitectureSpec]:
    """Every known family: the shipped ones and those registered since."""
    return {**shipped(), **_extra}


def register(path: Path) -> ArchitectureSpec:
    """Add a family from a file outside the package, for this process."""
    spec = load_file(path)
    _extra[spec.family] = spec
    return spec


def find(config: Mapping[str, Any]) -> ArchitectureSpec | None:
    """The family of a model with this config, or None."""
    classes = set(config.get("architectures") or [])
    model_type = config.get("model_type")
    fits = [spec for spec in families().values() if classes & set(spec.classes)]
    exact = [spec for spec in fits if not spec.model_types or model_type in spec.model_types]
    if exact:
        return exact[0]
    if classes:
        return None
    return next((spec for spec in families().values() if model_type in spec.model_types), None)


def resolve(config: Mapping[str, Any], names: Collection[str], model: str, keep_unknown: bool = False) -> Architecture:
    """The architecture of one checkpoint.

    Args:
        config: its config.json as a dictionary.
        names: the tensors it holds.
        model: what to call it in errors.
        keep_unknown: leave tensors that the architecture does not know aside instead of refusing them.

    Raises:
        ArchitectureError: the architecture is not supported.
        CheckpointError: tensors are missing, or are there that the architecture does not know.
    """
    spec = find(config)
    if spec is None:
        classes = ", ".join(config.get("architectures") or []) or f"model_type {config.get('model_type')}"
        raise ArchitectureError(
            f"architecture {classes} is not supported",
            where=model,
            remedy="see 'rotation-merge architectures', add a data file (docs/add-architecture.md), "
            "or set 'unsupported: merge' under parameters to merge it without alignment",
        )
    present = set(names)
    candidates = [
        _present_only(build(spec, config, base, spelling), present)
        for base in spec.bases
        for spelling in spec.spellings
    ]
    architecture = min(candidates, key=lambda c: len(_missing(c, present)))
    if missing := _missing(architecture, present):
        raise CheckpointError(
            f"{len(missing)} tensors of a {spec.family} model are missing, the first is '{missing[0]}'",
            where=model,
            remedy="the checkpoint is incomplete, or its config.json belongs to another model",
        )
    unknown = unknown_names(architecture, spec, present)
    if unknown and not keep_unknown:
        raise CheckpointError(
            f"{len(unknown)} tensors are not part of the {spec.family} architecture, the first is '{unknown[0]}'",
            where=model,
            remedy="set 'unsupported: merge' under parameters to merge them without alignment",
        )
    return architecture


def _missing(architecture: Architecture, present: set[str]) -> list[str]:
    tied = {name: t.tied for t in architecture.tensors() for name in t.names}
    return [n for n in required(architecture) if n not in present and not present.intersection(tied[n])]


def unknown_names(architecture: Architecture, spec: ArchitectureSpec, present: Collection[str]) -> list[str]:
    """Tensors of the checkpoint that the architecture neither knows nor ignores."""
    known = architecture.named()
    return sorted(n for n in present if n not in known and not any(n.endswith(end) for end in spec.ignored))


def _present_only(architecture: Architecture, present: set[str]) -> Architecture:
    """The architecture without the optional tensors that the checkpoint lacks."""
    blocks = []
    for block in architecture.blocks:
        kept = tuple(t for t in block.tensors if not t.optional or present.intersection(t.names))
        blocks.append(replace(block, tensors=kept))
    return replace(architecture, blocks=tuple(block for block in blocks if block.tensors))
