"""What a fit learns by and judges by, against numbers worked out by hand: its report shows their sums only."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from test_measuring import tiny

from rotation_merge import AlignConfig, FitConfig
from rotation_merge.matching.fit import _Fit, _pairs, along
from rotation_merge.matching.objective import distillation


def test_masked_positions_do_not_count_in_distillation():
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(1, 5, 7, generator=generator) for _ in range(2))
    teacher = teacher.softmax(-1)
    mask = torch.tensor([[1, 1, 1, 0, 0]])
    share = torch.tensor([0.0, 1.0])
    taught = [torch.zeros_like(teacher), teacher]
    short = distillation(SimpleNamespace(logits=student[:, :3]), [t[:, :3] for t in taught], share)
    padded = distillation(SimpleNamespace(logits=student), taught, share, mask)
    torch.testing.assert_close(padded, short)
    assert not torch.isclose(padded, distillation(SimpleNamespace(logits=student), taught, share))


@pytest.fixture(scope="module")
def a_fit() -> _Fit:
    generator = torch.Generator().manual_seed(0)
    batches = [{"input_ids": torch.randint(1, 12, (2, 6), generator=generator)} for _ in range(8)]
    models = [tiny(0), tiny(1)]
    return _Fit(_pairs(models, AlignConfig()), models[0], batches, FitConfig(steps=1, held_out=0.25), lambda *_: None)


def test_held_out_batches_are_never_trained_on(a_fit: _Fit):
    assert len(a_fit.held_out) == 2
    assert not set(a_fit.held_out) & set(a_fit.training)
    assert sorted(a_fit.held_out + a_fit.training) == list(range(8))
    assert {a_fit._pick() for _ in range(200)} == set(a_fit.training)


def test_the_path_of_three_models_goes_from_the_anchor_over_their_mean_to_the_donors():
    found = torch.stack([along(point, 3) for point in (0.0, 0.25, 0.5, 0.75, 1.0)])
    torch.testing.assert_close(found[:, 0], torch.tensor([1, 2 / 3, 1 / 3, 1 / 6, 0]))
    torch.testing.assert_close(found[:, 1:], (1 - found[:, :1]).expand(5, 2) / 2)


def test_the_score_of_a_fit_measures_above_the_line_from_the_anchor_to_the_donor(a_fit: _Fit, monkeypatch):
    """Losses 0, 1, 2, 3, 10 along the path: above the straight line nothing is, at a quarter of it the most (-1.5)."""
    seen = iter([0.0, 1.0, 2.0, 3.0, 10.0])
    now = {}

    def loss(batch, answers, coefficients):
        share = float(coefficients[1])
        if share not in now:
            now[share] = next(seen)
        return torch.tensor(now[share])

    monkeypatch.setattr(a_fit, "loss", loss)
    inside, barrier = a_fit.score([{}])
    assert inside == pytest.approx(2.0)
    assert barrier == pytest.approx(1.0 - 2.5)
    assert sorted(now) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert now[0.0] == 0.0
    assert now[1.0] == 10.0
