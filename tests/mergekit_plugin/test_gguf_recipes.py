"""Models in GGUF in recipes and commands: the same as the checkpoints that they were written from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from cli_support import run
from gguf_support import TEXT, byte_tokenizer, saved, written
from hub_support import at_home, served
from mergekit.io.tasks import LoaderCache
from plugin_support import load, merged, state
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


def _run(*arguments: object) -> str:
    LoaderCache.loaders.clear()
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


def _read(path: object) -> rm.View:
    """The tensors of a model, as they are."""
    return rm.average([str(path)])


RECIPES = {
    "ours": "merge_method: rotation_merge\nparameters: {{delegate: linear, attention: rotation, heads: permutation}}\n",
    "tokens together": "merge_method: rotation_merge\nparameters: {{delegate: linear}}\ntokenizer: {{source: union}}\n",
    "another method": "merge_method: linear\n",
    "another method, tokens together": "merge_method: linear\ntokenizer: {{source: union}}\n",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_merge_of_files_is_the_merge_of_the_checkpoints(name: str, models: Path, tmp_path: Path) -> None:
    recipe = RECIPES[name] + (
        "base_model: {a}\nmodels:\n- model: {a}\n  parameters: {{weight: 0.3}}\n"
        "- model: {b}\n  parameters: {{weight: 0.7}}\ndtype: float32\n"
    )
    first = merged(recipe.format(a=models / "a", b=models / "b"), tmp_path / "first")
    again = merged(recipe.format(a=models / "a.gguf", b=models / "alone"), tmp_path / "again")
    assert first.keys() == again.keys()
    for key, tensor in first.items():
        torch.testing.assert_close(again[key], tensor, rtol=1e-5, atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "again")
    assert tokenizer(TEXT).input_ids == byte_tokenizer()(TEXT).input_ids
    if name == "ours":
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
        assert torch.equal(_read(name)["model.norm.weight"], _read(models / "b.gguf")["model.norm.weight"])
    result = run("verify", "org/b-GGUF:gone.gguf", models / "b")
    assert result.exit_code == 2
    assert "org/b-GGUF:gone.gguf: is neither here nor in the hub's cache" in result.output


@pytest.mark.slow
def test_a_repository_of_files_says_how_to_name_one(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "recipe.yml"
    recipe.write_text("merge_method: rotation_merge\nbase_model: org/a\nmodels:\n- model: org/b-GGUF\n")
    with served() as hub:
        at_home(hub, tmp_path / "cache", monkeypatch)
        hub.publish("org/a", models / "a")
        hub.commit("models/org/b-GGUF", {"b-F16.gguf": (models / "b.gguf").read_bytes(), "README.md": b"text"})
        for command in (
            ("inspect", "org/b-GGUF"),
            ("evaluate", "org/b-GGUF", "--data", "demo:bytes"),
            ("check", recipe),
        ):
            output = run(*command).output
            assert (
                "org/b-GGUF: holds models in GGUF: b-F16.gguf; name one of its files, as org/b-GGUF:b-F16.gguf"
                in output
            )
        misspelt = run("inspect", "org/b-GGUF:b-F17.gguf")
        assert "org/b-GGUF:b-F17.gguf: is not in the repository; did you mean 'b-F16.gguf'?" in misspelt.output
        assert "llama, 37,792 weights" in _run("inspect", "org/b-GGUF:b-F16.gguf")


@pytest.mark.slow
def test_commands_take_files(models: Path, tmp_path: Path) -> None:
    assert "was read from a.gguf" in _run("inspect", models / "a.gguf")
    assert "same" in _run("verify", models / "a.gguf", models / "a")
    _run("align", models / "a.gguf", models / "alone", tmp_path / "aligned")
    assert "same" in _run("verify", tmp_path / "aligned", models / "b")
    assert not [path for path in (tmp_path / "aligned").iterdir() if "gguf" in path.name]


def test_a_model_is_no_recipe(models: Path) -> None:
    result = run("check", models / "a.gguf")
    assert result.exit_code == 2
    assert "is a model, not a recipe; rotation-merge inspect" in result.output


def _lora(models: Path, base: object, folder: Path) -> Path:
    """An adapter of the first model, which says that it was trained on `base`."""
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(load(str(models / "a")), LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    adapted.save_pretrained(folder)
    settings = folder / "adapter_config.json"
    content = {**json.loads(settings.read_text()), "base_model_name_or_path": base and str(base)}
    settings.write_text(json.dumps(content))
    return folder


@pytest.mark.slow
def test_an_adapter_belongs_to_its_base_by_whatever_name(models: Path, tmp_path: Path) -> None:
    """transformers reads a GGUF by its folder, which peft writes down: the file in it, and its checkpoint, are it."""
    (tmp_path / "base").mkdir()
    file = shutil.copyfile(models / "a.gguf", tmp_path / "base" / "model-F16.gguf")
    adapter = _lora(models, tmp_path / "base", tmp_path / "lora")
    for base in (file, models / "a.gguf", models / "a"):
        _run("carry", adapter, "--from", base, "--to", models / "alone", tmp_path / f"out-{base.stem}{base.suffix}")
    result = run("carry", adapter, "--from", models / "b.gguf", "--to", models / "alone", tmp_path / "out")
    assert result.exit_code == 2
    assert "is an adapter of" in result.output


@pytest.mark.slow
def test_the_report_names_the_types_of_a_fine_tune_that_is_carried(models: Path, tmp_path: Path) -> None:
    tuned = shutil.copyfile(models / "a.gguf", tmp_path / "tuned.gguf")
    recipe = (
        "merge_method: rotation_merge\nparameters: {delegate: task_arithmetic}\ndtype: float32\n"
        f"base_model: {models / 'b'}\nmodels:\n- model: {models / 'b'}\n- model: {tuned}\n"
        f"  parameters: {{weight: 1, finetuned_from: {models / 'a'}}}\n"
    )
    merged(recipe, tmp_path / "merged")
    _run("carry", tuned, "--from", models / "a", "--to", models / "b", tmp_path / "carried")
    for folder in ("merged", "carried"):
        notes = json.loads((tmp_path / folder / "rotation_merge.json").read_text())["notes"]
        assert any("was read from tuned.gguf, whose tensors are" in note for note in notes)


def test_a_check_finds_the_weights_of_a_file(models: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yml"
    recipe.write_text(
        "merge_method: rotation_merge\nparameters: {delegate: linear, weight: 0.5}\ndtype: float32\n"
        f"base_model: {models / 'a.gguf'}\nmodels:\n- model: {models / 'a.gguf'}\n- model: {models / 'alone'}\n"
    )
    output = _run("check", recipe)
    assert "was read from" in output
    assert "no weights" not in output


@pytest.mark.parametrize("method", ["passthrough", "linear"])
def test_a_lora_on_a_file_in_other_methods(method: str, models: Path, tmp_path: Path) -> None:
    """Merged as it is read, as on the checkpoint, without the cache that mergekit wants for adapters on those."""
    adapter = _lora(models, None, tmp_path / "lora")
    name, on_checkpoint = f"{models / 'a.gguf'}+{adapter}", load(f"{models / 'a'}+{adapter}").state_dict()
    made = {"merge_method": method, "models": [{"model": name, "parameters": {"weight": 1}}], "dtype": "float32"}
    wanted = load(name).state_dict()
    for key, value in merged(made, tmp_path / "out").items():
        torch.testing.assert_close(value, wanted[key], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(value, on_checkpoint[key], rtol=2e-3, atol=2e-3)
    assert AutoTokenizer.from_pretrained(tmp_path / "out")(TEXT).input_ids == byte_tokenizer()(TEXT).input_ids


def test_a_chat_template_beside_a_files_tokenizer(models: Path, tmp_path: Path) -> None:
    for method in ("rotation_merge\nparameters: {delegate: linear, weight: 0.5}", "linear"):
        text = f"merge_method: {method}\nbase_model: {{a}}\nmodels:\n"
        text += "".join(f"- {{model: {models / name}, parameters: {{weight: 1}}}}\n" for name in ("a.gguf", "alone"))
        recipe = f"{text}chat_template: chatml\ndtype: float32\n".replace("{a}", str(models / "a.gguf"))
        merged(recipe, tmp_path / method[:6])
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / method[:6])
        assert "<|im_start|>" in tokenizer.chat_template
        assert tokenizer(TEXT).input_ids == byte_tokenizer()(TEXT).input_ids


@pytest.mark.slow
def test_the_search_takes_files(models: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("The quick foxes are here. " * 200)
    sizes = ("--samples", "8", "--length", "16", "--budget", "1s", "--data", tmp_path / "text.txt", "--anyway")
    out = tmp_path / "out"
    _run("merge", models / "a.gguf", models / "b.gguf", out, *sizes)
    assert f"model: {models / 'a.gguf'}" in (out / "recipe.yml").read_text()
    assert state(out).keys() == _read(models / "a.gguf").keys()


@pytest.mark.slow
def test_python_takes_files(models: Path, tmp_path: Path) -> None:
    anchor, donor = (str(models / name) for name in ("a.gguf", "alone"))
    alignment = rm.align(anchor, donor, rm.AlignConfig(heads="permutation"))
    alignment.apply(donor).save_pretrained(tmp_path / "moved")
    rm.average([anchor, donor]).save_pretrained(tmp_path / "mean")
    first, second, mean = (_read(path) for path in (anchor, donor, tmp_path / "mean"))
    for key in first:
        torch.testing.assert_close(
            mean[key].float(), (first[key].float() + second[key].float()) / 2, rtol=1e-2, atol=1e-2
        )
    assert "the two models compute the same" in _run("verify", tmp_path / "moved", models / "b")


def test_q8_0_is_near(models: Path, tmp_path: Path) -> None:
    model = load(str(models / "a"))
    again = load(str(written(models / "a", tmp_path / "a-Q8_0.gguf", "Q8_0")))
    for key, value in model.state_dict().items():
        difference = (again.state_dict()[key] - value).abs().max() / value.abs().max()
        assert difference < 1 / 127, key
