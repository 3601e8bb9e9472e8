"""A published folder, downloaded whole and checked against its manifest, or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace

from rotation_merge.errors import RotationMergeError, short
from rotation_merge.model.hub import HubFile, local_file, no_answer, reachable
from rotation_merge.model.staging import staged
from rotation_merge.record import MANIFEST_FILE
from rotation_merge.share.contents import is_weights
from rotation_merge.share.manifest import DAMAGED, Manifest, sha256_of
from rotation_merge.share.paths import check_paths, words_of

RECIPES = ("recipe.yml", "mergekit_config.yml")


def pull(
    repo: str,
    revision: str | None,
    out: str,
    weights: bool,
    watch: Callable[[str], None],
    include: Sequence[str],
) -> Manifest:
    """Download a published folder: recipes first, and check each file on arrival.

    Args:
        weights: whether to download the merged weights; without them, only the inputs for making the merge again.
        watch: told about every file.
        include: patterns of files that are taken although a merge has no such files.

    Returns:
        The manifest, of the files that were taken.

    Raises:
        RotationMergeError: the repository is missing, a file differs from the published one or is no part of a merge,
            or a recipe names paths outside its folder; nothing is left behind.
    """
    with staged(out) as staging:
        _fetch(repo, MANIFEST_FILE, revision, staging)
        manifest = Manifest.read(os.path.join(staging, MANIFEST_FILE), repo, include)
        names = [name for name in manifest.files if weights or not is_weights(name)]
        for name in sorted(names, key=lambda name: name not in RECIPES):
            watch(name)
            _fetch(repo, name, revision, staging)
            manifest.check(staging, name)
            if name in RECIPES:
                check_paths(_text(staging, name), name)
        shutil.rmtree(os.path.join(staging, ".cache"), ignore_errors=True)
        if RECIPES[0] in manifest.files:
            _check_referred(repo, _text(staging, RECIPES[0]), manifest)
    return replace(manifest, files={name: manifest.files[name] for name in names})


def _text(folder: str, name: str) -> str:
    try:
        with open(os.path.join(folder, name), encoding="utf-8") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise RotationMergeError("is not UTF-8 text", where=name, remedy=DAMAGED) from error


def _fetch(repo: str, name: str, revision: str | None, folder: str) -> None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
    )

    if not reachable():
        why, _ = no_answer()
        remedy = "check the connection, HF_ENDPOINT, and that HF_HUB_OFFLINE is not set"
        raise RotationMergeError(f"cannot be pulled: {why}", where=repo, remedy=remedy)
    try:
        hf_hub_download(repo, name, revision=revision, local_dir=folder)
    except LocalEntryNotFoundError as error:
        remedy = "check the connection, HF_ENDPOINT, and that HF_HUB_OFFLINE is not set"
        raise RotationMergeError("the hub cannot be reached", where=repo, remedy=remedy) from error
    except EntryNotFoundError as error:
        lacking = f"lacks '{name}', which its manifest names"
        known = "was not published by 'rotation-merge push'" if name == MANIFEST_FILE else lacking
        raise RotationMergeError(known, where=repo, remedy="ask who published it") from error
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        problem = f"'{name}' cannot be downloaded ({short(error)})"
        raise RotationMergeError(problem, where=repo, remedy="check the name and the revision") from error


def _check_referred(repo: str, recipe: str, manifest: Manifest) -> None:
    """Check that files of this repository in the recipe, at its commit, equal those of the folder.

    Afterwards they are in the cache, where the recipe finds them.
    """
    for name in words_of(recipe):
        file = HubFile.of(name)
        if file is None or file.repo != repo or file.name not in manifest.files:
            continue
        if sha256_of(local_file(name)) != manifest.files[file.name][0]:
            problem = "differs from the file of that name that was published with the recipe"
            raise RotationMergeError(problem, where=name, remedy=DAMAGED)
