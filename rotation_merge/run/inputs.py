"""Random inputs for a model: tokens, pixels, audio features, tokens around images."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from rotation_merge.errors import CheckpointError
from rotation_merge.run.batches import Batch
from rotation_merge.run.pictures import TOKENS, both_sides, image_shape, placeholder

SIZE, LENGTH = 2, 24
"""Examples in a random batch, and words in each."""

SPECIAL = (*chain(*TOKENS.values()), "pad_token_id", "boi_token_index", "eoi_token_index")
"""Entries of a config that name tokens which are no words."""

POSITIONS = ("max_position_embeddings", "max_target_positions")


def random_batch(model: Any, generator: torch.Generator) -> Batch:
    """Random inputs for a model, which may be without weights.

    Raises:
        CheckpointError: it takes something else.
    """
    config = model.config
    takes = set(inspect.signature(model.forward).parameters)
    batch: Batch = {}
    if "input_ids" in takes:
        batch["input_ids"] = _words(config, generator)
    if "decoder_input_ids" in takes and getattr(config, "is_encoder_decoder", False):
        batch["decoder_input_ids"] = _words(config, generator)
    image = placeholder(config, "pixel_values")
    if "pixel_values" in takes and "input_ids" in takes and image is not None:
        return _around_images(config, image, batch, takes, generator)
    if "pixel_values" in takes:
        batch["pixel_values"] = torch.randn(SIZE, *image_shape(config), generator=generator)
    if "input_features" in takes:
        bins, frames = getattr(config, "num_mel_bins", 80), 2 * getattr(config, "max_source_positions", 1500)
        batch["input_features"] = torch.randn(SIZE, bins, frames, generator=generator)
    if "input_values" in takes:
        shape = (config.max_length, config.num_mel_bins) if hasattr(config, "num_mel_bins") else (8000,)
        batch["input_values"] = torch.randn(SIZE, *shape, generator=generator)
    if not batch:
        problem = f"{type(model).__name__} takes {', '.join(sorted(takes))}: no random input is known for that"
        raise CheckpointError(problem, remedy="give inputs as 'data'")
    return batch


def _words(config: Any, generator: torch.Generator) -> Tensor:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    longest = min(getattr(text, key, None) or LENGTH + 4 for key in POSITIONS)
    length = max(2, min(LENGTH, longest - 4))
    special = {getattr(part, key, None) for part in (config, text) for key in SPECIAL}
    words = [token for token in range(text.vocab_size) if token not in special]
    return torch.tensor(words)[torch.randint(len(words), (SIZE, length), generator=generator)]


def _around_images(config: Any, image: int, words: Batch, takes: Collection[str], generator: torch.Generator) -> Batch:
    """Words around one image in each example."""
    vision, inputs, tokens = config.vision_config, Batch(), 4
    height, width = both_sides(vision.patch_size)
    if "image_grid_thw" in takes:  # patches in a row, of images of any size: here two by two of the merged ones
        side = 2 * vision.spatial_merge_size
        channels = getattr(vision, "in_channels", None) or getattr(vision, "in_chans", 3)
        size = channels * vision.temporal_patch_size * height * width
        inputs["pixel_values"] = torch.randn(SIZE * side * side, size, generator=generator)
        inputs["image_grid_thw"] = torch.tensor([[1, side, side]] * SIZE)
    elif "image_position_ids" in takes:  # patches with their places, so many of which become one
        side = 2 * vision.pooling_kernel_size
        inputs["pixel_values"] = torch.rand(SIZE, side * side, 3 * height * width, generator=generator)
        places = torch.cartesian_prod(torch.arange(side), torch.arange(side)).flip(1)
        inputs["image_position_ids"] = places.expand(SIZE, -1, -1).contiguous()
    elif "image_sizes" in takes and hasattr(config, "spatial_merge_size"):  # images of any size
        sides = [2 * config.spatial_merge_size * length for length in (height, width)]
        inputs["pixel_values"] = torch.randn(SIZE, getattr(vision, "num_channels", 3), *sides, generator=generator)
        inputs["image_sizes"] = torch.tensor([sides] * SIZE)
    else:
        inputs["pixel_values"] = torch.randn(SIZE, *image_shape(config), generator=generator)
        patches = inputs["pixel_values"][0, 0].numel() // (height * width)
        ratio = float(getattr(config, "downsample_ratio", None) or getattr(vision, "pixel_shuffle_ratio", None) or 1)
        whole = getattr(config, "vision_feature_select_strategy", "default") == "full"
        tokens = getattr(config, "mm_tokens_per_image", round(patches * ratio**2) + int(whole))
    text = words["input_ids"]
    ids = torch.cat([text[:, :2], torch.full((SIZE, tokens), image), text[:, 2:]], 1)
    kinds = {"mm_token_type_ids": (ids == image).int()} if "mm_token_type_ids" in takes else {}
    return {"input_ids": ids, **inputs, **kinds}
