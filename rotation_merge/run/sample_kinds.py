"""Kinds of samples in words, and the options of reading them."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic.dataclasses import dataclass

from rotation_merge.config import Config, Count, Length, option

KINDS = (
    "text (.txt, .md, .py ...), a table (.csv, .tsv) with a header, .jsonl or .json, .npz, .safetensors, a folder of "
    "images, a directory written by datasets' save_to_disk, or demo:NAME"
)

SOURCES = ("self", "synthetic")
"""Samples that need no file: text that a language model writes, and images made of noise."""

Statistic = Literal["gram", "fisher"]
STATISTICS = get_args(Statistic)
"""Kinds of statistics that `measure` writes."""

SAMPLES = 64
"""Samples that are made where no number is given."""


@dataclass(frozen=True)
class ReadingConfig(Config):
    """Options of reading samples."""

    limit: Count | None = option(None, "largest number of examples of each data set")
    batch_size: Count = option(32, "examples in a batch")
    length: Length = option(128, "tokens in a window of text")
