"""Bad inputs of the rotation-merge commands: one clear line, exit code 2 (a failed check: 1), nothing left behind."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from cli_support import run
from plugin_support import SpoiltDonor, make, state


@dataclass
class Bench(SpoiltDonor):
    """Good models and a good recipe in a folder of their own, to be spoilt."""

    folder: Path

    def __post_init__(self) -> None:
        self.anchor, self.donor, self.out = self.folder / "anchor", self.folder / "donor", self.folder / "out"
        self.recipe = self.folder / "recipe.yml"
        self.recipe.write_text(
            f"merge_method: rotation_merge\nbase_model: {self.anchor}\nmodels:\n  - model: {self.anchor}\n"
            f"    parameters: {{weight: 0.5}}\n  - model: {self.donor}\n    parameters: {{weight: 0.5}}\n"
            "parameters:\n  delegate: linear\ndtype: float32\n"
        )

    def text(self, old: str, new: str) -> None:
        found = self.recipe.read_text()
        assert old in found
        self.recipe.write_text(found.replace(old, new))

    def other(self, family: str, **sizes: object) -> None:
        shutil.rmtree(self.donor)
        make(family, self.donor, **sizes)


@pytest.fixture
def bench(pair: tuple[Path, Path], tmp_path: Path) -> Bench:
    for model in pair:
        shutil.copytree(model, tmp_path / model.name)
    return Bench(tmp_path)


def truncate(bench: Bench) -> None:
    bench.weights().write_bytes(bench.weights().read_bytes()[:-100])


def scramble(bench: Bench) -> None:
    bench.weights().write_bytes(b"\xff" * 4096)


def as_pickle(bench: Bench) -> None:
    bench.weights().unlink()
    (bench.donor / "pytorch_model.bin").write_bytes(pickle.dumps({"model": print}))


def not_finite(bench: Bench) -> None:
    bench.tensors(lambda t: t["model.layers.0.mlp.up_proj.weight"].fill_(float("nan")))


def drop_tensor(bench: Bench) -> None:
    bench.tensors(lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))


def lost_shard(bench: Bench) -> None:
    index = {"metadata": {}, "weight_map": dict.fromkeys(state(bench.donor), "model-00001-of-00002.safetensors")}
    (bench.donor / "model.safetensors.index.json").write_text(json.dumps(index))
    bench.weights().unlink()


SPOILT_DONORS: dict[str, tuple[Callable[[Bench], object], str]] = {
    "donor is not there": (lambda b: shutil.rmtree(b.donor), "no such directory"),
    "donor has no config": (lambda b: (b.donor / "config.json").unlink(), "config.json is missing"),
    "donor's config is not JSON": (lambda b: (b.donor / "config.json").write_text("{"), "config.json"),
    "donor's config is a list": (lambda b: (b.donor / "config.json").write_text("[]"), "config"),
    "donor has no weights": (lambda b: b.weights().unlink(), "weights"),
    "donor's weights are cut off": (truncate, "donor"),
    "donor's weights are noise": (scramble, "donor"),
    "donor's weights are empty": (lambda b: b.weights().write_bytes(b""), "donor"),
    "donor is a pickle of something else": (as_pickle, "donor"),
    "donor lost a shard": (lost_shard, "donor"),
    "donor lost a tensor": (drop_tensor, "up_proj"),
    "donor is of another architecture": (lambda b: b.other("bert"), "bert"),
    "donor is of another size": (lambda b: b.other("llama", hidden_size=64), "64"),
    "donor has other heads": (lambda b: b.other("llama", num_attention_heads=2), "2"),
    "donor has more layers": (lambda b: b.other("llama", num_hidden_layers=3), "layer"),
    "donor's config lies": (lambda b: b.config(intermediate_size=40), "intermediate"),
    "donor's class is not known": (lambda b: b.config(architectures=["NoSuchModel"], model_type="none"), "donor"),
}
"""What may be wrong with a checkpoint, and a word that the line must hold (in `compare`, `align` and `check`)."""

LOOSE = ("layer", "intermediate")
"""Words that stand for a difference that the commands name in several ways."""


def one_line(output: str, *words: str) -> None:
    lines = [line for line in output.splitlines() if line.strip()]
    assert "Traceback" not in output, output
    errors = [line for line in lines if line.startswith("Error: ")]
    assert len(errors) == 1, output
    for word in words:
        assert word in errors[0], errors[0]


@pytest.mark.parametrize("name", SPOILT_DONORS)
def test_compare_and_align_refuse_a_spoilt_donor(bench: Bench, name: str):
    spoil, word = SPOILT_DONORS[name]
    spoil(bench)
    words = () if word in LOOSE else (word,)
    for command in (["compare"], ["align"]):
        out = [str(bench.out)] if command == ["align"] else []
        done = run(*command, bench.anchor, bench.donor, *out)
        assert done.exit_code == 2, done.output
        one_line(done.output, *words)
        assert not bench.out.exists()
        assert not list(bench.folder.glob(".*partial"))


@pytest.mark.parametrize("name", SPOILT_DONORS)
def test_check_finds_a_spoilt_donor_at_its_line(bench: Bench, name: str):
    spoil, word = SPOILT_DONORS[name]
    spoil(bench)
    done = run("check", bench.recipe)
    assert done.exit_code == 1, done.output
    assert "Traceback" not in done.output
    faults = [line for line in done.output.splitlines() if line.startswith(f"{bench.recipe}:6:5: models[1].model")]
    assert faults, done.output
    assert word in LOOSE or any(word in fault for fault in faults), done.output


@pytest.mark.parametrize(
    "name", ["donor is not there", "donor has no config", "donor's weights are noise", "donor lost a tensor"]
)
def test_verify_refuses_what_cannot_be_loaded(bench: Bench, name: str):
    SPOILT_DONORS[name][0](bench)
    done = run("verify", bench.anchor, bench.donor)
    assert done.exit_code == 2, done.output
    one_line(done.output, "donor")


def test_verify_runs_no_code_from_a_checkpoint(bench: Bench):
    bench.config(architectures=["Own"], model_type="own", auto_map={"AutoModel": "evil.Own"})
    (bench.donor / "evil.py").write_text(f"open({str(bench.folder / 'ran')!r}, 'w')")
    done = run("verify", bench.donor, bench.donor)
    assert done.exit_code == 2
    assert not (bench.folder / "ran").exists()


def test_check_of_slices_that_ask_for_layers_beyond_the_model(bench: Bench):
    entry = "{{model: {}, layer_range: [0, 9], parameters: {{weight: 1}}}}"
    models = [entry.format(model) for model in (bench.anchor, bench.donor)]
    bench.recipe.write_text(
        f"merge_method: rotation_merge\nbase_model: {bench.anchor}\nslices:\n  - sources:\n      - {models[0]}\n"
        f"      - {models[1]}\ndtype: float32\n"
    )
    done = run("check", bench.recipe)
    assert done.exit_code == 1, done.output
    assert "the model has 2" in done.output


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "not there": (lambda path: path.unlink(), "no such file"),
    "a directory": (lambda path: (path.unlink(), path.mkdir()), "is a directory"),
    "empty": (lambda path: path.write_text(""), "is empty"),
    "no YAML": (lambda path: path.write_text("a: [1,\nb: }"), "line"),
    "no text": (lambda path: path.write_bytes(b"\xff\xfe\x00\x80"), "recipe.yml"),
}


@pytest.mark.parametrize("name", FILES)
def test_check_of_what_is_no_recipe(bench: Bench, name: str):
    spoil, words = FILES[name]
    spoil(bench.recipe)
    done = run("check", bench.recipe)
    assert done.exit_code == 2, done.output
    one_line(done.output, words)


def test_a_list_is_no_recipe(bench: Bench):
    bench.recipe.write_text("- a\n- b\n")
    done = run("check", bench.recipe)
    assert done.exit_code == 1
    assert "1:1" in done.output


COMMANDS: dict[str, tuple[list[str], str]] = {
    "align without output": (["align", "A", "D"], "OUT"),
    "align over an input": (["align", "A", "D", "D"], "is one of the inputs"),
    "align over a file": (["align", "A", "D", "R"], "is a file"),
    "align with an unknown dtype": (["align", "A", "D", "O", "--dtype", "float23"], "did you mean 'float32'?"),
    "align with a shard size of nothing": (["align", "A", "D", "O", "--shard-size", "x"], "is not a size"),
    "align with impossible layers": (["align", "A", "D", "O", "--layers", "x"], "ranges"),
    "align on a device that is not there": (
        ["align", "A", "D", "O", "--device", "cuda:99"],
        "'cuda:99' cannot be used",
    ),
    "align on a device that is none": (["align", "A", "D", "O", "--device", "gpu"], "'gpu' cannot be used"),
    "align on a device without numbers": (["align", "A", "D", "O", "--device", "meta"], "use --device cpu, or auto"),
    "fit on a device that is not there": (
        ["fit", "A", "D", "--data", "J", "--alignment", "O", "--device", "cuda:99"],
        "'cuda:99' cannot be used",
    ),
    "compare with an unknown group": (["compare", "A", "D", "--heads", "permute"], "permute"),
    "inspect of nothing": (["inspect", "./nothing"], "no such file or directory"),
    "barrier without data": (["barrier", "A", "D"], "--data"),
    "barrier of one model": (["barrier", "A", "--data", "demo:python"], "two models"),
    "barrier on data that are not there": (["barrier", "A", "D", "--data", "./gone.txt"], "no such file"),
    "barrier on unknown demo data": (["barrier", "A", "D", "--data", "demo:latin"], "demo:english"),
    "barrier on no JSON": (["barrier", "A", "D", "--data", "J"], "is not JSON"),
    "barrier on text without a tokenizer": (["barrier", "A", "D", "--data", "T"], "tokenizer"),
    "verify of nothing": (["verify", "A", "./nothing"], "no such directory"),
    "report of nothing": (["inspect", "A", "--report"], "no such file"),
    "unknown command": (["mearge"], "mearge"),
}
"""Other uses: A anchor, D donor, O output, R a file, J a damaged JSON file, T a text."""


@pytest.mark.parametrize("name", COMMANDS)
def test_other_bad_usage(bench: Bench, name: str):
    arguments, words = COMMANDS[name]
    (bench.folder / "bad.jsonl").write_text("{")
    (bench.folder / "text.txt").write_text("words " * 300)
    known = {"A": bench.anchor, "D": bench.donor, "O": bench.out, "R": bench.recipe}
    known |= {"J": bench.folder / "bad.jsonl", "T": bench.folder / "text.txt"}
    done = run(*[known.get(argument, argument) for argument in arguments])
    assert done.exit_code == 2, done.output
    one_line(done.output, words)
    assert not bench.out.exists()


def test_nan_weights_stop_an_alignment(bench: Bench):
    not_finite(bench)
    done = run("align", bench.anchor, bench.donor, bench.out)
    assert done.exit_code == 2
    one_line(done.output, "NaN", "up_proj")
    assert not bench.out.exists()


def test_a_read_only_place_is_one_line(bench: Bench):
    done = run("align", bench.anchor, bench.donor, "/proc/out")
    assert done.exit_code == 2, done.output
    one_line(done.output)
