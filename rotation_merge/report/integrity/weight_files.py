"""Weight files and their index: all present, readable, of one model, each tensor once."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from rotation_merge.errors import named
from rotation_merge.model.adapters import WEIGHTS as ADAPTER_WEIGHTS
from rotation_merge.model.contents import ADAPTER_CONFIG, AGAIN, APART, MEND, ONE_COPY, SETS, Contents, holders_of
from rotation_merge.report.integrity.defect import Corrections, Defect, json_entries, json_file, shard_header

DISAGREES = "index disagrees"
INDEX_OF_SHARDS = ("no index", "damaged index", DISAGREES)
"""Faults that go when the index is written anew."""
SAFETENSORS = re.compile(r"[^/]+\.safetensors")


def check_weight_files(contents: Contents) -> Iterator[Defect]:
    """Look at index and headers."""
    if contents.is_adapter:
        if not any(map(contents.has, ADAPTER_WEIGHTS)):
            yield Defect("no weights", "there is no adapter_model.safetensors", ADAPTER_CONFIG, AGAIN)
        return
    for kind, error in contents.faults():
        name = os.path.relpath(error.where or "", contents.folder)
        mends = kind in INDEX_OF_SHARDS and contents.shards and contents.whole_files
        corrections = _index(contents, name) if mends else {}
        remedy = ONE_COPY if mends and not corrections else error.remedy or AGAIN
        yield Defect(kind, error.what, name, remedy, corrections=corrections)
    if contents.index is not None and contents.weight_map:
        yield from _beside_index(contents, contents.index)
    elif contents.index is None and contents.single is not None and contents.shards:
        problem = f"{contents.single} and {named(contents.shards)} both exist"
        yield Defect(SETS, problem, contents.single, APART)
    yield from _format(contents)


def _index(contents: Contents, name: str, more: tuple[str, ...] = ()) -> Corrections:
    """The index of the shards as they are, and of `more` that no index names yet.

    None where a tensor is in several files of the folder, and the present index names none of these.
    """
    files = (*contents.by_file, *more)
    others = [file for file in sorted(contents.names) if SAFETENSORS.fullmatch(file) and file not in files]
    holders = holders_of({file: _names(contents, file) for file in (*files, *others)})
    weight_map = {}
    for tensor in sorted(name for file in files for name in _names(contents, file)):
        stated = contents.weight_map.get(tensor)
        if stated not in holders[tensor] and len(holders[tensor]) > 1:
            return {}
        weight_map[tensor] = stated if stated in holders[tensor] else holders[tensor][0]
    total = sum(_bytes(contents, file) for file in files)
    return json_file(name, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _names(contents: Contents, file: str) -> list[str]:
    """Names of the tensors of a weight file; none of a damaged one."""
    head = contents.header(file)
    return [] if head is None else [*head.shapes]


def _bytes(contents: Contents, name: str) -> int:
    """Bytes of a file's tensors."""
    with open(contents.path(name), "rb") as file:
        head = int.from_bytes(file.read(8), "little") + 8 if name.endswith(".safetensors") else 0
    return os.path.getsize(contents.path(name)) - head


def _beside_index(contents: Contents, index: str) -> Iterator[Defect]:
    """Tensors and files that the index lacks, and its total size."""
    stray = [name for name in contents.shards if name not in contents.weight_map.values()]
    unnamed = tuple(name for name in stray if (names := _names(contents, name)) and not contents.files.keys() & names)
    if stray and not (unnamed and contents.whole_files):
        problem = f"no index names {named(stray)}"
        yield Defect("stray shard", problem, stray[0], "remove the files of another model", fatal=False)
    if not contents.whole_files:
        return
    tensors = [name for file in (*contents.by_file, *unnamed) for name in _names(contents, file)]
    if lacking := [name for name in tensors if name not in contents.weight_map]:
        problem = f"lacks {len(lacking)} tensors of the shards, '{lacking[0]}' first"
        corrections = _index(contents, index, unnamed)
        yield Defect(DISAGREES, problem, index, MEND if corrections else ONE_COPY, corrections=corrections)
    metadata: Any = contents.mapping(index).get("metadata")
    stated = metadata.get("total_size") if isinstance(metadata, dict) else None
    size = sum(_bytes(contents, name) for name in contents.by_file)
    if ".safetensors" in index and stated is not None and stated != size and not contents.copies:
        problem = f"total_size is {stated}, its shards hold {size} bytes"
        corrected = json_entries(index, {"metadata.total_size": size})
        yield Defect("wrong total size", problem, index, MEND, fatal=False, corrections=corrected)


def stale_copies(parents: Mapping[str, Contents]) -> Iterator[Defect]:
    """Parents by name with a tensor in several files: mergekit reads that copy whose file it has open."""
    for name, parent in parents.items():
        for tensor, files in list(parent.copies.items())[:1]:
            problem = f"tensor '{tensor}' is in {named(files)}, and mergekit's methods may read either"
            remedy = "write the model again (from_pretrained, save_pretrained), and merge again"
            yield Defect("tensor twice", problem, name, remedy)


def _format(contents: Contents) -> Iterator[Defect]:
    """Releases of transformers before 5 refuse a file whose header does not say 'pt'."""
    heads = {name: head for name, head in contents.by_file.items() if name.endswith(".safetensors")}
    if unmarked := [name for name, head in heads.items() if head.metadata.get("format") is None]:
        problem = "its header lacks 'format', which transformers 4 refuses"
        corrections = dict.fromkeys(unmarked, shard_header({}))
        yield Defect("no format", problem, named(unmarked), "set it ('--mend')", fatal=False, corrections=corrections)
