"""Models of the hub: recognising their names, finding the downloaded ones."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass

from rotation_merge.errors import CheckpointError, RotationMergeError, nearest_path, short


def is_hub_name(path: str) -> bool:
    return path.count("/") == 1 and not path.startswith((".", "/", "~"))


def check_repository(name: str) -> None:
    """Refuse an invalid repository name, before the hub is asked.

    Raises:
        RotationMergeError: names it.
    """
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise RotationMergeError(f"'{name}' names no repository", remedy="write org/name")


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

    if constants.HF_HUB_OFFLINE and not _silenced:
        return False
    when, answer = _answers.get(constants.ENDPOINT, (-REMEMBERED, False))
    now = time.monotonic()
    if now - when >= REMEMBERED:
        constants.HF_HUB_OFFLINE = False
        answer = _asked(constants.ENDPOINT)
        _answers[constants.ENDPOINT] = now, answer
    constants.HF_HUB_OFFLINE = _silenced = not answer
    return answer


def _asked(endpoint: str) -> bool:
    from huggingface_hub.utils import get_session

    try:
        get_session().head(endpoint, timeout=SECONDS)
    except Exception:  # of the client of HTTP below, which is another each year
        return False
    return True


def no_answer() -> tuple[str, str]:
    """The reason why the hub cannot be asked, and the remedy."""
    if _silenced:
        return "the hub does not answer", "check the connection, or name a folder"
    return "HF_HUB_OFFLINE is set", "unset it, or name a folder"


def check_available(path: str, revision: str | None, cache: str | None) -> None:
    """Refuse a hub model that is not cached while the hub cannot be reached.

    Raises:
        CheckpointError: names it.
    """
    is_cached = in_cache(path, revision, cache) is not None
    if not (is_cached and _is_commit(revision)) and not reachable() and not is_cached:
        why, remedy = no_answer()
        problem = f"is neither a folder nor in the hub's cache, and {why}"
        raise CheckpointError(problem, where=path, remedy=nearest_path(path, remedy))


def _is_commit(revision: str | None) -> bool:
    return bool(re.fullmatch(r"[0-9a-f]{40}", revision or ""))


def in_cache(path: str, revision: str | None, cache: str | None = None) -> str | None:
    """The folder of a downloaded model of the hub; None if there is none."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return snapshot_download(path, revision=revision, cache_dir=cache, local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        return None


def downloaded(path: str, revision: str | None, cache: str | None, patterns: list[str]) -> str:
    """A local directory, or the folder of a hub repository, downloaded if needed.

    Raises:
        CheckpointError: there is no such directory or repository.
    """
    if os.path.isdir(path):
        return path
    if not is_hub_name(path):
        raise CheckpointError("no such directory", where=path, remedy=nearest_path(path))
    check_available(path, revision, cache)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return snapshot_download(path, revision=revision, cache_dir=cache, allow_patterns=patterns)
    except (OSError, HFValidationError, HfHubHTTPError) as error:
        raise CheckpointError(f"cannot be downloaded ({short(error)})", where=path, remedy="check the name") from error


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

        cached = try_to_load_from_cache(
            self.repo, self.name, cache_dir=cache, revision=self.revision, repo_type=self.kind
        )
        return cached if isinstance(cached, str) else None


def local_file(path: str, cache: str | None = None) -> str:
    """The path of a local file, or of a file of the hub, downloaded if needed.

    Raises:
        CheckpointError: it is not here, and cannot be downloaded.
    """
    file = HubFile.of(path)
    if file is None:
        return path
    cached = file.cached(cache)
    if cached is not None and (_is_commit(file.revision) or not reachable()):
        return cached
    if not reachable():
        why, remedy = no_answer()
        raise CheckpointError(f"is neither a file nor in the hub's cache, and {why}", where=path, remedy=remedy)
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return hf_hub_download(file.repo, file.name, repo_type=file.kind, revision=file.revision, cache_dir=cache)
    except (OSError, HFValidationError, HfHubHTTPError) as error:
        problem = f"is not a file here, and cannot be downloaded ({short(error)})"
        raise CheckpointError(
            problem, where=path, remedy="check the path; of the hub: org/repo/file@revision"
        ) from error
