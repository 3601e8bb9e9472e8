"""Every bad input ends in one line: what is wrong, where, and what to do; nothing is written, no input changes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
from pathlib import Path

import plugin_support
import pytest
import yaml
from bad_checkpoints import EVERY_READER, NO_READERS, READERS
from bad_ggufs import STORED
from bad_inputs import BESIDE, GOOD, NOWHERE, ROWS
from bad_recipes import STOCK
from hub_support import Hub
from huggingface_hub import constants
from interrupted_support import forked
from mergekit.config import MergeConfiguration
from programs import run
from spoiling import RECIPE, Row, model, put

import rotation_merge as rm

LONGEST = 600


FILES = {"file": b"x", "bad.jsonl": b"{", "text.txt": b"words " * 300, "junk.npz": b"x", "a.csv": b"one,two\n1,2\n"}
FILES |= {"few.txt": b"x", "bad.json": b"{", "junk.safetensors": b"x", "list.yml": b"- 1", "half.yml": b"a: [1"}
FILES |= {"none.yml": b"merge_method: linear\nmodels: []", "bytes.yml": b"\xff\xfe\x00", "plot.svg": b"x"}
FILES |= {"list/rotation_merge.json": b"[]", "list/barrier.json": b"[]", "recipe.yml": RECIPE}
FILES |= {"other/rotation_merge.json": b'{"version": 99}'}
"""The good recipe, and files that no command takes."""


@pytest.fixture(scope="module")
def good_inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three Llamas, one of four layers, a ViT, an alignment file of the first two, samples, a GGUF."""
    folder = tmp_path_factory.mktemp("good")
    for seed, name in enumerate(("anchor", "donor", "third")):
        model("LlamaForCausalLM", folder / name, seed)
    model("LlamaForCausalLM", folder / "deep", num_hidden_layers=4)
    model("ViTForImageClassification", folder / "vit", image_size=16, patch_size=8)
    aligned = rm.align(str(folder / "anchor"), str(folder / "donor"), residual="rotation", heads="permutation")
    aligned.save(folder / "map")
    rows = [{"input_ids": list(range(i, i + 8)), "labels": list(range(i, i + 8))} for i in range(16)]
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.copyfile(STORED, folder / "whole.gguf")
    for name, content in FILES.items():
        put(str(folder / name), content)()
    return folder


@pytest.fixture
def bench(soon: None, good_inputs: Path, home: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """A copy of the good inputs as the current folder, an empty stand-in of the hub, a limit of time, and a user who
    answers every question with yes."""
    shutil.copytree(good_inputs, tmp_path / "bench")
    monkeypatch.chdir(tmp_path / "bench")
    home.repos.clear()
    for name, value in (("HF_HUB_OFFLINE", True), ("HF_HOME", constants.HF_HUB_CACHE)):
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "bench" / "modules"))
    return home


def snapshot() -> dict[str, str]:
    """A digest of everything in the current folder."""

    def digest(path: Path) -> str:
        if path.is_symlink():
            return os.readlink(path)
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"

    return {str(path): digest(path) for path in sorted(Path().rglob("*"))}


def is_told(line: str, words: tuple[str, ...]) -> None:
    assert line.isprintable(), line
    assert len(line) < LONGEST, line
    for word in words:
        assert word in line, line


def one_error(code: int, out: str, err: str) -> str:
    """The one line of a program that was given a bad input."""
    assert (code, out) == (2, ""), (code, out, err)
    return plugin_support.one_error(err)


def check_recipe(row: Row) -> None:
    """`check` finds the fault, and `mergekit-yaml` stops at one that `check` finds."""
    faults: list[str] = []
    places: set[tuple[str, ...]] = set()
    if "check" in row.recipe:
        code, out, err = run("rotation-merge", "check", "recipe.yml")
        assert (code, err) == (1, ""), (code, out, err)
        *lines, last = out.splitlines()
        faults = [line for line in lines if not line.endswith("(a note)")]
        assert last.startswith(f"{len(faults)} fault"), out
        assert len(faults) == row.faults, out
        matches = [re.match(r"recipe\.yml:(\d+):(\d+): ", fault) for fault in faults]
        places = {match.groups() for match in matches if match}
        assert all(matches), out
        is_told(next((fault for fault in faults if row.words[0] in fault), faults[0]), row.words)
    if "merge" in row.recipe:
        line = one_error(*run("mergekit-yaml", "recipe.yml", row.out, "--quiet", *row.flags))
        is_told(line, row.words)
        place = re.search(r"line (\d+), column (\d+)", line)
        assert not faults or place is None or place.groups() in places, (line, faults)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_bad_input(row: Row, bench: Hub) -> None:
    row.spoil()
    if row.hub:
        bench.publish("org/donor", Path("donor"))
        constants.HF_HUB_OFFLINE = False
    before = snapshot()
    if row.recipe:
        check_recipe(row)
    for command in row.commands:
        is_told(one_error(*run("rotation-merge", *shlex.split(command))), row.words)
        if not (row.recipe or row.python):
            code, out, _ = run("rotation-merge", *shlex.split(command), "--json")
            told = "{where}: {what}; {remedy}".format(**json.loads(out)["error"])
            is_told(" ".join(told.split()), row.words)
            assert code == 2
    if row.python is not None:
        with pytest.raises(rm.RotationMergeError) as caught:
            row.python()
        is_told(str(caught.value), row.words)
        assert row.recipe or "--" not in re.sub(r"\(the command .* with --force\)", "", str(caught.value))
    assert snapshot() == before


@pytest.mark.parametrize("name", EVERY_READER)
def test_every_command_refuses_it(name: str, bench: Hub) -> None:
    spoil, words = EVERY_READER[name]
    spoil()
    before = snapshot()
    for command, line in READERS.items():
        code, out, err = run("rotation-merge", *shlex.split(line))
        assert code in (1, 2), (command, code, out, err)
        assert "Traceback" not in out + err
        assert words in " ".join((out + err).split()), (command, out, err)
        assert command in ("check", "doctor") or one_error(code, out, err)
        assert snapshot() == before, command


@pytest.mark.parametrize("name", BESIDE)
def test_no_command_runs_code_beside_a_checkpoint(name: str, bench: Hub) -> None:
    """Whatever a user answers who is asked; laws above try classes that transformers lacks, and pickles."""
    BESIDE[name]()
    for command, line in READERS.items():
        _, out, err = run("rotation-merge", *shlex.split(line))
        assert "Traceback" not in out + err, command
        assert not Path("ran").exists(), command
        assert not Path("modules").exists(), command


def test_every_command_reads_the_donor_or_no_model() -> None:
    _, out, _ = run("rotation-merge", "--help")
    commands = set(re.findall(r"^  (\w+)  ", out.partition("Commands:")[2], re.MULTILINE))
    readers = {line.split()[0] for line in READERS.values()}
    assert commands == NOWHERE.keys()
    assert commands <= readers | NO_READERS
    assert readers <= commands


@pytest.mark.parametrize("name", GOOD)
def test_what_is_near_is_good(name: str, bench: Hub) -> None:
    GOOD[name]()
    assert run("rotation-merge", "check", "recipe.yml")[0] == 0
    code, out, err = run("mergekit-yaml", "recipe.yml", "out", "--quiet")
    assert (code, Path("out", "model.safetensors").exists()) == (0, True), (out, err)


def test_weights_that_scale_the_model_are_a_note(bench: Hub) -> None:
    recipe = RECIPE.replace("weight: 0.5", "weight: 1")
    Path("recipe.yml").write_text(recipe.replace("delegate: linear", "delegate: linear\n  normalize: false"))
    code, out, _ = run("rotation-merge", "check", "recipe.yml")
    assert code == 0
    assert "the weights add up to 2; make them add up to 1, or leave out 'normalize: false' (a note)" in out
    assert run("mergekit-yaml", "recipe.yml", "out", "--quiet")[0] == 0


@pytest.mark.parametrize("method", STOCK)
def test_recipes_of_other_methods_that_run_are_ready(method: str, bench: Hub) -> None:
    """What mergekit ignores, such as `out_path`, is a note, as is a base without a tokenizer."""
    Path("recipe.yml").write_text(f"merge_method: {method}\n{STOCK[method]}\n")
    code, out, _ = run("rotation-merge", "check", "recipe.yml")
    assert (code, "out_path" in out) == (0, "out_path" in STOCK[method]), out
    assert "anchor: it has no tokenizer" in out
    flags = ("--quiet", "--no-copy-tokenizer", "--no-write-model-card")
    assert run("mergekit-yaml", "recipe.yml", "out", *flags)[0] == 0


def test_a_line_is_all_that_a_user_sees(bench: Hub) -> None:
    """In a process of its own; a traceback on request."""
    Path("recipe.yml").write_text(RECIPE.replace("linear", "lienar"))
    done, more = (forked("mergekit-yaml", "recipe.yml", "out", *flags) for flags in ((), ("-vv",)))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Error: ")
    assert done.stderr.count("\n") == 1
    assert "Traceback" in more.stderr


@pytest.mark.parametrize(
    "text",
    [
        "models: [{model: nowhere}]\nparameters: {unknown: 1}",
        "base_model: rotation_merge\nmodels: [{model: x/rotation_merge-out}]",
        "models: [rotation_merge/a",
    ],
)
def test_other_methods_are_left_alone(text: str, bench: Hub) -> None:
    """A recipe of mergekit's own fails as it does without us, also where a path in it is called as our method is."""
    Path("recipe.yml").write_text(f"merge_method: linear\n{text}\n")
    with pytest.raises(Exception) as caught:
        run("mergekit-yaml", "recipe.yml", "out")
    assert not isinstance(caught.value, rm.RotationMergeError)


def test_mergekit_pytorch_refuses(bench: Hub) -> None:
    Path("recipe.yml").write_text(RECIPE.replace("model: anchor", "model: anchor/model.safetensors"))
    assert "mergekit-yaml" in one_error(*run("mergekit-pytorch", "recipe.yml", "out"))


def test_a_configuration_made_in_python_is_refused() -> None:
    with pytest.raises(rm.RotationMergeError, match="tokeniser"):
        MergeConfiguration.model_validate({**yaml.safe_load(RECIPE), "tokeniser": "base"})
