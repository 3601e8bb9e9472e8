"""Download, disk and memory that a merge needs, compared with this machine's."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass

from rotation_merge.diagnose.donors import donors_of
from rotation_merge.errors import RotationMergeError
from rotation_merge.files.locks import first_missing
from rotation_merge.model.checkpoint import open_model
from rotation_merge.model.remote import RemoteModel
from rotation_merge.report.estimate import estimate

ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class ResourceNeeds:
    """Bytes that a merge needs, and free bytes.

    Attributes:
        downloads: by model of the hub.
        cache: folder that they are downloaded to.
        output, memory: of the merged model, and at the peak beyond Python and its libraries; None where no estimate is
            known (recipes of other methods).
        free_disk, free_memory: of the cache's disk and of the machine; None where the system does not say.
    """

    downloads: dict[str, int]
    cache: str
    output: int | None
    memory: int | None
    free_disk: int | None
    free_memory: int | None

    def shortages(self) -> Iterator[str]:
        """Missing resources in words."""
        needed = sum(self.downloads.values())
        if self.free_disk is not None and needed > self.free_disk:
            yield f"{_gigabytes(needed)} must go to {self.cache}, which has {_gigabytes(self.free_disk)} free"
        if self.memory is not None and self.free_memory is not None and self.memory > self.free_memory:
            yield f"the merge takes about {_gigabytes(self.memory)} of memory, {_gigabytes(self.free_memory)} are free"

    @property
    def words(self) -> str:
        parts = [f"{len(self.downloads)} models to download, {_gigabytes(sum(self.downloads.values()))}"]
        parts += [] if self.free_disk is None else [f"{_gigabytes(self.free_disk)} free in the cache"]
        parts += [] if self.output is None else [f"{_gigabytes(self.output)} to write"]
        parts += [] if self.memory is None else [f"about {_gigabytes(self.memory)} of memory"]
        return ", ".join(parts)


def needs_of(recipe: str, models: Collection[RemoteModel], cache: str) -> ResourceNeeds:
    """The needs of a recipe, from its models' headers.

    Args:
        models: those that are to be downloaded.
        cache: the folder that they will be downloaded to.
    """
    output, memory = None, None
    with suppress(RotationMergeError, ValueError):  # recipes of other methods, and such as `check` finds faults in
        for donor in donors_of(recipe):
            anchor = open_model(donor.anchor, donor.unsupported)
            size = ITEMSIZE.get(str(anchor.config.get("dtype") or anchor.config.get("torch_dtype")), 4)
            cost = estimate(anchor.architecture, dict(anchor.shapes), donor.options, size, size)
            output = size * sum(map(math.prod, anchor.shapes.values()))
            memory = max(memory or 0, cost.memory)
    downloads = {model.name: model.bytes for model in models}
    return ResourceNeeds(downloads, cache, output, memory, _free_disk(cache), _free_memory())


def _free_disk(folder: str) -> int | None:
    missing = first_missing(folder)
    place = folder if missing is None else os.path.dirname(missing)
    try:
        return shutil.disk_usage(place).free
    except OSError:
        return None


def _free_memory() -> int | None:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return None


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
