"""Samples from Python: batches, or the name of a source."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from rotation_merge.errors import DataError
from rotation_merge.model.model_inputs import OpenedModel
from rotation_merge.model.view import as_stored
from rotation_merge.run.data import Data, data_in_memory, read_batches
from rotation_merge.run.empty_models import empty_model
from rotation_merge.run.functions import local_path
from rotation_merge.run.generated_samples import SOURCES

Samples = Any
"""Batches of forward's inputs, or the name of a source: a file, `self`, `synthetic`, `demo:NAME`."""


def read_samples(
    opened: OpenedModel,
    samples: Samples,
    limit: int | None = None,
    batch_size: int = 16,
    length: int = 128,
    seed: int = 0,
    module: nn.Module | None = None,
) -> Data:
    """Samples for a model.

    Args:
        limit, batch_size, length: of sources by name: examples at most, in a batch, tokens of each text.
        seed: of samples that are made.
        module: the model in memory, where it is there anyway.

    Raises:
        DataError: they are of no use to the model, or text is to be read without a tokenizer.
    """
    named = isinstance(samples, str | os.PathLike)
    if module is None and named and str(samples) in SOURCES:
        module = as_stored(opened).to_module()
    kind = module or opened.module or empty_model(opened.transformers_config)
    if not named:
        return data_in_memory(samples, kind)
    source, checkpoint = str(samples), opened.checkpoint
    path = "" if checkpoint is None else local_path(str(checkpoint.reference.model.path))
    if checkpoint is None and source not in SOURCES and getattr(kind, "main_input_name", "") == "input_ids":
        problem = "is in memory without a tokenizer"
        raise DataError(problem, where=opened.name, remedy="give batches of input_ids, or the model's folder")
    return read_batches(source, path, kind, limit, batch_size, length, seed)


def for_each(samples: Samples, count: int) -> list[Samples]:
    """Samples for each of several models: those of all, or a list with those of each.

    Raises:
        DataError: the list has another length.
    """
    shared = isinstance(samples, str | os.PathLike) or not isinstance(samples, Sequence)
    if shared or all(isinstance(batch, Mapping) for batch in samples):
        return [samples] * count
    if len(samples) != count:
        remedy = "give batches for all, or a list with batches or a source for each"
        raise DataError(f"{len(samples)} sets of samples for {count} models", remedy=remedy)
    return list(samples)
