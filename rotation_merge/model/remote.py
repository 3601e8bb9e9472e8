"""Models of the hub before they are downloaded: config, index and headers by a few small requests.

Fetched files are kept in a temporary cache, as if the models had been downloaded: weight files there have headers and
lengths, but no numbers (sparse files, which take no disk space). So code that reads no weights works on them as on
local models.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rotation_merge.errors import CheckpointError, RotationMergeError, short
from rotation_merge.files import TemporaryFolder
from rotation_merge.model.gguf import refuse_bare_repository
from rotation_merge.model.headers import weight_map
from rotation_merge.model.hub import is_gguf_file, reachable

SMALL = ("config.json", "generation_config.json", "adapter_config.json")
INDEX, SINGLE, ADAPTER = "model.safetensors.index.json", "model.safetensors", "adapter_model.safetensors"
DOWNLOADED = (".safetensors", ".json", ".model", ".txt", ".jinja", ".tiktoken")
"""Endings of the files that a merge downloads."""
WORKERS = 16
LARGEST = 1 << 24
"""Bytes of a small file at most; an index of ten thousand tensors has one million."""


@dataclass(frozen=True)
class RemoteModel:
    """A model of the hub.

    Attributes:
        revision: the commit.
        sizes: bytes of its files by name.
        licence: as its card says; None where it says nothing.
    """

    name: str
    revision: str
    sizes: Mapping[str, int]
    licence: str | None

    @property
    def bytes(self) -> int:
        """Bytes of the model that a merge downloads."""
        return sum(size for name, size in self.sizes.items() if name.endswith(DOWNLOADED) and "/" not in name)


@dataclass(frozen=True)
class RemoteHeaders:
    """Headers of models on the hub that are not downloaded.

    Attributes:
        models: by the name that they were asked for with (`org/name` or `org/name@revision`).
        errors: of the others.
        cache: the hub's cache, which they would be downloaded to.
    """

    models: dict[str, RemoteModel] = field(default_factory=dict)
    errors: dict[str, RotationMergeError] = field(default_factory=dict)
    cache: str = ""


@contextmanager
def remote_headers(names: Sequence[str], offline: bool) -> Iterator[RemoteHeaders]:
    """Have the headers of models of the hub in the place of its cache while the block runs; the hub is not asked then.

    Args:
        names: of models, and of adapters, that have not been downloaded.
        offline: ask nobody.
    """
    from huggingface_hub import constants

    headers = RemoteHeaders(cache=os.path.abspath(constants.HF_HUB_CACHE))
    if offline or not names or not reachable():
        yield headers
        return
    with TemporaryFolder() as folder:
        with ThreadPoolExecutor(WORKERS) as pool:
            for name, fetched in zip(names, pool.map(lambda name: _fetched(name, folder), names), strict=True):
                if isinstance(fetched, RotationMergeError):
                    headers.errors[name] = fetched
                else:
                    headers.models[name] = fetched
        with _in_place_of_cache(folder):
            yield headers


@contextmanager
def _in_place_of_cache(folder: str) -> Iterator[None]:
    """Make the libraries use `folder` as an offline hub cache, with links to the real cache's contents."""
    from huggingface_hub import constants
    from mergekit.io.tasks import LoaderCache

    cache, offline = constants.HF_HUB_CACHE, constants.HF_HUB_OFFLINE
    present = set(os.listdir(folder))
    for name in os.listdir(cache) if os.path.isdir(cache) else ():
        if name not in present:
            os.symlink(os.path.join(os.path.abspath(cache), name), os.path.join(folder, name))
    constants.HF_HUB_CACHE, constants.HF_HUB_OFFLINE = folder, True
    try:
        yield
    finally:
        constants.HF_HUB_CACHE, constants.HF_HUB_OFFLINE = cache, offline
        for reference, loader in list(LoaderCache.loaders.items()):
            if str(loader.index.base_path).startswith(folder):
                del LoaderCache.loaders[reference]


def _fetched(name: str, cache: str) -> RemoteModel | RotationMergeError:
    """Fetch a model's headers into a cache; an error message if that fails."""
    repo, _, revision = name.partition("@")
    if not re.fullmatch(r"[\w./-]*", revision) or ".." in revision:
        return CheckpointError(f"'{revision}' is not a revision", where=repo, remedy="write org/name@revision")
    try:
        return _fetch(name, repo, revision or "main", cache)
    except RotationMergeError as error:
        return error
    except Exception as error:  # of huggingface_hub, and of the client of HTTP below it, which is another each year
        problem = f"its headers cannot be fetched from the hub ({short(error)})"
        return CheckpointError(problem, where=name, remedy="check the name, and 'hf auth login' where it is gated")


def _fetch(name: str, repo: str, revision: str, cache: str) -> RemoteModel:
    from huggingface_hub import HfApi

    api = HfApi()
    info = api.model_info(repo, revision=revision, files_metadata=True)
    sizes = {file.rfilename: int(file.size or 0) for file in info.siblings or []}
    card = getattr(info, "card_data", None)
    model = RemoteModel(name, str(info.sha), sizes, card.get("license") if card is not None else None)
    folder = os.path.join(cache, f"models--{repo.replace('/', '--')}")
    snapshot = os.path.join(folder, "snapshots", model.revision)
    os.makedirs(snapshot, exist_ok=True)
    if revision != model.revision:
        _write(os.path.join(folder, "refs", revision), model.revision.encode())
    for file in (*SMALL, INDEX):
        if sizes.get(file, LARGEST) < LARGEST:
            _write(os.path.join(snapshot, file), _content(repo, file, model.revision))
    index = os.path.join(snapshot, INDEX)
    names = sorted(set(weight_map(index).values())) if INDEX in sizes else (SINGLE, ADAPTER)
    files = [file for file in names if file in sizes]
    if not files:
        refuse_bare_repository(name, sorted(filter(is_gguf_file, sizes)))
        remedy = "download it; headers of pickles cannot be read without running them"
        raise CheckpointError("has no weights in safetensors", where=name, remedy=remedy)
    with ThreadPoolExecutor(WORKERS) as shards:
        each = shards.map(lambda file: api.parse_safetensors_file_metadata(repo, file, revision=model.revision), files)
        for file, head in zip(files, each, strict=True):
            _write_holes(os.path.join(snapshot, file), head)
    return model


def _content(repo: str, file: str, revision: str) -> bytes:
    """A small file, by one request."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    response = get_session().get(hf_hub_url(repo, file, revision=revision), headers=build_hf_headers(), timeout=10)
    hf_raise_for_status(response)
    return bytes(response.content)


def _write(path: str, content: bytes) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(content)


def _write_holes(path: str, head: Any) -> None:
    """Write a safetensors file with a header and sparse, unwritten data."""
    entries: dict[str, Any] = {
        name: {"dtype": str(entry.dtype), "shape": list(entry.shape), "data_offsets": list(entry.data_offsets)}
        for name, entry in head.tensors.items()
    }
    end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    text = json.dumps({"__metadata__": head.metadata or {}, **entries}).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
