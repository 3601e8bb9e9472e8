"""Checks that two models compute the same on random or given inputs, up to the effect of rounding weights."""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from rotation_merge.errors import CheckpointError, RotationMergeError
from rotation_merge.model.labels import with_classes_of
from rotation_merge.model.open import open_model, weights_of
from rotation_merge.model.view import stored_dtype
from rotation_merge.run.batches import Batch
from rotation_merge.run.functions import (
    configured_dtype,
    empty_model,
    floating_outputs,
    load,
    outputs,
    read_config,
)
from rotation_merge.run.pictures import TOKENS, both_sides, image_shape, placeholder
from rotation_merge.run.runner import Runner

LARGEST = 500_000_000
"""Weights of the largest model that is held whole, if it cannot be run one layer at a time."""

ROUNDINGS = 16.0
"""Allowed difference of two models, as a multiple of the effect of rounding the first one's weights."""

BATCHES = 2
"""Random batches of a proof."""

SIZE, LENGTH = 2, 24
"""Examples in a random batch, and words in each."""

SPECIAL = (*chain(*TOKENS.values()), "pad_token_id", "boi_token_index", "eoi_token_index")
"""Entries of a config that name tokens which are no words."""

POSITIONS = ("max_position_embeddings", "max_target_positions")


def blank_model(path: str) -> Any:
    """The model at a path without weights, or, where only transformers knows it, with them; it has a signature."""
    try:
        return empty_model(open_model(path, unsupported="merge"))
    except RotationMergeError:
        return load(path)


def outputs_of(
    path: str,
    inputs: Sequence[Batch],
    dtype: torch.dtype = torch.float32,
    like: str | None = None,
    unit: float = 0.0,
    seed: int = 0,
) -> list[Batch]:
    """Outputs of the model at a path for each batch; it runs one layer at a time, or as a whole where it cannot.

    Args:
        dtype: of the computation.
        like: a model in whose order its classes are to stand, where they have the same names.
        unit: each weight is off by up to half of this share, drawn with the seed.

    Raises:
        CheckpointError: it is large and cannot be run one layer at a time, or cannot be loaded.
    """
    draw = torch.Generator().manual_seed(seed)
    inputs = [{name: x.to(stored_dtype(x, dtype)) for name, x in batch.items()} for batch in inputs]
    try:
        view = open_model(path)
        view = view if like is None else with_classes_of(view, open_model(like))
        noisy = view.tensors.map(lambda _, tensor: _noisy(tensor.to(stored_dtype(tensor, dtype)), unit, draw))
        run = Runner(replace(view, tensors=noisy) if unit else view, inputs, dtype=dtype)
    except RotationMergeError:  # transformers knows the class, or the form of its files, alone
        if weights_of(path) > LARGEST:
            raise
        model = load(path, dtype, like)
        with torch.no_grad():
            for parameter in model.parameters() if unit else ():
                parameter.copy_(_noisy(parameter, unit, draw))
        return [outputs(model, batch) for batch in inputs]
    run.run_through()
    return [floating_outputs(run.model, run.answer(batch)) for batch in range(len(inputs))]


def _noisy(tensor: Tensor, unit: float, draw: torch.Generator) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor * (1 + unit * (torch.rand(tensor.shape, generator=draw, dtype=torch.float32).to(tensor) - 0.5))


def allowed_difference(
    first: str,
    second: str,
    inputs: Sequence[Batch],
    expected: Sequence[Batch],
    dtype: torch.dtype = torch.float32,
    probabilities: bool = False,
    seed: int = 0,
) -> float:
    """The relative difference of two models' outputs that rounding explains.

    It is a multiple of the effect of rounding the first one's weights, each by up to half a unit in the last place of
    the less precise storage type, or of float32.

    Args:
        expected: the first one's outputs for the inputs.
        dtype: of the computation.
        probabilities: see `largest_difference`.
    """
    dtypes = (configured_dtype(read_config(path)) for path in (first, second))
    unit = max(torch.finfo(stored).eps for stored in (torch.float32, *dtypes) if stored.is_floating_point)
    rounded = outputs_of(first, inputs, dtype, unit=unit, seed=seed)
    return ROUNDINGS * largest_difference(expected, rounded, (first, first), probabilities)[1]


def largest_difference(
    a: Sequence[Batch], b: Sequence[Batch], names: tuple[str, str], probabilities: bool = False
) -> tuple[float, float, str]:
    """The largest difference between two models' outputs.

    Args:
        probabilities: compare the logarithms of the probabilities that logits stand for, which a number added to all
            logits of a token does not change.

    Returns:
        The difference by itself, relative to the root mean square of the first one's output (infinite for NaN; the
        largest such one), and the name of the output that it is in.

    Raises:
        CheckpointError: their outputs have other names or shapes.
    """
    worst = 0.0, 0.0, "all outputs"
    pairs = [(n, x.get(n), y.get(n)) for x, y in zip(a, b, strict=True) for n in dict.fromkeys([*x, *y])]
    for name, x, y in pairs:
        if x is None or y is None or y.shape != x.shape:
            shapes = ["nothing" if z is None else str(list(z.shape)) for z in (y, x)]
            problem = f"output '{name}' is {shapes[0]}, that of {names[0]} is {shapes[1]}"
            raise CheckpointError(problem, where=names[1], remedy="compare models of one class and size")
        if probabilities and name == "logits":
            x, y = x.log_softmax(-1), y.log_softmax(-1)
        absolute = float((x - y).abs().max())
        if absolute != absolute:
            return math.inf, math.inf, f"{name} (NaN)"
        worst = max(worst, (absolute, absolute / (float(x.square().mean().sqrt()) or 1.0), name), key=lambda e: e[1])
    return worst


@dataclass(frozen=True)
class Proof:
    """Result of a proof: the largest difference of outputs and its limit, both relative; None with a reason."""

    difference: float | None = None
    allowed: float | None = None
    reason: str = ""

    @property
    def failed(self) -> bool:
        return self.difference is not None and self.allowed is not None and not self.difference <= self.allowed

    @property
    def words(self) -> str:
        if self.difference is None or self.allowed is None:
            return f"not checked: {self.reason}"
        return (
            f"outputs on {BATCHES} random batches differ by at most {self.difference:.2g} of their size; "
            f"{self.allowed:.2g} is allowed ({ROUNDINGS:g} times the effect of rounding the weights)"
        )


def prove(donor: str, result: str, probabilities: bool = False) -> Proof:
    """Compare the outputs of a donor and of its moved copy, both from their files, class by class.

    Args:
        probabilities: logits by the probabilities that they stand for.

    Raises:
        CheckpointError: the result cannot be loaded.
    """
    try:
        model = blank_model(donor)
        inputs = [random_batch(model, torch.Generator().manual_seed(i)) for i in range(BATCHES)]
        expected = outputs_of(donor, inputs)
    except RotationMergeError as error:
        return Proof(reason=str(error))
    except Exception as error:  # whatever a model's class raises on inputs that it does not take
        return Proof(reason=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    allowed = allowed_difference(donor, result, inputs, expected, probabilities=probabilities)
    results = outputs_of(result, inputs, like=donor)
    return Proof(largest_difference(expected, results, (donor, result), probabilities)[1], allowed)


# --- random inputs ---------------------------------------------------------------------------------------------------


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
