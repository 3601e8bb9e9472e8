"""Checkpoints that end every path in one line: weights that mergekit and transformers would take from different files,
and configs that count more than the files hold."""

from __future__ import annotations

import copy
import json
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from carry_support import make_adapter
from cli_support import COMMANDS, run
from hub_support import at_home, served
from plugin_support import make, mergekit_yaml, one_error, recipe_for, state
from residual_support import Checkpoint, case
from safetensors.torch import save_file
from tiny_models import ALL
from tiny_models import make as model_of

from rotation_merge import RotationMergeError, average

ENDLESS = 400_000_000


@pytest.fixture(autouse=True)
def soon() -> Iterator[None]:
    """Each test ends, or fails, after seconds."""

    def ended(*_: object) -> None:
        pytest.fail("it takes too long")  # no Exception: nobody catches it

    before = signal.signal(signal.SIGVTALRM, ended)
    signal.setitimer(signal.ITIMER_VIRTUAL, 20)
    yield
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    signal.signal(signal.SIGVTALRM, before)


def in_shards(model: Path) -> dict[str, list[str]]:
    """Write a checkpoint anew in two shards; by shard, what it holds."""
    tensors = state(model)
    (model / "model.safetensors").unlink()
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    held = {name: sorted(tensors)[i::2] for i, name in enumerate(names)}
    for name, keys in held.items():
        save_file({key: tensors[key] for key in keys}, model / name, {"format": "pt"})
    index = {key: name for name, keys in held.items() for key in keys}
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return held


def two_files(model: Path) -> None:
    tensors = state(model)
    in_shards(model)
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, model / "model.safetensors", {"format": "pt"})


def two_shards(model: Path) -> None:
    tensors = state(model)
    (first, keys), (_, others) = in_shards(model).items()
    save_file({key: tensors[key] + 1 for key in [*keys, others[0]]}, model / first, {"format": "pt"})


def two_pickles(model: Path) -> None:
    tensors = state(model)
    (model / "model.safetensors").unlink()
    names = [f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2)]
    for name in names:
        torch.save(tensors, model / name)
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, names[0]) | {min(tensors): names[1]}}
    (model / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def an_adapter_too(model: Path) -> None:
    make_adapter(Checkpoint(case("llama", "llama"), model).architecture, state(model)).save_pretrained(str(model))


def another_file_named(model: Path) -> None:
    save_file({n: x + 1 for n, x in state(model).items()}, model / "better.safetensors", {"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "transformers_weights": "better.safetensors"}))


def layers_without_end(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    del config["layer_types"]  # transformers makes a list of them
    (model / "config.json").write_text(json.dumps({**config, "num_hidden_layers": ENDLESS}))


SPOILT: dict[Callable[[Path], None], str] = {
    layers_without_end: f"'num_hidden_layers' is {ENDLESS}",
    two_files: "model.safetensors and model.safetensors.index.json",
    two_shards: "model-00001-of-00002.safetensors and in model-00002-of-00002.safetensors",
    two_pickles: "pytorch_model-00001-of-00002.bin and in pytorch_model-00002-of-00002.bin",
    an_adapter_too: "model.safetensors and adapter_config.json",
    another_file_named: "better.safetensors",
}

CALLS = {
    "align": ("A", "B", "OUT"),
    "barrier": ("A", "B", "--data", "synthetic"),
    "carry": ("B", "--from", "A", "--to", "A", "OUT"),
    "check": ("RECIPE",),
    "gguf": ("B", "OUT.gguf"),
    "compare": ("A", "B"),
    "doctor": ("A", "A", "B"),
    "evaluate": ("A", "B", "--data", "DATA"),
    "fingerprint": ("B",),
    "fit": ("A", "B", "--data", "DATA", "--alignment", "OUT"),
    "inspect": ("B",),
    "measure": ("B", "--data", "DATA", "--out", "OUT"),
    "merge": ("A", "B", "OUT", "--data", "DATA"),
    "polish": ("A", "OUT", "--teachers", "A", "B", "--data", "DATA"),
    "verify": ("A", "B"),
}
"""By command, a call that reads B."""

READ_NO_MODEL = {"demo", "lora", "pull", "push"}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models of one kind."""
    folder = tmp_path_factory.mktemp("good")
    for seed, name in enumerate("AB"):
        make("qwen2", folder / name, seed, tie_word_embeddings=False)
    return folder


@pytest.fixture
def bench(good: Path, tmp_path: Path) -> Path:
    """Those models, a recipe for them, and data."""
    shutil.copytree(good, tmp_path / "models")
    folder = tmp_path / "models"
    (folder / "RECIPE").write_text(yaml.safe_dump(recipe_for("linear", folder / "A", folder / "B")))
    rows = [{"input_ids": list(range(i, i + 8)), "labels": list(range(i, i + 8))} for i in range(16)]
    (folder / "DATA").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "DATA").rename(folder / "DATA.jsonl")
    return folder


def refused(output: str, words: str) -> None:
    text = " ".join(output.split())
    assert "Traceback" not in output
    assert words in text, output


@pytest.mark.parametrize("spoil", SPOILT, ids=lambda spoil: spoil.__name__)
def test_no_merge_takes_it(spoil: Callable[[Path], None], bench: Path) -> None:
    spoil(bench / "B")
    result = mergekit_yaml((bench / "RECIPE").read_text(), bench / "OUT")
    assert result.exit_code != 0
    refused(one_error(result.output), SPOILT[spoil])
    assert not (bench / "OUT").exists()
    done = run("check", bench / "RECIPE")
    assert done.exit_code == 1
    refused(done.output, SPOILT[spoil])


@pytest.mark.parametrize("name", sorted(CALLS.keys() & COMMANDS.keys()))
def test_no_command_takes_it(name: str, bench: Path) -> None:
    before = sorted(bench.rglob("*"))
    for spoil in (two_files, layers_without_end) if name not in ("align", "verify", "carry") else SPOILT:
        kept = bench.parent / "kept"
        shutil.copytree(bench / "B", kept)
        spoil(bench / "B")
        known = {path.name.partition(".")[0]: path for path in bench.iterdir()}
        known |= {out: bench / out for out in ("OUT", "OUT.gguf")}
        done = run(name, *(known.get(word, word) for word in CALLS[name]))
        assert done.exit_code in (1, 2), done.output
        refused(done.output, SPOILT[spoil])
        shutil.rmtree(bench / "B")
        kept.rename(bench / "B")
    assert sorted(bench.rglob("*")) == before


def test_every_command_is_called_or_reads_no_model() -> None:
    assert COMMANDS.keys() <= CALLS.keys() | READ_NO_MODEL


def by_name(config: Any, entry: str = "") -> Iterator[str]:
    """The entries of a config that count layers or experts, by their paths."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from by_name(value, f"{entry}{name}.")
        elif type(value) is int and value > 0 and re.fullmatch(r"(n|.*_layers?|.*_experts|depth)", name):
            yield entry + name


@pytest.mark.parametrize("family", sorted({case.family for case in ALL}))
def test_no_architecture_is_laid_out_beyond_its_tensors(family: str) -> None:
    """In Python, too: layers and experts are counted before they are made."""
    model = model_of(next(case for case in ALL if case.family == family))
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    refused = []
    for entry in by_name(config):
        spoilt = copy.deepcopy(config)
        part = spoilt
        for step in entry.split(".")[:-1]:
            part = part[step]
        part[entry.rpartition(".")[2]] = ENDLESS
        try:
            average([(model.state_dict(), spoilt)])
        except RotationMergeError as error:
            refused.append(str(error))
    assert any(str(ENDLESS) in line for line in refused) or family == "nemotron_h"  # which lists its layers


def test_an_index_of_the_one_file_is_not_ambiguous(bench: Path) -> None:
    """Nor are pickles beside safetensors, which everybody reads."""
    tensors = state(bench / "B")
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (bench / "B" / "model.safetensors.index.json").write_text(json.dumps(index))
    torch.save(tensors, bench / "B" / "pytorch_model.bin")
    assert run("check", bench / "RECIPE").exit_code == 0
    assert run("verify", bench / "B", bench / "B").exit_code == 0


@pytest.mark.parametrize("spoil", [two_files, layers_without_end])
def test_nor_one_of_the_hub(
    spoil: Callable[[Path], None], bench: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = (bench / "RECIPE").read_text().replace(str(bench / "B"), "org/b")
    (bench / "RECIPE").write_text(recipe)
    spoil(bench / "B")
    with served() as hub:
        at_home(hub, tmp_path / "cache", monkeypatch)
        hub.publish("org/b", bench / "B")
        refused(one_error(mergekit_yaml(recipe, bench / "OUT").output), SPOILT[spoil])
        for asked in (("verify", bench / "A", "org/b"), ("compare", bench / "A", "org/b"), ("check", bench / "RECIPE")):
            done = run(*asked)
            assert done.exit_code != 0, done.output
            refused(done.output, SPOILT[spoil])
    assert not (bench / "OUT").exists()
