"""Fusion by optimal transport: hard plans undo permutations, soft ones are marked as no symmetry."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from plugin_support import load, make, merged, mergekit_yaml, one_error, recipe_for, state, twin
from residual_support import checkpoint, report
from residual_support import twin as residual_twin
from transformers.models.llama.modeling_llama import LlamaModel

OFF = {"attention": "none", "heads": "none", "ffn": "none", "scaling": False}


def fused(anchor: Path, donor: Path, **parameters: object) -> dict:
    made = recipe_for("linear", anchor, donor, **{**OFF, **parameters})
    made["parameters"]["delegate"] = "ot_fusion"
    return made


@pytest.mark.parametrize("family", ["llama", "bert", "vit"])
def test_hard_plans_find_permuted_neurons(family: str, tmp_path: Path):
    anchor = make(family, tmp_path / "anchor")
    moved = twin(anchor, tmp_path / "twin", **{**OFF, "ffn": "permutation"})
    result = merged(fused(anchor, moved, plan="hard", stream="identity"), tmp_path / "out")
    for name, tensor in state(anchor).items():
        torch.testing.assert_close(result[name], tensor)


def test_experts_with_biases_in_one_tensor(tmp_path: Path):
    """gpt-oss: the biases of all experts stand in a matrix, and are no map."""
    anchor = checkpoint("gpt_oss", "sinks", tmp_path / "anchor")
    shutil.copytree(anchor.path, tmp_path / "same")
    result = merged(fused(anchor.path, tmp_path / "same", plan="hard"), tmp_path / "out")
    for name, tensor in anchor.state.items():
        torch.testing.assert_close(result[name], tensor.float(), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("data", [False, True])
def test_hard_plans_find_a_permuted_stream_from_weights_and_from_activations(data: bool, tmp_path: Path):
    anchor = checkpoint("vit", "classifier", tmp_path / "anchor")
    moved = residual_twin(
        anchor, tmp_path / "twin", "permutation", heads="none", attention="none", ffn="permutation", scaling=False
    )
    extra = {"data": "synthetic"} if data else {}
    result = merged(fused(anchor.path, moved.path, plan="hard", **extra), tmp_path / "out")
    for name, tensor in anchor.state.items():
        torch.testing.assert_close(result[name], tensor, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_activations_are_of_one_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Both models run on what the anchor writes, token by token; the donor would write something else."""
    anchor, donor = (make("llama", tmp_path / str(seed), seed=seed) for seed in (0, 1))
    stock, seen = LlamaModel.forward, {}

    def watched(self: LlamaModel, *args: object, **given: object):
        if not self.embed_tokens.weight.is_meta:
            seen.setdefault(float(self.embed_tokens.weight[0, 0]), []).append(given["input_ids"])
        return stock(self, *args, **given)

    monkeypatch.setattr(LlamaModel, "forward", watched)
    merged(fused(anchor, donor, data="self"), tmp_path / "out")
    writes, reads = (seen[float(state(path)["model.embed_tokens.weight"][0, 0])] for path in (anchor, donor))
    assert any(ids.shape[1] == 1 for ids in writes)
    assert all(any(torch.equal(ids, own) for own in writes) for ids in reads)


@pytest.mark.slow
def test_rotary_queries_are_never_mixed_and_soft_plans_are_said(tmp_path: Path):
    """Queries and keys of a donor come through untouched but for the stream, which stays as it is here."""
    anchor, donor = (make("llama", tmp_path / str(seed), seed=seed) for seed in (0, 1))
    out = tmp_path / "out"
    result = merged(fused(anchor, donor, stream="identity"), out)
    first, second = state(anchor), state(donor)
    for part in ("q", "k"):
        name = f"model.layers.0.self_attn.{part}_proj.weight"
        torch.testing.assert_close(result[name], (first[name] + second[name]) / 2)
    name = "model.layers.0.mlp.up_proj.weight"
    assert float((result[name] - (first[name] + second[name]) / 2).abs().max()) > 0.01
    assert any("not symmetries" in note for note in report(out)["notes"])
    load(str(out))


@pytest.mark.slow
def test_alignment_goes_before_fusion(tmp_path: Path):
    """A twin that alignment brings home needs no plan: the identity is the best one."""
    anchor = make("llama", tmp_path / "anchor")
    moved = twin(anchor, tmp_path / "twin")
    on = {"attention": "rotation", "heads": "permutation", "ffn": "permutation", "scaling": True}
    result = merged(fused(anchor, moved, plan="hard", **on), tmp_path / "out")
    for name, tensor in state(anchor).items():
        torch.testing.assert_close(result[name], tensor, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_experts_have_plans_of_their_own(tmp_path: Path):
    anchor = checkpoint("mixtral", "untied", tmp_path / "anchor")
    moved = residual_twin(anchor, tmp_path / "twin", "none", **{**OFF, "ffn": "permutation"})
    made = fused(anchor.path, moved.path, plan="hard", stream="identity", ffn="permutation")
    result = merged(made, tmp_path / "out")
    for name, tensor in anchor.state.items():
        torch.testing.assert_close(result[name], tensor, rtol=1e-4, atol=1e-4)


def test_bad_words_and_data_are_refused(tmp_path: Path):
    anchor, donor = (make("llama", tmp_path / str(seed), seed=seed) for seed in (0, 1))
    done = mergekit_yaml(fused(anchor, donor, plan="firm"), tmp_path / "out")
    assert done.exit_code == 2
    assert "one of: soft, hard" in one_error(done.output)
    done = mergekit_yaml(fused(anchor, donor, data=str(tmp_path / "none.npz")), tmp_path / "out")
    assert done.exit_code == 2
    assert "no such file" in one_error(done.output)
    sources = [{"model": str(model), "layer_range": place} for model, place in ((anchor, [0, 1]), (donor, [1, 2]))]
    made = {"slices": [{"sources": sources}], **fused(anchor, donor, data="self", weight=0.5)}
    del made["models"]
    assert "slices pair layers differently" in one_error(mergekit_yaml(made, tmp_path / "out").output)
    made = fused(anchor, donor)
    made["models"][1]["parameters"]["finetuned_from"] = str(anchor)
    assert "a task vector is already in the anchor's" in one_error(mergekit_yaml(made, tmp_path / "out").output)
    made = fused(anchor, donor)
    made["models"][0]["parameters"]["data"] = "self"
    done = mergekit_yaml(made, tmp_path / "out")
    assert "their own 'data'" in one_error(done.output)
    assert not (tmp_path / "out").exists()
