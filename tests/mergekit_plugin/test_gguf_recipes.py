"""Models in GGUF in recipes and commands: the same as the checkpoints that they were written from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from cli_support import output_of, run
from gguf_support import TEXT, byte_tokenizer, saved, written
from hub_support import at_home, served
from plugin_support import load, lora, merged, state
from transformers import AutoTokenizer

import rotation_merge as rm

pytestmark = pytest.mark.usefixtures("gguf_home")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, each as a checkpoint and as a GGUF; the second GGUF also alone in a folder."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("a", "b")):
        saved(folder / name, seed)
        written(folder / name, folder / f"{name}.gguf")
    (folder / "alone").mkdir()
    shutil.copyfile(folder / "b.gguf", folder / "alone" / "model-F16.gguf")
    return folder


def read(path: object) -> rm.View:
    """The tensors of a model, as they are."""
    return rm.average([str(path)])


def recipe(a: object, b: object, keys: str = "", parameters: str = "{delegate: linear}") -> str:
    """Of ours, or without parameters of mergekit's own `linear`."""
    models = "".join(f"- {{model: {name}, parameters: {{weight: {w}}}}}\n" for name, w in ((a, 0.3), (b, 0.7)))
    method = f"rotation_merge\nparameters: {parameters}" if parameters else "linear"
    head = f"merge_method: {method}\nbase_model: {a}\ndtype: float32\n"
    return f"{head}{keys}models:\n{models}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "parameters"),
    [
        ("", "{delegate: linear, attention: rotation, heads: permutation}"),
        ("tokenizer: {source: union}\n", "{delegate: linear}"),
        ("chat_template: chatml\n", "{delegate: linear}"),
        ("", ""),
        ("tokenizer: {source: union}\nchat_template: chatml\n", ""),
    ],
)
def test_a_merge_of_files_is_the_merge_of_the_checkpoints(
    keys: str, parameters: str, models: Path, tmp_path: Path
) -> None:
    first = merged(recipe(models / "a", models / "b", keys, parameters), tmp_path / "first")
    again = merged(recipe(models / "a.gguf", models / "alone", keys, parameters), tmp_path / "again")
    assert first.keys() == again.keys()
    for key, tensor in first.items():
        torch.testing.assert_close(again[key], tensor, rtol=1e-5, atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "again")
    assert tokenizer(TEXT).input_ids == byte_tokenizer()(TEXT).input_ids
    assert ("<|im_start|>" in str(tokenizer.chat_template)) == ("chatml" in keys)
    if parameters:
        report = json.loads((tmp_path / "again" / "rotation_merge.json").read_text())
        assert any("was read from a.gguf, whose tensors are" in note for note in report["notes"])
        assert set(report["models"]) == {str(models / "a.gguf"), str(models / "alone")}


def test_a_name_of_the_hub(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    snapshot = tmp_path / "models--org--b-GGUF" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text("0" * 40)
    shutil.copyfile(models / "b.gguf", snapshot / "b.gguf")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for name in ("org/b-GGUF:b.gguf", "org/b-GGUF"):
        assert torch.equal(read(name)["model.norm.weight"], read(models / "b.gguf")["model.norm.weight"])
    output = output_of("verify", "org/b-GGUF:gone.gguf", models / "b", code=2)
    assert "org/b-GGUF:gone.gguf: is neither" in output


@pytest.mark.slow
def test_a_repository_of_files_says_how_to_name_one(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, name = tmp_path / "recipe.yml", "org/b-GGUF:b-F16.gguf"
    path.write_text("merge_method: rotation_merge\nbase_model: org/a\nmodels:\n- model: org/b-GGUF\n")
    with served() as hub:
        at_home(hub, tmp_path / "cache", monkeypatch)
        hub.publish("org/a", models / "a")
        hub.commit("models/org/b-GGUF", {"b-F16.gguf": (models / "b.gguf").read_bytes(), "README.md": b"text"})
        for command in (("inspect", "org/b-GGUF"), ("evaluate", "org/b-GGUF", "--data", "demo:bytes"), ("check", path)):
            words = f"org/b-GGUF: holds models in GGUF: b-F16.gguf; name one of its files, as {name}"
            assert words in run(*command).output
        assert "did you mean 'b-F16.gguf'?" in run("inspect", "org/b-GGUF:b-F17.gguf").output
        assert "llama, 37,792 weights" in output_of("inspect", name)


@pytest.mark.slow
def test_commands_and_python_take_files(models: Path, tmp_path: Path) -> None:
    anchor, donor = (str(models / name) for name in ("a.gguf", "alone"))
    assert "was read from a.gguf" in output_of("inspect", anchor)
    assert "same" in output_of("verify", anchor, models / "a")
    output_of("align", anchor, donor, tmp_path / "aligned")
    assert "same" in output_of("verify", tmp_path / "aligned", models / "b")
    assert not [path for path in (tmp_path / "aligned").iterdir() if "gguf" in path.name]
    rm.align(anchor, donor, heads="permutation").apply(donor).save_pretrained(tmp_path / "moved")
    assert "the two models compute the same" in output_of("verify", tmp_path / "moved", models / "b")
    (tmp_path / "text.txt").write_text("The quick foxes are here. " * 200)
    sizes = ("--samples", "8", "--length", "16", "--budget", "1s", "--data", tmp_path / "text.txt", "--anyway")
    output_of("merge", anchor, models / "b.gguf", tmp_path / "out", *sizes)
    assert f"model: {anchor}" in (tmp_path / "out" / "recipe.yml").read_text()
    assert state(tmp_path / "out").keys() == read(anchor).keys()


def test_check_reads_the_weights_of_a_file_and_takes_no_model_for_a_recipe(models: Path, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yml"
    path.write_text(recipe(models / "a.gguf", models / "alone"))
    output = output_of("check", path)
    assert "was read from" in output
    assert "no weights" not in output
    assert "a.gguf: " in output_of("check", models / "a.gguf", code=2)


def adapter_of(models: Path, base: object, folder: Path) -> Path:
    """An adapter of the first model, which says that it was trained on `base`."""
    lora(folder, load(str(models / "a")), spread=0.2, base_model_name_or_path=base and str(base))
    return folder


@pytest.mark.slow
def test_an_adapter_belongs_to_its_base_by_whatever_name(models: Path, tmp_path: Path) -> None:
    """transformers reads a GGUF by its folder, which peft writes down: the file in it, and its checkpoint, are it."""
    (tmp_path / "base").mkdir()
    file = shutil.copyfile(models / "a.gguf", tmp_path / "base" / "model-F16.gguf")
    adapter = adapter_of(models, tmp_path / "base", tmp_path / "lora")
    for base in (file, models / "a.gguf", models / "a"):
        output_of(
            "carry", adapter, "--from", base, "--to", models / "alone", tmp_path / f"out-{base.stem}{base.suffix}"
        )
    output = output_of(
        "carry", adapter, "--from", models / "b.gguf", "--to", models / "alone", tmp_path / "out", code=2
    )
    assert "is an adapter of" in output
    names = [f"{base}+{adapter_of(models, None, tmp_path / 'own')}" for base in (models / "a.gguf", models / "a")]
    first, second = (load(name).state_dict() for name in names)
    for key, value in first.items():
        torch.testing.assert_close(value, second[key], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("method", ["passthrough", "linear"])
def test_an_adapter_on_a_file_in_other_methods(method: str, models: Path, tmp_path: Path) -> None:
    """Merged as it is read, as on the checkpoint, without the cache that mergekit wants for adapters on those."""
    adapter = adapter_of(models, None, tmp_path / "lora")
    name, on_checkpoint = f"{models / 'a.gguf'}+{adapter}", load(f"{models / 'a'}+{adapter}").state_dict()
    document = {"merge_method": method, "models": [{"model": name, "parameters": {"weight": 1}}], "dtype": "float32"}
    expected = load(name).state_dict()
    for key, value in merged(document, tmp_path / "out").items():
        torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(value, on_checkpoint[key], rtol=2e-3, atol=2e-3)


@pytest.mark.slow
def test_the_report_names_the_types_of_a_fine_tune_that_is_carried(models: Path, tmp_path: Path) -> None:
    tuned = shutil.copyfile(models / "a.gguf", tmp_path / "tuned.gguf")
    text = recipe(models / "b", tuned, parameters="{delegate: task_arithmetic}")
    merged(text.replace("weight: 0.7", f"weight: 1, finetuned_from: {models / 'a'}"), tmp_path / "merged")
    output_of("carry", tuned, "--from", models / "a", "--to", models / "b", tmp_path / "carried")
    for folder in ("merged", "carried"):
        notes = json.loads((tmp_path / folder / "rotation_merge.json").read_text())["notes"]
        assert any("was read from tuned.gguf, whose tensors are" in note for note in notes)


def test_q8_0_is_near(models: Path, tmp_path: Path) -> None:
    again = load(str(written(models / "a", tmp_path / "a-Q8_0.gguf", "Q8_0"))).state_dict()
    for key, value in load(str(models / "a")).state_dict().items():
        assert (again[key] - value).abs().max() / value.abs().max() < 1 / 127, key
