"""Layers that meet the keys and values of another one: these coordinates stay, query heads move inside their groups."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import ALL, Planted, planted

import rotation_merge as rm

ORDERED = {"heads": "permutation", "residual": "signed_permutation"}


@pytest.fixture(scope="module")
def model() -> Planted:
    """Five layers: the last two meet the keys and values of the second and third; in the third, keys are values."""
    return planted(next(case for case in ALL if (case.family, case.name) == ("gemma4", "shared keys")))


@pytest.mark.parametrize("options", [ORDERED, {}, {"heads": "spectral"}, {"heads": "permutation", "layers": "0-3"}])
def test_whatever_is_matched_donors_compute_what_they_did(
    model: Planted, options: dict[str, object], tmp_path: Path
) -> None:
    """Of models with nothing in common."""
    draw = torch.Generator().manual_seed(3)
    donor = {n: x + 9 * torch.randn(x.shape, generator=draw, dtype=x.dtype) for n, x in model.state.items()}
    alignment = rm.align(model.pair, (donor, model.config), **options)
    moved = alignment.apply((donor, model.config)).state_dict()
    assert model.differs(moved) == pytest.approx(model.differs(donor), abs=1e-8)
    alignment.save(tmp_path / "file")
    assert rm.Alignment.load(tmp_path / "file").transforms.keys() == alignment.transforms.keys()
