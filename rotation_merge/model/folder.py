"""A model's folder: which files hold its tensors, and those read when they are asked for."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any, TypeVar

from mergekit.common import ModelPath, ModelReference
from mergekit.io.lazy_tensor_loader import LazyTensorLoader, ShardedTensorIndex
from mergekit.options import MergeOptions
from torch import Tensor

from rotation_merge.errors import CheckpointError, RotationMergeError, short
from rotation_merge.model.gguf import gguf_files, in_cache, is_folder, refuse_bare_repository
from rotation_merge.model.headers import check_local, file_dtypes, file_shapes, single_file
from rotation_merge.model.hub import reachable
from rotation_merge.model.sentence import module_files, read_modules
from rotation_merge.model.tensors import Tensors, by_name

_UNPICKLING = Lock()
"""Held by whoever unpickles lazily: mergekit has all of torch read otherwise meanwhile, and two threads at once would
leave it so."""

Fact = TypeVar("Fact")

_open: weakref.WeakSet[Any] = weakref.WeakSet()
"""Loaders whose files may be mapped into memory."""


def local_folder(reference: ModelReference, options: MergeOptions) -> str:
    """The folder of a stored model, downloaded if need be; of a GGUF the one that was made from it.

    Raises:
        CheckpointError: it cannot be downloaded.
    """
    path, revision, cache = reference.model.path, reference.model.revision, options.transformers_cache
    if is_folder(path):
        return path
    try:
        known = in_cache(path, revision, cache)
        if known is not None and (gguf_files(known) or not reachable()):
            return known
        folder = ModelReference(model=ModelPath(path=path, revision=revision)).local_path(cache)
    except RotationMergeError:
        raise
    except Exception as error:  # downloads raise errors of many classes
        refuse_bare_repository(path, revision)
        raise CheckpointError(
            f"weights cannot be read ({short(error)})", where=str(reference), remedy="download them again"
        ) from error
    check_local(folder)
    return folder


@dataclass(frozen=True)
class Shards:
    """The weight files of a folder.

    Attributes:
        label: the model's name in errors.
        files: by name of a tensor, the file that holds it, from the folder.
        prefixes: by file, what its tensors' names begin with in the whole model: modules of sentence-transformers.
    """

    folder: str
    label: str
    files: Mapping[str, str]
    prefixes: Mapping[str, str]
    lazy_unpickle: bool = False

    @classmethod
    def of(cls, folder: str, label: str, lazy_unpickle: bool = False) -> Shards:
        """Find the weight files of a folder; their headers are checked.

        Raises:
            CheckpointError: names the file that cannot be read.
        """
        if (file := single_file(folder)) is not None:
            file_shapes(file)
        prefixes = module_files(folder, read_modules(folder))
        try:
            files = dict(_loader(folder, lazy_unpickle).index.tensor_paths)
        except RotationMergeError:
            raise
        except Exception as error:  # readers raise errors of many classes
            problem = f"weights cannot be read ({short(error)})"
            raise CheckpointError(problem, where=label, remedy="download them again") from error
        for file, prefix in prefixes.items():
            files |= {prefix + name: file for name in file_shapes(os.path.join(folder, file))}
        return cls(folder, label, files, prefixes, lazy_unpickle)

    def facts(self, read: Callable[[str], Mapping[str, Fact]]) -> dict[str, Fact]:
        """Apply a function to each weight file, with the names of the whole model."""
        known: dict[str, Fact] = {}
        for file in sorted(set(self.files.values())):
            described = read(os.path.join(self.folder, file))
            known.update({self.prefixes.get(file, "") + name: fact for name, fact in described.items()})
        return known

    def tensors(self) -> Tensors:
        """The folder's tensors, read when they are asked for.

        Raises:
            CheckpointError: an index names a tensor that its shard does not hold.
        """
        shapes = self.facts(file_shapes)
        if absent := [name for name in self.files if name not in shapes]:
            raise CheckpointError(
                f"the index names '{absent[0]}', but its shard does not hold it",
                where=self.label,
                remedy="the shards and their index do not belong together; download them again",
            )
        return Tensors({name: shapes[name] for name in self.files}, self.facts(file_dtypes), by_name(ShardReader(self)))


class ShardReader:
    """Reads tensors of a folder by name; in another process it opens the files anew."""

    def __init__(self, shards: Shards) -> None:
        self.shards = shards
        self._loaders: dict[str, Any] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardReader, (replace(self.shards, folder=os.path.abspath(self.shards.folder)),)

    def __call__(self, name: str) -> Tensor:
        shards = self.shards
        file = shards.files[name]
        prefix = shards.prefixes.get(file)
        place = shards.folder if prefix is None else os.path.join(shards.folder, os.path.dirname(file))
        if not os.path.isdir(place):  # where it was opened it was there
            raise CheckpointError("no such directory", where=place, remedy="put the model under the same path")
        if place not in self._loaders:
            self._loaders[place] = _loader(place, shards.lazy_unpickle)
        tensor: Tensor = self._loaders[place].get_tensor(name.removeprefix(prefix or ""))
        return tensor


def _loader(folder: str, lazy_unpickle: bool) -> Any:
    """mergekit's loader of a folder, which keeps one shard open."""
    loader = LazyTensorLoader(ShardedTensorIndex.from_disk(folder), lazy_unpickle=lazy_unpickle)
    if lazy_unpickle:
        loader.lock = _UNPICKLING
    _open.add(loader)
    return loader


def close_files() -> None:
    """Close the weight files that are mapped into memory; the next read opens them again."""
    for loader in list(_open):
        loader.flush()
