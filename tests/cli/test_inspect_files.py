"""`inspect` reads the heads of files of ours, and fingerprints; a merge ends with its summary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_support import run
from click.testing import CliRunner
from plugin_support import make, recipe_for, twin, write_recipe


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path, str]:
    """Anchor, twin, and the merge of both, with what mergekit-yaml said on stderr."""
    from mergekit.io.tasks import LoaderCache
    from mergekit.scripts.run_yaml import main

    folder = tmp_path_factory.mktemp("show")
    anchor = make("llama", folder / "anchor")
    donor = twin(anchor, folder / "donor")
    recipe = write_recipe(recipe_for("linear", anchor, donor), folder / "recipe.yml")
    LoaderCache.loaders.clear()
    result = CliRunner().invoke(main, [str(recipe), str(folder / "out")])
    assert result.exit_code == 0, result.output
    return anchor, donor, folder / "out", result.stderr


def test_a_merge_ends_with_its_summary(merged):
    anchor, donor, out, said = merged
    assert f"aligned to {anchor}, averaged by linear" in said
    assert f"{donor}: relative distance" in said
    assert "100% less" in said
    assert f"{out}/rotation_merge.json" in said


def test_fingerprints_of_model_and_file_agree(merged, tmp_path: Path):
    anchor, donor, out, _ = merged
    assert run("align", anchor, donor, "--alignment", tmp_path / "maps.safetensors").exit_code == 0
    of_file = json.loads(run("inspect", tmp_path / "maps.safetensors", "--fingerprint", "--json").stdout)
    of_models = [json.loads(run("inspect", model, "--fingerprint", "--json").stdout) for model in (anchor, donor)]
    assert of_file == of_models[0] | of_models[1]
    assert of_file == json.loads((out / "rotation_merge.json").read_text())["fingerprints"]
    shown = json.loads(run("inspect", tmp_path / "maps.safetensors", "--json").stdout)
    assert shown["fingerprints"] == of_file
    assert shown["holds"]["spaces"] == {"attention": 2, "ffn": 2}
    assert shown["holds"]["architecture"] == "llama"


def test_a_report_is_shown(merged):
    anchor, _, out, _ = merged
    result = run("inspect", out / "rotation_merge.json")
    assert result.exit_code == 0
    assert f"Report of a merge into {anchor}" in result.output
    assert "100% less" in result.output
    assert run("inspect", out, "--report").output == result.output


def test_an_alignment_is_known_whatever_it_is_called(merged, tmp_path: Path):
    anchor, donor, *_ = merged
    assert run("align", anchor, donor, "--alignment", tmp_path / "maps").exit_code == 0
    assert json.loads(run("inspect", tmp_path / "maps", "--json").stdout)["is"] == "Alignment"


def test_statistics_are_shown(merged, tmp_path: Path):
    from cli_support import CHECKPOINTS

    file = tmp_path / "s.safetensors"
    model = CHECKPOINTS / "llama-0"
    assert run("measure", model, "--data", "self", "--samples", "2", "--length", "8", "--out", file).exit_code == 0
    found = json.loads(run("inspect", file, "--json").stdout)
    assert found["is"] == "Statistics"
    assert found["holds"]["gram"] > 0
    assert found["fingerprints"] == json.loads(run("inspect", model, "--fingerprint", "--json").stdout)


@pytest.mark.parametrize("content", [b"", b"nonsense", b"{}"])
def test_other_files_are_named(content: bytes, tmp_path: Path):
    for name in ("x.safetensors", "x.json"):
        (tmp_path / name).write_bytes(content)
        result = run("inspect", tmp_path / name)
        assert result.exit_code == 2
        assert name in result.output
        assert "Traceback" not in result.output
    assert run("inspect", tmp_path / "x.safetensors", "--fingerprint").exit_code == 2
