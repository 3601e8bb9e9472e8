"""Folders of images, and images as the pixels that a model takes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rotation_merge.errors import DataError

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tiff")


def read_images(folder: Path, directory: str, config: Any) -> dict[str, Tensor]:
    """The images of a folder, labelled by subfolders if there are any.

    Args:
        folder: looked through with its subfolders.
        directory: the model's; see `preparer`.
        config: the model's; knows the names of its classes.

    Raises:
        ValueError: there are none.
    """
    files = sorted(f for f in folder.rglob("*") if f.suffix.lower() in IMAGES)
    if not files:
        raise ValueError("holds no images")
    classes = sorted({f.parent.name for f in files if f.parent != folder})
    prepare = preparer(directory, config)
    pixels = torch.stack([prepare(f) for f in files])
    if not classes:
        return {"pixel_values": pixels}
    numbers = _numbers(classes, config)
    return {"pixel_values": pixels, "labels": torch.tensor([numbers[f.parent.name] for f in files])}


def _numbers(classes: Sequence[str], config: Any) -> dict[str, int]:
    """The class of each subfolder: by the model's label names, else by number, else alphabetically."""
    known = {str(k): int(v) for k, v in (getattr(config, "label2id", None) or {}).items()}
    if all(name in known for name in classes):
        return {name: known[name] for name in classes}
    if all(name.isdigit() for name in classes):
        return {name: int(name) for name in classes}
    return {name: i for i, name in enumerate(classes)}


def preparer(directory: str, config: Any) -> Callable[[Any], Tensor]:
    """A function from an image, or its file, to pixels (channels, height, width).

    Args:
        directory: where the model's preprocessor_config.json lies, if it has one.
        config: the model's, with its image size.

    Raises:
        DataError: Pillow is not installed.
    """
    import numpy as np

    try:
        from PIL import Image
    except ImportError as error:
        raise DataError("images need Pillow", remedy="pip install pillow") from error
    channels, *size = image_shape(config)
    factor, mean, deviation = normalisation(directory, channels)

    def prepare(file: Any) -> Tensor:
        with Image.open(file) if isinstance(file, Path) else nullcontext(file) as image:
            converted = image.convert("L" if channels == 1 else "RGB")
            if converted.size != (size[1], size[0]):
                converted = converted.resize((size[1], size[0]), Image.Resampling.BICUBIC)
            array = np.asarray(converted, dtype=np.float32).reshape(size[0], size[1], -1).transpose(2, 0, 1)
        return (torch.as_tensor(array.copy()) * factor - mean) / deviation

    return prepare


def image_shape(config: Any) -> tuple[int, int, int]:
    """Channels, height and width of the images that a model takes."""
    vision = getattr(config, "vision_config", config)
    return getattr(vision, "num_channels", 3), *both_sides(getattr(vision, "image_size", 224))


def both_sides(side: Any) -> tuple[int, int]:
    """Height and width from a number, or from both."""
    height, width = side if isinstance(side, list | tuple) else (side, side)
    return int(height), int(width)


def normalisation(directory: str, channels: int) -> tuple[float, Tensor, Tensor]:
    """Factor, mean and deviation by which a model's preprocessor normalises values of 0 to 255.

    Args:
        directory: where preprocessor_config.json lies, if there is one.

    Returns:
        The factor, and mean and deviation of each channel, shape (channels, 1, 1).
    """
    path = Path(directory) / "preprocessor_config.json"
    says = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    factor = says.get("rescale_factor", 1 / 255) if says.get("do_rescale", True) else 1.0
    normalise = says.get("do_normalize", True)
    mean = torch.tensor(says.get("image_mean", [0.5] * channels) if normalise else [0.0]).view(-1, 1, 1)
    deviation = torch.tensor(says.get("image_std", [0.5] * channels) if normalise else [1.0]).view(-1, 1, 1)
    return factor, mean, deviation
