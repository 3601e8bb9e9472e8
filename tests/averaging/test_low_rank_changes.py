"""Changes of low rank are merged alike however they are given: in single or double precision, or as factors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from plugin_support import build, write_adapter
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

import rotation_merge as rm

MAPS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
RANK, MODELS = 2, 3
RULES = ("wudi", "tsv", "iso")


def factors(model: PreTrainedModel, seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    """B and A of a change of each map, by its weight's name."""
    draw = torch.Generator().manual_seed(seed)
    shapes = {n: p.shape for n, p in model.named_parameters() if n.removesuffix(".weight").endswith(MAPS)}
    return {
        name: (torch.randn(outputs, RANK, generator=draw) * 0.1, torch.randn(RANK, inputs, generator=draw) * 0.1)
        for name, (outputs, inputs) in shapes.items()
    }


def merged(method: str, dtype: torch.dtype, change: Callable[[int], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The merged change of fine-tunes of one base, in double precision."""
    base = build("llama").to(dtype)
    config, start = base.config, base.state_dict()
    tuned = [
        ({name: (x.double() + change(seed).get(name, 0.0)).to(dtype) for name, x in start.items()}, config)
        for seed in range(1, MODELS + 1)
    ]
    view = rm.average([base, *tuned], method, weights=[1.0] * (MODELS + 1)).to(torch.float64)
    return {name: view[name] - start[name].double() for name in factors(base, 1)}


def low_rank(seed: int) -> dict[str, Tensor]:
    return {name: b.double() @ a.double() for name, (b, a) in factors(build("llama"), seed).items()}


def full_rank(seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        name: 1e-3 * torch.randn(x.shape, generator=draw, dtype=torch.float64) for name, x in low_rank(seed).items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", [low_rank, full_rank])
@pytest.mark.parametrize("method", RULES)
def test_precision_does_not_matter(method: str, kind: Callable[[int], dict[str, Tensor]]) -> None:
    single, double = (merged(method, dtype, kind) for dtype in (torch.float32, torch.float64))
    for name, change in double.items():
        assert (single[name] - change).norm() <= 1e-4 * change.norm(), name


@pytest.mark.slow
@pytest.mark.parametrize("method", RULES)
def test_factors_are_merged_as_their_products(method: str, tmp_path: Path) -> None:
    for seed in range(1, MODELS + 1):
        parts = factors(build("llama"), seed)
        tensors = {
            f"base_model.model.{name.removesuffix('weight')}lora_{part}.weight": tensor.contiguous()
            for name, (b, a) in parts.items()
            for part, tensor in (("A", a), ("B", b))
        }
        settings = {"r": RANK, "lora_alpha": RANK, "base_model_name_or_path": "org/base"}
        write_adapter({"peft_type": "LORA", **settings}, tensors, tmp_path / str(seed))
    paths = [str(tmp_path / str(seed)) for seed in range(1, MODELS + 1)]
    rm.merge_adapters(paths, method).save(str(tmp_path / "out"))
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    for name, change in merged(method, torch.float32, low_rank).items():
        b, a = (found[f"base_model.model.{name.removesuffix('weight')}lora_{part}.weight"] for part in "BA")
        assert (b.double() @ a.double() - change).norm() <= 1e-4 * change.norm(), name
