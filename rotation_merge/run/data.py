"""Samples of a model: batches of its inputs, with labels for a loss, from whatever the user has."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rotation_merge.errors import DataError
from rotation_merge.model.open import open_model
from rotation_merge.model.view import View
from rotation_merge.run.batches import (
    Batch,
    by_rows,
    check_batches,
    check_inputs,
    data_hash,
    examples_in,
    holds_pairs,
    joined,
    unlabelled,
)
from rotation_merge.run.functions import empty_model, in_memory, load, predicts_next
from rotation_merge.run.pictures import word_mask
from rotation_merge.run.sample_kinds import KINDS, SAMPLES, SELF
from rotation_merge.run.sentence import is_sentence_model
from rotation_merge.run.sources import read_examples, tokenizer_of

Samples = Any
"""Batches of forward's inputs (a list, a `DataLoader`), or the name of a source: a file, `self`, `synthetic`,
`demo:NAME`."""

UNLABELLED = ("embedding", "none")
"""Tasks of data without labels."""

MASKED = 0.15
"""Share of tokens that are masked for masked language models."""


@dataclass(frozen=True)
class Data:
    """Batches of model inputs, with `labels` if there are any.

    Attributes:
        batches: tensors by the names that the model's forward takes.
        task: next token, masked token, class, labels (any number for each example), regression, similarity (of two
            texts, by a model that gives embeddings), or, without labels, embedding (of such a model) or none.
        examples: number of examples.
        source: name of the data.
        length: tokens that a window of running text was to have, where they were read or written so.
        batch_size: examples that a batch was to have.
    """

    batches: list[Batch]
    task: str
    examples: int
    source: str = ""
    length: int | None = None
    batch_size: int | None = None

    def with_batches(self, batches: Sequence[Batch]) -> Data:
        """The same source with other batches."""
        return replace(self, batches=[*batches], examples=sum(map(examples_in, batches)))


def read_samples(
    model: View | str,
    samples: Samples,
    limit: int | None = None,
    batch_size: int = 16,
    length: int = 128,
    seed: int = 0,
    module: nn.Module | None = None,
    mixed: bool = False,
) -> Data:
    """Samples for a model.

    Args:
        model: where tokenizer and preprocessor lie: a view, or a path.
        samples: batches, or the name of a source.
        limit, batch_size, length: of sources by name: examples at most (so many are made where they are made), examples
            in a batch, tokens of each text.
        seed: of masks for masked language models, of samples that are made, and of drawing.
        module: the model in memory, which determines inputs and labels, where it is there anyway.
        mixed: take examples from everywhere in the file, drawn, not the first ones in their order.

    Raises:
        DataError: they are of no use to the model; names the file and the expected content.
    """
    source = str(samples) if isinstance(samples, str | os.PathLike) else None
    module = module or _module(model, source)
    if source is None:
        return data_in_memory(samples, module)
    path = model if isinstance(model, str) else "" if model.files is None else str(model.files.reference.model.path)
    examples = read_examples(source, module, path, length, limit or SAMPLES, seed)
    count = min(len(examples), limit or len(examples))
    if count == 0:
        raise DataError("holds no examples", where=source, remedy=f"give {KINDS}")
    if mixed:
        order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(seed)).tolist()
        examples = [examples[i] for i in order]
    kinds = {frozenset(example) - {"labels"} for example in examples}
    alike = len(kinds) == 1 and all(len(x) == 1 for example in examples for x in example.values())
    size = batch_size if alike else 1  # examples with other numbers of pictures stay apart
    batches = [joined(examples[i : min(i + size, count)], source) for i in range(0, count, size)]
    batches, task = _checked(batches, module, source, path, seed)
    return Data(batches, task, count, source, length, batch_size)


def _module(model: View | str, source: str | None) -> Any:
    """A module of the model, with its weights where it writes the samples."""
    if source == SELF:
        return load(model) if isinstance(model, str) else in_memory(model, None)
    view = open_model(model, unsupported="merge") if isinstance(model, str) else model
    return view.module or empty_model(view)


def data_in_memory(samples: Samples, model: Any, source: str = "samples") -> Data:
    """Batches in memory, with labels for a loss.

    Args:
        samples: batches by the names that the model's forward takes, in a list or any iterable; at least one.
        model: takes them.

    Raises:
        DataError: they are none, or of another kind than the model takes.
    """
    remedy, samples = "give a list of dictionaries such as {'input_ids': tensor}", listed(samples)
    if not isinstance(samples, Sequence) or not samples or not all(isinstance(batch, Mapping) for batch in samples):
        raise DataError("are no batches", where=source, remedy=remedy)
    if not all(isinstance(x, Tensor) and len(x) for batch in samples for x in batch.values()):
        raise DataError("hold a value that is not a tensor of examples", where=source, remedy=remedy)
    narrow = {torch.int32, torch.int16, torch.int8, torch.uint8}  # which losses and embeddings do not take
    wide = [{name: x.long() if x.dtype in narrow else x for name, x in batch.items()} for batch in samples]
    batches, task = _checked(wide, model, source)
    return Data(batches, task, sum(map(examples_in, batches)), source)


def listed(samples: Samples) -> Samples:
    """Batches of a `DataLoader` or a generator as a list, which can be read more than once; others unchanged."""
    once = isinstance(samples, Iterable) and not isinstance(samples, str | os.PathLike | Mapping | Sequence | Tensor)
    return list(samples) if once else samples


def for_each(samples: Samples, count: int) -> list[Samples]:
    """Samples for each of several models: those of all, or a list with those of each.

    Raises:
        DataError: the list has another length.
    """
    samples = listed(samples)
    shared = isinstance(samples, str | os.PathLike) or not isinstance(samples, Sequence)
    if shared or all(isinstance(batch, Mapping) for batch in samples):
        return [samples] * count
    if len(samples) != count:
        remedy = "give batches for all, or a list with batches or a source for each"
        raise DataError(f"{len(samples)} sets of samples for {count} models", remedy=remedy)
    return list(samples)


def _checked(
    batches: Sequence[Batch], model: Any, source: str, model_path: str | None = None, seed: int = 0
) -> tuple[list[Batch], str]:
    """Batches of a model's inputs, with labels for a loss, and the task.

    Labels of some examples are labels of none; single texts of a model that gives embeddings have none.

    Args:
        model_path: where the tokenizer lies that says which token masks; None: nothing is masked.
    """
    check_inputs(batches[0], model, source)
    pairs_lack = is_sentence_model(model) and not all(map(holds_pairs, batches))
    if pairs_lack or not all("labels" in batch for batch in batches):
        batches = [unlabelled(batch) for batch in batches]
    batches = [_with_decoder_inputs(batch, model) for batch in batches]
    check_batches(batches, model, source)
    task = _task(model, batches[0])
    if task == "masked token" and model_path is not None:
        generator = torch.Generator().manual_seed(seed)
        return [_masked(batch, model_path, generator) for batch in batches], task
    if task == "next token" and "labels" not in batches[0]:
        words = ((batch, word_mask(batch, model.config)) for batch in batches)
        return [{**batch, "labels": batch["input_ids"].masked_fill(~mask, -100)} for batch, mask in words], task
    return batches, "none" if task == "masked token" else task


def _with_decoder_inputs(batch: Batch, model: Any) -> Batch:
    """Add decoder inputs to the batch of an encoder-decoder model that has only labels."""
    shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if shift is None or "labels" not in batch or "decoder_input_ids" in batch or batch["labels"].ndim < 2:
        return batch
    return {**batch, "decoder_input_ids": shift(batch["labels"])}


def _task(model: Any, batch: Batch) -> str:
    """The task that the data's labels define."""
    name, config = type(model).__name__, getattr(model, "config", None)
    if "input_ids" in batch and predicts_next(model):
        return "next token"
    if "input_ids" in batch and name.endswith("ForMaskedLM") and "labels" not in batch:
        return "masked token"
    if is_sentence_model(model):
        return "similarity" if "labels" in batch else "embedding"
    if "labels" not in batch:
        return "none"
    labels, outputs = batch["labels"], getattr(config, "num_labels", None)
    several = labels.ndim == 2 and labels.shape[1] == outputs
    if several and getattr(config, "problem_type", None) == "multi_label_classification":
        return "labels"
    numbers = labels.is_floating_point() or (outputs == 1 and name.endswith("Classification"))
    return "regression" if numbers else "class"


def _masked(batch: Batch, model_path: str, generator: torch.Generator) -> Batch:
    """Mask a share of the tokens; only they are labelled."""
    token = tokenizer_of(model_path).mask_token_id
    if token is None:
        raise DataError("the tokenizer has no mask token", where=model_path, remedy="give records with 'labels'")
    hidden = torch.rand(batch["input_ids"].shape, generator=generator) < MASKED
    hidden &= batch.get("attention_mask", torch.ones_like(batch["input_ids"])) == 1
    labels = batch["input_ids"].masked_fill(~hidden, -100)
    return {**batch, "input_ids": batch["input_ids"].masked_fill(hidden, token), "labels": labels}


def described(data: Data, batches: Sequence[Batch] | None = None) -> dict[str, Any]:
    """A description of samples, for the metadata of a file made from them.

    Args:
        batches: the batches as used, if they differ from those that were read.

    Returns:
        Among them `tokens`: ids of texts, each image or recording as one.
    """
    used = data.batches if batches is None else batches
    tokens = sum(b["input_ids"].numel() if "input_ids" in b else examples_in(b) for b in used)
    facts = {"data": data.source, "data_hash": data_hash(used), "samples": data.examples, "tokens": tokens}
    shape = {"length": data.length, "batch_size": data.batch_size}
    return {**facts, "task": data.task, **{name: value for name, value in shape.items() if value is not None}}


def split_batches(data: Data, count: int) -> tuple[Data, Data]:
    """The first so many examples, and those after them.

    Batches of which a tensor holds more than a row for each example stay whole.
    """
    count, parts = min(count, data.examples), [by_rows(batch) for batch in data.batches]
    remaining = round(count * sum(map(len, parts)) / max(1, data.examples))
    sides: tuple[list[Batch], list[Batch]] = [], []
    for examples in parts:
        cut = min(remaining, len(examples))
        remaining -= cut
        for side, part in zip(sides, (examples[:cut], examples[cut:]), strict=True):
            side += [joined(part)] if part else []
    before, after = sides
    return replace(data, batches=before, examples=count), replace(data, batches=after, examples=data.examples - count)
