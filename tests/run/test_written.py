"""Samples that need no data, and batches without padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cli_support import CHECKPOINTS
from tiny_models import ALL, keep_float64, make
from transformers.models.mamba.modeling_mamba import MambaCausalLMOutput

from rotation_merge import RotationMergeError
from rotation_merge.run.data import batched_by_length, read_samples, unpadded
from rotation_merge.run.functions import fused_attention, load
from rotation_merge.run.generated_samples import self_written

LLAMA, VIT = str(CHECKPOINTS / "llama-0"), str(CHECKPOINTS / "vit-0")


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {path: load(path) for path in (LLAMA, VIT)}


@pytest.mark.slow
def test_a_language_model_writes_its_own_samples(models: dict[str, Any]):
    model = models[LLAMA]
    first, again, other = (read_samples(LLAMA, "self", 3, length=40, seed=s, module=model) for s in (0, 0, 1))
    ids = first.batches[0]["input_ids"]
    assert (ids.shape, first.task) == ((3, 40), "next token")
    assert torch.equal(ids, again.batches[0]["input_ids"])
    assert not torch.equal(ids, other.batches[0]["input_ids"])
    noise = torch.randint(256, ids.shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        own, random = (float(model(input_ids=x, labels=x).loss) for x in (ids, noise))
    assert own < random - 3


def test_models_that_hand_out_no_keys_and_values_write_the_same(
    models: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """As Mamba, which keeps what it has read in another way: the whole text goes through it for every token."""
    model = models[LLAMA]
    wanted, forward = self_written(model, LLAMA, 2, 12), model.forward
    monkeypatch.setattr(model, "forward", lambda **inputs: MambaCausalLMOutput(logits=forward(**inputs).logits))
    assert torch.equal(self_written(model, LLAMA, 2, 12), wanted)


def test_synthetic_images_are_in_the_range_of_real_ones(models: dict[str, Any]):
    pixels = read_samples(VIT, "synthetic", 40, 40, module=models[VIT]).batches[0]["pixel_values"]
    assert pixels.shape == (40, 1, 8, 8)
    assert -0.5 <= float(pixels.min()) < -0.4
    assert 0.4 < float(pixels.max()) <= 0.5


@pytest.mark.parametrize(
    ("source", "path", "message"),
    [("self", VIT, "does not write text"), ("synthetic", LLAMA, "does not take images")],
)
def test_samples_of_another_kind_are_refused(source: str, path: str, message: str, models: dict[str, Any]):
    with pytest.raises(RotationMergeError, match=message):
        read_samples(path, source, module=models[path])


def test_padding_is_cut_off_and_equal_lengths_stand_together():
    left = {"input_ids": torch.tensor([[0, 8, 9]]), "attention_mask": torch.tensor([[0, 1, 1]])}
    right = {"input_ids": torch.tensor([[1, 2, 3], [4, 5, 0]]), "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]])}
    unmasked = {"input_ids": torch.tensor([[6, 7]])}
    long, short, one = unpadded([right, left, unmasked], "data")
    assert [long["input_ids"].tolist(), short["input_ids"].tolist()] == [[[1, 2, 3]], [[4, 5], [8, 9]]]
    assert one["input_ids"].tolist() == [[6, 7]]
    assert set(long) == {"input_ids"}
    with pytest.raises(RotationMergeError, match="holes"):
        unpadded([{"input_ids": torch.ones(1, 3), "attention_mask": torch.tensor([[1, 0, 1]])}], "data")


def test_texts_of_like_length_stand_together():
    texts = [torch.arange(1, n + 1) for n in (5, 10, 9, 4, 8)]
    pictures = {"input_ids": torch.ones(1, 3).long(), "pixel_values": torch.zeros(1, 1, 2, 2)}
    made = batched_by_length([*({"input_ids": text[None], "labels": torch.ones(1)} for text in texts), pictures], 30)
    assert [batch["input_ids"].shape for batch in made[:-1]] == [(3, 10), (2, 5)]
    assert [batch["attention_mask"].sum(1).tolist() for batch in made[:-1]] == [[10, 9, 8], [5, 4]]
    assert made[-1] is pictures
    assert torch.equal(made[0]["input_ids"][2, :8], texts[4])
    (alike,) = batched_by_length([{"input_ids": torch.ones(2, 4).long()}], 8)
    assert set(alike) == {"input_ids"}


@pytest.mark.parametrize(
    "family", ["bert", "deberta_v2", "mpnet", "gpt2", "llama", "falcon_h1", "qwen3_next", "mixtral"]
)
def test_padding_at_the_end_changes_no_family(family: str):
    """Recurrent ones, too: all families were tried once."""
    model = make(next(case for case in ALL if case.family == family), 0)
    long, short = (torch.randint(3, 20, (1, n), generator=torch.Generator().manual_seed(n)) for n in (10, 8))
    (both,) = batched_by_length([{"input_ids": long}, {"input_ids": short}], 100)
    with keep_float64(), torch.no_grad():
        padded, alone = (model(**batch)[0] for batch in (both, {"input_ids": short}))
    assert float((padded[1:, :8] - alone).abs().max()) <= 1e-9


def test_fused_attention_only_where_it_computes_the_same(models: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    model, batch = models[LLAMA], {"input_ids": torch.arange(20)[None]}
    with fused_attention(model, batch):
        assert model.config._attn_implementation == "sdpa"
    assert model.config._attn_implementation == "eager"
    usual = torch.nn.functional.scaled_dot_product_attention
    capped = lambda *inputs, **options: 0.9 * usual(*inputs, **options)  # noqa: E731
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", capped)
    with fused_attention(model, batch):
        assert model.config._attn_implementation == "eager"
