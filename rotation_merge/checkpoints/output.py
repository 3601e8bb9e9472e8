"""Writing a model whole or not at all: mergekit writes into a staging directory, which then takes the place."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from rotation_merge.durable import sync, sync_tree
from rotation_merge.errors import RotationMergeError

MODEL_FILES = ("model", "pytorch_model")
CONFIGS = ("config.json", "adapter_config.json")
"""Without one of these nothing in a directory loads; with both it loads as an adapter."""


def check_place(out_path: str, inputs: Iterable[str]) -> None:
    """Refuse a place that cannot be written to, or that holds a model which is merged.

    Raises:
        RotationMergeError: names the path and what is wrong with it.
    """
    target = os.path.realpath(out_path)
    for path in inputs:
        if os.path.realpath(path) == target:
            raise RotationMergeError(
                "the output directory is one of the models", where=out_path, remedy="write somewhere else"
            )
    place = target
    while not os.path.exists(place):
        place = os.path.dirname(place)
    if not os.path.isdir(place):
        raise RotationMergeError("a file stands in the way", where=place, remedy="write somewhere else")
    if not os.access(place, os.W_OK | os.X_OK):
        raise RotationMergeError("cannot be written to", where=place, remedy="check its permissions")


@contextmanager
def staged(out_path: str) -> Iterator[str]:
    """A directory to write into, later moved to `out_path`; removed when the block does not end well.

    Everything in it is on disk before it moves.

    It lies beside `out_path`, or inside, where that is already a directory (which may be a file system of its own).
    A directory that is already there keeps its other files. Its old weights, index and config go first (the config
    before all, without which nothing loads), the new config comes last, so that at no moment a mixture of two models,
    or of a model and an adapter, loads.
    """
    target = os.path.abspath(out_path)
    parent, name = os.path.split(target)
    missing = _first_missing(parent)
    beside, inside = (os.path.join(place, f".{name}.partial") for place in (parent, target))
    for left in (beside, inside):
        shutil.rmtree(left, ignore_errors=True)
    holder = inside if os.path.isdir(target) else beside
    staging = os.path.join(holder, name)
    try:
        os.makedirs(staging)
        yield staging
        sync_tree(staging)
        _replace(staging, target)
        sync(target)
    except BaseException:
        shutil.rmtree(holder, ignore_errors=True)
        if missing is not None:
            _remove_empty(parent, missing)
        raise
    shutil.rmtree(holder, ignore_errors=True)
    sync(os.path.dirname(target))


def _first_missing(path: str) -> str | None:
    """The topmost directory that creating `path` would create."""
    missing = None
    while not os.path.exists(path):
        missing, path = path, os.path.dirname(path)
    return missing


def _remove_empty(path: str, top: str) -> None:
    while os.path.isdir(path) and not os.listdir(path):
        os.rmdir(path)
        if path == top:
            return
        path = os.path.dirname(path)


def _replace(staging: str, target: str) -> None:
    if not os.path.isdir(target):
        os.rename(staging, target)
        return
    for name in sorted(os.listdir(target), key=lambda n: n not in CONFIGS):
        if name in CONFIGS or _is_weights(name):
            os.remove(os.path.join(target, name))
    for name in sorted(os.listdir(staging), key=lambda n: n in CONFIGS):
        destination = os.path.join(target, name)
        if os.path.isdir(destination) and not os.path.islink(destination):
            shutil.rmtree(destination)
        os.replace(os.path.join(staging, name), destination)


def _is_weights(name: str) -> bool:
    return name.startswith((*MODEL_FILES, "adapter_model")) and name.endswith((".safetensors", ".bin", ".index.json"))
