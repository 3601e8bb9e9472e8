"""What `align` writes proves itself: right work passes in every storage type, wrong work is kept aside."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_support import output_of, parsed, run
from plugin_support import error_of_merge, from_file, make, merged, one_error, recipe_for, state, write_state
from tiny_models import ALL, save
from tiny_models import make as tiny
from torch import Tensor

from rotation_merge import View
from rotation_merge.model.forms import named_as
from rotation_merge.run import proof, runner
from rotation_merge.run.proof import Proof

FAMILIES = ("llama", "qwen2", "bert", "vit")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    folder = tmp_path_factory.mktemp("models")
    return {f: (make(f, folder / f / "a"), make(f, folder / f / "b", seed=1)) for f in FAMILIES}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", "float32"), ("qwen2", "bfloat16"), ("bert", "float16"), ("vit", "bfloat16")]
)
def test_right_work_passes(family: str, dtype: str, models: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    found = parsed("align", *models[family], tmp_path / "out", "--heads", "permutation", "--dtype", dtype)["proof"]
    assert 0 < found["difference"] <= found["allowed"]
    assert "random batches" in (tmp_path / "out" / "README.md").read_text()
    assert not (tmp_path / "out.rejected").exists()


def spoil(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    """Let `align` move tensors of this name wrongly, but for the second layer's."""
    real = View.blocks

    def spoilt(view: View) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in real(view):
            yield name, tensor.flip(0) if wrong in name and ".1." not in name else tensor

    monkeypatch.setattr(View, "blocks", spoilt)


@pytest.mark.parametrize(
    ("wrong", "dtype"), [("gate_proj", "float32"), ("v_proj", "bfloat16"), ("embed_tokens", "float32")]
)
def test_wrong_work_is_kept_aside(
    wrong: str, dtype: str, models: dict[str, tuple[Path, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tensor of one layer left out of the move (or moved by itself)."""
    spoil(monkeypatch, wrong)
    arguments = ("align", *models["llama"], tmp_path / "out", "--dtype", dtype, "--alignment", tmp_path / "map")
    output = output_of(*arguments, code=2)
    line = one_error(output)
    assert "does not compute what" in line
    assert str(tmp_path / "out.rejected") in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.rejected"]
    assert state(tmp_path / "out.rejected")
    assert run(*arguments, "--no-verify").exit_code == 0
    assert (tmp_path / "out").exists()


@pytest.mark.slow
def test_an_output_that_is_no_answer_counts(tmp_path: Path) -> None:
    """CLIP's towers hand out their streams: one turned with its readers leaves the logits alone, and is found out."""
    case = next(case for case in ALL if case.class_name == "CLIPModel")
    for seed in (0, 1):
        save(tiny(case, seed).float(), tmp_path / str(seed))
    assert run("align", tmp_path / "0", tmp_path / "1", tmp_path / "out").exit_code == 0
    changed = state(tmp_path / "out")
    for name in ("text_model.final_layer_norm.weight", "text_model.final_layer_norm.bias"):
        changed[name] = 2 * changed[name]
    changed["text_projection.weight"] = changed["text_projection.weight"] / 2
    write_state(changed, tmp_path / "out", tmp_path / "changed")
    done = json.loads(run("verify", tmp_path / "1", tmp_path / "changed", "--json").stdout)
    assert not done["same"]
    assert done["output"].startswith("text_model_output.")


def test_models_have_their_classes_compared_by_name(tmp_path: Path) -> None:
    model = tiny(next(case for case in ALL if case.class_name == "ViTForImageClassification")).float()
    names, order = ["cat", "dog"], [1, 0]
    model.config.id2label = dict(enumerate(names))
    save(model, tmp_path / "one")
    for parameter in model.classifier.parameters():
        parameter.data = parameter.data[order]
    model.config.id2label = dict(enumerate(names[i] for i in order))
    save(model, tmp_path / "two")
    assert run("verify", tmp_path / "one", tmp_path / "two", "--batches", 1).exit_code == 0


@pytest.mark.slow
def test_what_cannot_be_run_by_layer_runs_whole_or_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where files have another form than the class, from which it cannot be joined."""
    case = next(case for case in ALL if case.family == "nomic_bert")
    for seed in (0, 1):
        save(tiny(case, seed).float(), tmp_path / str(seed))
    by_layer = parsed("align", tmp_path / "0", tmp_path / "1", tmp_path / "out")["proof"]
    as_stored = lambda source, stored, named: named_as(named, source, stored)  # noqa: E731
    monkeypatch.setattr(runner, "restructured", as_stored)
    whole = parsed("align", tmp_path / "0", tmp_path / "1", tmp_path / "whole")["proof"]
    assert (by_layer["difference"], by_layer["allowed"]) == pytest.approx(
        (whole["difference"], whole["allowed"]), rel=0.9
    )
    monkeypatch.setattr(proof, "LARGEST", 10)
    assert "NomicBertForMaskedLM in another form" in output_of(
        "align", tmp_path / "0", tmp_path / "1", tmp_path / "large"
    )


@pytest.mark.slow
def test_a_merge_proves_donors_moved_by_files(
    models: dict[str, tuple[Path, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    anchor, donor = models["llama"]
    assert run("align", anchor, donor, "--alignment", tmp_path / "map", "--residual", "rotation").exit_code == 0
    recipe = from_file(recipe_for("linear", anchor, donor, prove=True), tmp_path / "map")
    merged(recipe, tmp_path / "out")
    notes = " ".join(json.loads((tmp_path / "out" / "rotation_merge.json").read_text())["notes"])
    assert "random batches" in notes
    assert not [path for path in (tmp_path / "out").iterdir() if path.is_dir()]
    monkeypatch.setattr(proof, "prove", lambda *_: Proof(1.0, 0.1))
    assert f"changes the outputs of {donor}" in error_of_merge(recipe, tmp_path / "second")
