"""Weight files and their index: all there, readable, of one model, each tensor once."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rotation_merge.errors import named
from rotation_merge.model.adapters import WEIGHTS as ADAPTER_WEIGHTS
from rotation_merge.model.contents import ADAPTER_CONFIG, AGAIN, APART, INDEX, MEND, SETS, Contents
from rotation_merge.report.integrity.defect import Defect, json_entries, json_file, shard_header

INDEX_OF_SHARDS = ("damaged index", "index disagrees")
"""Faults that go when the index is written anew."""


def check_weight_files(contents: Contents, parents: Sequence[Contents]) -> Iterator[Defect]:
    """Look at index and headers; `parents` are of no use here."""
    if contents.is_adapter:
        if not any(map(contents.has, ADAPTER_WEIGHTS)):
            yield Defect("no weights", "there is no adapter_model.safetensors", ADAPTER_CONFIG, AGAIN)
        return
    for kind, error in contents.faults():
        name = os.path.relpath(error.where or "", contents.folder)
        mends = kind in INDEX_OF_SHARDS and contents.shards and contents.whole_files
        corrections = (json_file(name, index_of(contents)),) if mends else ()
        yield Defect(kind, error.what, name, error.remedy or AGAIN, corrections=corrections)
    if contents.index is None:
        yield from _without_index(contents)
    elif contents.weight_map:
        yield from _index(contents, contents.index)
    yield from _format(contents)


def index_of(contents: Contents, more: Mapping[str, Iterable[str]] | None = None) -> dict[str, Any]:
    """The index of the shards as they are.

    Args:
        more: tensors of shards that no index names yet, by file.
    """
    files = {**{name: head.shapes for name, head in contents.by_file.items()}, **(more or {})}
    sizes = sum(_bytes(contents, name) for name in files)
    weight_map = {tensor: name for name, tensors in files.items() for tensor in tensors}
    return {"metadata": {"total_size": sizes}, "weight_map": dict(sorted(weight_map.items()))}


def _bytes(contents: Contents, name: str) -> int:
    """Bytes of a file's tensors."""
    with open(contents.path(name), "rb") as file:
        head = int.from_bytes(file.read(8), "little") + 8 if name.endswith(".safetensors") else 0
    return os.path.getsize(contents.path(name)) - head


def _without_index(contents: Contents) -> Iterator[Defect]:
    if contents.single is not None and contents.shards:
        problem = f"{contents.single} and {named(contents.shards)} both exist"
        yield Defect(SETS, problem, contents.single, APART)
    elif contents.shards and contents.whole_files:
        name = re.sub(r"-\d+-of-\d+", "", contents.shards[0]) + INDEX
        problem = f"{len(contents.shards)} shards, but no index names them"
        yield Defect("no index", problem, name, MEND, corrections=(json_file(name, index_of(contents)),))


def _index(contents: Contents, index: str) -> Iterator[Defect]:
    """Tensors and files that the index lacks, and its total size."""
    stray = [name for name in contents.shards if name not in contents.weight_map.values()]
    headers = {name: head.shapes for name in stray if (head := contents.header(name)) is not None}
    unnamed = {name: shapes for name, shapes in headers.items() if not shapes.keys() & contents.files.keys()}
    if unnamed and contents.whole_files:
        corrections = (json_file(index, index_of(contents, unnamed)),)
        problem = f"lacks {named(unnamed)}, whose tensors are in no other file"
        yield Defect("index disagrees", problem, index, MEND, corrections=corrections)
    elif stray:
        problem = f"no index names {named(stray)}"
        yield Defect("stray shard", problem, stray[0], "remove the files of another model", fatal=False)
    if not contents.whole_files:
        return
    if lacking := [name for name in contents.files if name not in contents.weight_map]:
        problem = f"lacks {len(lacking)} tensors of its shards, '{lacking[0]}' first"
        yield Defect("index disagrees", problem, index, MEND, corrections=(json_file(index, index_of(contents)),))
    metadata = contents.mapping(index).get("metadata")
    stated = metadata.get("total_size") if isinstance(metadata, dict) else None
    size = sum(_bytes(contents, name) for name in contents.by_file)
    if ".safetensors" in index and stated is not None and stated != size:
        problem = f"total_size is {stated}, its shards hold {size} bytes"
        corrected = json_entries(index, {"metadata.total_size": size})
        yield Defect("wrong total size", problem, index, MEND, fatal=False, corrections=(corrected,))


def _format(contents: Contents) -> Iterator[Defect]:
    """Releases of transformers before 5 refuse a file whose header does not say 'pt'."""
    unmarked = [
        name
        for name, head in contents.by_file.items()
        if name.endswith(".safetensors") and head.metadata.get("format") is None
    ]
    if unmarked:
        problem = "its header lacks 'format', which transformers 4 refuses"
        corrections = tuple(map(shard_header, unmarked))
        remedy = "set it ('--mend')"
        yield Defect("no format", problem, named(unmarked), remedy, fatal=False, corrections=corrections)
