"""A published folder, downloaded whole and checked against its manifest, or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

from rotation_merge.checkpoints.hub import HubFile, local_file
from rotation_merge.checkpoints.output import MODEL_FILES, staged
from rotation_merge.errors import RotationMergeError, short
from rotation_merge.recipe.document import documents
from rotation_merge.sharing.manifest import DAMAGED, FILE, Manifest, sum_of


def pull(repo: str, revision: str | None, out: str, weights: bool, watch: Callable[[str], None]) -> Manifest:
    """Download what a push published.

    Args:
        weights: whether the merged model's weights come, too; without them, what is needed to make it again.
        watch: told about every file.

    Raises:
        RotationMergeError: the hub does not have it, or a file is not what was published; nothing is left behind.
    """
    with staged(out) as staging:
        _fetch(repo, FILE, revision, staging)
        manifest = Manifest.read(os.path.join(staging, FILE))
        names = [name for name in manifest.files if weights or not _is_weights(name)]
        for name in names:
            watch(name)
            _fetch(repo, name, revision, staging)
        shutil.rmtree(os.path.join(staging, ".cache"), ignore_errors=True)
        manifest.check(staging, names)
        _check_referred(repo, os.path.join(staging, "recipe.yml"), manifest)
    return manifest


def _is_weights(name: str) -> bool:
    return name.startswith(MODEL_FILES) and name.endswith((".safetensors", ".bin", ".index.json"))


def _fetch(repo: str, name: str, revision: str | None, folder: str) -> None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
    )

    try:
        hf_hub_download(repo, name, revision=revision, local_dir=folder)
    except LocalEntryNotFoundError as error:
        remedy = "check the connection, HF_ENDPOINT, and that HF_HUB_OFFLINE is not set"
        raise RotationMergeError("the hub cannot be reached", where=repo, remedy=remedy) from error
    except EntryNotFoundError as error:
        known = "was not published by 'rotation-merge push'" if name == FILE else f"lacks '{name}', which it names"
        raise RotationMergeError(known, where=repo, remedy="ask who published it") from error
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        what = f"'{name}' cannot be downloaded ({short(error)})"
        raise RotationMergeError(what, where=repo, remedy="check the name and the revision") from error


def _check_referred(repo: str, recipe: str, manifest: Manifest) -> None:
    """Files of this repository that the recipe reads, at the commit that it names, are those of the folder; they are in
    the cache afterwards, where the recipe finds them."""
    if not os.path.exists(recipe):
        return
    with open(recipe, encoding="utf-8") as file:
        found = [word for document in documents(file.read()) for word in _words(document.value)]
    for name in found:
        wanted = HubFile.of(name)
        if wanted is None or wanted.repo != repo or wanted.name not in manifest.files:
            continue
        if sum_of(local_file(name)) != manifest.files[wanted.name][0]:
            what = "is not the file of the same name that was published beside the recipe"
            raise RotationMergeError(what, where=name, remedy=DAMAGED)


def _words(value: Any) -> Iterator[str]:
    """Every word of a recipe."""
    if isinstance(value, str):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _words(item)
