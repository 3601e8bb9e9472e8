"""Location of a model's files: a folder, a hub repository, or a folder made of a GGUF's metadata.

For a GGUF, config and tokenizer are made once, in a folder of the hub's cache that bears the file's name; its weights
stay where they are, and are turned into numbers one tensor at a time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from rotation_merge.errors import CheckpointError, named, nearest, nearest_path
from rotation_merge.files import TemporaryFolder, sync_tree, write_json
from rotation_merge.model import hub
from rotation_merge.model.gguf.file import GgufFile, damage_named, has_ending, open_gguf, split_files

if TYPE_CHECKING:
    from mergekit.common import ModelReference

LOG = logging.getLogger(__name__)

FILES = "gguf-files"
"""In a folder that was made of a GGUF, the list of the files that hold its weights."""

WEIGHTS = (".safetensors", ".bin", ".index.json")
TOKENIZER = ("tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "chat_template")


def is_gguf(path: str) -> bool:
    """Whether a name is a GGUF model: a file, a folder with no other weights, or `org/repo:file.gguf`."""
    return not is_folder(path) if os.path.isdir(path) else has_ending(path)


def is_folder(path: str) -> bool:
    """Whether a model is a folder in transformers' format, not a GGUF."""
    if not os.path.isdir(path):
        return False
    names = os.listdir(path)
    return not any(has_ending(name) for name in names) or any(name.endswith(WEIGHTS) for name in names)


def gguf_files(folder: str) -> list[str]:
    """The GGUF files that a folder was made from; empty for any other folder."""
    try:
        with open(os.path.join(folder, FILES), encoding="utf-8") as file:
            paths: list[str] = json.load(file)
    except FileNotFoundError:
        return []
    return paths


def in_cache(path: str, revision: str | None, cache: str | None = None) -> str | None:
    """The folder of a downloaded model, or of one in a GGUF; None otherwise."""
    if is_gguf(path):
        file = _here(path, revision, cache)
        return None if file is None else folder_of_gguf(open_gguf(file))
    folder = hub.in_cache(path, revision, cache)
    return folder_of_gguf(open_gguf(_only(folder))) if folder is not None and not is_folder(folder) else folder


def downloaded(path: str, revision: str | None, cache: str | None, patterns: list[str]) -> str:
    """`hub.downloaded`, and of a GGUF the folder that is made of it.

    Raises:
        CheckpointError: there is no such file, directory or repository, or it is damaged.
    """
    if is_gguf(path):
        file = _here(path, revision, cache) or _fetched(path, revision, cache)
        return folder_of_gguf(open_gguf(file))
    folder = hub.downloaded(path, revision, cache, patterns)
    if not os.path.isdir(folder) or not os.listdir(folder):  # nothing of it is in transformers' format
        refuse_bare_repository(path, revision)
    return folder if is_folder(folder) else folder_of_gguf(open_gguf(_only(folder)))


def is_absent(reference: ModelReference) -> bool:
    """Whether a model, or its adapter, is one of the hub that has not been downloaded; nothing is fetched."""
    parts = [part for part in (reference.model, reference.lora) if part is not None]
    return any(_absent(part.path, part.revision) for part in parts if not os.path.exists(part.path))


def _absent(path: str, revision: str | None) -> bool:
    if is_gguf(path):
        return _of_hub(path) is not None and _here(path, revision, None) is None
    return hub.is_hub_name(path) and hub.in_cache(path, revision) is None


def weight_files(path: str) -> tuple[str, ...]:
    """The files of a local GGUF outside the hub's cache; empty for any other model."""
    return split_files(_only(path) if os.path.isdir(path) else path) if is_gguf(path) and os.path.exists(path) else ()


def located(path: str, revision: str | None, cache: str | None) -> tuple[str | None, str]:
    """The local folder of a GGUF model, if it exists, and its repository's name on the hub, if any."""
    parts = _of_hub(path)
    file = _here(path, revision, cache)
    return None if file is None else os.path.dirname(os.path.abspath(file)), parts[0] if parts else path


def _of_hub(path: str) -> tuple[str, str] | None:
    """Repository and file of `org/repo:file.gguf`."""
    match = re.fullmatch(r"([\w.-]+/[\w.-]+):(.+\.gguf)", path, re.IGNORECASE)
    return (match[1], match[2]) if match else None


def _here(path: str, revision: str | None, cache: str | None) -> str | None:
    """The local file of a name, if it exists."""
    if os.path.isdir(path):
        return _only(path)
    if os.path.isfile(path):
        return path
    parts = _of_hub(path)
    if parts is None:
        return None
    from huggingface_hub import try_to_load_from_cache

    repo, name = parts
    cached = [try_to_load_from_cache(repo, file, cache_dir=cache, revision=revision) for file in split_files(name)]
    return str(cached[0]) if all(isinstance(file, str) for file in cached) else None


def _fetched(path: str, revision: str | None, cache: str | None) -> str:
    """Download the file of a repository, with all parts of a split model."""
    parts = _of_hub(path)
    if parts is None:
        otherwise = "check the path; of the hub: org/repo:file.gguf"
        remedy = nearest_path(
            path, otherwise, lambda beside: os.path.exists(beside) and (is_gguf(beside) or os.path.isdir(beside))
        )
        raise CheckpointError("no such file", where=path, remedy=remedy)
    repo, name = parts
    end = f"@{revision}" if revision else ""
    try:
        files = [hub.local_file(f"{repo}/{file}{end}", cache) for file in split_files(name)]
    except CheckpointError as error:
        known = _in_repository(repo, revision)
        if not known or name in known:
            raise
        raise CheckpointError("is not in the repository", where=path, remedy=nearest(name, known)) from error
    return files[0]


def _in_repository(repo: str, revision: str | None) -> list[str]:
    """The GGUF files of a repository of the hub, of split ones the first; empty if the hub cannot tell."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if not hub.reachable():
        return []
    try:
        names = HfApi().list_repo_files(repo, revision=revision)
    except (OSError, HfHubHTTPError, HFValidationError):
        return []
    return sorted({split_files(name)[0] for name in names if has_ending(name)})


def refuse_bare_repository(path: str, revision: str | None) -> None:
    """Refuse a repository of the hub as a model whose files are GGUF, which are named one by one.

    Raises:
        CheckpointError: names them.
    """
    if hub.is_hub_name(path) and not os.path.exists(path) and (files := _in_repository(path, revision)):
        raise bare_repository(path, files)


def bare_repository(path: str, files: Sequence[str]) -> CheckpointError:
    """The error for a repository that is named as a model, but holds GGUF files only."""
    remedy = f"name one of its files, as {path}:{files[0]}"
    return CheckpointError(f"holds models in GGUF: {named(files)}", where=path, remedy=remedy)


def _only(folder: str) -> str:
    """The only GGUF model in a folder.

    Raises:
        CheckpointError: there are several.
    """
    names = sorted(name for name in os.listdir(folder) if has_ending(name))
    models = {split_files(name)[0]: name for name in reversed(names) if not name.startswith("mmproj")}
    if not models:
        raise CheckpointError(f"holds no language model in GGUF, only {named(names)}", where=folder, remedy="name one")
    if len(models) != 1:
        problem = f"holds {len(models)} models in GGUF: {', '.join(sorted(models))}"
        raise CheckpointError(problem, where=folder, remedy="name one of the files")
    return os.path.join(folder, next(iter(models.values())))


def folder_of_gguf(gguf: GgufFile) -> str:
    """The folder with config and tokenizer of a GGUF, made on first use.

    Raises:
        CheckpointError: its architecture or tokenizer is not read.
    """
    folder = os.path.join(_room(), f"{Path(gguf.paths[0]).stem[:80]}-{_mark(gguf.paths)}")
    if not os.path.isdir(folder):
        with damage_named(gguf.paths[0]):
            _make(gguf, folder)
    return folder


def _room() -> str:
    from huggingface_hub import constants

    return os.path.join(constants.HF_HOME, "rotation_merge", "gguf")


def _mark(paths: Sequence[str]) -> str:
    """A key of the files, the tokenizer beside them, and the code that reads them."""
    beside = os.path.join(os.path.dirname(paths[0]), "tokenizer.json")
    facts = [
        (os.path.realpath(p), os.stat(p).st_size, os.stat(p).st_mtime_ns) for p in (*paths, beside) if os.path.exists(p)
    ]
    return hashlib.blake2b(json.dumps([_code(), facts]).encode(), digest_size=6).hexdigest()


@cache
def _code() -> str:
    """A key of the code and the tables that make a folder."""
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(Path(__file__).parent.glob("*.*")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _make(gguf: GgufFile, folder: str) -> None:
    from rotation_merge.model.gguf.config import family_of, read_config
    from rotation_merge.model.gguf.tokenizer import check_size, check_vocabulary, read_tokenizer

    config = read_config(gguf, family_of(gguf))
    check_size(gguf)
    beside = [name for name in os.listdir(os.path.dirname(gguf.paths[0]) or ".") if name.startswith(TOKENIZER)]
    try:
        with TemporaryFolder(os.path.dirname(folder)) as temporary:
            os.makedirs(staging := os.path.join(temporary, "made"))
            write_json(os.path.join(staging, "config.json"), config)
            write_json(os.path.join(staging, FILES), [os.path.abspath(path) for path in gguf.paths])
            if "tokenizer.json" in beside:
                place = os.path.dirname(gguf.paths[0])
                check_vocabulary(gguf, os.path.join(place, "tokenizer.json"))
                for name in beside:
                    shutil.copyfile(os.path.join(place, name), os.path.join(staging, name))
            elif (tokenizer := read_tokenizer(gguf)) is not None:
                tokenizer.save_pretrained(staging)
            sync_tree(staging)
            os.rename(staging, folder)
        LOG.info("%s: config and tokenizer were written to %s", gguf.paths[0], folder)
    except OSError as error:
        if not os.path.isdir(folder):  # else another process was quicker
            problem = f"cannot be written: {str(error.strerror).lower()}"
            raise CheckpointError(problem, where=folder, remedy="set HF_HOME to a folder of your own") from error
