"""Pure state-space models: the stream moves, and the channels of Mamba; heads and states of Mamba-2 stay."""

from __future__ import annotations

import pytest
import torch
from tiny_models import ALL, planted

import rotation_merge as rm

WHOLE = rm.AlignConfig(heads="permutation", residual="permutation")


@pytest.mark.parametrize(("family", "kinds"), [("mamba", {"stream", "ffn"}), ("mamba2", {"stream"})])
def test_twins_are_found(family: str, kinds: set[str]) -> None:
    model = planted(next(case for case in ALL if case.family == family))
    twin = rm.Alignment.random(model.pair, WHOLE, seed=2)
    assert {t.kind for t in twin.transforms.values() if not t.is_identity()} == kinds
    donor = twin.apply(model.pair).state_dict()
    assert model.differs(donor) <= 1e-9
    assert any(not torch.equal(donor[name], model.state[name]) for name in donor)
    back = rm.align(model.pair, (donor, model.config), WHOLE).apply((donor, model.config)).state_dict()
    for name, tensor in model.state.items():
        torch.testing.assert_close(back[name], tensor, rtol=0, atol=1e-12)
