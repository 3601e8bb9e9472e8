"""Figures that decide: losses, barriers, what is held out, padding, rounding; against numbers worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from plugin_support import build, merged, recipe_for, save
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from rotation_merge import AlignConfig, FitConfig, align, fit
from rotation_merge.matching.fit import _Fit
from rotation_merge.matching.objective import distillation
from rotation_merge.run.curves import Curve
from rotation_merge.run.data import Data
from rotation_merge.run.evaluate import evaluate, path


class Successor(nn.Module):
    """Says of every token that the one with the next number follows, with the given certainty (log-odds)."""

    def __init__(self, certainty: float, words: int = 4) -> None:
        super().__init__()
        self.certainty = nn.Parameter(torch.tensor(certainty))
        self.words = words

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        after = torch.nn.functional.one_hot((input_ids + 1) % self.words, self.words)
        return SimpleNamespace(logits=self.certainty * after.float())


def tokens(*ids: int, labels: list[int] | None = None) -> Data:
    row = torch.tensor([ids])
    return Data([{"input_ids": row, "labels": row if labels is None else torch.tensor([labels])}], "next token", 1)


def test_next_token_loss_is_that_of_the_token_that_follows():
    loss, accuracy = evaluate(Successor(2.0), tokens(0, 1, 2, 3))
    assert accuracy == 1.0
    assert loss == pytest.approx(math.log(math.exp(2.0) + 3) - 2.0)


def test_padding_is_no_token_to_predict():
    whole, _ = evaluate(Successor(2.0), tokens(0, 1, 2, 3))
    padded, _ = evaluate(Successor(2.0), tokens(0, 1, 2, 3, 0, 0, labels=[0, 1, 2, 3, -100, -100]))
    assert padded == pytest.approx(whole)


def test_a_path_goes_from_the_first_model_to_the_second():
    curve = path(Successor(0.0), Successor(3.0), tokens(0, 1, 2), 4, "p")
    assert curve.t == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert curve.loss == pytest.approx([math.log(math.exp(c) + 3) - c for c in (0.0, 1.0, 2.0, 3.0)])


@pytest.mark.parametrize(
    ("losses", "barrier"),
    [
        ([1.0, 2.5, 3.0], 0.5),  # above the line, below the higher end
        ([3.0, 2.5, 1.0], 0.5),
        ([1.0, 1.5, 3.0], 0.0),  # below the line: the ends are on it
        ([2.0, 2.0, 2.0], 0.0),
    ],
)
def test_the_barrier_stands_on_the_line_between_the_ends(losses: list[float], barrier: float):
    assert Curve("p", [0.0, 0.5, 1.0], losses, [0.0] * 3).barrier() == pytest.approx(barrier)


def test_the_barrier_of_unequal_ends_off_the_middle():
    assert Curve("p", [0.0, 0.25, 1.0], [0.0, 2.0, 4.0], [0.0] * 3).barrier() == pytest.approx(1.0)


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


def tiny(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=12, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    ).eval()


@pytest.fixture(scope="module")
def a_fit() -> _Fit:
    generator = torch.Generator().manual_seed(0)
    batches = [{"input_ids": torch.randint(1, 12, (2, 6), generator=generator)} for _ in range(8)]
    return _Fit([tiny(0), tiny(1)], batches, AlignConfig(), FitConfig(steps=1, held_out=0.25), lambda *_: None, None)


def test_held_out_batches_are_never_trained_on(a_fit: _Fit):
    assert len(a_fit.held_out) == 2
    assert not set(a_fit.held_out) & set(a_fit.training)
    assert sorted(a_fit.held_out + a_fit.training) == list(range(8))
    assert {a_fit._pick() for _ in range(200)} == set(a_fit.training)


def test_the_path_of_three_models_goes_from_the_anchor_over_their_mean_to_the_donors():
    three = SimpleNamespace(parents=range(3), device=torch.device("cpu"))
    found = torch.stack([_Fit._along(three, share) for share in (0.0, 0.25, 0.5, 0.75, 1.0)])  # type: ignore[arg-type]
    torch.testing.assert_close(found[:, 0], torch.tensor([1, 2 / 3, 1 / 3, 1 / 6, 0]))
    torch.testing.assert_close(found[:, 1:], (1 - found[:, :1]).expand(5, 2) / 2)


def test_a_fit_looks_after_its_last_step_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rotation_merge.matching.fit.LOOKS", 2)
    batches = [{"input_ids": torch.arange(12).reshape(2, 6)}] * 2
    found = fit(tiny(0), tiny(1), batches, options=FitConfig(steps=5, start="identity"))
    assert [step for step, *_ in found.report.history] == [0, 2, 4, 5]


def test_the_score_of_a_fit_measures_above_the_line_from_the_anchor_to_the_donor(a_fit: _Fit, monkeypatch):
    """Losses 0, 1, 2, 3, 10 along the path: above the straight line nothing is, at a quarter of it the most (-1.5)."""
    seen = iter([0.0, 1.0, 2.0, 3.0, 10.0])
    now = {}

    def loss(weights, batch, taught, coefficients):
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


def test_a_donor_is_rounded_once(tmp_path: Path):
    """bfloat16 models merged in float32: the moved donor keeps the digits that bfloat16 has no room for."""
    anchor, donor = (build("llama", seed).to(torch.bfloat16) for seed in (0, 1))
    paths = [save(model, tmp_path / name) for name, model in (("anchor", anchor), ("donor", donor))]
    recipe = recipe_for("linear", *paths)
    for entry, weight in zip(recipe["models"], (0.0, 1.0), strict=True):
        entry["parameters"]["weight"] = weight
    whole = {name: tensor.float() for name, tensor in donor.state_dict().items()}
    options = {"heads": "permutation", "scaling": True}
    first = {name: tensor.float() for name, tensor in anchor.state_dict().items()}
    moved = align((first, anchor.config), (whole, anchor.config), **options).apply((whole, anchor.config))
    result = merged(recipe, tmp_path / "out")
    name = "model.layers.0.mlp.down_proj.weight"
    torch.testing.assert_close(result[name], moved[name], rtol=1e-5, atol=1e-6)
    assert (result[name] != result[name].bfloat16().float()).any()
    half = merged({**recipe, "dtype": "bfloat16"}, tmp_path / "half")
    assert torch.equal(half[name], result[name].bfloat16())
