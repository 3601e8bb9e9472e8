"""Refit through mergekit: twins, weights, heads and experts; what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from plugin_support import merged, mergekit_yaml, one_error, state
from residual_support import Checkpoint, checkpoint, recipe, report, twin
from torch import Tensor


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return checkpoint("llama", "llama", tmp_path_factory.mktemp("refit") / "anchor")


def refit_recipe(*models: Checkpoint, residual: str = "none", **parameters: Any) -> dict[str, Any]:
    return recipe(*models, residual=residual, **{"delegate": "refit", "samples": 4, **parameters})


@pytest.mark.slow
@pytest.mark.parametrize("residual", ["none", "rotation"])
def test_twin_through_mergekit(llama: Checkpoint, residual: str, tmp_path: Path) -> None:
    """A twin in other coordinates, on text that both write: the merge is the anchor."""
    other = twin(llama, tmp_path / "twin", residual)
    found = merged(refit_recipe(llama, other, residual=residual), tmp_path / "out")
    expected = llama.folded() if residual == "rotation" else llama.state
    assert max(float((found[name] - expected[name]).abs().max()) for name in expected) <= 2e-5
    assert found.keys() == expected.keys()
    notes = "\n".join(report(tmp_path / "out")["notes"])
    assert "Refit solved 15 linear maps" in notes
    assert "own model" in notes


@pytest.mark.slow
def test_more_models_weights_and_bf16(llama: Checkpoint, tmp_path: Path) -> None:
    others = [twin(llama, tmp_path / str(seed), "none", seed=seed, noise=0.05) for seed in (1, 2)]
    made = refit_recipe(llama, *others, targets="mean", ridge=0.1)
    for share, entry in zip((0.0, 0.75, 0.25), made["models"], strict=True):
        entry["parameters"]["weight"] = share
    found = merged({**made, "dtype": "bfloat16"}, tmp_path / "out")
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    notes = "\n".join(report(tmp_path / "out")["notes"])
    assert "mean of all models' answers" in notes
    assert f"`{llama.path}` self" not in notes
    again = merged({**made, "dtype": "bfloat16"}, tmp_path / "again")
    assert all(torch.equal(found[name], again[name]) for name in found)


@pytest.mark.slow
def test_weights_are_shares_of_samples_or_of_answers(llama: Checkpoint, tmp_path: Path) -> None:
    """A model of twice the weight is one whose own samples count twice; answers of all are on a line."""
    other = checkpoint("llama", "llama", tmp_path / "other", seed=4)
    texts = [torch.randint(3, 40, (4, 8), generator=torch.Generator().manual_seed(i)).tolist() for i in range(2)]
    files = [tmp_path / f"{name}.jsonl" for name in ("first", "second", "twice")]
    for file, rows in zip(files, (*texts, texts[1] * 2), strict=True):
        file.write_text("\n".join(json.dumps({"input_ids": row}) for row in rows))

    def found(share: float, data: Path, targets: str) -> dict[str, Tensor]:
        made = refit_recipe(llama, other, targets=targets, start="anchor", samples=8)
        for weight, source, entry in zip((1 - share, share), (files[0], data), made["models"], strict=True):
            entry["parameters"] |= {"weight": weight, "data": str(source)}
        return merged(made, tmp_path / f"{targets}-{share}-{data.stem}")

    once, twice = found(2 / 3, files[1], "own"), found(0.5, files[2], "own")
    assert all(torch.allclose(once[name], twice[name], rtol=1e-3, atol=1e-4) for name in once)
    a, b, c = (found(s, files[1], "mean")["model.layers.0.self_attn.q_proj.weight"] for s in (0.25, 0.5, 0.75))
    assert float((c - a).norm()) > 0.1
    assert torch.allclose(c - b, b - a, atol=1e-4)


@pytest.mark.slow
def test_excluded_tensors_and_the_start(llama: Checkpoint, tmp_path: Path) -> None:
    other = checkpoint("llama", "llama", tmp_path / "other", seed=4)
    found = merged(refit_recipe(llama, other, exclude="lm_head, layers.1.", start="anchor"), tmp_path / "out")
    own = llama.state
    still = [name for name in own if "proj" not in name or "layers.1." in name]
    assert all(torch.equal(found[name], own[name]) for name in still)
    assert not torch.equal(found["model.layers.0.mlp.up_proj.weight"], own["model.layers.0.mlp.up_proj.weight"])


@pytest.mark.slow
def test_a_tied_head_keeps_the_average(tmp_path: Path) -> None:
    a, b = (checkpoint("llama", "qwen2", tmp_path / str(seed), seed=seed) for seed in (0, 4))
    found = merged(refit_recipe(a, b), tmp_path / "out")
    assert "lm_head.weight" not in found
    assert "tied" in "\n".join(report(tmp_path / "out")["notes"])
    untied = merged(refit_recipe(a, b, untie=True), tmp_path / "untied")
    assert not torch.equal(untied["lm_head.weight"], untied["model.embed_tokens.weight"])
    assert torch.equal(untied["model.embed_tokens.weight"], found["model.embed_tokens.weight"])


@pytest.mark.slow
def test_experts_are_named(tmp_path: Path) -> None:
    a, b = (checkpoint("mixtral", "untied", tmp_path / str(seed), seed=seed) for seed in (0, 4))
    merged(refit_recipe(a, b), tmp_path / "out")
    notes = "\n".join(report(tmp_path / "out")["notes"])
    assert "experts and routers" in notes
    assert "block_sparse_moe.gate.weight" in notes


@pytest.mark.slow
def test_pictures(tmp_path: Path) -> None:
    """ViTs answer to synthetic images, which are one pool."""
    a, b = (checkpoint("vit", "classifier", tmp_path / str(seed), seed=seed) for seed in (0, 4))
    found = merged(refit_recipe(a, b), tmp_path / "out")
    assert state(a.path).keys() == found.keys()
    notes = "\n".join(report(tmp_path / "out")["notes"])
    assert "synthetic" in notes
    assert "mean of all models' answers" in notes


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "data": ({"data": "nowhere.txt"}, "no such file"),
    "kind": ({"data": "synthetic"}, "does not take images"),
    "targets": ({"targets": "all"}, "'targets' is 'all'"),
    "pool": ({"data": "demo:python", "targets": "own"}, "'targets: own' needs different samples for each model"),
    "ridge": ({"ridge": -1.0}, "'ridge' is -1"),
    "samples": ({"samples": 0}, "'samples' is 0"),
    "weights": ({"weight": 0.0}, "weights are shares"),
    "few": ({"ridge": 0.0, "samples": 1, "data": "few.jsonl"}, "do not determine"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(name: str, llama: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("few.jsonl").write_text('{"input_ids": [3, 4, 5, 6]}\n')
    parameters, expected = BAD[name]
    made = refit_recipe(llama, checkpoint("llama", "llama", tmp_path / "b", seed=2), **parameters)
    if name == "weights":
        for entry in made["models"]:
            entry["parameters"]["weight"] = 0.0
    done = mergekit_yaml(made, tmp_path / "out")
    assert done.exit_code == 2
    assert expected in one_error(done.output)
    assert not (tmp_path / "out").exists()


def test_slices_and_task_vectors_are_refused(llama: Checkpoint, tmp_path: Path) -> None:
    made = refit_recipe(llama)
    made.pop("models")
    source = {"model": str(llama.path), "layer_range": [0, 1], "parameters": {"weight": 1.0}}
    made["slices"] = [{"sources": [source]}, {"sources": [source]}]
    assert "refit runs whole models" in one_error(mergekit_yaml(made, tmp_path / "slices").output)
    tuned = refit_recipe(llama, checkpoint("llama", "llama", tmp_path / "b", seed=2))
    tuned["models"][1]["parameters"]["finetuned_from"] = str(llama.path)
    assert "needs whole models" in one_error(mergekit_yaml(tuned, tmp_path / "tuned").output)
