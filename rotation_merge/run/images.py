"""Folders of images, and images as the pixels that a model takes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rotation_merge.errors import DataError, short
from rotation_merge.model.contents import read_json
from rotation_merge.run.functions import local_path

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tiff")
FILE = "preprocessor_config.json"


def image_rows(folder: Path, config: Any) -> list[dict[str, Any]]:
    """The images of a folder and its subfolders, which are their classes.

    A class is known by the model's label names, else by number, else alphabetically.
    """
    files = sorted(f for f in folder.rglob("*") if f.suffix.lower() in IMAGES)
    classes = sorted({f.parent.name for f in files if f.parent != folder})
    numbers: dict[str, int] = {str(k): int(v) for k, v in (getattr(config, "label2id", None) or {}).items()}
    if not all(name in numbers for name in classes):
        numbers = {name: int(name) if all(map(str.isdigit, classes)) else i for i, name in enumerate(classes)}
    return [{"image": f, "label": None if f.parent == folder else numbers[f.parent.name]} for f in files]


def pixel_reader(model_path: str, config: Any) -> Callable[[Any], Tensor]:
    """A function from an image, or its file, to pixels (channels, height, width), by the model's own processor.

    Without a preprocessor_config.json images are resized to the model's size, with values from -1 to 1.

    Raises:
        DataError: Pillow is missing, or the processor cannot be loaded.
    """
    import numpy as np
    import transformers

    folder, (channels, height, width) = local_path(model_path) if model_path else "", image_shape(config)
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
        raise DataError(problem, where=model_path or None, remedy=remedy) from error

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


def normalisation(model_path: str, channels: int) -> tuple[float, Tensor, Tensor]:
    """The value of white before a model's processor normalises it, and the mean and deviation of each channel.

    Returns:
        A number, and tensors of shape (channels, 1, 1).
    """
    folder = local_path(model_path) if model_path else ""
    says = read_json(os.path.join(folder, FILE)) if folder and Path(folder, FILE).exists() else {}
    white = 1.0 if says.get("do_rescale", True) and says.get("rescale_factor", 1 / 255) != 1.0 else 255.0
    normalises = says.get("do_normalize", True)
    mean = torch.tensor(says.get("image_mean", [0.5] * channels) if normalises else [0.0])
    deviation = torch.tensor(says.get("image_std", [0.5] * channels) if normalises else [1.0])
    return white, mean.view(-1, 1, 1), deviation.view(-1, 1, 1)


def image_shape(config: Any) -> tuple[int, int, int]:
    """Channels, height and width of the images that a model takes."""
    vision = getattr(config, "vision_config", config)
    return getattr(vision, "num_channels", 3), *both_sides(getattr(vision, "image_size", 224))


def both_sides(side: Any) -> tuple[int, int]:
    """Height and width from a number, or from both."""
    height, width = side if isinstance(side, list | tuple) else (side, side)
    return int(height), int(width)
