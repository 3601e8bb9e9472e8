"""Tiny checkpoints for the residual stream: anchors, twins moved in every space, other models of the same class."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from plugin_support import recipe_for, state, write_state
from tiny_models import ALL, Case, difference, inputs, load, make, outputs, save
from torch import Tensor

import rotation_merge as rm
from rotation_merge.architecture import Architecture, resolve


def case(family: str, name: str) -> Case:
    """A tiny model by the name it has in tests/architectures."""
    return next(c for c in ALL if (c.family, c.name) == (family, name))


@dataclass
class Checkpoint:
    """A checkpoint on disk and how to run it."""

    case: Case
    path: Path

    @property
    def config(self) -> dict[str, Any]:
        return transformers.AutoConfig.from_pretrained(self.path).to_dict()

    @property
    def state(self) -> dict[str, Tensor]:
        return state(self.path)

    @property
    def architecture(self) -> Architecture:
        """The labels of its tensors."""
        return resolve(self.config, list(self.state), self.case.name)

    def folded(self) -> dict[str, Tensor]:
        """Tensors with all norm gains folded into their readers."""
        return rm.Alignment.random(self.path, residual="rotation").apply_anchor(self.path).state_dict()

    def outputs(self, path: Path | None = None) -> dict[str, Tensor]:
        """What the checkpoint (or another one of its class) computes, in float64."""
        model = load(self.case, path or self.path)
        return outputs(model, inputs(self.case, model))

    def differs(self, path: Path) -> float:
        """Largest difference of another checkpoint's outputs from these."""
        return difference(self.outputs(path), self.outputs())

    def write(self, tensors: dict[str, Tensor], where: Path) -> Checkpoint:
        """Another checkpoint of the same class."""
        write_state({name: x.contiguous() for name, x in tensors.items()}, self.path, where)
        return Checkpoint(self.case, where)


def checkpoint(family: str, name: str, where: Path, seed: int = 0) -> Checkpoint:
    """A tiny random model, in float32."""
    chosen = case(family, name)
    save(make(chosen, seed).float(), where)
    return Checkpoint(chosen, where)


def twin(
    anchor: Checkpoint, where: Path, residual: str, seed: int = 5, noise: float = 0.0, **options: Any
) -> Checkpoint:
    """The anchor moved in every space, with relative noise on its weights; it computes the same without."""
    chosen = {"heads": "permutation", "residual": residual, **options}
    moved = rm.Alignment.random(anchor.path, seed=seed, **chosen).apply(anchor.path)
    generator = torch.Generator().manual_seed(seed + 1)
    noisy = {
        name: x + noise * x.std() * torch.randn(x.shape, generator=generator) if noise and x.ndim > 1 else x
        for name, x in moved.items()
    }
    return anchor.write({name: x.float() for name, x in noisy.items()}, where)


def recipe(anchor: Checkpoint, /, *donors: Checkpoint, residual: str, **parameters: Any) -> dict[str, Any]:
    """All models with equal weights, every local group on."""
    return recipe_for("linear", anchor.path, *(donor.path for donor in donors), residual=residual, **parameters)


def transport(anchor: Checkpoint, /, *tuned: tuple[Checkpoint, Checkpoint], **parameters: Any) -> dict[str, Any]:
    """Task vectors of (fine-tune, its base) pairs carried over to the anchor, by task arithmetic."""
    models = [
        {"model": str(fine.path), "parameters": {"weight": 1.0, "finetuned_from": str(base.path)}}
        for fine, base in tuned
    ]
    return {**recipe_for("task_arithmetic", anchor.path, **parameters), "models": models}


def report(where: Path) -> dict[str, Any]:
    """The report of a merge."""
    content: dict[str, Any] = json.loads((where / "rotation_merge.json").read_text())
    return content
