"""Models of the hub before they are downloaded: config, index and headers by a few small requests.

Fetched files are kept in a temporary cache, as if the models had been downloaded: weight files there have headers and
lengths, but no numbers (sparse files, which take no disk space). So code that reads no weights works on them as on
local models.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

from rotation_merge.errors import CheckpointError, RotationMergeError, short
from rotation_merge.files import TemporaryFolder
from rotation_merge.model.contents import ADAPTER_CONFIG, CONFIG, GENERATION, INDEX, WEIGHT_FILES, Contents
from rotation_merge.model.gguf import refuse_absent
from rotation_merge.model.hub import reachable

SMALL = (CONFIG, GENERATION, ADAPTER_CONFIG, WEIGHT_FILES[0] + INDEX)
SINGLE = (WEIGHT_FILES[0], "adapter_model.safetensors")
DOWNLOADED = (".safetensors", ".json", ".model", ".txt", ".jinja", ".tiktoken")
"""Endings of the files that a merge downloads."""
WORKERS = 16

Refused = dict[str, RotationMergeError]
"""Errors by model."""


def downloaded_bytes(info: Any) -> int:
    """Bytes of the files that a merge downloads, of what the hub says of a model."""
    names = {file.rfilename: int(file.size or 0) for file in info.siblings or []}
    return sum(size for name, size in names.items() if name.endswith(DOWNLOADED) and "/" not in name)


@contextmanager
def remote_headers(names: Sequence[str], offline: bool) -> Iterator[tuple[dict[str, Any], Refused, str]]:
    """Have the headers of models of the hub in the place of its cache while the block runs; the hub is not asked then.

    Gives the hub's `ModelInfo` of these models by name, the errors of the others, and the place of the cache.

    Args:
        names: of models, and of adapters, that have not been downloaded.
        offline: ask nobody.
    """
    if offline or not names or not reachable():
        yield {}, {}, ""
        return
    with TemporaryFolder() as folder:
        with ThreadPoolExecutor(WORKERS) as pool:
            results = dict(zip(names, pool.map(partial(_fetched, cache=folder), names), strict=True))
        refused = {name: result for name, result in results.items() if isinstance(result, RotationMergeError)}
        with _in_place_of_cache(folder) as cache:
            yield {name: info for name, info in results.items() if name not in refused}, refused, cache


@contextmanager
def _in_place_of_cache(folder: str) -> Iterator[str]:
    """Make the libraries use `folder` as an offline hub cache, with links to the real cache's contents; gives that."""
    from huggingface_hub import constants

    cache, offline = constants.HF_HUB_CACHE, constants.HF_HUB_OFFLINE
    present = set(os.listdir(folder))
    for name in os.listdir(cache) if os.path.isdir(cache) else ():
        if name not in present:
            os.symlink(os.path.join(os.path.abspath(cache), name), os.path.join(folder, name))
    constants.HF_HUB_CACHE, constants.HF_HUB_OFFLINE = folder, True
    try:
        yield os.path.abspath(cache)
    finally:
        constants.HF_HUB_CACHE, constants.HF_HUB_OFFLINE = cache, offline


def _fetched(name: str, cache: str) -> Any:
    """What the hub says of a model whose headers are fetched into a cache, or the error why they are not."""
    try:
        return _fetch(name, cache)
    except RotationMergeError as error:
        return error
    except Exception as error:  # of huggingface_hub, and of the client of HTTP below it, which is another each year
        problem = f"its headers cannot be fetched from the hub ({short(error)})"
        return CheckpointError(problem, where=name, remedy="check the name, and 'hf auth login' where it is gated")


def _fetch(name: str, cache: str) -> Any:
    """Download a model's small files into a cache, and write weight files that have their headers alone."""
    from huggingface_hub import HfApi, snapshot_download

    api, (repo, _, revision) = HfApi(), name.partition("@")
    info = api.model_info(repo, revision=revision or None, files_metadata=True)
    names = [file.rfilename for file in info.siblings or []]
    snapshot = snapshot_download(repo, revision=revision or None, cache_dir=cache, allow_patterns=list(SMALL))
    os.makedirs(snapshot, exist_ok=True)
    files = [file for file in set(Contents(snapshot).weight_map.values()) or SINGLE if file in names]
    if not files:
        refuse_absent(name, names)
        remedy = "download it; headers of pickles cannot be read without running them"
        raise CheckpointError("has no weights in safetensors", where=name, remedy=remedy)
    with ThreadPoolExecutor(WORKERS) as pool:
        heads = pool.map(partial(api.parse_safetensors_file_metadata, repo, revision=str(info.sha)), files)
        for file, head in zip(files, heads, strict=True):
            _write_sparse(os.path.join(snapshot, file), head)
    return info


def _write_sparse(path: str, head: Any) -> None:
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
