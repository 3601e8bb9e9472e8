"""Samples of a model: batches of its inputs, with labels for a loss, from whatever the user has."""

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
from rotation_merge.run.arrays import by_rows, joined, word_mask
from rotation_merge.run.data_checks import check_batches, check_inputs
from rotation_merge.run.examples import read_examples, tokenizer_of
from rotation_merge.run.functions import Batch, empty_model, load, module_of, predicts_next, unlabelled
from rotation_merge.run.generated_samples import self_written, synthetic_images
from rotation_merge.run.sample_kinds import KINDS, SAMPLES, SELF, SYNTHETIC
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
    if source == SELF:
        examples = [{"input_ids": x} for x in self_written(module, path, limit or SAMPLES, length, seed).split(1)]
    elif source == SYNTHETIC:
        examples = [{"pixel_values": x} for x in synthetic_images(module, path, limit or SAMPLES, seed).split(1)]
    else:
        examples = read_examples(source, module, path, length)
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
    if isinstance(model, str):
        return load(model)
    return module_of(model) if source == SELF else model.module or empty_model(model.transformers_config)


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
    single = is_sentence_model(model) and any(batch.get("input_ids", NO_PAIRS).ndim < 3 for batch in batches)
    if single or not all("labels" in batch for batch in batches):
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


NO_PAIRS = torch.empty(0, 0)


def _with_decoder_inputs(batch: Batch, model: Any) -> Batch:
    """Add decoder inputs to the batch of an encoder-decoder model that has only labels."""
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


def _masked(batch: Batch, model_path: str, generator: torch.Generator) -> Batch:
    """Mask 15% of the tokens; only they are labelled."""
    token = tokenizer_of(model_path).mask_token_id
    if token is None:
        raise DataError("the tokenizer has no mask token", where=model_path, remedy="give records with 'labels'")
    hidden = torch.rand(batch["input_ids"].shape, generator=generator) < 0.15
    hidden &= batch.get("attention_mask", torch.ones_like(batch["input_ids"])) == 1
    labels = batch["input_ids"].masked_fill(~hidden, -100)
    return {**batch, "input_ids": batch["input_ids"].masked_fill(hidden, token), "labels": labels}


def examples_in(batch: Batch) -> int:
    """Number of examples in a batch."""
    return len(next(iter(batch.values())))


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


def split_batches(data: Data, count: int) -> tuple[Data, Data]:
    """The first so many examples, and those after them.

    Batches of which a tensor holds more than a row for each example stay whole.
    """
    before: list[Batch] = []
    after: list[Batch] = []
    remaining = min(count, data.examples)
    for batch in data.batches:
        examples = by_rows(batch)
        cut = min(remaining, len(examples))
        remaining -= cut
        before += [joined(examples[:cut])] if cut else []
        after += [joined(examples[cut:])] if cut < len(examples) else []
    count = min(count, data.examples)
    return replace(data, batches=before, examples=count), replace(data, batches=after, examples=data.examples - count)


def unpadded(batches: Sequence[Batch], source: str) -> list[Batch]:
    """The examples without padding, grouped by their shapes in the order of each shape's first example.

    Pairs of texts, whose embeddings are compared, become single texts without scores.

    Args:
        source: name of the data for errors.

    Raises:
        DataError: a mask has holes inside an example.
    """
    groups: dict[Any, list[Batch]] = {}
    size = max(map(examples_in, batches), default=1)
    for batch in batches:
        if batch.get("input_ids", NO_PAIRS).ndim == 3:
            batch = {name: batch[name].flatten(0, 1) for name in ("input_ids", "attention_mask") if name in batch}
        for example in by_rows(batch):
            cut = _without_padding(example, source)
            groups.setdefault(tuple((name, tensor.shape) for name, tensor in cut.items()), []).append(cut)
    return [joined(group[i : i + size]) for group in groups.values() for i in range(0, len(group), size)]


def _without_padding(example: Batch, source: str) -> Batch:
    """An example without its mask and what that masks at an end."""
    mask = example.get("attention_mask")
    if mask is None or len(mask) != 1:
        return example
    positions = mask[0].nonzero()[:, 0].tolist()
    if not positions or positions[-1] - positions[0] >= len(positions):
        problem, remedy = "an attention mask has holes, or is empty", "pad examples at one end, not inside"
        raise DataError(problem, where=source, remedy=remedy)
    real = slice(positions[0], positions[-1] + 1)
    return {
        name: tensor[:, real] if tensor.shape[:2] == mask.shape else tensor
        for name, tensor in example.items()
        if name != "attention_mask"
    }


def batched_by_length(batches: Sequence[Batch], tokens: int) -> list[Batch]:
    """Texts without padding and labels, by length, in few batches: shorter ones are padded at the end, with a mask.

    Args:
        batches: examples without padding; those that hold more than a row for each token stay as they are.
        tokens: so many at most in a batch of several texts; no text gets more than a fifth of padding.
    """
    texts: list[Tensor] = []
    apart: list[Batch] = []
    for batch in batches:
        if unlabelled(batch).keys() == {"input_ids"}:
            texts += batch["input_ids"].split(1)
        else:
            apart.append(batch)
    groups: list[list[Tensor]] = []
    for text in sorted(texts, key=lambda text: text.shape[1], reverse=True):
        longest, length = groups[-1][0].shape[1] if groups else 0, text.shape[1]
        if longest * (len(groups[-1]) + 1 if groups else 1) <= tokens and 5 * length >= 4 * longest > 0:
            groups[-1].append(text)
        else:
            groups.append([text])
    batches = [joined([{"input_ids": x, "attention_mask": torch.ones_like(x)} for x in group]) for group in groups]
    return [
        batch if not batch["attention_mask"].all() else {"input_ids": batch["input_ids"]} for batch in batches
    ] + apart


def with_small_first_batch(batches: Sequence[Batch]) -> list[Batch]:
    """The examples with an eighth of the first batch as a batch of its own, which a model is probed on in less time."""
    examples = by_rows(batches[0]) if batches else []
    count = len(examples) // 8
    return [joined(examples[:count]), joined(examples[count:]), *batches[1:]] if count else [*batches]
