"""What `align` writes proves itself: right work passes in every storage type, wrong work is kept aside."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_support import error_of, output_of, parsed
from plugin_support import error_of_merge, from_file, make, merged, recipe_for, state, write_state
from tiny_models import ALL, save
from tiny_models import make as tiny
from torch import Tensor

from rotation_merge import View
from rotation_merge.model.forms import named_as
from rotation_merge.run import proof, runner
from rotation_merge.run.proof import Proof


def two(family: str, folder: Path) -> tuple[Path, Path]:
    """Two tiny models of the first case of a family."""
    case = next(case for case in ALL if case.family == family)
    for seed in (0, 1):
        save(tiny(case, seed).float(), folder / str(seed))
    return folder / "0", folder / "1"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", "float32"), ("qwen2", "bfloat16"), ("bert", "float16"), ("vit", "bfloat16")]
)
def test_right_work_passes(family: str, dtype: str, tmp_path: Path) -> None:
    models = [make(family, tmp_path / str(seed), seed) for seed in (0, 1)]
    found = parsed("align", *models, tmp_path / "out", "--heads", "permutation", "--dtype", dtype)["proof"]
    assert 0 < found["difference"] <= found["allowed"]
    assert "random batches" in (tmp_path / "out" / "README.md").read_text()
    assert not (tmp_path / "out.rejected").exists()


@pytest.mark.parametrize(
    ("wrong", "dtype"), [("gate_proj", "float32"), ("v_proj", "bfloat16"), ("embed_tokens", "float32")]
)
def test_wrong_work_is_kept_aside(
    wrong: str, dtype: str, pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tensor of one layer left out of the move (or moved by itself)."""
    real = View.blocks

    def spoilt(view: View) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in real(view):
            yield name, tensor.flip(0) if wrong in name and ".1." not in name else tensor

    monkeypatch.setattr(View, "blocks", spoilt)
    arguments = ("align", *pair, tmp_path / "out", "--dtype", dtype, "--alignment", tmp_path / "map")
    line = error_of(*arguments)
    assert "does not compute what" in line
    assert str(tmp_path / "out.rejected") in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.rejected"]
    assert state(tmp_path / "out.rejected")
    output_of(*arguments, "--no-verify")
    assert (tmp_path / "out").exists()


@pytest.mark.slow
def test_an_output_that_is_no_answer_counts(tmp_path: Path) -> None:
    """CLIP's towers hand out their streams: one turned with its readers leaves the logits alone, and is found out."""
    anchor, donor = two("clip", tmp_path)
    output_of("align", anchor, donor, tmp_path / "out")
    changed = state(tmp_path / "out")
    for name in ("text_model.final_layer_norm.weight", "text_model.final_layer_norm.bias"):
        changed[name] = 2 * changed[name]
    changed["text_projection.weight"] = changed["text_projection.weight"] / 2
    write_state(changed, tmp_path / "out", tmp_path / "changed")
    done = json.loads(output_of("verify", donor, tmp_path / "changed", "--json", code=1))
    assert not done["same"]
    assert done["output"].startswith("text_model_output.")


def test_models_have_their_classes_compared_by_name(tmp_path: Path) -> None:
    model = tiny(next(case for case in ALL if case.class_name == "ViTForImageClassification")).float()
    model.config.id2label = {0: "cat", 1: "dog"}
    save(model, tmp_path / "one")
    for parameter in model.classifier.parameters():
        parameter.data = parameter.data.flip(0)
    model.config.id2label = {0: "dog", 1: "cat"}
    save(model, tmp_path / "two")
    output_of("verify", tmp_path / "one", tmp_path / "two", "--batches", 1)


@pytest.mark.slow
def test_what_cannot_be_run_by_layer_runs_whole_or_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where files have another form than the class, from which it cannot be joined."""
    models = two("nomic_bert", tmp_path)
    by_layer = parsed("align", *models, tmp_path / "out")["proof"]
    as_stored = lambda source, stored, named: named_as(named, source, stored)  # noqa: E731
    monkeypatch.setattr(runner, "restructured", as_stored)
    whole = parsed("align", *models, tmp_path / "whole")["proof"]
    for name in ("difference", "allowed"):
        assert by_layer[name] == pytest.approx(whole[name], rel=0.9)
    monkeypatch.setattr(proof, "LARGEST", 10)
    assert "NomicBertForMaskedLM in another form" in output_of("align", *models, tmp_path / "large")


@pytest.mark.slow
def test_a_merge_proves_donors_moved_by_files(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output_of("align", *pair, "--alignment", tmp_path / "map", "--residual", "rotation")
    recipe = from_file(recipe_for("linear", *pair, prove=True), tmp_path / "map")
    merged(recipe, tmp_path / "out")
    notes = " ".join(json.loads((tmp_path / "out" / "rotation_merge.json").read_text())["notes"])
    assert "random batches" in notes
    assert not [path for path in (tmp_path / "out").iterdir() if path.is_dir()]
    monkeypatch.setattr(proof, "prove", lambda *_: Proof(1.0, 0.1))
    assert f"changes the outputs of {pair[1]}" in error_of_merge(recipe, tmp_path / "second")
