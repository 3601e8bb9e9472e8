"""How a model is written: its small files and sizes, and its folder, moved to its place when it is whole."""

from __future__ import annotations

import itertools
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mergekit.common import parse_kmb

from rotation_merge.errors import RotationMergeError, short
from rotation_merge.files import PARTIAL, companion, locked, sync, sync_tree
from rotation_merge.record import DISTANCES, REPORT_FILE

WEIGHTS = re.compile(r"(model|pytorch_model|adapter_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")

CONFIGS = ("config.json", "adapter_config.json")
"""Without one of these nothing in a directory loads; with both it loads as an adapter."""

HEADS = "heads"
"""Folder of checkpoints of one merged body under the head of each donor."""

KEPT = (".json", ".txt", ".model", ".jinja", ".vocab", ".tiktoken", ".bpe")
"""Endings of a checkpoint's small files that are taken along (tokenizer, preprocessor, generation settings)."""

TEMPLATES = "additional_chat_templates"
"""A checkpoint's folder of chat templates beside the usual one."""

SHARD_SIZE = 5_000_000_000
"""Bytes of a weight file at most."""


def parse_size(text: str) -> int:
    """A file size such as 500M or 5B.

    Raises:
        RotationMergeError: it is none.
    """
    with suppress(ValueError, IndexError):
        if (size := parse_kmb(text)) > 0:
            return size
    raise RotationMergeError(f"'{text}' is not a size", remedy="write a number of bytes above 0, or 500M, or 5B")


def untied(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the same model with an untied head, in nested configs, too."""
    parts = {
        name: {**part, "tie_word_embeddings": False}
        for name, part in config.items()
        if isinstance(part, dict) and "tie_word_embeddings" in part
    }
    return {**config, **parts, "tie_word_embeddings": False}


def small_files(folder: str) -> dict[str, bytes]:
    """Small files of a checkpoint or adapter that belong to it whatever its weights (tokenizer, preprocessor)."""
    paths = sorted(Path(folder).iterdir()) + sorted(Path(folder, TEMPLATES).glob("*"))
    own = (*CONFIGS, REPORT_FILE)
    small = (p for p in paths if p.name.endswith(KEPT) and p.name not in own and not p.name.endswith(".index.json"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in small if path.is_file()}


@contextmanager
def staged(out: str) -> Iterator[str]:
    """A folder beside `out` that becomes its content when the block ends without an error, and is removed otherwise.

    Everything in it is on disk before it moves, and nobody else writes `out` meanwhile. An existing folder keeps its
    files, except those of the model that lies there: its config goes first, and the new one comes last, so that what a
    killed process leaves never loads as a model that it is not. The next run removes what is left of the staging.

    Raises:
        RotationMergeError: another run writes there, or the staged files cannot be moved; they are then kept.
    """
    target = os.path.realpath(out)
    with locked(target):
        holder = companion(target, PARTIAL)
        shutil.rmtree(holder, ignore_errors=True)
        staging = os.path.join(holder, os.path.basename(os.path.abspath(out)))
        try:
            os.makedirs(staging)
            yield staging
            sync_tree(staging)
        except BaseException:
            shutil.rmtree(holder, ignore_errors=True)
            raise
        try:
            _move(Path(staging), Path(target))
        except OSError as error:
            remedy = f"until the next run the new files are kept in {staging}"
            raise RotationMergeError(f"cannot be written ({short(error)})", where=out, remedy=remedy) from error
        shutil.rmtree(holder, ignore_errors=True)
        sync(os.path.dirname(target))


def _move(staging: Path, target: Path) -> None:
    """Move staged files to their place, configs last."""
    if not target.exists() or not os.listdir(target):
        os.replace(staging, target)
        return
    incoming = [path.relative_to(staging) for path in staging.rglob("*") if not path.is_dir()]
    for number, path in enumerate(sorted(_outgoing(target, incoming), key=lambda path: path.name not in CONFIGS)):
        os.replace(target / path, f"{staging}.{number}")
    sync(str(target))
    for path in sorted(incoming, key=lambda path: (path.name in CONFIGS, -len(path.parts), path)):
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        os.replace(staging / path, target / path)
    for folder in {target / path.parent for path in incoming} | {target}:
        sync(str(folder))


def _outgoing(target: Path, incoming: Sequence[Path]) -> Iterator[Path]:
    """What has to go from a folder before files come into it, by relative paths."""
    if blocked := next((path for path in incoming if _is_folder(target / path)), None):
        raise IsADirectoryError(f"{target / blocked} is a folder, where a file is to be written")
    folders = {folder for path in incoming for folder in path.parents}
    for folder in folders:
        path = target / folder
        if os.path.lexists(path) and not _is_folder(path) and _is_folder(path.parent):
            yield folder
    for folder in filter(_is_folder, {target / path.parent for path in incoming if is_of_a_model(path.name)}):
        yield from (p.relative_to(target) for p in folder.iterdir() if is_of_a_model(p.name) and not p.is_dir())
    if Path(HEADS) in folders and _is_folder(target / HEADS):  # heads of an earlier merge, which this one has not
        heads = {Path(HEADS, name) for name in os.listdir(target / HEADS)} - folders
        yield from (head for head in heads if (target / head / REPORT_FILE).is_file())
    if Path(REPORT_FILE) in incoming and all((target / name).is_file() for name in (REPORT_FILE, DISTANCES)):
        yield Path(DISTANCES)  # which shows what the earlier report says


def _is_folder(path: Path) -> bool:
    """Whether there is a folder, and no link on the way to it."""
    return path.is_dir() and path.resolve() == path


def is_of_a_model(name: str) -> bool:
    """Whether a file of this name is a config or weights of the model in its folder."""
    return name in CONFIGS or WEIGHTS.fullmatch(name) is not None


def free_name(name: str, exists: Callable[[str], bool] = os.path.lexists) -> str:
    """A name that is not taken (a path where nothing is): this one, or this one with a number."""
    names = (name if number == 1 else f"{name}-{number}" for number in itertools.count(1))
    return next(name for name in names if not exists(name))


def write_files(folder: str, files: Mapping[str, bytes]) -> None:
    """Write files by name into a folder, some of them into folders in it."""
    for name, content in files.items():
        path = os.path.join(folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(content)
