"""Models in GGUF: stored files of every family are read as they were when they were written and checked against their
models; recipes and commands take them as the checkpoints that they were written from.

The files were written with llama.cpp's names and order of numbers by the writer that this package had (commit
46596653), whose files were compared with those of llama.cpp's converter. `truth.json` holds configs, dtypes, shapes and
checksums of tensors, and the logits of the models that they were written from; `tokens-*` the tokenizers.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import output_of, run
from hub_support import at_home, served
from plugin_support import load, lora, merged, recipe_for, state, twin, write_recipe
from safetensors.torch import load_file
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import rotation_merge as rm
from rotation_merge.model.gguf import ORIGIN, decoded, quantised
from rotation_merge.model.gguf_checkpoint import open_gguf
from rotation_merge.model.open import on_base, open_model

STORED = Path(__file__).parent / "gguf"
TRUTH: dict[str, dict[str, Any]] = json.loads((STORED / "truth.json").read_text())
TEXT = "The 12 foxes aren't <|end|> here,  über\n\n3.14 東"

pytestmark = pytest.mark.usefixtures("gguf_home")


def stored(name: str) -> str:
    return str(STORED / f"{name}.gguf")


def first_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """That of the model that a stored file was written from."""
    return PreTrainedTokenizerFast.from_pretrained(STORED / name)


def facts(tensor: torch.Tensor) -> list[Any]:
    """Dtype, shape and checksum."""
    digest = hashlib.blake2b(tensor.view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), digest]


def equal(ours: Any, theirs: Any) -> bool:
    """Whether two values of configs are the same, numbers up to float32."""
    if isinstance(theirs, dict):
        return set(ours) == set(theirs) and all(equal(ours[key], theirs[key]) for key in theirs)
    return math.isclose(ours, theirs, rel_tol=1e-6) if isinstance(theirs, float) else bool(ours == theirs)


@pytest.mark.parametrize("name", TRUTH)
def test_a_stored_file_is_read_as_before(name: str) -> None:
    """Its config, its tensors, and the outputs of the model that was written."""
    folder, truth = Path(decoded(stored(name))), TRUTH[name]
    assert equal(json.loads((folder / "config.json").read_text()), truth["config"])
    tensors = load_file(folder / "model.safetensors")
    assert {key: facts(tensor) for key, tensor in sorted(tensors.items())} == truth["tensors"]
    if "logits" in truth:
        ids = torch.tensor([[5, 17, 3, 39, 8, 25, 9, 1, 2, 37, 31, 6]])
        with torch.no_grad():
            logits = load(stored(name))(ids, use_cache=False).logits[0, -1]
        torch.testing.assert_close(logits, torch.tensor(truth["logits"]), rtol=1e-4, atol=1e-4)


def test_types_are_read_as_ggml_reads_them() -> None:
    """K-quants and others, from a file that ggml's reference code made, with what it makes of each."""
    model = open_gguf([str(STORED.parent / "quantised.gguf")])
    kinds = [name for name in model.tensors if f"{name}.numbers" in model.tensors]
    assert {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"} <= set(kinds)
    for name in kinds:
        assert model.tensors[name].tensor_type.name == name
        torch.testing.assert_close(model.read(name), model.read(f"{name}.numbers"), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["tokens-bytes", "tokens-pieces"])
def test_the_tokenizer_comes_back(name: str) -> None:
    ours, first = AutoTokenizer.from_pretrained(decoded(stored(name))), first_tokenizer(name)
    for text in (TEXT, "the fathers and   the other", ""):
        ids = first(text, add_special_tokens=False).input_ids
        assert ours(text, add_special_tokens=False).input_ids == ids
        assert ours.decode(ids) == first.decode(ids)
    for word in ("bos_token", "eos_token", "unk_token", "pad_token"):
        assert getattr(ours, word) == getattr(first, word)
    assert ours.get_vocab() == first.get_vocab()
    assert name != "tokens-bytes" or "message" in ours.chat_template


def test_a_tokenizer_beside_the_file_is_used(tmp_path: Path) -> None:
    file, tokenizer = shutil.copyfile(stored("tokens-bytes"), tmp_path / "model.gguf"), first_tokenizer("tokens-bytes")
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(tmp_path)
    assert "<more>" in AutoTokenizer.from_pretrained(decoded(str(file))).get_vocab()


def test_names_of_files_and_folders(tmp_path: Path) -> None:
    """Split files are one model; a checkpoint in a folder of such a name, also with such a file; capital letters."""
    (tmp_path / "split").mkdir()
    parts = [shutil.copy(part, tmp_path / "split") for part in sorted(STORED.glob("mixtral-split-*.gguf"))]
    assert len({decoded(path) for path in parts} | {open_model(str(tmp_path / "split")).folder}) == 1
    folder, first = shutil.copytree(decoded(stored("llama")), tmp_path / "model.gguf"), open_model(stored("llama"))
    assert open_model(str(folder)).folder == str(folder)
    shutil.copyfile(stored("llama"), folder / "beside.gguf")
    assert open_model(str(folder)).folder == str(folder)
    (tmp_path / "capital").mkdir()
    for name in (shutil.copyfile(stored("llama"), tmp_path / "capital" / "MODEL-F16.GGUF"), tmp_path / "capital"):
        again = open_model(str(name))
        assert (again.shapes, again.dtypes) == (first.shapes, first.dtypes)


def test_an_adapter_stands_on_the_file_that_it_names(tmp_path: Path) -> None:
    folder, lora = tmp_path / "alone", tmp_path / "lora"
    folder.mkdir()
    lora.mkdir()
    for base in (shutil.copyfile(stored("llama"), folder / "model-F16.gguf"), folder):
        (lora / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
        assert on_base(str(lora)) == f"{base}+{lora}"


def test_a_file_is_decoded_once_until_it_changes(tmp_path: Path, gguf_home: str) -> None:
    """A killed process leaves nothing; the folder says what it was made of."""
    file = shutil.copyfile(stored("llama-q8_0"), tmp_path / "once.gguf")
    folder = Path(decoded(str(file)))
    assert json.loads((folder / ORIGIN).read_text())["files"] == [str(file)]
    assert "16 Q8_0" in (note := quantised(str(folder)))
    assert "quantised were read as float32" in note
    assert "quantised" not in quantised(decoded(stored("llama")))
    assert not quantised(str(STORED))
    stamps = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert decoded(str(file)) == str(folder)
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == stamps
    killed = folder.with_name(f".{folder.name}.partial")
    killed.mkdir()
    shutil.rmtree(folder)
    assert decoded(str(file)) == str(folder)
    assert not killed.exists()
    os.utime(file, (1, 1))
    again = Path(decoded(str(file)))
    assert again != folder
    assert [path for path in Path(gguf_home).rglob("once-*") if path.is_dir()] == [again]


def test_processes_decode_a_file_once(tmp_path: Path, gguf_home: str) -> None:
    file, children = shutil.copyfile(stored("mixtral"), tmp_path / "both.gguf"), list[int]()
    torch.set_num_threads(1)  # OpenMP waits forever for threads that are not forked
    for _ in range(2):
        children.append(os.fork())
        if not children[-1]:
            os._exit(not os.path.isdir(decoded(str(file))))
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    (folder,) = Path(gguf_home).rglob("*both-*")
    assert decoded(str(file)) == str(folder)


def test_shards_are_as_large_as_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rotation_merge.model.gguf_checkpoint.SHARD", 20_000)
    model = open_model(shutil.copyfile(stored("mixtral"), tmp_path / "large.gguf"))
    first, shards = open_model(stored("mixtral")), list(Path(model.folder).glob("model-*.safetensors"))
    assert len(shards) > 2
    assert all(path.stat().st_size < 25_000 for path in shards)
    assert all(torch.equal(model[name], first[name]) for name in first)


# --- recipes and commands --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, gguf_home: str) -> Path:
    """A model as a checkpoint `a`, as a GGUF, and as one alone in a folder; a twin `b` as a checkpoint."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "alone").mkdir()
    for place in ("a.gguf", "alone/model-F16.gguf"):
        shutil.copyfile(stored("tokens-bytes"), folder / place)
    shutil.copytree(decoded(stored("tokens-bytes")), folder / "a", ignore=shutil.ignore_patterns(ORIGIN))
    twin(folder / "a", folder / "b")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(folder / "a" / file, folder / "b" / file)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("method", ["rotation_merge", "linear"])
@pytest.mark.parametrize("keys", [{}, {"tokenizer": {"source": "union"}, "chat_template": "chatml"}], ids=len)
def test_a_merge_of_files_is_the_merge_of_the_checkpoints(
    method: str, keys: dict[str, Any], models: Path, tmp_path: Path
) -> None:
    def merge(anchor: str, donor: str) -> dict[str, torch.Tensor]:
        recipe = {**recipe_for("linear", models / anchor, models / donor), **keys}
        stock = {"merge_method": "linear", "parameters": {}}
        return merged({**recipe, **(stock if method == "linear" else {})}, tmp_path / anchor / donor)

    expected = merge("b", "a")
    for donor in ("a.gguf", "alone"):
        result = merge("b", donor)
        assert result.keys() == expected.keys()
        for key, tensor in expected.items():
            torch.testing.assert_close(result[key], tensor, rtol=1e-5, atol=1e-5)
    merge("a.gguf", "b")
    out = tmp_path / "a.gguf" / "b"
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer(TEXT).input_ids == first_tokenizer("tokens-bytes")(TEXT).input_ids
    assert ("<|im_start|>" in str(tokenizer.chat_template)) == bool(keys)
    if method == "rotation_merge":
        report = json.loads((out / "rotation_merge.json").read_text())
        assert any("was read from a.gguf, whose tensors are" in note for note in report["notes"])
        assert set(report["models"]) == {str(models / "a.gguf"), str(models / "b")}


@pytest.mark.slow
def test_a_repository_of_files_says_how_to_name_one(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was downloaded is read without the hub, too."""
    path, name = tmp_path / "recipe.yml", "org/b-GGUF:b-F16.gguf"
    path.write_text("merge_method: rotation_merge\nbase_model: org/a\nmodels:\n- model: org/b-GGUF\n")
    with served() as hub:
        at_home(hub, tmp_path / "cache", monkeypatch)
        hub.publish("org/a", models / "a")
        hub.commit("models/org/b-GGUF", {"b-F16.gguf": (models / "a.gguf").read_bytes(), "README.md": b"text"})
        for command in (
            ("inspect", "org/b-GGUF"),
            ("evaluate", "org/b-GGUF", "--data", "demo:english"),
            ("check", path),
        ):
            words = f"org/b-GGUF: holds models in GGUF: b-F16.gguf; name one of its files, as {name}"
            assert words in run(*command).output
        assert "did you mean 'b-F16.gguf'?" in run("inspect", "org/b-GGUF:b-F17.gguf").output
        assert "llama, " in output_of("inspect", name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for stored in (name, "org/b-GGUF"):
        assert torch.equal(open_model(stored)["model.norm.weight"], open_model(models / "a.gguf")["model.norm.weight"])
    assert "org/b-GGUF:gone.gguf: is neither" in output_of("verify", "org/b-GGUF:gone.gguf", models / "b", code=2)


@pytest.mark.slow
def test_commands_and_python_take_files(models: Path, tmp_path: Path) -> None:
    anchor, donor = models / "b", str(models / "alone")
    assert "was read from a.gguf" in output_of("inspect", models / "a.gguf")
    output_of("align", anchor, donor, tmp_path / "aligned")
    assert "same" in output_of("verify", tmp_path / "aligned", models / "a.gguf")
    assert not [path for path in (tmp_path / "aligned").iterdir() if "gguf" in path.name]
    rm.align(anchor, donor, heads="permutation").apply(donor).save_pretrained(tmp_path / "moved")
    assert "the two models compute the same" in output_of("verify", tmp_path / "moved", models / "a")
    (tmp_path / "text.txt").write_text("The quick foxes are here. " * 200)
    sizes = ("--samples", "8", "--length", "16", "--budget", "1s", "--data", tmp_path / "text.txt", "--anyway")
    output_of("merge", models / "a.gguf", anchor, tmp_path / "out", *sizes)
    assert f"model: {models / 'a.gguf'}" in (tmp_path / "out" / "recipe.yml").read_text()
    assert state(tmp_path / "out").keys() == state(anchor).keys()


def test_check_reads_the_weights_of_a_file_and_takes_no_model_for_a_recipe(models: Path, tmp_path: Path) -> None:
    recipe = recipe_for("linear", models / "a.gguf", models / "alone")
    output = output_of("check", write_recipe(recipe, tmp_path / "recipe.yml"))
    assert "was read from" in output
    assert "no weights" not in output
    stock = write_recipe({**recipe, "merge_method": "linear", "parameters": {}}, tmp_path / "stock.yml")
    assert "the recipe is ready to run" in output_of("check", stock)
    assert "a.gguf: " in output_of("check", models / "a.gguf", code=2)


def adapter_of(models: Path, base: Path | None, folder: Path) -> Path:
    """An adapter of the first model, which says that it was trained on `base`."""
    lora(folder, load(str(models / "a")), spread=0.2, base_model_name_or_path=base and str(base))
    return folder


@pytest.mark.slow
def test_an_adapter_belongs_to_its_base_by_whatever_name(models: Path, tmp_path: Path) -> None:
    """transformers reads a GGUF by its folder, which peft writes down: the file in it, and its checkpoint, are it."""
    (tmp_path / "base").mkdir()
    file = shutil.copyfile(models / "a.gguf", tmp_path / "base" / "model-F16.gguf")
    adapter = adapter_of(models, tmp_path / "base", tmp_path / "lora")
    for number, base in enumerate((file, models / "a.gguf", models / "a")):
        output_of("carry", adapter, "--from", base, "--to", models / "b", tmp_path / str(number))
    output = output_of("carry", adapter, "--from", models / "b", "--to", models / "alone", tmp_path / "out", code=2)
    assert "is an adapter of" in output


def test_an_adapter_on_a_file_in_other_methods(models: Path, tmp_path: Path) -> None:
    """Merged as it is read, as on the checkpoint, without the cache that mergekit wants for adapters on those."""
    adapter = adapter_of(models, None, tmp_path / "lora")
    model = {"model": f"{models / 'a.gguf'}+{adapter}", "parameters": {"weight": 1}}
    result = merged({"merge_method": "linear", "models": [model], "dtype": "float32"}, tmp_path / "out")
    expected = load(f"{models / 'a'}+{adapter}").state_dict()
    for key, value in result.items():
        torch.testing.assert_close(value, expected[key], rtol=2e-3, atol=2e-3)


@pytest.mark.slow
def test_the_report_names_the_types_of_a_fine_tune_that_is_carried(models: Path, tmp_path: Path) -> None:
    tuned = shutil.copyfile(models / "a.gguf", tmp_path / "tuned.gguf")
    recipe = recipe_for("task_arithmetic", models / "b", tuned)
    recipe["models"][1]["parameters"]["finetuned_from"] = str(models / "a")
    merged(recipe, tmp_path / "merged")
    output_of("carry", tuned, "--from", models / "a", "--to", models / "b", tmp_path / "carried")
    for folder in ("merged", "carried"):
        notes = json.loads((tmp_path / folder / "rotation_merge.json").read_text())["notes"]
        assert any("was read from tuned.gguf, whose tensors are" in note for note in notes)
