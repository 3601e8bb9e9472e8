"""Data for measuring models: examples in batches, with labels for a loss."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rotation_merge.errors import DataError
from rotation_merge.model.view import View
from rotation_merge.run.arrays import ExampleBatches, one_by_one, word_mask
from rotation_merge.run.data_checks import (
    check_decoder,
    check_inputs,
    check_numbers,
    check_shape,
    check_tokens,
)
from rotation_merge.run.empty_models import empty_model
from rotation_merge.run.examples import KINDS, read_examples, tokenizer_of
from rotation_merge.run.functions import Batch, local_path, module_of, predicts_next, unlabelled
from rotation_merge.run.generated_samples import SOURCES, write_samples
from rotation_merge.run.sample_kinds import SAMPLES
from rotation_merge.run.sentence import is_sentence_model

Samples = Any
"""Batches of forward's inputs (a list, a `DataLoader`), or the name of a source: a file, `self`, `synthetic`,
`demo:NAME`."""

UNLABELLED = ("embedding", "none")
"""Tasks of data without labels."""


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


def read_batches(
    source: str,
    model_path: str,
    model: Any,
    limit: int | None = None,
    batch_size: int = 32,
    length: int = 128,
    seed: int = 0,
    mixed: bool = False,
) -> Data:
    """Read data for a model.

    Args:
        source: a path, `demo:digits`, `demo:python`, `demo:english`, `demo:c`, or a source without data: `self`,
            `synthetic` (see `generated_samples`).
        model_path: where tokenizer and preprocessor lie.
        model: the loaded model, which determines inputs and labels.
        limit: at most so many examples; so many are made where they are made.
        length: tokens in a window of running text.
        seed: of the masks for masked language models, of samples that are made, and of drawing.
        mixed: take examples from everywhere in the file, drawn, not the first ones in their order.

    Raises:
        DataError: names the file and the expected content.
    """
    if source in SOURCES:
        examples: Any = write_samples(source, model, model_path, limit or SAMPLES, length, seed)
    else:
        examples = read_examples(source, model_path, model, length)
    if isinstance(examples, ExampleBatches):
        batches = examples.batches[:limit]
        count = len(batches)
    else:
        whole = len(next(iter(examples.values()))) if isinstance(examples, dict) else len(examples)
        count = min(whole, limit) if limit else whole
        draw = torch.Generator().manual_seed(seed)
        rows: Sequence[int] = torch.randperm(whole, generator=draw).tolist()[:count] if mixed else range(count)
        batches = [_batch(examples, rows[i : i + batch_size]) for i in range(0, count, batch_size)]
    if count == 0:
        raise DataError("holds no examples", where=source, remedy=f"give {KINDS}")
    batches, task = _checked(batches, model, source, model_path, seed)
    return Data(batches, task, count, source, length, batch_size)


_NARROW = (torch.int32, torch.int16, torch.int8, torch.uint8)
"""Integers that losses and embeddings do not take."""


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
    wide = [{name: x.long() if x.dtype in _NARROW else x for name, x in batch.items()} for batch in samples]
    batches, task = _checked(wide, model, source)
    return Data(batches, task, sum(map(examples_in, batches)), source)


def _checked(
    batches: list[Batch], model: Any, source: str, model_path: str | None = None, seed: int = 0
) -> tuple[list[Batch], str]:
    """Batches of a model's inputs, with labels for a loss.

    Args:
        model_path: where the tokenizer lies that says which token masks; None: nothing is masked.
    """
    check_inputs(batches[0], model, source)
    check_shape(model, batches[0], source)
    batches = [_with_decoder_inputs(batch, model) for batch in _all_labelled(batches, model)]
    for batch in batches:
        check_numbers(batch, source)
        check_tokens(batch, model, source)
    check_decoder(batches, model, source)
    task = _task(model, batches[0])
    if task == "masked token" and model_path is not None:
        generator = torch.Generator().manual_seed(seed)
        batches = [_masked(batch, model_path, generator) for batch in batches]
    elif task == "masked token":
        task = "none"
    elif task == "next token" and "labels" not in batches[0]:
        batches = [{**b, "labels": _labels(b, model.config)} for b in batches]
    return batches, task


def examples_in(batch: Batch) -> int:
    """Number of examples in a batch."""
    return len(next(iter(batch.values())))


def split_batches(data: Data, count: int) -> tuple[Data, Data]:
    """The first so many examples, and those after them.

    Batches of which a tensor holds more than a row for each example stay whole.
    """
    by_rows = sum(map(examples_in, data.batches)) == data.examples
    before: list[Batch] = []
    after: list[Batch] = []
    offset = 0
    for batch in data.batches:
        rows = examples_in(batch) if by_rows else 1
        cut = min(max(count - offset, 0), rows)
        offset += rows
        if cut == rows:
            before.append(batch)
        elif cut == 0:
            after.append(batch)
        else:
            before.append({name: tensor[:cut] for name, tensor in batch.items()})
            after.append({name: tensor[cut:] for name, tensor in batch.items()})
    examples = min(count, data.examples)
    return replace(data, batches=before, examples=examples), replace(
        data, batches=after, examples=data.examples - examples
    )


def described(data: Data, batches: Sequence[Batch] | None = None) -> dict[str, Any]:
    """A description of samples, for the metadata of a file made from them.

    Args:
        batches: the batches as used, if they differ from those that were read.

    Returns:
        Among them `tokens`: ids of texts, each image or recording as one.
    """
    used = data.batches if batches is None else batches
    tokens = sum(b["input_ids"].numel() if "input_ids" in b else examples_in(b) for b in used)
    shape = {"length": data.length, "batch_size": data.batch_size}
    return {
        "data": data.source,
        "data_hash": data_hash(used),
        "samples": data.examples,
        "tokens": tokens,
        "task": data.task,
        **{name: value for name, value in shape.items() if value is not None},
    }


def data_hash(batches: Sequence[Batch]) -> str:
    """A hash of all tensors of all batches, 40 characters."""
    digest = hashlib.blake2b(digest_size=20)
    for batch in batches:
        for name in sorted(batch):
            tensor = batch[name].contiguous()
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def _all_labelled(batches: Sequence[Batch], model: Any) -> list[Batch]:
    """Labels of some examples are labels of none; single texts of a model that gives embeddings have none."""
    single = is_sentence_model(model) and any(batch.get("input_ids", NO_PAIRS).ndim < 3 for batch in batches)
    if all("labels" in batch for batch in batches) and not single:
        return list(batches)
    return [unlabelled(batch) for batch in batches]


def _with_decoder_inputs(batch: Batch, model: Any) -> Batch:
    """Add decoder inputs to the batch of an encoder-decoder model that has only labels.

    They are no longer than the batch's texts.
    """
    shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if shift is None or "labels" not in batch or "decoder_input_ids" in batch or batch["labels"].ndim < 2:
        return batch
    return {**batch, "decoder_input_ids": shift(batch["labels"])}


def _task(model: Any, batch: Batch) -> str:
    """The task that the data's labels define."""
    name = type(model).__name__
    if "input_ids" in batch and predicts_next(model):
        return "next token"
    if "input_ids" in batch and name.endswith("ForMaskedLM") and "labels" not in batch:
        return "masked token"
    if is_sentence_model(model):
        return "similarity" if "labels" in batch else "embedding"
    if "labels" not in batch:
        return "none"
    labels, config = batch["labels"], getattr(model, "config", None)
    several = labels.ndim == 2 and labels.shape[1] == getattr(config, "num_labels", None)
    if several and getattr(config, "problem_type", None) == "multi_label_classification":
        return "labels"
    one_output = getattr(config, "num_labels", None) == 1 and name.endswith("Classification")
    return "regression" if labels.is_floating_point() or one_output else "class"


def _batch(examples: Any, rows: Sequence[int]) -> Batch:
    if isinstance(examples, dict):
        part = slice(rows[0], rows[-1] + 1) if isinstance(rows, range) else list(rows)
        return {name: array[part] for name, array in examples.items()}
    chosen = [examples[row] for row in rows]
    longest = max(example["input_ids"].shape[-1] for example in chosen)
    ids = torch.stack([_padded(example["input_ids"], longest, -1) for example in chosen])
    mask = torch.stack([_padded(torch.ones_like(e["input_ids"]), longest, 0) for e in chosen])
    mask = mask * (ids >= 0) if ids.ndim == 3 else mask  # of two texts, the shorter one ends in -1
    batch: Batch = {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}
    if all("labels" in example for example in chosen):
        labels = [example["labels"] for example in chosen]
        if len({label.shape for label in labels}) > 1 or labels[0].shape == chosen[0]["input_ids"].shape:
            labels = [_padded(label, longest, -100) if label.ndim else label for label in labels]
        batch["labels"] = torch.stack(labels)
    return batch


def _padded(row: Tensor, length: int, value: int) -> Tensor:
    return torch.nn.functional.pad(row, (0, length - row.shape[-1]), value=value)


def _labels(batch: Batch, config: Any) -> Tensor:
    return batch["input_ids"].masked_fill(~word_mask(batch, config), -100)


def _masked(batch: Batch, model_path: str, generator: torch.Generator) -> Batch:
    """Mask 15% of the tokens; only they are labelled."""
    token = tokenizer_of(model_path).mask_token_id
    if token is None:
        raise DataError("the tokenizer has no mask token", where=model_path, remedy="give records with 'labels'")
    hidden = torch.rand(batch["input_ids"].shape, generator=generator) < 0.15
    hidden &= batch.get("attention_mask", torch.ones_like(batch["input_ids"])) == 1
    labels = batch["input_ids"].masked_fill(~hidden, -100)
    return {**batch, "input_ids": batch["input_ids"].masked_fill(hidden, token), "labels": labels}


NO_PAIRS = torch.empty(0, 0)

FEW = 256
"""Positions that a model is looked at with in no more time than those of a smaller batch."""

SLACK = 48
"""Positions of padding that cost no more than another batch, measured on layers of width 384."""


def unpadded(batches: Sequence[Batch], source: str) -> list[Batch]:
    """The examples without padding, grouped by length in the order of each length's first example.

    Pairs of texts, whose embeddings are compared, become single texts without scores.

    Args:
        source: name of the data for errors.

    Raises:
        DataError: a mask has holes inside an example.
    """
    groups: dict[int, list[Batch]] = {}
    size = max(map(examples_in, batches), default=1)
    for batch in batches:
        if batch.get("input_ids", NO_PAIRS).ndim == 3:
            batch = {name: batch[name].flatten(0, 1) for name in ("input_ids", "attention_mask") if name in batch}
        if "attention_mask" not in batch:
            groups.setdefault(-1, []).append(batch)
            continue
        for row in range(len(batch["attention_mask"])):
            begin, end = _real(batch["attention_mask"][row], source)
            shape = batch["attention_mask"].shape[:2]
            example = one_by_one(batch)[row]
            cut = {
                name: example[name][:, begin:end] if tensor.shape[:2] == shape else example[name]
                for name, tensor in batch.items()
                if name != "attention_mask"
            }
            groups.setdefault(end - begin, []).append(cut)
    return [batch for rows in groups.values() for batch in _joined(rows, size)]


def batched_by_length(batches: Sequence[Batch], tokens: int) -> list[Batch]:
    """Texts without padding and labels, by length, in few batches: shorter ones are padded at the end, with a mask.

    Args:
        batches: examples without padding; those that hold more than a row for each token stay as they are.
        tokens: so many at most in a batch of several texts; no text gets more than a fifth of padding, but where the
            batch has no more than `SLACK` in all.
    """
    texts: list[Batch] = []
    apart: list[Batch] = []
    for batch in batches:
        inputs = unlabelled(batch)
        if "input_ids" in inputs and all(x.shape == inputs["input_ids"].shape for x in inputs.values()):
            texts += [{name: x[i] for name, x in inputs.items()} for i in range(len(inputs["input_ids"]))]
        else:
            apart.append(batch)
    groups: list[list[Batch]] = []
    for text in sorted(texts, key=lambda text: -len(text["input_ids"])):
        longest = len(groups[-1][0]["input_ids"]) if groups else 0
        whole = longest * (len(groups[-1]) + 1) if groups else 0
        padding = whole - len(text["input_ids"]) - sum(len(t["input_ids"]) for t in groups[-1]) if groups else 0
        if groups and whole <= tokens and (padding <= SLACK or 5 * len(text["input_ids"]) >= 4 * longest):
            groups[-1].append(text)
        else:
            groups.append([text])
    return [_padded_batch(group) for group in groups] + apart


def with_small_first_batch(batches: Sequence[Batch]) -> list[Batch]:
    """The examples with an eighth of the first batch as a separate first batch, for probing a model.

    Unchanged if one batch is small already.

    Args:
        batches: those that do not hold a row for each example stay as they are.
    """
    first = batches[0] if batches else {}
    if any(next(iter(batch.values())).numel() <= FEW for batch in batches):
        return [*batches]
    count = min(map(len, first.values()), default=0) // 8
    if count == 0 or len({len(tensor) for tensor in first.values()}) > 1:
        return [*batches]
    first_part, second_part = (
        {name: x[part] for name, x in first.items()} for part in (slice(count), slice(count, None))
    )
    return [first_part, second_part, *batches[1:]]


def _padded_batch(texts: Sequence[Batch]) -> Batch:
    """Texts, the longest first, in one batch; with a mask where they are not of one length."""
    longest, shortest = (len(texts[i]["input_ids"]) for i in (0, -1))
    marked = [{**t, "attention_mask": torch.ones_like(t["input_ids"])} if shortest < longest else t for t in texts]
    return {name: torch.stack([_padded(text[name], longest, 0) for text in marked]) for name in marked[0]}


def _real(mask: Tensor, source: str) -> tuple[int, int]:
    """First and last real token of an example."""
    positions = mask.nonzero()[:, 0]
    begin, end = (int(positions[0]), int(positions[-1]) + 1) if len(positions) else (0, 0)
    if end - begin != len(positions) or not len(positions):
        raise DataError(
            "an attention mask has holes, or is empty", where=source, remedy="pad examples at one end, not inside"
        )
    return begin, end


def _joined(rows: list[Batch], size: int) -> list[Batch]:
    """Examples of one length in batches of at most `size`."""
    flat = [example for batch in rows for example in one_by_one(batch)]
    groups = [flat[i : i + size] for i in range(0, len(flat), size)]
    return [
        {name: torch.cat([e[name] for e in group if name in e]) for name in dict.fromkeys(n for e in group for n in e)}
        for group in groups
    ]


def read_samples(
    opened: View,
    samples: Samples,
    limit: int | None,
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
        module = module_of(opened)
    kind = module or opened.module or empty_model(opened.transformers_config)
    if not named:
        return data_in_memory(samples, kind)
    source, files = str(samples), opened.files
    path = "" if files is None else local_path(str(files.reference.model.path))
    if files is None and source not in SOURCES and getattr(kind, "main_input_name", "") == "input_ids":
        problem = "is in memory without a tokenizer"
        raise DataError(problem, where=opened.name, remedy="give batches of input_ids, or the model's folder")
    return read_batches(source, path, kind, limit, batch_size, length, seed)


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
