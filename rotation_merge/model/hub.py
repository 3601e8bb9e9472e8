"""The hub: names of its repositories and files, whether it answers, and what of it is here."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from rotation_merge.errors import CheckpointError, RotationMergeError, nearest_path, short

T = TypeVar("T")


def is_hub_name(path: str) -> bool:
    """Whether a name may be that of a repository, `org/name`."""
    return path.count("/") == 1 and not path.startswith((".", "/", "~")) and not is_gguf_file(path)


def is_gguf_file(path: str) -> bool:
    """Whether a file is called as a GGUF is."""
    return path.lower().endswith(".gguf")


def on_hub(path: str) -> tuple[str, str]:
    """The repository and the file of a model that is named `org/repo:file.gguf`; of any other name no file."""
    match = re.fullmatch(r"([\w.-]+/[\w.-]+):(.+\.gguf)", path, re.IGNORECASE)
    return (match[1], match[2]) if match else (path, "")


def check_path(path: str) -> None:
    """Refuse the path of a model that is neither here nor the name of a repository.

    Raises:
        CheckpointError: names the path, and the nearest one.
    """
    if not os.path.exists(path) and not is_hub_name(on_hub(path)[0]):
        kind, fits = ("file", os.path.exists) if is_gguf_file(path) else ("directory", os.path.isdir)
        raise CheckpointError(f"no such {kind}", where=path, remedy=nearest_path(path, "check the path", fits))


def check_adapter(path: str) -> None:
    """Refuse the path of an adapter that is neither here nor the name of a repository.

    Raises:
        CheckpointError: names the path, and the nearest one.
    """
    if not os.path.exists(path) and (path.endswith(".safetensors") or not is_hub_name(path)):
        remedy = nearest_path(path, "name a folder or a .safetensors file", os.path.exists)
        raise CheckpointError("there is no LoRA adapter", where=path, remedy=remedy)


def check_file(path: str, remedy: str = "check the path", kind: type[RotationMergeError] = CheckpointError) -> None:
    """Refuse the path of a file or folder that is neither here nor the name of a file on the hub.

    Args:
        remedy: where no path beside it is called alike.
        kind: class of the error.

    Raises:
        RotationMergeError: names the path, and the nearest one.
    """
    if not os.path.exists(path) and HubFile.of(path) is None:
        raise kind("no such file", where=path, remedy=nearest_path(path, remedy, os.path.exists))


def check_local(path: str) -> None:
    """Refuse the path of a recipe or a model that is not here, unless it is the name of a file or adapter on the hub.

    Raises:
        CheckpointError: names the path, and the nearest one.
    """
    if not (os.path.exists(path) or is_gguf_file(path) or "+" in path):
        remedy = nearest_path(path, "give a recipe or a merged model", os.path.exists)
        raise CheckpointError("no such file or directory", where=path, remedy=remedy)


SECONDS = 5.0
"""The hub answers within so many, or it is not there."""
REMEMBERED = 60.0
"""For so many seconds nobody asks again whether it is there."""

_answers: dict[str, tuple[float, bool]] = {}
_silenced = False


def reachable() -> bool:
    """Whether the hub answers; if not, the libraries are set offline, as each would try for half a minute."""
    global _silenced
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE and not _silenced:
        return False
    when, answer = _answers.get(constants.ENDPOINT, (-REMEMBERED, False))
    if time.monotonic() - when >= REMEMBERED:
        constants.HF_HUB_OFFLINE, answer = False, True
        try:
            get_session().head(constants.ENDPOINT, timeout=SECONDS)
        except Exception:  # of the client of HTTP below, which is another each year
            answer = False
        _answers[constants.ENDPOINT] = time.monotonic(), answer
    constants.HF_HUB_OFFLINE = _silenced = not answer
    return answer


def no_answer() -> tuple[str, str]:
    """The reason why the hub cannot be asked, and the remedy."""
    if _silenced:
        return "the hub does not answer", "check the connection, or name a folder"
    return "HF_HUB_OFFLINE is set", "unset it, or name a folder"


def sent(name: str, cached: T | None, download: Callable[[], T], remedy: str = "check the name") -> T:
    """What the hub sends, or what is cached while it cannot be reached.

    Args:
        remedy: where the hub sends nothing.

    Raises:
        CheckpointError: neither is there.
    """
    if not reachable():
        if cached is not None:
            return cached
        why, otherwise = no_answer()
        problem = f"is neither here nor in the hub's cache, and {why}"
        raise CheckpointError(problem, where=name, remedy=nearest_path(name, otherwise))
    try:
        return download()
    except Exception as error:  # as in `reachable`
        raise CheckpointError(f"cannot be downloaded ({short(error)})", where=name, remedy=remedy) from error


@dataclass(frozen=True)
class HubFile:
    """A file on the hub, in recipes `org/repo/path/file@revision`; of a dataset with `datasets/` in front."""

    kind: str
    repo: str
    name: str
    revision: str | None

    @classmethod
    def of(cls, text: str) -> HubFile | None:
        """Parse a name; None if it is a local file or folder, or no such name."""
        part = r"[A-Za-z0-9_][\w.-]*"
        match = re.fullmatch(rf"(datasets/)?({part}/{part})/((?:{part}/)*{part})(?:@([\w./-]+))?", text)
        if match is None or os.path.exists(text) or (not match[4] and os.path.isdir(text.partition("/")[0])):
            return None
        return cls("dataset" if match[1] else "model", match[2], match[3], match[4])

    def cached(self, cache: str | None = None) -> str | None:
        """Its path in the cache; None if it was not downloaded."""
        from huggingface_hub import try_to_load_from_cache

        place = {"revision": self.revision, "repo_type": self.kind}
        cached = try_to_load_from_cache(self.repo, self.name, cache_dir=cache, **place)
        return cached if isinstance(cached, str) else None


def local_file(path: str, cache: str | None = None) -> str:
    """The path of a local file, or of a file of the hub, downloaded if needed; of a commit, the hub is asked once.

    Raises:
        CheckpointError: it is not here, and cannot be downloaded.
    """
    from huggingface_hub import hf_hub_download

    if (file := HubFile.of(path)) is None:
        return path
    cached = file.cached(cache)
    if cached is not None and re.fullmatch(r"[0-9a-f]{40}", file.revision or ""):
        return cached
    place = {"revision": file.revision, "repo_type": file.kind, "cache_dir": cache}
    download = partial(hf_hub_download, file.repo, file.name, **place)
    return sent(path, cached, download, "check the path; of the hub: org/repo/file@revision")
