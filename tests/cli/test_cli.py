"""The commands on real (shipped) and tiny checkpoints: output on a pipe, JSON, exit codes, what is written."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_support import CHECKPOINTS, COMMANDS, parsed, run
from plugin_support import make, state, twin
from transformers import AutoTokenizer, LlamaForCausalLM

VITS = str(CHECKPOINTS / "vit-0"), str(CHECKPOINTS / "vit-1")
LLAMAS = str(CHECKPOINTS / "llama-0-english"), str(CHECKPOINTS / "llama-0-c")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A tiny Llama and its twin."""
    folder = tmp_path_factory.mktemp("pair")
    anchor = make("llama", folder / "anchor")
    return str(anchor), str(twin(anchor, folder / "twin"))


def recipe(folder: Path, anchor: str, donor: str, *parameters: str) -> Path:
    lines = [f"  {line}" for line in ("delegate: linear", *parameters)]
    text = (
        f"merge_method: rotation_merge\nbase_model: {anchor}\nmodels:\n"
        f"  - model: {anchor}\n    parameters: {{weight: 0.5}}\n  - model: {donor}\n    parameters: {{weight: 0.5}}\n"
    )
    path = folder / "recipe.yml"
    path.write_text(text + "\n".join(["parameters:", *lines, "dtype: float32\n"]))
    return path


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(name: str):
    done = run(name, "--help")
    assert done.exit_code == 0
    assert "Example" in done.output
    assert "--json" in done.output


def test_help_is_quick_because_nothing_heavy_is_imported():
    code = (
        "import sys; from rotation_merge.cli.app import app; print('torch' in sys.modules, 'mergekit' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


class TestCheck:
    def test_a_good_recipe_passes(self, pair: tuple[str, str], tmp_path: Path):
        done = run("check", recipe(tmp_path, *pair))
        assert done.exit_code == 0
        assert "ready to run" in done.output

    def test_all_faults_are_named_at_once_at_their_places(self, pair: tuple[str, str], tmp_path: Path):
        path = recipe(tmp_path, *pair, "attention: rotatoin", "layers: 3-1", "residual: rotation", "colour: red")
        path.write_text(path.read_text().replace("dtype: float32", "dtype: float23\nbase_modle: x"))
        done = run("check", path)
        assert done.exit_code == 1
        for place, words in {
            "10:3": "did you mean 'rotation'?",
            "11:3": "it must be all, or ranges",
            "13:3": "there is no parameter 'colour'",
            "14:1": "did you mean 'float32'?",
            "15:1": "did you mean 'base_model'?",
        }.items():
            assert any(line.startswith(f"{path}:{place}:") and words in line for line in done.output.splitlines()), (
                done.output
            )
        assert "5 faults" in done.output

    @pytest.mark.parametrize(
        ("parameters", "replaced", "remedies"),
        [
            (("residual: rotatoin",), {}, ["did you mean 'rotation'?"]),
            (
                (),
                {"base_model": "base_modle", "{weight": "{weigth"},
                ["did you mean 'base_model'?", "did you mean 'weight'?"],
            ),
        ],
    )
    def test_a_misspelt_word_is_one_fault(
        self,
        parameters: tuple[str, ...],
        replaced: dict[str, str],
        remedies: list[str],
        pair: tuple[str, str],
        tmp_path: Path,
    ):
        """And its key is not said to be missing, too."""
        path = recipe(tmp_path, *pair, *parameters)
        for word, other in replaced.items():
            path.write_text(path.read_text().replace(word, other, 1))
        *faults, count = run("check", path).output.splitlines()
        assert [remedy in line for remedy, line in zip(remedies, faults, strict=True)] == [True] * len(remedies)
        assert count == f"{len(remedies)} fault{'s' if len(remedies) > 1 else ''}"

    def test_a_misspelt_folder_is_named(self, pair: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.chdir(tmp_path)
        shutil.copytree(pair[0], "models/donor-7b")
        done = run("check", recipe(tmp_path, pair[0], "models/doner-7b"))
        assert "did you mean 'models/donor-7b'?" in done.output
        assert "if the models that were not checked exist" in done.output

    def test_json_holds_line_column_and_remedy(self, pair: tuple[str, str], tmp_path: Path):
        done = run("check", recipe(tmp_path, *pair, "ffn: permutatoin"), "--json")
        assert done.exit_code == 1
        fault = json.loads(done.stdout)["faults"][0]
        assert (fault["line"], fault["column"], fault["where"]) == (10, 3, "parameters.ffn")
        assert "permutation" in fault["remedy"]

    def test_a_delegates_missing_parameter_stands_at_the_model(self, pair: tuple[str, str], tmp_path: Path):
        path = recipe(tmp_path, *pair)
        path.write_text(path.read_text().replace("parameters: {weight: 0.5}", "parameters: {}", 1))
        done = run("check", path)
        assert f"{path}:4:5: models[0]: delegate linear needs the parameter 'weight'" in done.output

    def test_groups_are_held_against_the_architecture(self, tmp_path: Path):
        anchor = make("bert", tmp_path / "bert")
        done = run("check", recipe(tmp_path, str(anchor), str(anchor), "residual: rotation"))
        assert done.exit_code == 1
        assert "the largest it admits is 'residual: permutation'" in done.output

    def test_vocabularies_need_a_tokenizer_setting(self, tmp_path: Path):
        anchor, donor = make("llama", tmp_path / "a"), make("llama", tmp_path / "b", vocab_size=50)
        done = run("check", recipe(tmp_path, str(anchor), str(donor)))
        assert done.exit_code == 1
        assert "tokenizer: {source: base}" in done.output

    def test_faults_are_found_without_weights(self, pair: tuple[str, str], tmp_path: Path, monkeypatch):
        """Only what says which preset fits looks at some, where there are no faults."""
        from rotation_merge.diagnose import check
        from rotation_merge.model.folder import ShardReader

        monkeypatch.setattr(ShardReader, "__call__", lambda *_: pytest.fail("a weight was read"))
        assert run("check", recipe(tmp_path, *pair, "colour: red")).exit_code == 1
        monkeypatch.setattr(check, "likeness", lambda *_: 1.0)
        assert run("check", recipe(tmp_path, *pair)).exit_code == 0


class TestInspect:
    def test_model(self):
        found = parsed("inspect", LLAMAS[0], "--heads", "permutation")[0]
        assert found["parameters"] == 443_232
        kinds = {line["kind"]: line for line in found["lines"]}
        assert kinds["attention"]["count"] == 4
        assert "RoPE" in kinds["attention"]["group"]
        assert found["memory"] > 0
        assert found["disk"] == 2 * 443_232

    def test_recipe_and_words(self, tmp_path: Path):
        done = run("inspect", recipe(tmp_path, *LLAMAS, "attention: none"))
        assert done.exit_code == 0
        assert "residual: none" in done.output
        assert "on disk" in done.output


class TestAlign:
    @pytest.mark.slow
    def test_the_output_is_a_normal_checkpoint_that_computes_the_same(self, tmp_path: Path):
        out = tmp_path / "aligned"
        done = run("align", *LLAMAS, out, "--residual", "rotation", "--heads", "permutation", "--dtype", "float32")
        assert done.exit_code == 0, done.output
        for name in ("config.json", "tokenizer.json", "README.md", "rotation_merge.json"):
            assert (out / name).exists()
        LlamaForCausalLM.from_pretrained(out)
        assert AutoTokenizer.from_pretrained(out)("ab")["input_ids"] == [97, 98]
        done = run("verify", LLAMAS[1], out)
        assert done.exit_code == 0, done.output
        wide = run("align", *LLAMAS, tmp_path / "wide", "--heads", "permutation", "--dtype", "float64")
        assert wide.exit_code == 0, wide.output
        for how in ((), ("--float64",)):
            assert run("verify", LLAMAS[1], tmp_path / "wide", *how).exit_code == 0
            assert run("verify", LLAMAS[0], tmp_path / "wide", *how).exit_code == 1

    def test_the_twin_comes_back_to_the_anchor(self, pair: tuple[str, str], tmp_path: Path):
        out = tmp_path / "aligned"
        found = parsed("align", *pair, out, "--heads", "permutation")
        assert found["after"] < 1e-3 < 0.1 < found["before"]
        ours, theirs = state(out), state(Path(pair[0]))
        for name, tensor in theirs.items():
            torch.testing.assert_close(ours[name], tensor, rtol=1e-3, atol=1e-3)

    @pytest.mark.slow
    @pytest.mark.parametrize("device", ["auto", "cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
    def test_any_device_gives_the_same_up_to_rounding(self, device: str, pair: tuple[str, str], tmp_path: Path):
        options = ("--heads", "permutation", "--residual", "rotation", "--alignment", tmp_path / "a.safetensors")
        done = run("align", *pair, tmp_path / "out", *options, "--device", device)
        assert done.exit_code == 0, done.output
        done = run("align", *pair, tmp_path / "cpu", *options[:4])
        assert done.exit_code == 0, done.output
        ours, theirs = state(tmp_path / "out"), state(tmp_path / "cpu")
        assert list(ours) == list(theirs)
        for name, tensor in theirs.items():
            torch.testing.assert_close(ours[name], tensor, rtol=1e-3, atol=1e-3)

    def test_large_models_are_written_in_shards(self, pair: tuple[str, str], tmp_path: Path):
        done = run("align", *pair, tmp_path / "out", "--shard-size", "20K")
        assert done.exit_code == 0, done.output
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert len(set(index["weight_map"].values())) > 1
        LlamaForCausalLM.from_pretrained(tmp_path / "out")

    def test_the_alignment_file_alone(self, pair: tuple[str, str], tmp_path: Path):
        done = run("align", *pair, "--alignment", tmp_path / "a.safetensors", "--half")
        assert done.exit_code == 0, done.output
        path = recipe(tmp_path, *pair)
        line = f"parameters: {{weight: 0.5, alignment: {tmp_path / 'a.safetensors'}}}"
        path.write_text(line.join(path.read_text().rsplit("parameters: {weight: 0.5}", 1)))
        assert run("check", path).exit_code == 0


class TestVerify:
    def test_different_models_exit_with_one(self):
        done = run("verify", *VITS)
        assert done.exit_code == 1
        assert "differ" in done.output

    def test_double_precision_and_given_inputs(self, pair: tuple[str, str]):
        found = parsed("verify", VITS[0], VITS[0], "--data", "demo:digits", "--float64")
        assert found["same"]
        assert found["absolute"] == 0.0

    @pytest.mark.parametrize("family", ["qwen2", "bert", "roberta", "vit"])
    def test_random_inputs_for_every_kind(self, family: str, tmp_path: Path):
        anchor = make(family, tmp_path / "a")
        assert run("verify", anchor, twin(anchor, tmp_path / "b")).exit_code == 0


def test_compare_finds_one_model_in_two_coordinate_systems(pair: tuple[str, str]):
    found = parsed("align", *pair, "--heads", "permutation")
    assert "one model in two coordinate systems" in found["summary"]
    whole = found["gaps"][-1]
    assert whole["angle_after"] < 0.01 < whole["angle_before"]
    assert {gap["space"] for gap in found["gaps"]} == {"attn", "ffn", "all"}


def test_compare_says_when_there_is_nothing_to_do():
    done = run("align", *LLAMAS, "--by", "layer")
    assert "share their coordinates" in done.output


class TestBarrier:
    @pytest.mark.slow
    def test_two_models(self, tmp_path: Path):
        pytest.importorskip("sklearn")
        pytest.importorskip("matplotlib")
        merged = tmp_path / "merged"
        merged.mkdir()
        options = [
            "--data",
            "demo:digits",
            "--points",
            3,
            "--limit",
            64,
            "--save",
            merged,
            "--plot",
            tmp_path / "b.svg",
        ]
        found = parsed("barrier", *VITS, *options)[0]
        plain, aligned = found["curves"]
        assert plain["loss"][0] == pytest.approx(aligned["loss"][0], abs=1e-4)
        assert plain["loss"][2] == pytest.approx(aligned["loss"][2], abs=1e-3)
        assert found["measures"]["plain"]["barrier"] > 1
        assert (tmp_path / "b.svg").read_text().startswith("<?xml")
        assert (merged / "barrier.json").exists()

    @pytest.mark.slow
    def test_an_alignment_file_stands_in_for_matching(self, pair: tuple[str, str], tmp_path: Path):
        file, data = tmp_path / "a.safetensors", tmp_path / "data.npz"
        np.savez(data, input_ids=np.arange(40).reshape(2, 20))
        assert run("align", *pair, "--alignment", file, "--heads", "permutation").exit_code == 0
        found = parsed("barrier", *pair, "--data", data, "--points", 3, "--alignment", file)[0]
        plain, aligned = (curve["loss"] for curve in found["curves"])
        assert aligned[1] == pytest.approx(aligned[0], abs=1e-3)
        assert plain[1] != pytest.approx(plain[0], abs=1e-2)
        swapped = run("barrier", *reversed(pair), "--data", data, "--alignment", file)
        assert swapped.exit_code == 2
        assert "other weights" in swapped.output

    @pytest.mark.slow
    def test_recipe_and_text_on_a_pipe(self, tmp_path: Path):
        (tmp_path / "held-out.txt").write_text("def f(x):\n    return x + 1\n" * 40)
        texts = ("--data", tmp_path / "held-out.txt", "--data", "demo:c", "--limit", 4)
        done = run("barrier", recipe(tmp_path, *LLAMAS), *texts, "--points", 3)
        assert done.exit_code == 0, done.output
        assert done.output.count("Barrier:") == 2
        assert "held-out.txt (next token" in done.output
        assert "demo:c (next token, 4 examples)" in done.output


def test_methods_and_architectures():
    assert "slerp" in {entry["name"] for entry in parsed("inspect", "--methods")["delegates"]}
    assert "llama" in parsed("inspect", "--architectures")
    assert "LlamaForCausalLM" in run("inspect", "--architectures").output
    assert "finetuned_from" in run("inspect", "--methods").output


@pytest.mark.slow
def test_the_demo_shows_the_twin_come_back(tmp_path: Path):
    pytest.importorskip("sklearn")
    found = parsed("demo", "--only", "twin", "--keep", tmp_path)["results"][0]
    assert found["merges"]["plain"] < 0.5
    assert found["merges"]["whole"] == pytest.approx(found["parents"][0], abs=0.005)
    assert (tmp_path / "twin" / "whole" / "rotation_merge.json").exists()


def test_completion_is_offered_by_click():
    done = subprocess.run(
        [sys.executable, "-c", "from rotation_merge.cli import main; main()"],
        env={"_ROTATION_MERGE_COMPLETE": "bash_source", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert "complete" in done.stdout
