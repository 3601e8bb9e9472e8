"""A random alignment as a value: its model's twin has other weights and the same outputs, through public calls only."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from residual_support import Checkpoint, checkpoint
from tiny_models import difference

import rotation_merge as rm

CASES = [
    ("llama", "llama", {"residual": "rotation"}),
    ("llama", "llama", {"residual": "none", "layers": "1"}),
    ("vit", "classifier", {"residual": "rotation"}),
    ("bert", "classifier", {"residual": "permutation"}),
    ("t5", "plain", {"residual": "largest"}),
    ("gemma2", "tied", {"residual": "largest"}),
    ("llama", "llama, tied, biases", {"residual": "rotation", "untie": True}),
    ("mixtral", "untied", {"residual": "rotation"}),
]
"""Rotary and not, LayerNorm folded, two streams, a tied head and one untied, experts."""


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-{'-'.join(map(str, case[2].values()))}")
def model(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Checkpoint, dict[str, object]]:
    family, name, options = request.param
    return checkpoint(family, name, tmp_path / "model"), {"heads": "permutation", **options}


def test_a_random_alignment_is_saved_and_inverted_like_any(
    model: tuple[Checkpoint, dict[str, object]], tmp_path: Path
) -> None:
    parent, options = model
    alignment = rm.Alignment.random(parent.path, **options)
    twin = alignment.apply(parent.path)
    alignment.save(tmp_path / "twin.safetensors")
    again = rm.Alignment.load(tmp_path / "twin.safetensors").apply(parent.path)
    assert all(torch.equal(again[name], tensor) for name, tensor in twin.items())
    alignment.inverse().save(tmp_path / "inverse.safetensors")
    rm.Alignment.load(tmp_path / "inverse.safetensors").apply(twin).save_pretrained(tmp_path / "back")
    assert difference(parent.outputs(tmp_path / "back"), parent.outputs()) <= 1e-4


def test_seeds_tell_twins_apart(tmp_path: Path) -> None:
    parent = checkpoint("llama", "llama", tmp_path / "parent")
    name = "model.layers.0.mlp.up_proj.weight"
    first, same, other = (rm.Alignment.random(parent.path, seed=seed).apply(parent.path)[name] for seed in (0, 0, 1))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_a_group_that_the_model_does_not_admit_is_refused(tmp_path: Path) -> None:
    parent = checkpoint("llama", "llama, tied, biases", tmp_path / "parent")
    with pytest.raises(rm.RotationMergeError, match="untie"):
        rm.Alignment.random(parent.path, residual="rotation")
    with pytest.raises(rm.RotationMergeError, match="did you mean"):
        rm.Alignment.random(parent.path, heds="permutation")
    with pytest.raises(rm.RotationMergeError, match="whole number"):
        rm.Alignment.random(parent.path, seed="x")  # type: ignore[arg-type]
