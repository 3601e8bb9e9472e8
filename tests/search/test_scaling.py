"""The search for `lambda`: every model that it judges lies on the line from the base through the merge."""

from __future__ import annotations

import copy

import torch
from torch import nn

from rotation_merge.search.judge import Figures
from rotation_merge.search.scaling import best_scale


class Tied(nn.Module):
    """An embedding that is the head, too, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mean", torch.zeros(3))


def test_scales_move_every_tensor_along_the_line_once() -> None:
    torch.manual_seed(0)
    base, merged = Tied(), Tied()
    merged.mean += 1.0
    change = {name: tensor - base.state_dict()[name] for name, tensor in copy.deepcopy(merged).state_dict().items()}
    visited: list[float] = []

    def measure(model: nn.Module) -> Figures:
        scales = [
            float((tensor - base.state_dict()[name]).flatten() @ change[name].flatten() / change[name].square().sum())
            for name, tensor in model.state_dict().items()
        ]
        torch.testing.assert_close(scales, [scales[0]] * len(scales), atol=1e-5, rtol=0)
        visited.append(scales[0])
        score = (scales[0] - 2.0) ** 2
        return Figures(score, None, [score])

    scale, figures = best_scale(merged, base, 1.0, measure, lambda figures: (0.0, figures.score))
    assert abs(scale - 2.0) < 0.2
    assert figures.score < 0.04
    assert len(set(visited)) == len(visited)
