"""The models of a recipe: their configs, tensors and architectures, checked before any weight is read."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import torch
from mergekit.common import ModelReference
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions
from torch import Tensor

from rotation_merge.architectures import Architecture, resolve
from rotation_merge.architectures.registry import find, unaligned
from rotation_merge.errors import ArchitectureError, CheckpointError
from rotation_merge.matching.state import check_shape

WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


class Model:
    """One checkpoint, read lazily: config, tensor names and shapes now, tensors when asked for by name."""

    def __init__(
        self, reference: ModelReference, options: MergeOptions, unsupported: str = "error", untie: bool = False
    ) -> None:
        self.reference, self.options, self.unsupported, self.untie = reference, options, unsupported, untie

    @cached_property
    def config(self) -> dict[str, Any]:
        path = self.reference.model.path
        if os.path.isdir(path):
            self._check_config(os.path.join(path, "config.json"))
        try:
            config = self.reference.config(trust_remote_code=self.options.trust_remote_code)
        except (OSError, ValueError, KeyError) as error:
            detail = " ".join(str(error).split())[:160]
            raise CheckpointError(
                f"no model config can be loaded ({detail})",
                where=path,
                remedy="check the path or the repository's name",
            ) from error
        return config.to_dict()

    @staticmethod
    def _check_config(path: str) -> None:
        try:
            with open(path, encoding="utf-8") as file:
                json.load(file)
        except FileNotFoundError as error:
            raise CheckpointError(
                "config.json is missing", where=os.path.dirname(path), remedy="is it a model?"
            ) from error
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise CheckpointError(f"cannot be read ({error})", where=path, remedy="it must be a JSON object") from error

    def check_files(self) -> None:
        """Refuse a missing directory or missing weight files, before mergekit opens anything."""
        path = self.reference.model.path
        looks_local = path.startswith((".", "/", "~")) or path.count("/") != 1
        if not os.path.exists(path):
            if looks_local:
                raise CheckpointError("no such directory", where=path, remedy="check the path")
            return
        if not any(os.path.exists(os.path.join(path, name)) for name in WEIGHT_FILES):
            raise CheckpointError(
                "no weights are there", where=path, remedy=f"one of {', '.join(WEIGHT_FILES)} is needed"
            )
        if self.reference.lora is not None and not self.options.lora_merge_cache:
            raise CheckpointError(
                "a LoRA needs a place to be merged in", where=str(self.reference), remedy="pass --lora-merge-cache DIR"
            )

    @cached_property
    def loader(self) -> Any:
        self.check_files()
        try:
            loader = LoaderCache().get(self.reference)
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            raise self._unreadable(error) from error
        for shard in sorted(set(loader.index.tensor_paths.values())):
            if not os.path.exists(os.path.join(loader.index.base_path, shard)):
                raise CheckpointError(
                    f"shard {shard} is missing", where=str(self.reference), remedy="download it again"
                )
        return loader

    def _unreadable(self, error: Exception) -> CheckpointError:
        detail = " ".join(str(error).split())[:200]
        return CheckpointError(
            f"weights cannot be read ({detail})", where=str(self.reference), remedy="download them again"
        )

    @cached_property
    def names(self) -> list[str]:
        return list(self.loader.index.tensor_paths)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor, from the files' headers (of pickles: loaded without their data)."""
        index = self.loader.index
        result: dict[str, tuple[int, ...]] = {}
        for shard in sorted(set(index.tensor_paths.values())):
            path = os.path.join(index.base_path, shard)
            try:
                shapes = safetensors_shapes(path) if shard.endswith(".safetensors") else _pickle_shapes(path)
            except (OSError, ValueError, RuntimeError, EOFError, struct.error) as error:
                raise self._unreadable(error) from error
            result.update(shapes)
        if absent := [name for name in index.tensor_paths if name not in result]:
            raise CheckpointError(
                f"the index names '{absent[0]}', its shard does not hold it",
                where=str(self.reference),
                remedy="the shards and their index do not belong together; download them again",
            )
        return result

    @cached_property
    def architecture(self) -> Architecture:
        """Resolved from config and tensor names, shapes checked."""
        merge_anyway = self.unsupported == "merge"
        where = str(self.reference)
        if merge_anyway and find(self.config) is None:
            return unaligned(self.names)
        architecture = resolve(self.config, self.names, where, keep_unknown=merge_anyway, untie=self.untie)
        for info in architecture.tensors():
            present = [name for name in info.names if name in self.shapes]
            if present:
                shape = self.shapes[present[0]]
                check_shape(info, (len(info.names), *shape) if info.stacked else shape, where)
        return architecture

    @cached_property
    def tied_head(self) -> str | None:
        """Name of a head that is tied to an embedding and has no tensor of its own, if there is one."""
        if self.unsupported == "merge" and find(self.config) is None:
            return None
        untied = resolve(self.config, self.names, str(self.reference), keep_unknown=True, untie=True)
        return next((t.name for t in untied.tensors() if t.tied and t.name not in self.names), None)

    def __contains__(self, name: object) -> bool:
        return name in self.loader.index.tensor_paths

    def __getitem__(self, name: str) -> Tensor:
        return self.loader.get_tensor(name)


def safetensors_shapes(path: str) -> dict[str, tuple[int, ...]]:
    """Shapes from a safetensors header; the file's length is checked against it.

    Raises:
        ValueError: the header is damaged, or the file is shorter or longer than the header says.
    """
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
        if not 0 < length <= size - 8:
            raise ValueError(f"{os.path.basename(path)} is truncated or not a safetensors file")
        header = json.loads(file.read(length))
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
    if size != 8 + length + end:
        raise ValueError(f"{os.path.basename(path)} is {size} bytes long, its header says {8 + length + end}")
    return {name: tuple(entry["shape"]) for name, entry in tensors.items()}


def _pickle_shapes(path: str) -> dict[str, tuple[int, ...]]:
    try:
        state = torch.load(path, map_location="meta", weights_only=True)
    except Exception as error:  # pickle errors come in every class
        raise ValueError(f"{os.path.basename(path)} holds something else than tensors: {error}") from error
    state = state.get("state_dict", state)
    return {name: tuple(value.shape) for name, value in state.items() if isinstance(value, Tensor)}


class Models:
    """The models of one merge, opened once each."""

    def __init__(self, options: MergeOptions, unsupported: str = "error", untie: bool = False) -> None:
        self.options, self.unsupported, self.untie = options, unsupported, untie
        self._opened: dict[ModelReference, Model] = {}
        LoaderCache().setup(options=options)

    def __getitem__(self, reference: ModelReference) -> Model:
        if reference not in self._opened:
            self._opened[reference] = Model(reference, self.options, self.unsupported, self.untie)
        return self._opened[reference]

    def check(self, anchor: ModelReference, others: Iterable[ModelReference]) -> None:
        """All models exist, are whole, and are of the anchor's architecture and sizes.

        Raises:
            CheckpointError, ArchitectureError: name the model and what differs.
        """
        references = [anchor, *(r for r in others if r != anchor)]
        for reference in references:
            self[reference].check_files()
        for reference in references:
            self[reference].config  # noqa: B018  (loads and checks)
        for reference in references:
            self._compare(self[anchor], self[reference])

    @staticmethod
    def _compare(anchor: Model, other: Model) -> None:
        ours, theirs = anchor.architecture, other.architecture
        where = str(other.reference)
        if ours.family != theirs.family:
            raise ArchitectureError(
                f"architecture is {theirs.family}, that of {anchor.reference} is {ours.family}",
                where=where,
                remedy="only models of one architecture can be aligned",
            )
        ours_spaces, theirs_spaces = (
            {space.name.split(".")[-1]: space for block in a.blocks for space in block.spaces.values()}
            for a in (ours, theirs)
        )
        pairs = [(ours.streams.get(n), s) for n, s in theirs.streams.items()]
        pairs += [(ours_spaces.get(n), s) for n, s in theirs_spaces.items()]
        for mine, its in pairs:
            if mine is not None and mine.sizes != its.sizes:
                raise CheckpointError(
                    f"space '{its.name}' has {_sizes(its.sizes)}, in {anchor.reference} it has {_sizes(mine.sizes)}",
                    where=where,
                    remedy="only models of equal sizes can be aligned",
                )


def _sizes(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in sizes.items())
