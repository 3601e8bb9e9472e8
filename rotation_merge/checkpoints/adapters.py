"""Models with a LoRA: mergekit merges the two into a cache; here whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile

from mergekit.common import ModelReference
from mergekit.options import MergeOptions

from rotation_merge.checkpoints.headers import check_local, file_shapes, read_json
from rotation_merge.errors import CheckpointError


def merge_adapter(reference: ModelReference, options: MergeOptions) -> None:
    """Have mergekit merge a LoRA into its cache, unless it did so before.

    mergekit writes right where it looks the next time, and takes whatever is there for finished. Here it writes beside
    that place, and what it has finished is moved there; so do several processes at a time.

    Raises:
        CheckpointError: what lies in the cache is not whole.
    """
    cache, lora = options.lora_merge_cache, reference.lora
    if lora is None or not cache:
        return
    place = os.path.join(
        cache, f"{reference.model._unique_id()}_{lora._unique_id()}"
    )  # as ModelReference.merged has it
    if os.path.exists(place):
        _check_whole(place)
        return
    os.makedirs(cache, exist_ok=True)
    staging = tempfile.mkdtemp(prefix=".partial-", dir=cache)
    try:
        made = reference.merged(staging, options.trust_remote_code, options.lora_merge_dtype).model.path
        place = os.path.join(cache, os.path.basename(made))
        try:
            os.rename(made, place)
        except OSError:
            if not os.path.isdir(place):  # else another process was quicker
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _check_whole(folder: str) -> None:
    try:
        read_json(os.path.join(folder, "config.json"))
        check_local(folder)
        for name in os.listdir(folder):
            if name.endswith(".safetensors"):
                file_shapes(os.path.join(folder, name))
    except CheckpointError as error:
        raise CheckpointError(
            f"this merged LoRA is not whole, as an interrupted merge leaves it ({error.what})",
            where=folder,
            remedy="delete the directory, it will be made again",
        ) from error
