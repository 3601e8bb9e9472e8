"""Pure state-space models: what may change places in Mamba-2 and Mamba is found again, and nothing else may."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import ALL, Planted, planted
from torch import Tensor

import rotation_merge as rm

HEADS = 8
SEED = 5
"""With which every part of the elements that are drawn moves something."""

WHOLE = rm.AlignConfig(heads="permutation", residual="permutation")


def tiny(family: str) -> Planted:
    return planted(next(case for case in ALL if case.family == family))


def moved(model: Planted, alignment: rm.Alignment) -> dict[str, Tensor]:
    return alignment.apply((model.state, model.config)).state_dict()


def found_again(model: Planted, donor: dict[str, Tensor]) -> dict[str, Tensor]:
    """A donor aligned to the model."""
    pair = (model.state, model.config), (donor, model.config)
    return rm.align(*pair, WHOLE).apply(pair[1]).state_dict()


def only(part: str, transform: Any) -> Any:
    """One part of an element, whatever else it moves left in place."""
    return replace(transform.still(), **{part: getattr(transform, part)})


@pytest.mark.parametrize("part", ["own", "heads", "groups", "shared", "everything"])
def test_what_mamba_2_moves_is_found(part: str) -> None:
    """Channels within a head, heads within a group, groups, states, and all of them with the stream."""
    model = tiny("mamba2")
    draw = rm.Alignment.random((model.state, model.config), WHOLE, seed=SEED)
    if part != "everything":
        mixers = {name: only(part, t) for name, t in draw.transforms.items() if t.space_kind == "mixer"}
        assert mixers
        assert not any(transform.is_identity() for transform in mixers.values())
        draw = replace(draw, transforms=mixers)
    donor = moved(model, draw)
    assert model.differs(donor) <= 1e-9
    found = found_again(model, donor)
    assert donor.keys() == found.keys()
    assert any(not torch.equal(donor[name], model.state[name]) for name in donor)
    for name, tensor in model.state.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-12)


def test_heads_across_groups_break_the_function() -> None:
    """A head that goes to another group meets other states there: as one group of all heads it would be allowed."""
    model = tiny("mamba2")
    for heads, breaks in (([1, 0, 2, 3, 4, 5, 6, 7], False), ([4, 1, 2, 3, 0, 5, 6, 7], True)):
        order = torch.tensor(heads)
        state = dict(model.state)
        for info in model.architecture.tensors():
            for dim, axis in enumerate(info.axes):
                sizes = [part.size for part in axis.parts]
                pieces = list(state[info.name].split(sizes, dim)) if axis.parts else []
                for at, part in enumerate(axis.parts):
                    if part.role in ("head", "own"):
                        pieces[at] = (
                            pieces[at].unflatten(dim, (HEADS, -1)).index_select(dim, order).flatten(dim, dim + 1)
                        )
                if pieces:
                    state[info.name] = torch.cat(pieces, dim)
        assert (model.differs(state) > 1e-3) == breaks


def test_what_mamba_moves_is_found() -> None:
    """Channels, with the stream; not a state, nor half of what a channel is."""
    model = tiny("mamba")
    draw = rm.Alignment.random((model.state, model.config), WHOLE, seed=2)
    assert [transform.space_kind for transform in draw.transforms.values()].count("ffn") == 2
    donor = moved(model, draw)
    assert model.differs(donor) <= 1e-9
    found = found_again(model, donor)
    for name, tensor in model.state.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-12)
    wrong = dict(model.state)
    name = "backbone.layers.0.mixer.A_log"
    wrong[name] = wrong[name].flip(1)
    assert model.differs(wrong) > 1e-3
