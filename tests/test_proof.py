"""What `align` writes proves itself: right work passes in every storage type, wrong work is kept aside."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_support import parsed, run
from plugin_support import make, merged, mergekit_yaml, one_error, recipe_for, state
from torch import Tensor

from rotation_merge.checkpoints import aligned
from rotation_merge.samples.proof import Proof
from rotation_merge.seam import merge

FAMILIES = ("llama", "qwen2", "mistral", "bert", "roberta", "vit")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    folder = tmp_path_factory.mktemp("models")
    return {f: (make(f, folder / f / "a"), make(f, folder / f / "b", seed=1)) for f in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_right_work_passes(family: str, dtype: str, models: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    found = parsed("align", *models[family], tmp_path / "out", "--heads", "permutation", "--dtype", dtype)["proof"]
    assert 0 < found["difference"] <= found["allowed"]
    assert "random batches" in (tmp_path / "out" / "README.md").read_text()
    assert not (tmp_path / "out.rejected").exists()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("wrong", ["gate_proj", "v_proj", "embed_tokens"])
def test_wrong_work_is_kept_aside(
    wrong: str, dtype: str, models: dict[str, tuple[Path, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tensor of one layer left out of the move (or moved by itself)."""
    real = aligned.aligned_tensors

    def spoilt(*arguments: Any) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in real(*arguments):
            yield name, tensor.flip(0) if wrong in name and ".1." not in name else tensor

    monkeypatch.setattr(aligned, "aligned_tensors", spoilt)
    arguments = ("align", *models["llama"], tmp_path / "out", "--dtype", dtype, "--alignment", tmp_path / "map")
    done = run(*arguments)
    assert done.exit_code == 2
    line = one_error(done.output)
    assert "does not compute what" in line
    assert str(tmp_path / "out.rejected") in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.rejected"]
    assert state(tmp_path / "out.rejected")
    assert run(*arguments, "--no-verify").exit_code == 0
    assert (tmp_path / "out").exists()


def test_what_cannot_be_run_is_said(
    models: dict[str, tuple[Path, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rotation_merge.samples import proof

    monkeypatch.setattr(proof, "LARGEST", 10)
    done = run("align", *models["llama"], tmp_path / "out")
    assert done.exit_code == 0
    assert "not checked" in done.output


@pytest.mark.parametrize("residual", ["none", "rotation"])
def test_a_merge_proves_donors_moved_by_files(
    residual: str, models: dict[str, tuple[Path, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    anchor, donor = models["llama"]
    assert run("align", anchor, donor, "--alignment", tmp_path / "map", "--residual", residual).exit_code == 0
    recipe = recipe_for("linear", anchor, donor, prove=True)
    recipe["models"][-1]["parameters"]["alignment"] = str(tmp_path / "map")
    merged(recipe, tmp_path / "out")
    notes = " ".join(json.loads((tmp_path / "out" / "rotation_merge.json").read_text())["notes"])
    assert "random batches" in notes
    monkeypatch.setattr(merge, "prove", lambda *_: Proof(1.0, 0.1))
    done = mergekit_yaml(recipe, tmp_path / "second")
    assert done.exit_code == 2
    assert f"changes what {donor} computes" in one_error(done.output)
    assert not (tmp_path / "second").exists()
