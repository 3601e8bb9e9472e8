"""Proofs of models too large to be held whole: the limit is lowered, so that small ones count as such."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import parsed, run
from plugin_support import from_file, merged, mergekit_yaml, one_error, recipe_for
from test_proof import models as models
from test_proof import spoil
from tiny_models import ALL, save
from tiny_models import make as tiny

from rotation_merge.model.forms import named_as
from rotation_merge.run import proof, runner
from rotation_merge.run.inputs import random_batch
from rotation_merge.run.proof import Proof, prove


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "bert", "vit"])
def test_large_models_are_proven_layer_by_layer(
    family: str, models: dict[str, tuple[Path, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No model is held whole: the same difference and limit as otherwise, and wrong work is kept aside."""
    donor = models[family][1]
    monkeypatch.setattr(proof, "LARGEST", 10)
    monkeypatch.setattr(proof, "load", never)
    found = parsed("align", *models[family], tmp_path / "out")["proof"]
    monkeypatch.undo()
    whole = prove(str(donor), str(tmp_path / "out"))
    assert (found["difference"], found["allowed"]) == pytest.approx((whole.difference, whole.allowed), rel=0.9)
    assert found["difference"] < found["allowed"]
    monkeypatch.setattr(proof, "LARGEST", 10)
    monkeypatch.setattr(proof, "load", never)
    assert run("verify", donor, tmp_path / "out", "--batches", 1).exit_code == 0
    assert run("verify", *models[family], "--batches", 1).exit_code == 1
    assert "too large to be held in memory" in one_error(run("verify", donor, donor, "--data", "self").output)
    spoil(monkeypatch, "v_proj" if family == "qwen2" else "output.dense.weight")
    done = run("align", *models[family], tmp_path / "second")
    assert done.exit_code == 2, done.output
    assert str(tmp_path / "second.rejected") in one_error(done.output)
    assert not (tmp_path / "second").exists()


def test_large_models_have_their_classes_compared_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "LARGEST", 10)
    model = tiny(next(case for case in ALL if case.class_name == "ViTForImageClassification")).float()
    names, order = ["cat", "dog"], [1, 0]
    model.config.id2label = dict(enumerate(names))
    save(model, tmp_path / "one")
    for parameter in model.classifier.parameters():
        parameter.data = parameter.data[order]
    model.config.id2label = dict(enumerate(names[i] for i in order))
    save(model, tmp_path / "two")
    assert run("verify", tmp_path / "one", tmp_path / "two", "--batches", 1).exit_code == 0


def never(*_: Any) -> Any:
    raise AssertionError("a large model is held whole")


@pytest.mark.slow
def test_what_cannot_be_run_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in ALL if case.family == "nomic_bert")
    for seed in (0, 1):
        save(tiny(case, seed).float(), tmp_path / str(seed))
    assert parsed("align", tmp_path / "0", tmp_path / "1", tmp_path / "out")["proof"]["difference"] is not None
    monkeypatch.setattr(proof, "LARGEST", 10)
    assert "not checked: " not in run("align", tmp_path / "0", tmp_path / "1", tmp_path / "large").output
    as_stored = lambda source, stored, named: named_as(named, source, stored)  # noqa: E731
    monkeypatch.setattr(runner, "restructured", as_stored)  # a form that is not the file's in pieces
    done = run("align", tmp_path / "0", tmp_path / "1", tmp_path / "strange")
    assert done.exit_code == 0
    assert "not checked: " in done.output
    assert "NomicBertForMaskedLM in another form" in done.output


@pytest.mark.slow
@pytest.mark.parametrize("residual", ["none", "rotation"])
def test_a_merge_proves_donors_moved_by_files(
    residual: str, models: dict[str, tuple[Path, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    anchor, donor = models["llama"]
    assert run("align", anchor, donor, "--alignment", tmp_path / "map", "--residual", residual).exit_code == 0
    recipe = from_file(recipe_for("linear", anchor, donor, prove=True), tmp_path / "map")
    if residual == "rotation":  # one layer at a time
        monkeypatch.setattr(proof, "LARGEST", 10)
        monkeypatch.setattr(proof, "load", never)
    merged(recipe, tmp_path / "out")
    notes = " ".join(json.loads((tmp_path / "out" / "rotation_merge.json").read_text())["notes"])
    assert "random batches" in notes
    assert not [path for path in (tmp_path / "out").iterdir() if path.is_dir()]
    monkeypatch.setattr(proof, "prove", lambda *_: Proof(1.0, 0.1))
    done = mergekit_yaml(recipe, tmp_path / "second")
    assert done.exit_code == 2
    assert f"changes the outputs of {donor}" in one_error(done.output)
    assert not (tmp_path / "second").exists()


@pytest.mark.parametrize("family", ["llama", "bert", "vit"])
def test_a_model_run_layer_by_layer_answers_to_every_batch(
    family: str, models: dict[str, tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, layered = (proof.ModelOutputs(str(models[family][0]), torch.float64) for _ in range(2))
    draw = torch.Generator().manual_seed(0)
    inputs = [random_batch(whole.model, draw) for _ in range(3)]
    wanted = whole.on(inputs)
    monkeypatch.setattr(proof, "LARGEST", 10)
    for expected, computed in zip(wanted, layered.on(inputs), strict=True):
        assert expected.keys() == computed.keys()
        for name in expected:
            torch.testing.assert_close(computed[name], expected[name])
