"""Checks that data fit a model; each error is one line that names the data."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from typing import Any

import torch

from rotation_merge.errors import DataError, nearest, short
from rotation_merge.linalg.finite import all_finite
from rotation_merge.run.batches import Batch, device_of, inputs_for


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
    if longest is not None and ids.shape[-1] > longest and _learns_positions(model):
        return f"{ids.shape[-1]} tokens in a row, the model has positions for {longest}"
    return None


def _vocabulary(model: Any) -> int | None:
    try:
        return getattr(model.get_input_embeddings(), "num_embeddings", None)
    except NotImplementedError:  # of models with two towers (CLIP)
        return int(model.config.get_text_config().vocab_size)


def _learns_positions(model: Any) -> bool:
    return any("position" in name or "wpe" in name for name, _ in model.named_parameters())


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
