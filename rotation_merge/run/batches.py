"""Batches of a model's inputs: split into examples, joined, without padding, sorted by length, hashed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rotation_merge.errors import DataError, short

Batch = dict[str, Tensor]
"""Inputs by the names that a model's forward takes, one row for each example; perhaps with `labels`."""


def unlabelled(batch: Mapping[str, Tensor]) -> Batch:
    """A batch without its labels."""
    return {name: tensor for name, tensor in batch.items() if name != "labels"}


def device_of(model: Any) -> torch.device:
    """The device of a model's parameters, or where its modules read them when they run; the CPU for what has none."""
    first = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    return torch.device(getattr(model, "hf_device_map", {}).get("", "cpu" if first is None else first.device))


def inputs_for(model: Any, batch: Mapping[str, Tensor]) -> Batch:
    """A batch without its labels, on the model's device."""
    device = device_of(model)
    return {name: tensor.to(device) for name, tensor in unlabelled(batch).items()}


def examples_in(batch: Batch) -> int:
    """Number of examples in a batch."""
    return len(next(iter(batch.values())))


def holds_pairs(batch: Mapping[str, Tensor]) -> bool:
    """Whether each example is two texts, (n, 2, length)."""
    return "input_ids" in batch and batch["input_ids"].ndim == 3


def by_rows(batch: Mapping[str, Tensor], size: int = 1) -> list[Batch]:
    """A batch in parts of so many examples; the whole batch where not all tensors have a row for each example."""
    lengths = {len(tensor) for tensor in batch.values()}
    if len(lengths) != 1:
        return [dict(batch)]
    starts = range(0, lengths.pop(), size)
    return [{name: tensor[first : first + size] for name, tensor in batch.items()} for first in starts]


def joined(batches: Sequence[Mapping[str, Tensor]], source: str | None = None) -> Batch:
    """Batches in one, of what all of them have; tokens, masks and labels of tokens are padded at the end.

    Raises:
        DataError: their shapes differ otherwise.
    """
    batch: Batch = {}
    for name in (name for name in batches[0] if all(name in each for each in batches)):
        tensors, value = [each[name] for each in batches], -100 if name == "labels" else 0
        if tensors[0].ndim > 1 and not tensors[0].is_floating_point():
            longest = max(tensor.shape[-1] for tensor in tensors)
            tensors = [torch.nn.functional.pad(x, (0, longest - x.shape[-1]), value=value) for x in tensors]
        try:
            batch[name] = torch.cat(tensors)
        except RuntimeError as error:
            problem = f"holds examples whose '{name}' differ in shape ({short(error)})"
            raise DataError(problem, where=source, remedy="bring them to one shape") from error
    return batch


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
        if holds_pairs(batch):
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
    only_texts = [unlabelled(batch).keys() == {"input_ids"} for batch in batches]
    texts = [x for batch, is_text in zip(batches, only_texts, strict=True) if is_text for x in batch["input_ids"]]
    groups: list[list[Tensor]] = []
    for text in sorted(texts, key=len, reverse=True):
        longest = len(groups[-1][0]) if groups else 0
        if groups and longest * (len(groups[-1]) + 1) <= tokens and 5 * len(text) >= 4 * longest:
            groups[-1].append(text)
        else:
            groups.append([text])
    padded = [joined([{"input_ids": x[None], "attention_mask": torch.ones_like(x)[None]} for x in g]) for g in groups]
    results = [batch if not batch["attention_mask"].all() else {"input_ids": batch["input_ids"]} for batch in padded]
    return results + [batch for batch, is_text in zip(batches, only_texts, strict=True) if not is_text]


def with_small_first_batch(batches: Sequence[Batch]) -> list[Batch]:
    """The examples with an eighth of the first batch as a batch of its own, which a model is probed on in less time."""
    examples = by_rows(batches[0]) if batches else []
    count = len(examples) // 8
    return [joined(examples[:count]), joined(examples[count:]), *batches[1:]] if count else [*batches]


def data_hash(batches: Sequence[Batch]) -> str:
    """A hash of all tensors of all batches, 40 characters."""
    digest = hashlib.blake2b(digest_size=20)
    for batch in batches:
        for name in sorted(batch):
            tensor = batch[name].contiguous()
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()
