"""A model's folder: where it is, which of its files hold its tensors, and those read when they are asked for."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from threading import Lock
from typing import Any

from mergekit.common import ModelPath, ModelReference
from mergekit.io.loader import TensorLoader
from torch import Tensor

from rotation_merge.errors import CheckpointError
from rotation_merge.model import gguf
from rotation_merge.model.contents import Contents, Header, header, tensor_files
from rotation_merge.model.hub import check_path, is_hub_name, on_hub, sent
from rotation_merge.model.sentence import module_files
from rotation_merge.model.tensors import Tensors, by_name

SMALL = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.py")
"""Files of a model beside its weights: config, tokenizer, code."""

_UNPICKLING = Lock()
"""Held by whoever unpickles lazily: mergekit has all of torch read otherwise meanwhile, and two threads at once would
leave it so."""

_readers: weakref.WeakSet[ShardReader] = weakref.WeakSet()
"""Those whose files may be mapped into memory."""


def place_of(part: ModelPath, cache: str | None = None) -> str | None:
    """Where a name's files are, on this disk or in the hub's cache: a folder, or a GGUF; None: not here."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    repo, file = on_hub(part.path)
    if os.path.exists(part.path) or not is_hub_name(repo):
        return part.path if os.path.exists(part.path) else None
    with suppress(LocalEntryNotFoundError, HFValidationError, OSError):
        here = {"revision": part.revision, "cache_dir": cache, "allow_patterns": [], "local_files_only": True}
        folder = snapshot_download(repo, **here)
        paths = [os.path.join(folder, name) for name in gguf.split_files(file)] if file else [folder]
        return paths[0] if all(map(os.path.exists, paths)) else None
    return None


def folder_of(part: ModelPath, cache: str | None = None) -> str | None:
    """The folder of a model that is here, of a GGUF the one that is made from it; None otherwise.

    Raises:
        CheckpointError: it is a GGUF that is damaged.
    """
    place = place_of(part, cache)
    return None if place is None else gguf.decoded(place)


def fetched(part: ModelPath, cache: str | None = None, patterns: Sequence[str] = SMALL) -> str:
    """The folder of a model, of a GGUF the one that is made from it; downloaded if need be.

    Args:
        patterns: of the names of the files that are wanted.

    Raises:
        CheckpointError: there is no such file, folder or repository, or it is a GGUF that is damaged.
    """
    path = part.path
    if os.path.isfile(path) and not gguf.is_gguf(path):
        raise CheckpointError("is a file", where=path, remedy="name the directory that holds the model, or a GGUF")
    check_path(path)
    return gguf.decoded(path if os.path.exists(path) else _downloaded(part, cache, patterns))


def _downloaded(part: ModelPath, cache: str | None, patterns: Sequence[str]) -> str:
    """Where a model's folder, or its GGUF, is in the hub's cache; a GGUF is downloaded once."""
    from huggingface_hub import HfApi, snapshot_download

    cached, (repo, file) = place_of(part, cache), on_hub(part.path)
    if file and cached is not None:
        return cached
    names = gguf.split_files(file) if file else list(patterns)
    place = {"revision": part.revision, "cache_dir": cache, "allow_patterns": names}
    folder = sent(part.path, cached, partial(snapshot_download, repo, **place))
    path = os.path.join(folder, file) if file else folder
    if not os.path.exists(path) or (not file and not os.listdir(path)):  # nothing is in transformers' format
        listed = partial(HfApi().list_repo_files, repo, revision=part.revision)
        gguf.refuse_absent(part.path, sent(part.path, None, listed))
    return path


def fetched_weights(part: ModelPath, cache: str | None = None) -> str:
    """`fetched` with the weights: safetensors, or pickles where there are none."""
    folder = fetched(part, cache, [*SMALL, "*.safetensors"])
    return folder if Contents(folder).opened else fetched(part, cache, [*SMALL, "*.bin"])


def absent_parts(reference: ModelReference) -> list[ModelPath]:
    """A model, or its adapter, where it is on the hub and has not been downloaded; nothing is fetched."""
    return [part for part in (reference.model, reference.lora) if part is not None and not _is_complete(part)]


def _is_complete(part: ModelPath) -> bool:
    """Whether a name is of this disk, or of a repository whose weights are in the cache, not small files alone."""
    if os.path.exists(part.path) or not is_hub_name(on_hub(part.path)[0]):
        return True
    place = place_of(part) or ""
    names = os.listdir(place) if os.path.isdir(place) else [place]
    return any(name.lower().endswith((".safetensors", ".bin", ".gguf")) for name in names)


class ShardReader:
    """Reads tensors of a folder by name, one file open at a time; in another process it opens the files anew.

    Attributes:
        places: by name of a tensor, the file that holds it, from the folder, and its name there.
    """

    def __init__(self, folder: str, places: Mapping[str, tuple[str, str]], lazy_unpickle: bool) -> None:
        self.folder, self.places, self.lazy_unpickle = os.path.abspath(folder), places, lazy_unpickle
        self._lock = _UNPICKLING if lazy_unpickle else Lock()
        self._open: tuple[str, Any] = ("", None)
        _readers.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardReader, (self.folder, self.places, self.lazy_unpickle)

    def __call__(self, name: str) -> Tensor:
        file, key = self.places[name]
        if not os.path.isdir(self.folder):  # where it was opened it was there
            raise CheckpointError("no such directory", where=self.folder, remedy="put the model under the same path")
        with self._lock:
            if self._open[0] != file:
                self._open = "", None  # a pickle is in memory
                self._open = file, TensorLoader.get(os.path.join(self.folder, file), self.lazy_unpickle)
            tensor: Tensor = self._open[1].get_tensor(key)
        return tensor

    def close(self) -> None:
        """Close the file that is mapped into memory."""
        with self._lock:
            self._open = "", None


def stored_tensors(
    folder: str, modules: list[dict[str, Any]], lazy_unpickle: bool = False
) -> tuple[Tensors, Mapping[str, str]]:
    """The tensors of a folder, read when they are asked for, and the types that their files call them.

    Args:
        modules: those of sentence-transformers after the model; their tensors are read as further ones of it.

    Raises:
        CheckpointError: names the file that cannot be read.
    """
    places = {name: (file, name) for name, file in tensor_files(folder).items()}
    for file, prefix in module_files(folder, modules).items():
        places |= {prefix + name: (file, name) for name in header(os.path.join(folder, file)).shapes}
    headers = {file: header(os.path.join(folder, file)) for file in {file for file, _ in places.values()}}
    shapes = {name: headers[file].shapes[key] for name, (file, key) in places.items()}
    whole = Header(shapes, {name: headers[file].kinds[key] for name, (file, key) in places.items()})
    return Tensors(shapes, whole.dtypes, by_name(ShardReader(folder, places, lazy_unpickle))), whole.kinds


def close_files() -> None:
    """Close the weight files that are mapped into memory; the next read opens them again."""
    for reader in list(_readers):
        reader.close()
