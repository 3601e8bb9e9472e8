"""Examples and batches: a batch of one, several of them joined, and the examples in the arrays of a file.

Outputs of processors of vision-language models (`processor(images=..., text=..., return_tensors="np")`) are accepted
unchanged: the images of all examples in one row, in the order of their image tokens in `input_ids`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from rotation_merge.errors import DataError, short
from rotation_merge.run.data_checks import check_inputs
from rotation_merge.run.functions import Batch
from rotation_merge.run.inputs import IMAGE_TOKENS

PICTURES = {
    "pixel_values": ("image_grid_thw", IMAGE_TOKENS, ("image_sizes", "image_position_ids")),
    "pixel_values_videos": ("video_grid_thw", ("video_token_id", "video_token_index"), ("second_per_grid_ts",)),
}
"""Arrays of pictures: the array with the patches of each, the config's names of its token, other arrays by picture."""

UNCHANGED = "save everything that the model's processor gives, unchanged"


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


def split_arrays(arrays: Mapping[str, Tensor], model: Any, source: str) -> list[Batch]:
    """The examples in arrays with a row for each, and in arrays of pictures, of which an example has any number.

    Raises:
        DataError: an array is missing, or unknown, or its length does not fit.
    """
    check_inputs(arrays, model, source)
    rows: dict[str, list[int]] = {}
    for name in PICTURES if "input_ids" in arrays else ():
        rows |= _picture_rows(arrays, model, name, source)
    lengths = {name: len(array) if array.ndim else 0 for name, array in arrays.items() if name not in rows}
    if len(set(lengths.values())) != 1:
        words = ", ".join(f"{name} {length}" for name, length in lengths.items())
        remedy = "give one row for each example"
        raise DataError(f"arrays of different lengths: {words or 'none'}", where=source, remedy=remedy)
    count = next(iter(lengths.values()))
    parts = {name: array.split(rows.get(name, [1] * count)) for name, array in arrays.items()}
    names = sorted(parts, key=lambda name: name != "input_ids")
    return [{name: parts[name][i] for name in names if len(parts[name][i])} for i in range(count)]


def _picture_rows(arrays: Mapping[str, Tensor], model: Any, name: str, source: str) -> dict[str, list[int]]:
    """By array of pictures (`name` and those beside it), the number of rows of each example."""
    grid, keys, beside = PICTURES[name]
    token = next((getattr(model.config, key) for key in keys if getattr(model.config, key, None) is not None), None)
    if token is None:
        return {}
    places = (arrays["input_ids"] == token).flatten(1).sum(1).tolist()
    takes = inspect.signature(model.forward).parameters
    lacking = [key for key in (name, grid, "mm_token_type_ids") if name in takes and key in takes and key not in arrays]
    if lacking and (any(places) or name in arrays or grid in arrays):
        raise DataError(f"'{lacking[0]}' is missing, although there are images", where=source, remedy=UNCHANGED)
    if name not in arrays:
        return {}
    patches, tokens = _sizes(arrays, model.config, name, sum(places))
    by_picture = [key for key in (grid, *beside) if key in arrays]
    ends, bounds = [0, *accumulate(tokens)], [0, *accumulate(places)]
    counts = {len(patches), len(tokens), *(len(arrays[key]) for key in by_picture)}
    first = [ends.index(bound) for bound in bounds] if set(bounds) <= set(ends) else [-1]
    if len(counts) > 1 or sum(patches) != len(arrays[name]) or first[-1] != len(tokens):
        problem = f"'{name}' has {len(arrays[name])} rows for images of {short(patches)} rows"
        problem += f" that take {short(tokens)} tokens; the texts have {short(places)} tokens for images"
        raise DataError(problem, where=source, remedy=UNCHANGED)
    rows = [sum(patches[start:end]) for start, end in pairwise(first)]
    pictures = [end - start for start, end in pairwise(first)]
    return {name: rows, **dict.fromkeys(by_picture, pictures)}


def _sizes(arrays: Mapping[str, Tensor], config: Any, name: str, places: int) -> tuple[list[int], list[int]]:
    """Number of rows in `name`, and of placeholder tokens, of each picture."""
    grid, vision, count = PICTURES[name][0], config.vision_config, len(arrays[name])
    if grid in arrays:
        sizes = [int(row.prod()) for row in arrays[grid]]
        return sizes, [size // int(getattr(vision, "spatial_merge_size", 1)) ** 2 for size in sizes]
    if "image_position_ids" in arrays:
        real = (arrays["image_position_ids"] >= 0).all(-1).sum(-1).tolist()
        return [1] * count, [size // int(vision.pooling_kernel_size) ** 2 for size in real]
    if "image_sizes" in arrays and hasattr(config, "spatial_merge_size"):
        unit = int(vision.patch_size) * int(config.spatial_merge_size)
        return [1] * count, [int(height) // unit * (int(width) // unit) for height, width in arrays["image_sizes"]]
    return [1] * count, [places // max(count, 1)] * count


def word_mask(batch: Batch, config: Any) -> Tensor:
    """A mask of word tokens, bool, (examples, tokens): neither padding nor image placeholders."""
    ids = batch["input_ids"]
    mask = batch.get("attention_mask", torch.ones_like(ids)) == 1
    for key in (key for _, keys, _ in PICTURES.values() for key in keys):
        if (token := getattr(config, key, None)) is not None:
            mask = mask & (ids != token)
    return mask
