"""Models of the hub: which names are theirs, which of them have been downloaded."""

from __future__ import annotations

import os

from mergekit.common import ModelReference

from rotation_merge.errors import CheckpointError, short


def is_hub_name(path: str) -> bool:
    return path.count("/") == 1 and not path.startswith((".", "/", "~"))


def is_absent(reference: ModelReference) -> bool:
    """Whether a model, or its adapter, is one of the hub that has not been downloaded; nothing is fetched."""
    parts = [part for part in (reference.model, reference.lora) if part is not None]
    return any(
        is_hub_name(part.path) and not os.path.exists(part.path) and not _in_cache(part.path, part.revision)
        for part in parts
    )


def _in_cache(path: str, revision: str | None) -> bool:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        snapshot_download(path, revision=revision, local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        return False
    return True


def downloaded(path: str, revision: str | None, cache: str | None, patterns: list[str]) -> str:
    """A directory as it is; of a repository of the hub its files, fetched where they are not there yet.

    Raises:
        CheckpointError: there is no such directory or repository.
    """
    if os.path.isdir(path):
        return path
    if not is_hub_name(path):
        raise CheckpointError("no such directory", where=path, remedy="check the path")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return snapshot_download(path, revision=revision, cache_dir=cache, allow_patterns=patterns)
    except (OSError, HFValidationError, HfHubHTTPError) as error:
        raise CheckpointError(f"cannot be downloaded ({short(error)})", where=path, remedy="check the name") from error
