"""The models and samples that come with the package, and what a model is worth on them.

Models are folders, modules or views, as `rotation_merge.evaluate` takes them.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import transformers
from torch import Tensor

import rotation_merge as rm
from rotation_merge.run.demo import CHECKPOINTS, NAMES, TEXTS, digits, text

__all__ = ["CHECKPOINTS", "NAMES", "TEXTS", "digits", "text"]

Batches = list[dict[str, Tensor]]


def load(folder: Path | str) -> Any:
    """A checkpoint as a module, in float32."""
    kind = json.loads((Path(folder) / "config.json").read_text())["architectures"][0]
    return getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32).eval()


def windows(name: str, length: int = 128) -> Tensor:
    """Held-out text in windows of so many bytes."""
    tokens = text(name)
    return tokens[: len(tokens) // length * length].view(-1, length)


def next_token(ids: Tensor, size: int = 32) -> Batches:
    """Windows of text, whose labels are the windows themselves."""
    return [{"input_ids": part, "labels": part} for part in ids.split(size)]


def images(count: int, labels: bool, size: int = 64) -> Batches:
    """The first training images, in batches."""
    pixels, classes, _, _ = digits()
    parts = zip(pixels[:count].split(size), classes[:count].split(size), strict=True)
    return [{"pixel_values": some, **({"labels": truth} if labels else {})} for some, truth in parts]


def held_out_images() -> Batches:
    """All 540."""
    _, _, pixels, classes = digits()
    return [{"pixel_values": pixels, "labels": classes}]


def accuracy(model: Any) -> float:
    """On the test images."""
    return rm.evaluate(model, held_out_images())["accuracy"]


def loss(model: Any, *domains: str, count: int = 160) -> float:
    """Nats a byte of so many windows of 128 bytes of held-out text, mean over domains."""
    return fmean(rm.evaluate(model, next_token(windows(domain)[:count]))["loss"] for domain in domains)
