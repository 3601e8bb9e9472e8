"""Models in GGUF: how they are named, and the folder in transformers' format that each is decoded into, once.

The folder lies in the hub's cache, bears the file's name, and is an ordinary checkpoint until the file changes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rotation_merge.errors import CheckpointError, RotationMergeError, named, nearest, nearest_path, no_space, short
from rotation_merge.files import write_json
from rotation_merge.model import hub
from rotation_merge.model.staging import staged

if TYPE_CHECKING:
    from mergekit.common import ModelReference

LOG = logging.getLogger(__name__)

ENDING = ".gguf"
ORIGIN = "gguf-files"
"""In a folder that was made of a GGUF: the files that it was made of, and a note on their quantisation. As the name has
no ending, nothing copies it into other models."""

FORMAT = 1
"""Counted up when the same file is decoded into another folder than before."""

WEIGHTS = (".safetensors", ".bin", ".index.json")
_SPLIT = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.gguf")


def has_ending(name: str) -> bool:
    """Whether a file is called as a GGUF is."""
    return name.lower().endswith(ENDING)


def is_gguf(path: str) -> bool:
    """Whether a name is a GGUF model: a file, a folder with no other weights, or `org/repo:file.gguf`."""
    return not is_folder(path) if os.path.isdir(path) else has_ending(path)


def is_folder(path: str) -> bool:
    """Whether a model is a folder in transformers' format, not a GGUF."""
    if not os.path.isdir(path):
        return False
    names = os.listdir(path)
    return not any(has_ending(name) for name in names) or any(name.endswith(WEIGHTS) for name in names)


def split_files(path: str) -> tuple[str, ...]:
    """All files of the model that a file is a part of, by its name (NAME-00001-of-00003.gguf)."""
    match = _SPLIT.fullmatch(os.path.basename(path))
    if match is None:
        return (path,)
    count, folder = int(match["count"]), os.path.dirname(path)
    names = (f"{match['stem']}-{number:05}-of-{count:05}{ENDING}" for number in range(1, count + 1))
    return tuple(os.path.join(folder, name) for name in names)


def _origin(folder: str) -> dict[str, Any]:
    try:
        with open(os.path.join(folder, ORIGIN), encoding="utf-8") as file:
            known = json.load(file)
    except (FileNotFoundError, ValueError):
        known = []
    return known if isinstance(known, dict) else {"files": known, "note": ""}  # a list: of an older version


def gguf_files(folder: str) -> list[str]:
    """The GGUF files that a folder was made of; empty for any other folder."""
    return list(_origin(folder)["files"])


def quantised(folder: str) -> str:
    """Describe the quantisation of the weights of a folder made of a GGUF; empty for other folders."""
    return str(_origin(folder)["note"])


def weight_files(path: str) -> tuple[str, ...]:
    """The files of a local GGUF outside the hub's cache; empty for any other model."""
    if not is_gguf(path) or not os.path.exists(path):
        return ()
    return split_files(_model_in(path) if os.path.isdir(path) else path)


def in_cache(path: str, revision: str | None, cache: str | None = None) -> str | None:
    """The folder of a downloaded model, or the one that a GGUF is decoded into; None otherwise."""
    place = _cached(path, revision, cache)
    return None if place is None else _folder_of(place)


def downloaded(path: str, revision: str | None, cache: str | None, patterns: list[str]) -> str:
    """`hub.downloaded`, and of a GGUF the folder that it is decoded into.

    Raises:
        CheckpointError: there is no such file, directory or repository, or it is damaged.
    """
    if is_gguf(path):
        return _folder_of(_cached(path, revision, cache) or _fetched(path, revision, cache))
    folder = hub.downloaded(path, revision, cache, patterns)
    if not os.path.isdir(folder) or not os.listdir(folder):  # nothing of it is in transformers' format
        refuse_bare_repository(path, revision)
    return _folder_of(folder)


def is_absent(reference: ModelReference) -> bool:
    """Whether a model, or its adapter, is one of the hub that has not been downloaded; nothing is fetched."""
    parts = [part for part in (reference.model, reference.lora) if part is not None and not os.path.exists(part.path)]
    return any(_is_of_hub(part.path) and _cached(part.path, part.revision, None) is None for part in parts)


def _is_of_hub(path: str) -> bool:
    return _repository_and_file(path) is not None if is_gguf(path) else hub.is_hub_name(path)


def located(path: str, revision: str | None, cache: str | None) -> tuple[str | None, str]:
    """The local folder of a GGUF model, if it exists, and its repository's name on the hub, if any."""
    parts = _repository_and_file(path)
    place = _cached(path, revision, cache)
    folder = place if place is None or os.path.isdir(place) else os.path.dirname(os.path.abspath(place))
    return folder, parts[0] if parts else path


def _folder_of(place: str) -> str:
    """The folder in transformers' format of a local folder or GGUF file."""
    if is_folder(place):
        return place
    return decoded(_model_in(place) if os.path.isdir(place) else place)


def _repository_and_file(path: str) -> tuple[str, str] | None:
    """The parts of `org/repo:file.gguf`."""
    match = re.fullmatch(r"([\w.-]+/[\w.-]+):(.+\.gguf)", path, re.IGNORECASE)
    return (match[1], match[2]) if match else None


def _cached(path: str, revision: str | None, cache: str | None) -> str | None:
    """The local file or folder of a GGUF, or the folder of a model of the hub, if it is there."""
    if not is_gguf(path):
        return hub.in_cache(path, revision, cache)
    if os.path.exists(path):
        return path
    if (parts := _repository_and_file(path)) is None:
        return None
    from huggingface_hub import try_to_load_from_cache

    repo, name = parts
    files = [try_to_load_from_cache(repo, file, cache_dir=cache, revision=revision) for file in split_files(name)]
    return str(files[0]) if all(isinstance(file, str) for file in files) else None


def _fetched(path: str, revision: str | None, cache: str | None) -> str:
    """Download the file of a repository, with all parts of a split model."""
    parts = _repository_and_file(path)
    if parts is None:
        otherwise = "check the path; of the hub: org/repo:file.gguf"
        remedy = nearest_path(path, otherwise, lambda beside: os.path.isdir(beside) or bool(weight_files(beside)))
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


def _model_in(folder: str) -> str:
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


def decoded(path: str) -> str:
    """The folder that a GGUF is decoded into; written on first use, by one process.

    Args:
        path: any one of its files.

    Raises:
        CheckpointError: it is truncated or damaged, a file is missing, or it is of a kind that is not read.
    """
    from filelock import FileLock
    from huggingface_hub import constants

    paths = split_files(path)
    if missing := next((file for file in paths if not os.path.isfile(file)), None):
        problem = f"is one of {len(paths)} files, but {os.path.basename(missing)} is missing"
        raise CheckpointError(problem, where=path, remedy="download it, too")
    parent = os.path.join(constants.HF_HOME, "rotation_merge", "gguf")
    folder = os.path.join(parent, f"{Path(paths[0]).stem[:80]}-{_mark(paths)}")
    if not os.path.isdir(folder):
        with _named_errors(path, folder):
            os.makedirs(parent, exist_ok=True)
            with FileLock(f"{folder}.lock"):
                if not os.path.isdir(folder):
                    _decode(paths, folder)
    return folder


def _mark(paths: Sequence[str]) -> str:
    """A key of the files, and of the tokenizer beside them."""
    beside = os.path.join(os.path.dirname(paths[0]), "tokenizer.json")
    files = [os.path.realpath(path) for path in [*paths, beside] if os.path.exists(path)]
    facts = [(path, os.path.getsize(path), os.stat(path).st_mtime_ns) for path in files]
    return hashlib.blake2b(json.dumps([FORMAT, facts]).encode(), digest_size=6).hexdigest()


@contextmanager
def _named_errors(path: str, folder: str) -> Iterator[None]:
    """Within the block, whatever damaged metadata or a full disk make a library raise becomes one line.

    Raises:
        CheckpointError: names the file, or the folder that cannot be written.
    """
    remedy = "set HF_HOME to a folder of your own, with room for all weights as float32"
    try:
        yield
    except RotationMergeError:
        raise
    except Exception as error:  # numpy, torch, safetensors and tokenizers raise errors of many classes
        if isinstance(error, OSError | NotImplementedError) or no_space(error):  # a disk without locks
            problem = f"the weights of {path} cannot be written ({short(getattr(error, 'strerror', None) or error)})"
            raise CheckpointError(problem, where=folder, remedy=remedy) from error
        problem = f"its metadata are damaged ({short(error)})"
        raise CheckpointError(problem, where=path, remedy="download it again") from error


def _decode(paths: Sequence[str], folder: str) -> None:
    """Write the folder under another name; remove what killed runs and earlier states of the files have left."""
    from rotation_merge.model.gguf_checkpoint import write_checkpoint

    files = [os.path.abspath(path) for path in paths]
    beside = [entry.path for entry in os.scandir(os.path.dirname(folder)) if entry.is_dir()]
    LOG.info("%s is decoded into %s", paths[0], folder)
    for former in (place for place in beside if gguf_files(place) == files):
        shutil.rmtree(former, ignore_errors=True)
    with staged(folder) as staging:
        note = write_checkpoint(paths, staging)
        write_json(os.path.join(staging, ORIGIN), {"files": files, "note": note})
