"""Samples in three parts: for merging, for selecting, and for reporting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from rotation_merge.errors import DataError
from rotation_merge.files.durable import replacing
from rotation_merge.run.data import Data, examples_in
from rotation_merge.run.functions import Batch

HELD_OUT = 0.5
"""Share of the samples that no merge sees; half of them choose, the other half is reported."""
PARTS = 4
"""So many batches a set of samples needs: two to merge with, one for each other part."""


@dataclass(frozen=True)
class SampleSets:
    """Samples of every parent (or one set for all), in three parts."""

    training: list[Data]
    deciding: list[Data]
    reported: list[Data]


def split(samples: Sequence[Data], seed: int) -> SampleSets:
    """Split every set of samples into training, selecting and reporting parts, by whole batches.

    Raises:
        DataError: a set has fewer than four examples.
    """
    parts: list[list[Data]] = [[], [], []]
    for data in samples:
        batches = _in_parts(data)
        count = len(batches)
        if count < PARTS:
            problem = f"{data.examples} samples are too few to hold some out"
            raise DataError(problem, where=data.source or None, remedy=f"give {PARTS} or more")
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
        half = max(1, round(count * HELD_OUT / 2))
        for part, rows in zip(parts, (order[2 * half :], order[:half], order[half : 2 * half]), strict=True):
            part.append(with_batches(data, [batches[i] for i in sorted(rows)]))
    return SampleSets(*parts)


def with_batches(data: Data, batches: Sequence[Batch]) -> Data:
    """A subset of the batches of a set of samples."""
    return replace(data, batches=[*batches], examples=sum(map(examples_in, batches)))


def _in_parts(data: Data) -> list[Batch]:
    """Batches, split into smaller ones if there are too few."""
    if len(data.batches) >= PARTS or not all(_by_row(batch) for batch in data.batches):
        return data.batches
    size = max(1, sum(map(examples_in, data.batches)) // PARTS)
    return [
        {name: tensor[first : first + size] for name, tensor in batch.items()}
        for batch in data.batches
        for first in range(0, examples_in(batch), size)
    ]


def _by_row(batch: Batch) -> bool:
    """Whether every input holds a row for each example."""
    return len({len(tensor) for tensor in batch.values()}) == 1


def write_data(data: Data, path: Path) -> Path:
    """Write samples as a file for `--data` and recipes; rows of unequal length are padded and masked."""
    names = list(data.batches[0])
    longest = {n: max(b[n].shape[-1] if b[n].ndim > 1 else 0 for b in data.batches) for n in names}
    arrays = {}
    for name in names:
        fill = -100 if name == "labels" else 0
        rows = [_padded(batch[name], longest[name], fill) for batch in data.batches]
        arrays[name] = torch.cat(rows).contiguous()
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        save_file(arrays, temporary)
    return path


def _padded(tensor: Tensor, length: int, fill: int) -> Tensor:
    if tensor.ndim < 2 or tensor.is_floating_point() or tensor.shape[-1] == length:
        return tensor
    return torch.nn.functional.pad(tensor, (0, length - tensor.shape[-1]), value=fill)


def tokens_in(data: Sequence[Data]) -> int:
    """Number of tokens of texts, one for each other input: a measure of a model's time."""
    batches = [batch for part in data for batch in part.batches]
    return sum(batch["input_ids"].numel() if "input_ids" in batch else examples_in(batch) for batch in batches)
