"""What `align` writes proves itself: right work passes in every storage type, wrong work is kept aside."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_support import parsed, run
from plugin_support import make, one_error, state, write_state
from tiny_models import ALL, save
from tiny_models import make as tiny
from torch import Tensor

from rotation_merge import View

FAMILIES = ("llama", "qwen2", "mistral", "bert", "roberta", "vit")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    folder = tmp_path_factory.mktemp("models")
    return {f: (make(f, folder / f / "a"), make(f, folder / f / "b", seed=1)) for f in FAMILIES}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("wrong", ["gate_proj", "v_proj", "embed_tokens"])
def test_wrong_work_is_kept_aside(
    wrong: str, dtype: str, models: dict[str, tuple[Path, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tensor of one layer left out of the move (or moved by itself)."""
    spoil(monkeypatch, wrong)
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
