"""Text that a language model writes itself, as samples that need no data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rotation_merge.errors import DataError
from rotation_merge.run.batches import device_of
from rotation_merge.run.functions import check_answers, fused_attention, outputs
from rotation_merge.run.sources import tokenizer_of
from rotation_merge.workers import listener

AT_ONCE = 64
"""Sequences that are written together."""


def writes_text(model: Any) -> bool:
    """Whether a model predicts the next token."""
    return type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))


@torch.no_grad()
def self_written(model: Any, model_path: str, count: int, length: int = 128, seed: int = 0) -> Tensor:
    """Token ids sampled from a causal language model itself, int64, (count, length).

    Every sequence begins with the tokenizer's BOS; with a token drawn uniformly only where there is none.

    Raises:
        DataError: the model does not write text.
    """
    if not writes_text(model):
        remedy = "give a file, or 'synthetic' for image models"
        raise DataError(f"{type(model).__name__} does not write text", remedy=remedy)
    text = model.config.get_text_config()
    length = min(length, getattr(text, "max_position_embeddings", None) or length)
    draw, first = torch.Generator().manual_seed(seed), _first_token(model_path)
    if first is None or first >= text.vocab_size:
        begins = torch.randint(text.vocab_size, (count, 1), generator=draw)
    else:
        begins = torch.full((count, 1), first)
    prompt = {"input_ids": torch.arange(min(length, 32))[None] % text.vocab_size}
    check_answers(model, outputs(model, prompt).values(), model_path)
    parts, written = begins.split(AT_ONCE), list[Tensor]()
    with fused_attention(model, prompt):
        for part in parts:
            written.append(_continued(model, part, length, draw, len(written) * length, len(parts) * length))
    return torch.cat(written)


def _first_token(model_path: str) -> int | None:
    """The tokenizer's BOS; None where there is none."""
    try:
        token: int | None = tokenizer_of(model_path).bos_token_id
    except DataError:
        return None
    return token


def _continued(model: Any, ids: Tensor, length: int, draw: torch.Generator, done: int, total: int) -> Tensor:
    """Sequences (count, length) that begin with these ids; `done` of `total` tokens a sequence have been written."""
    step, past, progress = ids, None, listener()
    while ids.shape[1] < length:
        result = model(input_ids=step.to(device_of(model)), past_key_values=past, use_cache=True)
        past = getattr(result, "past_key_values", None)
        token = torch.multinomial(result.logits[:, -1].float().softmax(-1).cpu(), 1, generator=draw)
        ids = torch.cat([ids, token], 1)
        progress("writing samples, tokens", done + ids.shape[1], total)
        step = ids if past is None else token
    return ids
