"""Batches of a model's inputs: split, joined, without padding, sorted by length, hashed, checked against the model."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rotation_merge.errors import DataError, nearest, short
from rotation_merge.linalg.finite import all_finite

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
            tensor = batch[name].detach().cpu().contiguous()
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


# --- whether they fit a model -----------------------------------------------------------------------------------------


def check_inputs(names: Collection[str], model: Any, source: str) -> None:
    """Check that the data hold inputs that the model takes, and no others."""
    takes, main_input = set(inspect.signature(model.forward).parameters), getattr(model, "main_input_name", None)
    odd = [name for name in names if name not in takes and name != "labels"]
    if main_input in takes and not {main_input, "inputs_embeds"} & set(names):
        problem, remedy = f"takes {main_input}", "give data of the model's own kind"
    elif odd:
        problem, remedy = f"does not take {', '.join(odd)}", nearest(odd[0], takes)
    else:
        return
    raise DataError(f"holds {', '.join(names)}; {type(model).__name__} {problem}", where=source, remedy=remedy)


def check_batches(batches: Sequence[Batch], model: Any, source: str) -> None:
    """Check that batches are numbers and tokens of the model, and that it computes something of each kind of batch.

    Raises:
        DataError: they are not, or it does not.
    """
    for batch in batches:
        for name, tensor in batch.items():
            if not all_finite([tensor]):
                raise DataError(f"'{name}' holds NaN or infinity", where=source, remedy="leave such examples out")
        if "input_ids" in batch and (fault := _token_fault(batch, model)):
            remedy = "give rows of tokens as the model's own tokenizer encodes them, with masks, in windows that fit"
            raise DataError(fault, where=source, remedy=f"{remedy} ('length')")
    for batch in {frozenset(batch): batch for batch in batches}.values():
        decoding = getattr(model.config, "is_encoder_decoder", False) and "decoder_input_ids" not in batch
        if decoding or "input_ids" not in batch:
            _check_runs(batch, model, source, decoding)


def _token_fault(batch: Batch, model: Any) -> str | None:
    """What is wrong with tokens: their form, their mask, the model's vocabulary or positions; None if nothing."""
    ids, mask, words = batch["input_ids"], batch.get("attention_mask"), _vocabulary(model)
    if ids.is_floating_point() or ids.ndim < 2:
        return f"'input_ids' is of {str(ids.dtype).removeprefix('torch.')}, shape {list(ids.shape)}"
    if mask is not None and mask.ndim <= ids.ndim and mask.shape != ids.shape:
        return f"'attention_mask' has shape {list(mask.shape)}, 'input_ids' {list(ids.shape)}"
    odd = [] if words is None else ids[(ids < 0) | (ids >= words)].tolist()
    if odd:
        return f"token id {odd[0]} is outside the model's vocabulary of {words}"
    longest = getattr(model.config, "max_position_embeddings", None)
    learned = (name for name, _ in model.named_parameters() if "position" in name or "wpe" in name)
    if longest is not None and ids.shape[-1] > longest and any(learned):
        return f"{ids.shape[-1]} tokens in a row, the model has positions for {longest}"
    return None


def _vocabulary(model: Any) -> int | None:
    try:
        return getattr(model.get_input_embeddings(), "num_embeddings", None)
    except NotImplementedError:  # of models with two towers (CLIP)
        return int(model.config.get_text_config().vocab_size)


@torch.no_grad()
def _check_runs(batch: Batch, model: Any, source: str, decoding: bool) -> None:
    """Check that the model takes images and recordings of this size, and knows what its decoder reads."""
    try:
        model(**inputs_for(model, {name: tensor[:1] for name, tensor in batch.items() if name != "attention_mask"}))
    except (ValueError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and device_of(model).type == "meta":
            return  # of a model without weights some buffers are not there either
        name, tensor = next(iter(batch.items()))
        problem = f"{type(model).__name__} cannot run on '{name}' of shape {list(tensor.shape)} ({short(error)})"
        remedy = "prepare it as the model's own preprocessor does"
        if decoding:
            problem = f"holds nothing that the decoder of {type(model).__name__} reads ({short(error)})"
            remedy = "give 'labels' (the tokens that its decoder should write), or arrays with 'decoder_input_ids'"
        raise DataError(problem, where=source, remedy=remedy) from error


def check_labels(batches: Sequence[Batch], model: Any, task: str, source: str) -> None:
    """Check that labels are classes of the model, or a number for each output."""
    name, problem = type(model).__name__, ""
    for labels in (batch["labels"] for batch in batches if "labels" in batch and name.endswith("Classification")):
        count = model.config.num_labels
        odd = labels[(labels != -100) & ((labels < 0) | (labels >= count))].flatten()
        if task == "class" and len(odd):
            problem = f"label {int(odd[0])} is none of the model's {count} classes"
        elif task != "class" and labels.numel() != count * len(labels):
            problem = f"{labels.numel() // len(labels)} numbers for each example, {name} gives {count}"
        if problem:
            remedy = "give numbers of its own classes, or one number for each output of the model"
            raise DataError(problem, where=source or None, remedy=remedy)
