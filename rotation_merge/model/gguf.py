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
from collections.abc import Iterable, Sequence
from pathlib import Path

from rotation_merge.errors import CheckpointError, named, nearest, short
from rotation_merge.files import locked, write_json
from rotation_merge.model.contents import Contents, reason
from rotation_merge.model.hub import is_gguf_file, on_hub
from rotation_merge.model.writing import staged

LOG = logging.getLogger(__name__)

ORIGIN = "gguf-files"
"""In a folder that was made of a GGUF: the files that it was made of, and a note on their quantisation. As the name has
no ending, nothing copies it into other models."""

FORMAT = 1
"""Counted up when the same file is decoded into another folder than before."""

WEIGHTS = (".safetensors", ".bin", ".index.json")


def is_gguf(path: str) -> bool:
    """Whether a name is a GGUF model: a file, a folder with no other weights, or `org/repo:file.gguf`."""
    if not os.path.isdir(path):
        return is_gguf_file(path)
    names = os.listdir(path)
    return any(map(is_gguf_file, names)) and not any(name.endswith(WEIGHTS) for name in names)


def split_files(path: str) -> list[str]:
    """All files of the model that a file is a part of, by its name (NAME-00001-of-00003.gguf)."""
    match = re.fullmatch(r"(.+)-\d{5}-of-(\d{5})\.gguf", path)
    return [f"{match[1]}-{i + 1:05}-of-{match[2]}.gguf" for i in range(int(match[2]))] if match else [path]


def refuse_absent(path: str, names: Iterable[str]) -> None:
    """Refuse a GGUF that its repository does not have, or a repository that has nothing but GGUF files.

    Args:
        names: of the files that it has.

    Raises:
        CheckpointError: names those in GGUF.
    """
    repo, file = on_hub(path)
    known = sorted({split_files(name)[0] for name in names if is_gguf_file(name)})
    if file:
        raise CheckpointError("is not in the repository", where=path, remedy=nearest(file, known))
    if known:
        remedy = f"name one of its files, as {repo}:{known[0]}"
        raise CheckpointError(f"holds models in GGUF: {named(known)}", where=repo, remedy=remedy)


def quantised(folder: str) -> str:
    """Describe the quantisation of the weights of a folder made of a GGUF; empty for other folders."""
    return str(Contents(folder).mapping(ORIGIN).get("note", ""))


def decoded(path: str) -> str:
    """The folder that a GGUF is decoded into; written on first use, by one process. Of any other model its own folder.

    Args:
        path: any one of its files, or the folder that holds no other model.

    Raises:
        CheckpointError: it is truncated or damaged, a file is missing, or it is of a kind that is not read.
    """
    from huggingface_hub import constants

    if not is_gguf(path):
        return path
    paths = _files_of(path)
    name = f"{Path(paths[0]).stem[:80]}-{_mark(paths)}"
    folder = os.path.join(constants.HF_HOME, "rotation_merge", "gguf", name)
    if os.path.isdir(folder):
        return folder
    try:
        with locked(folder, wait=-1.0):  # for ever, while another process decodes the same file
            if not os.path.isdir(folder):
                _decode(paths, folder)
    except CheckpointError:
        raise
    except Exception as error:  # numpy, torch, safetensors and tokenizers raise errors of many classes
        problem = f"its metadata are damaged, or {folder} cannot be written ({short(reason(error))})"
        remedy = "download it again, or set HF_HOME to a folder with room for all weights as float32"
        raise CheckpointError(problem, where=path, remedy=remedy) from error
    return folder


def _files_of(path: str) -> list[str]:
    """All files of the model that a file, or a folder with one language model, stands for."""
    if os.path.isdir(path):
        names = sorted(filter(is_gguf_file, os.listdir(path)))
        models = sorted({split_files(name)[0] for name in names if not name.startswith("mmproj")})
        if len(models) != 1:
            words = f"{len(models)} models in GGUF: {named(models)}"
            problem = f"holds {words if models else f'no language model in GGUF, only {named(names)}'}"
            raise CheckpointError(problem, where=path, remedy="name one of the files")
        path = os.path.join(path, models[0])
    paths = split_files(path)
    if missing := next((file for file in paths if not os.path.isfile(file)), None):
        problem = f"is one of {len(paths)} files, but {os.path.basename(missing)} is missing"
        raise CheckpointError(problem, where=path, remedy="download it, too")
    return paths


def _mark(paths: Sequence[str]) -> str:
    """A key of the files, and of the tokenizer beside them."""
    beside = os.path.join(os.path.dirname(paths[0]), "tokenizer.json")
    files = [os.path.realpath(path) for path in [*paths, beside] if os.path.exists(path)]
    facts = [(path, os.path.getsize(path), os.stat(path).st_mtime_ns) for path in files]
    return hashlib.blake2b(json.dumps([FORMAT, facts]).encode(), digest_size=6).hexdigest()


def _decode(paths: Sequence[str], folder: str) -> None:
    """Write the folder under another name; remove those of earlier states of the files."""
    from rotation_merge.model.gguf_checkpoint import write_checkpoint

    LOG.info("%s is decoded into %s", paths[0], folder)
    files = [os.path.abspath(path) for path in paths]
    for entry in os.scandir(os.path.dirname(folder)):
        if entry.is_dir() and Contents(entry.path).mapping(ORIGIN).get("files") == files:
            shutil.rmtree(entry.path, ignore_errors=True)
    with staged(folder) as staging:
        note = write_checkpoint(paths, staging)
        write_json(os.path.join(staging, ORIGIN), {"files": files, "note": note})
