"""Models of the hub: which names are theirs, which of them have been downloaded."""

from __future__ import annotations

from mergekit.common import ModelReference


def is_hub_name(path: str) -> bool:
    return path.count("/") == 1 and not path.startswith((".", "/", "~"))


def in_cache(reference: ModelReference) -> bool:
    """Whether a hub model has been downloaded; nothing is fetched."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        snapshot_download(reference.model.path, revision=reference.model.revision, local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        return False
    return True
