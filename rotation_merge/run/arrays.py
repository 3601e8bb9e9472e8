"""Arrays of a file as examples: one row an example, except arrays that count images or patches.

Outputs of processors of vision-language models (`processor(images=..., text=..., return_tensors="np")`) are accepted
unchanged: the images of all examples in one row, in the order of their image tokens in `input_ids`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from rotation_merge.errors import DataError, nearest
from rotation_merge.run.functions import Batch
from rotation_merge.run.inputs import IMAGE_TOKENS

SEEN = {
    "pixel_values": ("image_grid_thw", IMAGE_TOKENS),
    "pixel_values_videos": ("video_grid_thw", ("video_token_id", "video_token_index")),
}
"""Arrays of images: the array with the number of patches of each picture, and the config's names of its token."""

BESIDE = {"pixel_values": ("image_sizes", "image_position_ids"), "pixel_values_videos": ("second_per_grid_ts",)}
"""Other arrays with an entry for each picture."""


@dataclass(frozen=True)
class ExampleBatches:
    """Examples whose tensors do not all count examples, one batch each."""

    batches: list[Batch]


def by_example(arrays: dict[str, Tensor], model: Any, source: str) -> dict[str, Tensor] | ExampleBatches:
    """The arrays if dimension 0 of each counts examples, else the part of each example.

    Raises:
        DataError: an array is missing, or unknown, or its length does not fit.
    """
    takes = set(inspect.signature(model.forward).parameters)
    for name in arrays:
        if name not in takes and name != "labels" and takes & set(arrays):
            raise DataError(
                f"holds '{name}', which {type(model).__name__} does not take", where=source, remedy=nearest(name, takes)
            )
    pictures = [_pictures(arrays, model, takes, name, source) for name in SEEN] if "input_ids" in arrays else []
    picture_rows = {name: counts for counts_by_name in pictures for name, counts in counts_by_name.items()}
    _check_lengths(arrays, picture_rows, source)
    if all(count == 1 for counts in picture_rows.values() for count in counts):
        return arrays
    parts = {
        name: array.split(picture_rows[name]) if name in picture_rows else array.split(1)
        for name, array in arrays.items()
    }
    order = sorted(parts, key=lambda name: name != "input_ids")
    examples = [{name: parts[name][i] for name in order} for i in range(len(arrays["input_ids"]))]
    return ExampleBatches([{name: part for name, part in batch.items() if len(part)} for batch in examples])


def _check_lengths(arrays: Mapping[str, Tensor], picture_rows: Mapping[str, list[int]], source: str) -> None:
    lengths = {name: len(array) for name, array in arrays.items() if name not in picture_rows}
    if len(set(lengths.values())) != 1:
        words = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise DataError(
            f"arrays of different lengths: {words or 'none'}", where=source, remedy="give one row for each example"
        )


def _pictures(
    arrays: Mapping[str, Tensor], model: Any, takes: set[str], name: str, source: str
) -> dict[str, list[int]]:
    """Rows of each example in each array of images (`name` and its companions), by array."""
    grid, keys = SEEN[name]
    token = next((getattr(model.config, key) for key in keys if getattr(model.config, key, None) is not None), None)
    if token is None:
        return {}
    places = (arrays["input_ids"] == token).flatten(1).sum(1).tolist()
    needed = [name, *(key for key in (grid, "mm_token_type_ids") if key in takes)] if name in takes else []
    present = [key for key in (name, grid) if key in arrays]
    lacking = [key for key in needed if key not in arrays]
    if lacking and (present or any(places)):
        problem = "the texts have image tokens (id {token})" if not present else f"'{present[0]}' is given"
        raise DataError(
            f"'{lacking[0]}' is missing, although {problem.format(token=token)}",
            where=source,
            remedy="save everything that the model's processor gives",
        )
    if not present:
        return {}
    patches, tokens = _sizes(arrays, model.config, name, sum(places), source)
    if sum(patches) != len(arrays[name]):
        raise DataError(
            f"'{name}' has {len(arrays[name])} rows, '{grid}' counts {sum(patches)}",
            where=source,
            remedy="save what the model's processor gives, unchanged",
        )
    counts = list(_images_per_example(tokens, places, name, source))
    starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    rows = [sum(patches[a:b]) for a, b in pairwise(starts)]
    beside = [key for key in (grid, *BESIDE[name]) if key in arrays]
    return {name: rows, **dict.fromkeys(beside, counts)}


def _sizes(
    arrays: Mapping[str, Tensor], config: Any, name: str, places: int, source: str
) -> tuple[list[int], list[int]]:
    """Number of rows in `name`, and of placeholder tokens, of each picture."""
    grid = SEEN[name][0]
    if grid in arrays:
        patches = [int(row.prod()) for row in arrays[grid]]
        merged = int(getattr(config.vision_config, "spatial_merge_size", 1)) ** 2
        return patches, [count // merged for count in patches]
    single_rows = [1] * len(arrays[name])
    if "image_position_ids" in arrays:
        real = (arrays["image_position_ids"] >= 0).all(-1).sum(-1).tolist()
        return single_rows, [count // int(config.vision_config.pooling_kernel_size) ** 2 for count in real]
    if "image_sizes" in arrays and hasattr(config, "spatial_merge_size"):
        unit = int(config.vision_config.patch_size) * int(config.spatial_merge_size)
        return single_rows, [int(side[0]) // unit * (int(side[1]) // unit) for side in arrays["image_sizes"]]
    if not single_rows or places % len(single_rows):
        raise DataError(
            f"the texts have {places} image tokens for the {len(single_rows)} images of '{name}'",
            where=source,
            remedy="give each image as many image tokens as the model's processor does",
        )
    return single_rows, [places // len(single_rows)] * len(single_rows)


def _images_per_example(tokens: list[int], places: list[int], name: str, source: str) -> Iterator[int]:
    """Number of images of each example, from its placeholder tokens."""
    remaining = iter(tokens)
    for number, word_count in enumerate(places, 1):
        count, picture_words = 0, 0
        while picture_words < word_count:
            picture_words, count = picture_words + next(remaining, word_count + 1), count + 1
        if picture_words != word_count:
            raise DataError(
                f"example {number} has {word_count} image tokens, which its images in '{name}' do not fill",
                where=source,
                remedy="give each image as many image tokens as the model's processor does",
            )
        yield count
    if next(remaining, None) is not None:
        raise DataError(
            f"'{name}' has more images than the texts have image tokens",
            where=source,
            remedy="remove the images that no text uses",
        )


def one_by_one(batch: Mapping[str, Tensor]) -> list[Batch]:
    """Each example of a batch by itself; the whole batch where tensors do not all count examples (`ExampleBatches`)."""
    lengths = {len(tensor) for tensor in batch.values()}
    if len(lengths) != 1:
        return [dict(batch)]
    return [{name: tensor[row : row + 1] for name, tensor in batch.items()} for row in range(lengths.pop())]


def word_mask(batch: Batch, config: Any) -> Tensor:
    """A mask of word tokens, bool, (examples, tokens): neither padding nor image placeholders."""
    ids = batch["input_ids"]
    mask = batch.get("attention_mask", torch.ones_like(ids)) == 1
    for keys in (keys for _, keys in SEEN.values()):
        for token in (getattr(config, key, None) for key in keys):
            mask = mask if token is None else mask & (ids != token)
    return mask
