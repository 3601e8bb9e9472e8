"""Checks that data fit a model; each error is one line that names the data."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rotation_merge.errors import DataError, short
from rotation_merge.linalg.finite import all_finite
from rotation_merge.run.functions import Batch, device_of, inputs_for


def check_inputs(examples: Mapping[str, Tensor], model: Any, source: str) -> None:
    """Check that the data hold inputs that the model takes."""
    takes, main_input = set(inspect.signature(model.forward).parameters), getattr(model, "main_input_name", None)
    odd = [name for name in examples if name not in takes and name != "labels"]
    lacking = main_input in takes and not {main_input, "inputs_embeds"} & set(examples)
    if odd or lacking or not takes & set(examples):
        words = main_input or "something else"
        words += f", and no {', '.join(odd)}" if odd and takes & set(examples) else ""
        raise DataError(
            f"holds {', '.join(examples)}; {type(model).__name__} takes {words}",
            where=source,
            remedy="give data of the model's own kind",
        )


def check_shape(model: Any, batch: Batch, source: str) -> None:
    """Check that images and recordings have the model's sizes."""
    if "input_ids" in batch or getattr(model.config, "is_encoder_decoder", False):
        return
    first = inputs_for(model, {name: tensor[:1] for name, tensor in batch.items()})
    try:
        with torch.no_grad():
            model(**first)
    except ValueError as error:
        name, tensor = next(iter(batch.items()))
        raise DataError(
            f"{type(model).__name__} cannot run on '{name}' of shape {list(tensor.shape)} ({short(error)})",
            where=source,
            remedy="prepare it as the model's own preprocessor does",
        ) from error
    except RuntimeError:  # of a model without weights, some of whose buffers are not there either
        if device_of(model).type != "meta":
            raise


def check_numbers(batch: Batch, source: str) -> None:
    """Check that values are finite and tokens are integers."""
    for name, tensor in batch.items():
        if not all_finite([tensor]):
            raise DataError(f"'{name}' holds NaN or infinity", where=source, remedy="leave such examples out")
        if name == "input_ids" and (tensor.is_floating_point() or tensor.ndim < 2):
            problem = f"'{name}' is of {str(tensor.dtype).removeprefix('torch.')}, shape {list(tensor.shape)}"
            raise DataError(problem, where=source, remedy="give whole numbers, one row of tokens for each example")


def check_tokens(batch: Batch, model: Any, source: str) -> None:
    """Check that tokens fit their mask, and the model's vocabulary and positions."""
    if "input_ids" not in batch:
        return
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    if mask is not None and mask.ndim <= ids.ndim and mask.shape != ids.shape:
        problem = f"'attention_mask' has shape {list(mask.shape)}, 'input_ids' {list(ids.shape)}"
        raise DataError(problem, where=source, remedy="give one number for each token")
    try:
        words = getattr(model.get_input_embeddings(), "num_embeddings", None)
    except NotImplementedError:  # of models with two towers (CLIP)
        words = model.config.get_text_config().vocab_size
    if words is not None and (int(ids.min()) < 0 or int(ids.max()) >= words):
        odd = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        raise DataError(
            f"token id {odd} is outside the model's vocabulary of {words}",
            where=source,
            remedy="encode the text with the model's own tokenizer",
        )
    longest = getattr(model.config, "max_position_embeddings", None)
    learned = any("position" in name or "wpe" in name for name, _ in model.named_parameters())
    if longest is not None and learned and ids.shape[-1] > longest:
        raise DataError(
            f"{ids.shape[-1]} tokens in a row, the model has positions for {longest}",
            where=source,
            remedy=f"give windows of at most {longest} ('length')",
        )


def check_decoder(batches: Sequence[Batch], model: Any, source: str) -> None:
    """Check that data have decoder inputs where the model cannot derive them (T5, Whisper; BART can)."""
    lacking = [batch for batch in batches if "decoder_input_ids" not in batch]
    if not lacking or not getattr(model.config, "is_encoder_decoder", False):
        return
    first = inputs_for(model, {name: x[:1] for name, x in lacking[0].items() if name != "attention_mask"})
    begun = {**first, "decoder_input_ids": torch.zeros(1, 1, dtype=torch.long, device=device_of(model))}
    if _runs(model, begun) and not _runs(model, first):
        raise DataError(
            f"has examples without an input for the decoder of {type(model).__name__}",
            where=source,
            remedy="give records with 'labels' (the tokens that it should write), or arrays with 'decoder_input_ids'",
        )


@torch.no_grad()
def _runs(model: Any, batch: Batch) -> bool:
    """Whether a model computes something of a batch."""
    try:
        model(**batch)
    except Exception:  # each class refuses in its own way
        return False
    return True


def check_labels(batches: Sequence[Batch], model: Any, task: str, source: str) -> None:
    """Check that labels are classes of the model, or a number for each output."""
    name = type(model).__name__
    if not name.endswith("Classification"):
        return
    count, wrong = model.config.num_labels, ""
    for labels in (batch["labels"] for batch in batches if "labels" in batch):
        if task == "class":
            odd = labels[(labels != -100) & ((labels < 0) | (labels >= count))].flatten()
            wrong = wrong or (f"label {int(odd[0])} is none of the model's {count} classes" if len(odd) else "")
        elif labels.numel() != count * len(labels):
            wrong = f"{labels.numel() // len(labels)} numbers for each example, {name} gives {count}"
    if wrong:
        remedy = (
            "give the numbers of its own classes" if task == "class" else "give one number for each output of the model"
        )
        raise DataError(wrong, where=source or None, remedy=remedy)
