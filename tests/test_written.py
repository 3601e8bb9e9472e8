"""Samples that need no data, and batches without padding."""

from __future__ import annotations

import pytest
import torch

from rotation_merge.errors import DataError
from rotation_merge.samples.data import read_batches, unpadded
from rotation_merge.samples.demo import CHECKPOINTS
from rotation_merge.samples.functions import load

LLAMA, VIT = str(CHECKPOINTS / "llama-0"), str(CHECKPOINTS / "vit-0")


def test_a_language_model_writes_its_own_samples():
    model = load(LLAMA)
    first, again, other = (read_batches("self", LLAMA, model, limit=3, length=40, seed=s) for s in (0, 0, 1))
    ids = first.batches[0]["input_ids"]
    assert ids.shape == (3, 40)
    assert first.task == "next token"
    assert torch.equal(ids, again.batches[0]["input_ids"])
    assert not torch.equal(ids, other.batches[0]["input_ids"])
    with torch.no_grad():
        own = model(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).mean()
        noise = torch.randint(256, ids.shape, generator=torch.Generator().manual_seed(0))
        random = model(input_ids=noise).logits[:, :-1].log_softmax(-1).gather(-1, noise[:, 1:, None]).mean()
    assert own > random + 3
    with pytest.raises(DataError, match="does not take images"):
        read_batches("synthetic", LLAMA, model)


def test_synthetic_images_are_in_the_range_of_real_ones():
    model = load(VIT)
    pixels = read_batches("synthetic", VIT, model, limit=40).batches[0]["pixel_values"]
    assert pixels.shape[1:] == (1, 8, 8)
    assert -0.5 <= float(pixels.min()) < -0.4
    assert 0.4 < float(pixels.max()) <= 0.5
    with pytest.raises(DataError, match="does not write text"):
        read_batches("self", VIT, model)


def test_padding_is_cut_off_and_equal_lengths_stand_together():
    left = {"input_ids": torch.tensor([[0, 8, 9]]), "attention_mask": torch.tensor([[0, 1, 1]])}
    right = {
        "input_ids": torch.tensor([[1, 2, 3], [4, 5, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
    }
    long, short = unpadded([right, left], "data")
    assert long["input_ids"].tolist() == [[1, 2, 3]]
    assert short["input_ids"].tolist() == [[4, 5], [8, 9]]
    assert set(long) == {"input_ids"}
    with pytest.raises(DataError, match="holes"):
        unpadded([{"input_ids": torch.ones(1, 3), "attention_mask": torch.tensor([[1, 0, 1]])}], "data")
