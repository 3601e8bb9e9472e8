"""Figures that decide: losses, barriers, what is held out, padding, rounding; against numbers worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import rotation_merge as rm


def successor(certainty: float, words: int = 4) -> LlamaForCausalLM:
    """Says of every token that the one with the next number follows, with the given certainty (log-odds)."""
    sizes = {"hidden_size": words, "intermediate_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=words, rms_norm_eps=0.0, tie_word_embeddings=False, **sizes)).eval()
    with torch.no_grad():
        layer = model.model.layers[0]
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(words))
        follows = torch.eye(words).roll(1, 0)
        model.lm_head.weight.copy_(certainty * follows / math.sqrt(words))  # the norm makes each token so long
    return model


def tokens(*ids: int, labels: list[int] | None = None) -> list[dict[str, torch.Tensor]]:
    row = torch.tensor([ids])
    return [{"input_ids": row, "labels": row if labels is None else torch.tensor([labels])}]


def test_next_token_loss_is_that_of_the_token_that_follows():
    scores = rm.evaluate(successor(2.0), tokens(0, 1, 2, 3))
    assert scores["accuracy"] == 1.0
    assert scores["loss"] == pytest.approx(math.log(math.exp(2.0) + 3) - 2.0)


def test_padding_is_no_token_to_predict():
    whole = rm.evaluate(successor(2.0), tokens(0, 1, 2, 3))
    padded = rm.evaluate(successor(2.0), tokens(0, 1, 2, 3, 0, 0, labels=[0, 1, 2, 3, -100, -100]))
    assert padded == pytest.approx(whole)


def on_path(points: int) -> Any:
    return rm.barrier(successor(0.0), successor(3.0), tokens(0, 1, 2), rm.BarrierConfig(points=points))


def test_a_path_goes_from_the_first_model_to_the_second():
    curve = on_path(4)
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
    assert replace(on_path(3), loss=losses).barrier() == pytest.approx(barrier)


def test_the_barrier_of_unequal_ends_off_the_middle():
    assert replace(on_path(3), t=[0.0, 0.25, 1.0], loss=[0.0, 2.0, 4.0]).barrier() == pytest.approx(1.0)


def tiny(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=12, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    ).eval()
