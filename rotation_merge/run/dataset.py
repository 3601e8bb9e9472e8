"""Directories written by `datasets.Dataset.save_to_disk`: text, images or audio, through the model's own processor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MARKS = ("dataset_info.json", "state.json", "dataset_dict.json")
"""Files that tell such a directory from a folder of images."""

TEXT, IMAGE, AUDIO, LABEL = ("text", "sentence", "content"), ("image", "img"), ("audio",), ("labels", "label")
"""Names of columns that are looked for, in this order."""


def is_dataset(path: Path) -> bool:
    return any((path / mark).exists() for mark in MARKS)


def rows_of(path: Path) -> Any:
    """The rows of a dataset; of a dictionary of splits, its first.

    Raises:
        ValueError: it cannot be read, or `datasets` is not installed.
    """
    try:
        from datasets import load_from_disk
    except ImportError as error:
        raise ValueError("the package 'datasets' is not installed") from error
    try:
        splits = load_from_disk(str(path))
    except Exception as error:  # of many classes
        raise ValueError(str(error)) from error
    return (
        splits
        if hasattr(splits, "column_names") and isinstance(splits.column_names, list)
        else next(iter(splits.values()))
    )


def column(rows: Any, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in rows.column_names), None)


def read_dataset(path: Path, preparer: Callable[[], Callable[[Any], Tensor]], extractor: Callable[[], Any]) -> Any:
    """Examples of a dataset: records with `text`, or arrays by input name, with `labels` where there are any.

    Args:
        path: the directory.
        preparer: gives what makes pixels (channels, height, width) of a picture; asked only for images.
        extractor: gives the model's feature extractor; asked only for audio.

    Raises:
        ValueError: no column of a known name.
    """
    rows = rows_of(path)
    label = column(rows, LABEL)
    text, image, audio = (column(rows, names) for names in (TEXT, IMAGE, AUDIO))
    if text is not None:
        return [{"text": row[text], **({"label": row[label]} if label else {})} for row in rows]
    if image is not None:
        prepare = preparer()
        examples = {"pixel_values": torch.stack([prepare(row[image]) for row in rows])}
    elif audio is not None:
        examples = _audio([row[audio] for row in rows], extractor())
    else:
        known_columns = ", ".join((*TEXT, *IMAGE, *AUDIO))
        raise ValueError(f"columns are {', '.join(rows.column_names)}; one of {known_columns} is needed")
    if label is not None:
        examples["labels"] = torch.tensor([row[label] for row in rows])
    return examples


def _audio(clips: list[Any], extractor: Any) -> dict[str, Tensor]:
    rate = getattr(extractor, "sampling_rate", 16000)
    wrong = next((clip["sampling_rate"] for clip in clips if clip["sampling_rate"] != rate), None)
    if wrong is not None:
        raise ValueError(f"audio is sampled at {wrong} Hz, the model takes {rate} Hz")
    inputs = extractor([clip["array"] for clip in clips], sampling_rate=rate, return_tensors="pt", padding=True)
    return {name: tensor for name, tensor in inputs.items() if name != "attention_mask"}
