"""Pictures: folders of them, pixels by a model's processor, noise, and the arrays of vision-language processors.

Outputs of such a processor (`processor(images=..., text=..., return_tensors="np")`) are accepted unchanged: the images
of all examples in one row, in the order of their image tokens in `input_ids`.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from io import BytesIO
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rotation_merge.errors import DataError, short
from rotation_merge.model.contents import read_json
from rotation_merge.run.batches import Batch

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tiff")
FILE = "preprocessor_config.json"

SCALES = (1, 2, 3, 4, 6, 8)
"""Noise is drawn on grids of so many cells a side (and of the full size), and enlarged."""

TOKENS = {
    "pixel_values": ("image_token_id", "image_token_index"),
    "pixel_values_videos": ("video_token_id", "video_token_index"),
}
"""Arrays of pictures, and the entries of a config that name the token which stands for them."""

BESIDE = {
    "pixel_values": ("image_grid_thw", "image_sizes", "image_position_ids"),
    "pixel_values_videos": ("video_grid_thw", "second_per_grid_ts"),
}
"""Arrays with one row for each picture; the first has the patches of each."""


def image_rows(folder: Path, config: Any) -> list[dict[str, Any]]:
    """The images of a folder and its subfolders, which are their classes.

    A class is known by the model's label names, else by number, else alphabetically.
    """
    files = sorted(f for f in folder.rglob("*") if f.suffix.lower() in SUFFIXES)
    classes = sorted({f.parent.name for f in files if f.parent != folder})
    numbers: dict[str, int] = {str(k): int(v) for k, v in (getattr(config, "label2id", None) or {}).items()}
    if not all(name in numbers for name in classes):
        numbers = {name: int(name) if all(map(str.isdigit, classes)) else i for i, name in enumerate(classes)}
    return [{"image": f, "label": None if f.parent == folder else numbers[f.parent.name]} for f in files]


def image_shape(config: Any) -> tuple[int, int, int]:
    """Channels, height and width of the images that a model takes."""
    vision = getattr(config, "vision_config", config)
    return getattr(vision, "num_channels", 3), *both_sides(getattr(vision, "image_size", 224))


def both_sides(side: Any) -> tuple[int, int]:
    """Height and width from a number, or from both."""
    height, width = side if isinstance(side, list | tuple) else (side, side)
    return int(height), int(width)


def pixel_reader(folder: str, config: Any) -> Callable[[Any], Tensor]:
    """A function from an image, or its file, to pixels (channels, height, width), by the model's own processor.

    Without a preprocessor_config.json images are resized to the model's size, with values from -1 to 1.

    Args:
        folder: of the model; empty: none.

    Raises:
        DataError: Pillow is missing, or the processor cannot be loaded.
    """
    import numpy as np
    import transformers

    channels, height, width = image_shape(config)
    try:
        from PIL import Image

        if folder and Path(folder, FILE).exists():
            processor = transformers.AutoImageProcessor.from_pretrained(folder, local_files_only=True, backend="pil")
        else:
            kind = getattr(transformers, "ViTImageProcessorPil", None) or transformers.ViTImageProcessor
            half, size = [0.5] * channels, {"height": height, "width": width}
            processor = kind(size=size, resample=Image.Resampling.BICUBIC, image_mean=half, image_std=half)
    except Exception as error:  # each class refuses in its own way
        problem, remedy = f"its images cannot be prepared ({short(error)})", f"pip install pillow, or repair its {FILE}"
        raise DataError(problem, where=folder or None, remedy=remedy) from error

    def pixels(file: Any) -> Tensor:
        file = BytesIO(file["bytes"]) if isinstance(file, Mapping) else file
        with Image.open(file) if isinstance(file, str | Path | BytesIO) else nullcontext(file) as image:
            converted = image.convert("L" if channels == 1 else "RGB")
        if not getattr(processor, "do_resize", False) and converted.size != (width, height):
            converted = converted.resize((width, height), Image.Resampling.BICUBIC)
        array = np.asarray(converted).reshape(converted.height, converted.width, channels).transpose(2, 0, 1)
        values = processor(array, return_tensors="pt", input_data_format="channels_first")["pixel_values"]
        return torch.as_tensor(values[0])

    return pixels


def synthetic_images(model: Any, folder: str, count: int, seed: int) -> Tensor:
    """Noise of several scales, contrasts and brightnesses, squashed into the range of real pixels; float32, NCHW.

    Args:
        folder: of the preprocessor, which defines the values of black and white; empty: none.

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
    return _normalised(torch.cat(images), folder)


def _normalised(pixels: Tensor, folder: str) -> Tensor:
    """Pixels from 0 to 1, (n, channels, height, width), as a model's processor normalises them."""
    settings = read_json(os.path.join(folder, FILE)) if folder and Path(folder, FILE).exists() else {}
    white = 1.0 if settings.get("do_rescale", True) and settings.get("rescale_factor", 1 / 255) != 1.0 else 255.0
    if not settings.get("do_normalize", True):
        return pixels * white
    half = [0.5] * pixels.shape[1]
    mean, deviation = (torch.tensor(settings.get(key, half)).view(-1, 1, 1) for key in ("image_mean", "image_std"))
    return (pixels * white - mean) / deviation


# --- arrays of processors --------------------------------------------------------------------------------------------


def split_arrays(arrays: Mapping[str, Tensor], model: Any, source: str) -> list[Batch]:
    """The examples in the arrays of a file, each with its pictures.

    Raises:
        DataError: an array is missing, or its length does not fit.
    """
    rows: dict[str, list[int]] = {}
    for name in TOKENS if "input_ids" in arrays else ():
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
    if (token := placeholder(model.config, name)) is None:
        return {}
    grid, remedy = BESIDE[name][0], "save everything that the model's processor gives, unchanged"
    places = (arrays["input_ids"] == token).flatten(1).sum(1).tolist()
    takes = inspect.signature(model.forward).parameters
    lacking = [key for key in (name, grid, "mm_token_type_ids") if name in takes and key in takes and key not in arrays]
    if lacking and (any(places) or name in arrays or grid in arrays):
        raise DataError(f"'{lacking[0]}' is missing, although there are images", where=source, remedy=remedy)
    if name not in arrays:
        return {}
    patches, tokens = _sizes(arrays, model.config, name, sum(places))
    by_picture = [key for key in BESIDE[name] if key in arrays]
    ends, bounds = [0, *accumulate(tokens)], [0, *accumulate(places)]
    first = [ends.index(bound) for bound in bounds] if set(bounds) <= set(ends) else [-1]
    alike = {len(patches), len(tokens), *(len(arrays[key]) for key in by_picture)} == {first[-1]}
    if not alike or sum(patches) != len(arrays[name]):
        problem = f"'{name}' has {len(arrays[name])} rows for images of {short(patches)} rows"
        problem += f" that take {short(tokens)} tokens; the texts have {short(places)} tokens for images"
        raise DataError(problem, where=source, remedy=remedy)
    spans = list(pairwise(first))
    counts = [end - start for start, end in spans]
    return {name: [sum(patches[start:end]) for start, end in spans], **dict.fromkeys(by_picture, counts)}


def _sizes(arrays: Mapping[str, Tensor], config: Any, name: str, places: int) -> tuple[list[int], list[int]]:
    """Number of rows in `name`, and of placeholder tokens, of each picture."""
    grid, vision, count = BESIDE[name][0], config.vision_config, len(arrays[name])
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


def placeholder(config: Any, name: str) -> int | None:
    """The token that stands for an array of pictures; None if the model has none."""
    return next((getattr(config, key) for key in TOKENS[name] if getattr(config, key, None) is not None), None)


def word_mask(batch: Batch, config: Any) -> Tensor:
    """A mask of word tokens, bool, (examples, tokens): neither padding nor image placeholders."""
    ids = batch["input_ids"]
    mask = batch.get("attention_mask", torch.ones_like(ids)) == 1
    for token in (placeholder(config, name) for name in TOKENS):
        mask = mask if token is None else mask & (ids != token)
    return mask
