"""Matching on activations alone: of other weights than ran, and its whitening. From outside the two go together."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_match_on import FIRST, twins
from tiny_models import inputs, keep_float64

import rotation_merge as rm
from rotation_merge.matching.activations import Activations
from rotation_merge.matching.match_on import ROWS, ActivationMatcher, centred


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2", "vit", "t5"])
def test_activations_decide_where_weights_say_nothing(family: str) -> None:
    """The weights that are handed over are others in both models; only activations know the twin."""
    case = next(case for case in FIRST if case.family == family)
    model, other, options = twins(case, scaling=False)
    with keep_float64():
        given = [inputs(case, model, seed) for seed in range(2, 8)]
        architecture = rm.average([model]).architecture
        pair = [Activations.of(m, given, ROWS) for m in (model, other)]
    draw = torch.Generator().manual_seed(3)
    states = [
        {n: x if x.ndim < 2 else 0.1 * torch.randn(x.shape, generator=draw, dtype=x.dtype) for n, x in m.items()}
        for m in (model.state_dict(), other.state_dict())
    ]
    found = ActivationMatcher("activations", lambda: (pair[0], pair[1]))(architecture, *states, options)
    anchor, blank = model.state_dict(), rm.align(model, other, attention="none", ffn="none", scaling=False)
    moved = replace(blank.without_biases(), transforms=found.transforms).apply(other).state_dict()
    for name, tensor in moved.items():
        torch.testing.assert_close(tensor, anchor[name], rtol=1e-4, atol=1e-4)


def test_partial_whitening_turns_with_what_is_whitened() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(40, 4, generator=draw, dtype=torch.float64) * torch.tensor([9.0, 3.0, 1.0, 0.1]).double()
    turn = torch.linalg.qr(torch.randn(4, 4, generator=draw, dtype=torch.float64))[0]
    torch.testing.assert_close(centred(x + 5.0) @ turn.mT, centred(x @ turn.mT))
    before, after = (torch.linalg.svdvals(m) for m in (x - x.mean(0), centred(x)))
    torch.testing.assert_close(after[0] / after[-1], (before[0] / before[-1]).sqrt())
