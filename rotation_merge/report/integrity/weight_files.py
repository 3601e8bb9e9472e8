"""Weight files and their index: all there, readable, of one model, each tensor once."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rotation_merge.errors import named
from rotation_merge.model.headers import ADAPTER_CONFIG, header
from rotation_merge.report.integrity.contents import STEMS, Contents
from rotation_merge.report.integrity.defect import Defect, JsonEntries, JsonFile, ShardHeader

AGAIN = "download or merge again"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")


def check_weight_files(contents: Contents, parents: Sequence[Contents]) -> Iterator[Defect]:
    """Look at index and headers; `parents` are of no use here."""
    if contents.is_adapter:
        if not contents.names & set(WEIGHTS):
            yield Defect("no weights", "there is no adapter_model.safetensors", ADAPTER_CONFIG, AGAIN)
        return
    contents.tensors  # noqa: B018  (reads all headers, and keeps what is damaged)
    if not contents.weight_files and not contents.weight_map:
        yield Defect("no weights", "there are no weight files", STEMS[0], AGAIN)
    yield from _index(contents)
    for name in contents.weight_files:
        if name in contents.damaged:
            yield Defect("damaged weight file", contents.damaged[name], name, AGAIN)
    yield from _twice(contents)
    yield from _format(contents)


def index_of(contents: Contents, more: Mapping[str, Iterable[str]] | None = None) -> dict[str, Any]:
    """The index of the shards as they are.

    Args:
        more: tensors of shards that no index names yet, by file.
    """
    files: dict[str, Iterable[str]] = {**contents.by_file, **(more or {})}
    sizes = sum(_bytes(contents, name) for name in files)
    weight_map = {tensor: name for name, tensors in files.items() for tensor in tensors}
    return {"metadata": {"total_size": sizes}, "weight_map": dict(sorted(weight_map.items()))}


def _bytes(contents: Contents, name: str) -> int:
    """Bytes of a file's tensors."""
    with open(contents.path(name), "rb") as file:
        head = int.from_bytes(file.read(8), "little") + 8 if name.endswith(".safetensors") else 0
    return os.path.getsize(contents.path(name)) - head


def _index(contents: Contents) -> Iterator[Defect]:
    index, single = contents.index, next((stem for stem in STEMS if stem in contents.names), None)
    if index is None:
        if single is None and contents.shards and contents.whole_files:
            name = f"{STEMS[0] if contents.shards[0].endswith('.safetensors') else STEMS[1]}.index.json"
            written = JsonFile(name, index_of(contents))
            yield Defect("no index", f"{len(contents.shards)} shards, but no index names them", name,
                         "write it ('--mend')", corrections=(written,))  # fmt: skip
        elif single is not None and contents.shards:
            problem = f"{single} and {named(contents.shards)} both exist"
            yield Defect("two sets of weights", problem, single, "move away the files of the other model")
        return
    if not contents.weight_map:
        mended = (JsonFile(index, index_of(contents)),) if contents.shards and contents.whole_files else ()
        yield Defect("damaged index", contents.damaged.get(index, "is empty"), index, AGAIN, corrections=mended)
        return
    if absent := sorted(set(contents.weight_map.values()) - contents.names):
        yield Defect("missing shard", f"names {named(absent)}, which is not there", index, AGAIN)
    if single is not None and single not in contents.weight_map.values():
        problem = f"{single} and {index} both exist"
        yield Defect("two sets of weights", problem, single, "move away the files of the other model")
    known = contents.tensors.keys()
    if contents.whole_files:
        yield from _disagreements(contents, index)
    stray = [name for name in contents.shards if name not in contents.weight_map.values()]
    unnamed = {name: header for name in stray if (header := contents.header(name)) and not header.keys() & known}
    if unnamed and contents.whole_files:
        corrections = (JsonFile(index, index_of(contents, unnamed)),)
        problem = f"lacks {named(unnamed)}, whose tensors are in no other file"
        yield Defect("index disagrees", problem, index, "rewrite it ('--mend')", corrections=corrections)
    elif stray:
        problem = f"no index names {named(stray)}"
        yield Defect("stray shard", problem, stray[0], "remove the files of another model", fatal=False)


def _disagreements(contents: Contents, index: str) -> Iterator[Defect]:
    """An index that does not match its shards."""
    places = {name: tensor.file for name, tensor in contents.tensors.items()}
    if wrong := [name for name, place in contents.weight_map.items() if place != places.get(name)]:
        problem = f"puts {len(wrong)} tensors, '{wrong[0]}' first, into files that do not hold them"
    elif wrong := [name for name in places if name not in contents.weight_map]:
        problem = f"lacks {len(wrong)} tensors of its shards, '{wrong[0]}' first"
    if wrong:
        corrections = (JsonFile(index, index_of(contents)),)
        yield Defect("index disagrees", problem, index, "rewrite it ('--mend')", corrections=corrections)
        return
    metadata = contents.mapping(index).get("metadata")
    stated = metadata.get("total_size") if isinstance(metadata, dict) else None
    size = sum(_bytes(contents, name) for name in contents.by_file)
    if index.startswith(STEMS[0]) and stated is not None and stated != size:
        problem = f"total_size is {stated}, its shards hold {size} bytes"
        corrected = JsonEntries(index, {"metadata.total_size": size})
        yield Defect("wrong total size", problem, index, "set it ('--mend')", fatal=False, corrections=(corrected,))


def _twice(contents: Contents) -> Iterator[Defect]:
    """A tensor that transformers reads from another shard, the last that holds it, than the index says."""
    holders: dict[str, list[str]] = {}
    for file, tensors in contents.by_file.items():
        for name in tensors:
            holders.setdefault(name, []).append(file)
    for name, files in holders.items():
        if len(files) > 1 and contents.weight_map.get(name) != files[-1]:
            problem = f"'{name}' is in {files[0]} and in {files[-1]}"
            yield Defect("tensor twice", problem, files[-1], "remove the files that are not the model's")
            return


def _format(contents: Contents) -> Iterator[Defect]:
    """Releases of transformers before 5 refuse a file whose header does not say 'pt'."""
    unmarked = [
        name
        for name in contents.by_file
        if name.endswith(".safetensors") and header(contents.path(name)).metadata.get("format") is None
    ]
    if unmarked:
        problem = "its header lacks 'format', which transformers 4 refuses"
        corrections = tuple(map(ShardHeader, unmarked))
        remedy = "set it ('--mend')"
        yield Defect("no format", problem, named(unmarked), remedy, fatal=False, corrections=corrections)
