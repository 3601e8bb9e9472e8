"""Changes of low rank are merged alike in single and double precision; as factors: test_adapter_merge.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from plugin_support import build
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
