"""What tests of carrying share: the command, texts and fine-tunes, bases in other coordinates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from cli_support import output_of
from plugin_support import state, write_state
from torch import Tensor

import rotation_merge as rm


def carry(*arguments: object) -> str:
    """What the command prints."""
    return output_of("carry", *arguments)


def texts(folder: Path, rows: list[list[int]] | None = None, count: int = 32) -> Path:
    """A file of token ids."""
    rows = rows or [[(7 * i + j * j) % 40 for j in range(10)] for i in range(count)]
    (folder / "texts.jsonl").write_text("\n".join(json.dumps({"input_ids": row}) for row in rows))
    return folder / "texts.jsonl"


def noisy(model: Path, folder: Path, size: float, seed: int = 2) -> Path:
    """A model with all of its weights changed."""
    draw = torch.Generator().manual_seed(seed)
    changed = {n: t + size * torch.randn(t.shape, generator=draw) for n, t in state(model).items()}
    return write_state(changed, model, folder)


def lift_of(out: Path) -> dict[str, Any]:
    lift: dict[str, Any] = json.loads((out / "rotation_merge.json").read_text())["lift"]
    return lift


def other_coordinates(model: Any, options: rm.AlignConfig, seed: int = 5) -> tuple[dict[str, Tensor], rm.Alignment]:
    """An old base that computes the same in other coordinates, and what brings it to the model.

    Where the stream is turned, its norms are folded: those of the model alone have gains and shifts.
    """
    drawn = rm.Alignment.random(model, options, seed=seed)
    return drawn.apply(model).state_dict(), drawn.inverse()
