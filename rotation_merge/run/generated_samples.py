"""Samples that need no data: text that a language model writes itself, images made of smooth noise."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rotation_merge.errors import DataError
from rotation_merge.run.examples import tokenizer_of
from rotation_merge.run.functions import check_answers, device_of, fused_attention, outputs
from rotation_merge.run.images import image_shape, normalisation
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
    prompt = torch.arange(min(length, 32))[None] % text.vocab_size
    check_answers(model, outputs(model, {"input_ids": prompt}).values(), model_path)
    parts = begins.split(AT_ONCE)
    with fused_attention(model, {"input_ids": prompt}):
        return torch.cat([_continued(model, part, length, draw, (i, len(parts))) for i, part in enumerate(parts)])


def _first_token(model_path: str) -> int | None:
    """The tokenizer's BOS; None where there is none."""
    try:
        token: int | None = tokenizer_of(model_path).bos_token_id
    except DataError:
        return None
    return token


def _continued(model: Any, ids: Tensor, length: int, draw: torch.Generator, part: tuple[int, int]) -> Tensor:
    """Sequences (count, length) that begin with these ids; `part` is their number, and how many parts there are."""
    step, past, tell = ids, None, listener()
    while ids.shape[1] < length:
        result = model(input_ids=step.to(device_of(model)), past_key_values=past, use_cache=True)
        past = getattr(result, "past_key_values", None)
        token = torch.multinomial(result.logits[:, -1].float().softmax(-1).cpu(), 1, generator=draw)
        ids = torch.cat([ids, token], 1)
        tell("writing samples, tokens", part[0] * length + ids.shape[1], part[1] * length)
        step = ids if past is None else token
    return ids


SCALES = (1, 2, 3, 4, 6, 8)
"""Noise is drawn on grids of so many cells a side (and of the full size), and enlarged."""


def synthetic_images(model: Any, model_path: str, count: int, seed: int) -> Tensor:
    """Noise of several scales, contrasts and brightnesses, squashed into the range of real pixels; float32, NCHW.

    Args:
        model_path: folder of the preprocessor, which defines the values of black and white.

    Raises:
        DataError: the model does not take images.
    """
    if not hasattr(getattr(model.config, "vision_config", model.config), "image_size"):
        remedy = "'synthetic' is for image models; give a file"
        raise DataError(f"{type(model).__name__} does not take images", remedy=remedy)
    channels, height, width = image_shape(model.config)
    draw = torch.Generator().manual_seed(seed)
    scales = [scale for scale in SCALES if scale < min(height, width)] + [min(height, width)]
    images = []
    for cells in (scales[number % len(scales)] for number in range(count)):
        noise = torch.randn(1, channels, cells, cells, generator=draw)
        mode = "bicubic" if cells > 1 else "nearest"
        image = torch.nn.functional.interpolate(noise, size=(height, width), mode=mode)
        contrast, brightness = 0.5 + 2.5 * torch.rand(1, generator=draw), torch.randn(1, generator=draw)
        images.append(torch.sigmoid(contrast * image + brightness))
    white, mean, deviation = normalisation(model_path, channels)
    return (torch.cat(images) * white - mean) / deviation
