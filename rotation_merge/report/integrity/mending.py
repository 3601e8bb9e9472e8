"""Corrections of a checkpoint folder, file by file, each atomically."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from typing import Any, BinaryIO

from rotation_merge.errors import RotationMergeError
from rotation_merge.files import locked, replacing, write_text
from rotation_merge.model.writing import staged
from rotation_merge.report.integrity import Contents, Defect, check_folder
from rotation_merge.report.integrity.companions import check_companions
from rotation_merge.report.integrity.defect import Correction, FileCopy, JsonEntries, JsonFile, ShardHeader

ROUNDS = 6
"""Defects may hide others, such as a damaged index those of the config; so often a folder is looked at again."""
CHUNK = 1 << 24


def mend(folder: str, parents: Sequence[str] = ()) -> list[str]:
    """Correct every defect that needs no decision and no change of tensors.

    Returns:
        A line for each corrected file.

    Raises:
        RotationMergeError: a file cannot be written; those before it have been.
    """
    done: list[str] = []
    with locked(folder):
        for _ in range(ROUNDS):
            corrections = _open(check_folder(folder, parents))
            if not corrections:
                break
            for correction in corrections:
                _carry_out(folder, correction)
                done.append(correction.words)
    return done


def copy_companions(folder: str, parents: Sequence[str], without: Collection[str]) -> list[str]:
    """Copy the small files that parents have and a folder that is being written lacks; gives their names.

    Args:
        without: kinds of defects that stay.
    """
    copies = {
        correction.file: correction
        for defect in check_companions(Contents(folder), [Contents(parent) for parent in parents])
        for correction in defect.corrections
        if defect.kind not in without and isinstance(correction, FileCopy)
    }
    for correction in copies.values():
        _carry_out(folder, correction)
    return list(copies)


def mended_copy(folder: str, out: str, parents: Sequence[str]) -> list[str]:
    """`mend` on a copy, which comes to its place whole."""
    with staged(out) as staging:
        shutil.copytree(folder, staging, symlinks=False, dirs_exist_ok=True)
        return mend(staging, parents)


def _open(defects: Sequence[Defect]) -> list[Correction]:
    """The first correction of each file: one may make another unnecessary."""
    firsts: dict[str, Correction] = {}
    for defect in defects:
        for correction in defect.corrections:
            firsts.setdefault(correction.file, correction)
    return list(firsts.values())


def _carry_out(folder: str, correction: Correction) -> None:
    path = os.path.join(folder, correction.file)
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        match correction:
            case JsonEntries(entries=entries):
                write_text(path, json.dumps(_with_entries(path, entries), indent=2, ensure_ascii=False) + "\n")
            case JsonFile(content=content):
                write_text(path, json.dumps(content, indent=2) + "\n")
            case FileCopy(source=source):
                with replacing(path) as temporary:
                    shutil.copyfile(source, temporary)
            case ShardHeader(names=names):
                _rewrite(path, names)
    except (OSError, ValueError) as error:
        raise RotationMergeError(
            f"cannot be corrected ({error})", where=path, remedy="check permissions and free space"
        ) from error


def _with_entries(path: str, entries: Mapping[str, Any]) -> dict[str, Any]:
    with open(path, encoding="utf-8") as file:
        content: dict[str, Any] = json.load(file)
    for place, value in entries.items():
        *steps, last = place.split(".")
        part = content
        for step in steps:
            part = part.setdefault(step, {})
        if value is None:
            part.pop(last, None)
        else:
            part[last] = value
    return content


def _rewrite(path: str, names: Mapping[str, str]) -> None:
    """A safetensors file with tensors renamed, read and written in pieces."""
    with open(path, "rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(start - 8))
    head: dict[str, Any] = {"__metadata__": {"format": "pt", **(entries.pop("__metadata__", None) or {})}}
    place = 0
    ordered = sorted(entries.items(), key=lambda entry: entry[1]["data_offsets"][0])
    for name, entry in ordered:
        begin, end = entry["data_offsets"]
        head[names.get(name, name)] = {**entry, "data_offsets": [place, place + end - begin]}
        place += end - begin
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "rb") as source, replacing(path) as temporary, open(temporary, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for _, entry in ordered:
            begin, end = (start + offset for offset in entry["data_offsets"])
            _copy(source, out, begin, end)


def _copy(source: BinaryIO, out: BinaryIO, begin: int, end: int) -> None:
    source.seek(begin)
    while begin < end:
        piece = source.read(min(CHUNK, end - begin))
        if not piece:
            raise ValueError(f"{source.name} ends early")
        begin += out.write(piece)
