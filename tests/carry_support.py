"""What tests of carrying share: the command, texts and fine-tunes, bases in other coordinates."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from cli_support import output_of
from plugin_support import state, write_state
from torch import Tensor

import rotation_merge as rm
from rotation_merge.architecture import Architecture


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
    """A base that computes the same in other coordinates, and what brings the first one there.

    Where the stream is turned, the norms of the new base get gains and shifts of their own.
    """
    alignment = rm.Alignment.random(model, options, seed=seed)
    view = alignment.apply(model)
    drawn = torch.Generator().manual_seed(seed)
    return unfolded(view.architecture, view.state_dict(), alignment.folded, drawn), alignment


def unfolded(
    architecture: Architecture, state: dict[str, Tensor], streams: Iterable[str], generator: torch.Generator
) -> dict[str, Tensor]:
    """Gains and shifts of the folded norms made random, and taken back out of what reads them."""
    result = dict(state)
    for block in architecture.blocks:
        for norm in [n for n in block.norms if n.stream in streams]:
            gain_info = block.tensor(norm.gain)
            if gain_info is None or gain_info.name not in state:
                continue
            size = state[gain_info.name].shape[0]
            gain = 0.5 + torch.rand(size, generator=generator, dtype=torch.float64)
            gain[::3] *= -1
            result[gain_info.name] = gain - norm.offset
            shift_info = block.tensor(norm.shift) if norm.shift else None
            readers = [i for i in block.tensors if _weight_of(i.key, norm.reads) and i.names[0] in state]
            biased = all(i.name.removesuffix("weight") + "bias" in state for i in readers)
            shift = None
            if shift_info is not None and shift_info.name in state:
                if biased:
                    shift = torch.randn(size, generator=generator, dtype=torch.float64)
                    result[shift_info.name] = shift
                else:
                    result[shift_info.name] = state[shift_info.name] * gain
            for info in readers:
                dims = [d for d, a in enumerate(info.axes) if any(p.role == "read" for p in a.parts)]
                for name in info.names:
                    dim = dims[0] - info.stacked
                    copies = state[name].shape[dim] // size
                    shape = [-1 if d == dim else 1 for d in range(state[name].ndim)]
                    result[name] = state[name] / gain.repeat(copies).reshape(shape)
                    if shift is not None:
                        bias = name.removesuffix("weight") + "bias"
                        result[bias] = state[bias] - (result[name] * shift.repeat(copies).reshape(shape)).sum(dim)
        for scale in [s for s in block.scales if s.stream in streams]:
            info = block.tensor(scale.gain)
            assert info is not None
            factor = 0.5 + torch.rand(state[info.name].shape, generator=generator, dtype=torch.float64)
            result[info.name] = factor
            for key in scale.writes:
                if (info := block.tensor(key)) is not None and info.name in state:
                    result[info.name] = state[info.name] / factor.reshape(-1, *[1] * (state[info.name].ndim - 1))
    return result


def _weight_of(key: str, reads: Iterable[str]) -> bool:
    return not key.endswith(".bias") and (key in reads or key.removesuffix(".weight") in reads)
