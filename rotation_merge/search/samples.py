"""Held-out samples: every set in three parts, in batches whose logits fit, and as files that recipes read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from rotation_merge.errors import DataError
from rotation_merge.files import replacing
from rotation_merge.run.arrays import by_rows, joined
from rotation_merge.run.data import Data

HELD_OUT = 0.5
"""Share of the samples that no merge sees; half of them choose, the other half is reported."""
PARTS = 4
"""So many batches a set of samples needs: two to merge with, one for each other part."""
LOGITS = 1 << 24
"""A batch of held-out samples gives no more of them, if it has several rows."""
BY_TOKEN = ("next token", "masked token", "none")
"""Tasks whose models may give logits for every token."""


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
        size = max(1, data.examples // PARTS)
        batches = data.batches if len(data.batches) >= PARTS else [p for b in data.batches for p in by_rows(b, size)]
        count = len(batches)
        if count < PARTS:
            problem = f"{data.examples} samples are too few to hold some out"
            raise DataError(problem, where=data.source or None, remedy=f"give {PARTS} or more")
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
        half = max(1, round(count * HELD_OUT / 2))
        for part, rows in zip(parts, (order[2 * half :], order[:half], order[half : 2 * half]), strict=True):
            part.append(data.with_batches([batches[i] for i in sorted(rows)]))
    return SampleSets(*parts)


def in_small_batches(data: Data, vocabulary: int) -> Data:
    """Samples of text in batches of few enough rows for their logits to stay below `LOGITS`."""
    batches = []
    for batch in data.batches:
        row = batch["input_ids"][0].numel() * vocabulary if data.task in BY_TOKEN and "input_ids" in batch else 1
        batches += by_rows(batch, max(1, LOGITS // row))
    return data.with_batches(batches)


def write_data(data: Data, path: Path) -> Path:
    """Write samples as a file for `--data` and recipes; rows of unequal length are padded and masked."""
    arrays = {name: tensor.contiguous() for name, tensor in joined(data.batches).items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        save_file(arrays, temporary)
    return path
