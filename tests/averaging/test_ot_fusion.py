"""Fusion by optimal transport: hard plans undo permutations, soft ones are marked as no symmetry."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from plugin_support import load, make, merged, recipe_for, state, twin
from residual_support import checkpoint, report
from residual_support import twin as residual_twin
from transformers.models.llama.modeling_llama import LlamaModel

OFF = {"attention": "none", "heads": "none", "ffn": "none", "scaling": False}


def fused(anchor: Path, donor: Path, **parameters: object) -> dict[str, Any]:
    return recipe_for("ot_fusion", anchor, donor, **{**OFF, **parameters})


def assert_anchor(result: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in expected.items():
        torch.testing.assert_close(result[name], tensor.float(), rtol=1e-3, atol=1e-4)


STILL = {"stream": "identity"}
PERMUTED: list[Any] = [
    *(("llama/llama", "none", STILL), ("bert/classifier", "none", STILL)),
    *(("vit/classifier", "permutation", {}), ("vit/classifier", "permutation", {"data": "synthetic"})),
    ("vit/classifier", "none", {**STILL, "ffn": "permutation", "data": "synthetic"}),
]
"""Neurons; a stream, from weights and from activations. What alignment has brought back needs no plan: activations are
those of moved donors."""


@pytest.mark.parametrize(("model", "residual", "options"), PERMUTED)
def test_hard_plans_find_what_was_permuted(model: str, residual: str, options: dict[str, Any], tmp_path: Path) -> None:
    anchor = checkpoint(*model.split("/"), tmp_path / "anchor")
    moved = residual_twin(anchor, tmp_path / "twin", residual, **{**OFF, "ffn": "permutation"})
    assert_anchor(merged(fused(anchor.path, moved.path, plan="hard", **options), tmp_path / "out"), anchor.state)


def test_each_expert_has_a_plan_of_its_own(tmp_path: Path) -> None:
    anchor = checkpoint("mixtral", "untied", tmp_path / "anchor")
    moved, draw = dict(anchor.state), torch.Generator().manual_seed(0)
    for name in (name for name in anchor.state if name.endswith("w1.weight")):
        order = torch.randperm(len(moved[name]), generator=draw)
        for part, dim in (("w1", 0), ("w3", 0), ("w2", 1)):
            key = name.replace("w1", part)
            moved[key] = moved[key].index_select(dim, order)
    donor = anchor.write(moved, tmp_path / "donor")
    document = fused(anchor.path, donor.path, plan="hard", **STILL)
    assert_anchor(merged(document, tmp_path / "out"), anchor.state)


def test_biases_of_all_experts_in_a_matrix_are_no_map(tmp_path: Path) -> None:
    anchor = checkpoint("gpt_oss", "sinks", tmp_path / "sinks")
    shutil.copytree(anchor.path, tmp_path / "same")
    assert_anchor(merged(fused(anchor.path, tmp_path / "same", plan="hard"), tmp_path / "one"), anchor.state)


@pytest.mark.slow
def test_activations_are_of_one_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both models run on what the anchor writes, token by token; the donor would write something else."""
    anchor, donor = (make("llama", tmp_path / str(seed), seed=seed) for seed in (0, 1))
    stock, reads = LlamaModel.forward, dict[float, list[torch.Tensor]]()

    def watched(self: LlamaModel, *arguments: object, **options: Any) -> Any:
        if not self.embed_tokens.weight.is_meta:
            reads.setdefault(float(self.embed_tokens.weight[0, 0]), []).append(options["input_ids"])
        return stock(self, *arguments, **options)

    monkeypatch.setattr(LlamaModel, "forward", watched)
    merged(fused(anchor, donor, data="self"), tmp_path / "out")
    first, second = (reads[float(state(path)["model.embed_tokens.weight"][0, 0])] for path in (anchor, donor))
    assert any(ids.shape[1] == 1 for ids in first)
    assert all(any(torch.equal(ids, written) for written in first) for ids in second)


@pytest.mark.slow
def test_rotary_queries_are_never_mixed_and_soft_plans_are_said(tmp_path: Path) -> None:
    """Queries and keys of a donor come through untouched but for the stream, which stays as it is here. A twin that
    alignment brings home needs no plan."""
    anchor, donor = (make("llama", tmp_path / str(seed), seed=seed) for seed in (0, 1))
    out, first, second = tmp_path / "out", state(anchor), state(donor)
    result = merged(fused(anchor, donor, stream="identity"), out)
    for part in ("q", "k"):
        name = f"model.layers.0.self_attn.{part}_proj.weight"
        torch.testing.assert_close(result[name], (first[name] + second[name]) / 2)
    name = "model.layers.0.mlp.up_proj.weight"
    assert float((result[name] - (first[name] + second[name]) / 2).abs().max()) > 0.01
    assert any("not symmetries" in note for note in report(out)["notes"])
    load(str(out))
    on = {"attention": "rotation", "heads": "permutation", "ffn": "permutation", "scaling": True}
    moved = twin(anchor, tmp_path / "twin")
    assert_anchor(merged(fused(anchor, moved, plan="hard", **on), tmp_path / "home"), first)
