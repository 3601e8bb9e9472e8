"""Commands behave as a shell expects: pipes, Ctrl-C, colours, errors as JSON, nothing written over without a word."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cli_support import CHECKPOINTS, COMMANDS, run

from rotation_merge.cli import app as cli
from rotation_merge.cli import command, show
from rotation_merge.errors import RotationMergeError, no_space
from rotation_merge.files import locked
from rotation_merge.mergekit_plugin.console import line

LLAMAS = [str(CHECKPOINTS / f"llama-{seed}") for seed in (0, 1)]
LORA = str(CHECKPOINTS / "llama-0-lora-english")


def test_an_error_is_json_where_json_was_asked_for():
    result = run("align", LLAMAS[0], "nowhere", "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout) == {
        "error": {"what": "no such directory", "where": "nowhere", "remedy": "check the path"}
    }


NOWHERE: dict[str, list[str]] = {
    "check": ["nowhere"],
    "inspect": ["nowhere"],
    "align": ["nowhere", "nowhere", "out"],
    "carry": ["nowhere", "out", "--from", "nowhere", "--to", "nowhere"],
    "verify": ["nowhere", "nowhere"],
    "barrier": ["nowhere", "nowhere", "--data", "demo:python"],
    "merge": ["nowhere", "nowhere", "out"],
    "doctor": ["nowhere"],
    "polish": ["nowhere", "out", "--teachers", "nowhere"],
    "evaluate": ["nowhere", "--data", "demo:python"],
    "measure": ["nowhere", "--data", "self", "--out", "out"],
    "lora": ["nowhere", "nowhere", "out"],
    "push": ["nowhere", "org/name"],
    "demo": ["--only", "nowhere"],
}
"""Every command, given what is not there."""


@pytest.mark.parametrize("name", COMMANDS)
def test_what_is_not_there_is_one_line_in_every_command(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As text and as JSON; nothing is written."""
    monkeypatch.chdir(tmp_path)
    result = run(name, *NOWHERE[name])
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert sum("Error: " in line for line in result.stderr.splitlines()) == 1, result.stderr
    assert "nowhere" in result.stderr
    assert "Traceback" not in result.stderr
    result = run(name, *NOWHERE[name], "--json")
    assert result.exit_code == 2
    assert "nowhere" in str(json.loads(result.stdout)["error"])
    assert list(tmp_path.iterdir()) == []


WRONG: dict[str, tuple[list[str], str]] = {
    "a doctor's folder without a model": (["doctor", "empty"], "config.json is missing"),
    "a doctor's file that is no recipe": (["doctor", "file"], "names no merge_method"),
    "a doctor's list": (["doctor", "list.yml"], "names no merge_method"),
    "a doctor's recipe of nothing": (["doctor", "none.yml"], "none.yml"),
    "a doctor's bytes": (["doctor", "bytes.yml"], "is not a text file"),
    "a model that nobody merged, pushed": (["push", LLAMAS[0], "org/name"], "no such file"),
    "a file, pushed": (["push", "file", "org/name"], "no such file"),
    "a repository's name": (["push", LLAMAS[0], "a/b/c"], "names no repository"),
    "weights, inspected": (["inspect", f"{LLAMAS[0]}/model.safetensors"], "neither an alignment nor statistics"),
    "junk, inspected": (["inspect", "junk.safetensors"], "cannot be read"),
    "a damaged report, inspected": (["inspect", "list/rotation_merge.json"], "is not a report"),
    "the fingerprint of a folder": (["inspect", "empty", "--fingerprint"], "config.json is missing"),
    "the fingerprint of junk": (["inspect", "junk.safetensors", "--fingerprint"], "cannot be read"),
    "the fingerprint of a recipe": (["inspect", "half.yml", "--fingerprint"], "nor a report (.json)"),
    "the report of another version": (["inspect", "other", "--report"], "it lacks 'anchor'"),
    "the report of a folder without one": (["inspect", "empty", "--report"], "no such file"),
    "the report of a list": (["inspect", "list", "--report"], "is not a report"),
    "a draft of nothing": (["inspect", "nowhere", "--draft"], "no such directory"),
    "a proof of nothing": (["inspect", "--prove", "nowhere"], "cannot be read"),
    "two questions": (["inspect", LLAMAS[0], "--draft", "--fingerprint"], "use one at a time"),
    "a list about a model": (["inspect", LLAMAS[0], "--methods"], "takes no model"),
    "nothing to inspect": (["inspect"], "name a model, a recipe or a file"),
    "a config of no proof": (["inspect", LLAMAS[0], "--config", "file"], "--config needs --prove"),
    "options beside a recipe": (["inspect", "none.yml", "--heads", "permutation"], "an option of aligning a model"),
    "a command that there is not": (["inspct", LLAMAS[0]], "did you mean 'inspect'?"),
    "bytes, inspected": (["inspect", "bytes.yml"], "cannot be read"),
    "half a recipe, inspected": (["inspect", "half.yml"], "not valid YAML"),
    "layers that are none": (["inspect", LLAMAS[0], "--layers", "9"], "the model has no layer 9"),
    "data that is not there": (["evaluate", LLAMAS[0], "--data", "none.txt"], "no such file"),
    "data of nothing": (["evaluate", LLAMAS[0], "--data", "file.txt"], "give more text"),
    "arrays that are none": (["evaluate", LLAMAS[0], "--data", "junk.npz"], "is not an archive of arrays"),
    "the fingerprint of an adapter": (["inspect", LORA, "--fingerprint"], "is an adapter, not a model"),
    "a table without texts": (["evaluate", LLAMAS[0], "--data", "a.csv"], "cannot be read"),
}
"""Wrong calls, and what is said of them."""


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of things that are not what commands want."""
    folder = tmp_path_factory.mktemp("wrong")
    for name in ("empty", "list", "other"):
        (folder / name).mkdir()
    texts = {
        **{"file": "x", "file.txt": "x", "junk.safetensors": "x", "junk.npz": "x", "a.csv": "one,two\n1,2\n"},
        **{"list.yml": "- 1", "half.yml": "a: [1", "none.yml": "merge_method: linear\nmodels: []"},
        **{"list/rotation_merge.json": "[]", "other/rotation_merge.json": '{"version": 99}'},
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "bytes.yml").write_bytes(b"\xff\xfe\x00")
    return folder


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_one_line(name: str, wrong: Path, monkeypatch: pytest.MonkeyPatch):
    """As text and as JSON; nothing is written."""
    monkeypatch.chdir(wrong)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    before = sorted(wrong.rglob("*"))
    arguments, said = WRONG[name]
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    assert said in result.stderr
    result = run(*arguments, "--json")
    assert result.exit_code == 2
    assert said in str(json.loads(result.stdout)["error"]).replace("\\", "")
    assert sorted(wrong.rglob("*")) == before


RESUMES = ("align", "barrier", "carry", "measure", "merge", "polish")
"""Commands that continue an interrupted run."""


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_interrupted_and_read_as_a_shell_does(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    given = [word for word in NOWHERE[name] if not word.startswith("--nowhere")]
    given = [] if name == "demo" else given
    monkeypatch.setattr(command.os, "dup2", lambda *_: None)
    for error, code, said in ((KeyboardInterrupt(), 130, "Interrupted"), (BrokenPipeError(), 141, "")):
        monkeypatch.setattr(command, "_printed", lambda *_, error=error, **__: (_ for _ in ()).throw(error))
        result = run(name, *given)
        assert (result.exit_code, result.stdout) == (code, ""), result.output
        assert result.stderr.startswith(said)
        assert bool(result.stderr) == bool(said)
        assert ("run the same command to continue" in result.stderr) == (bool(said) and name in RESUMES)


def test_ctrl_c_while_libraries_come_up_ends_with_130(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cli, "import_module", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    result = run("check", "recipe.yml")
    assert (result.exit_code, result.stderr) == (130, "Interrupted.\n")


def test_what_is_there_is_not_written_over(tmp_path: Path):
    file = tmp_path / "maps.safetensors"
    file.write_text("mine")
    for arguments in (
        ["align", *LLAMAS, "--alignment", file],
        ["align", *LLAMAS, "--learn", "--data", "demo:python", "--alignment", file],
        ["measure", LLAMAS[0], "--data", "self", "--out", file],
        ["align", *LLAMAS, tmp_path],
        ["carry", LLAMAS[0], tmp_path, "--from", LLAMAS[0], "--to", LLAMAS[1]],
        ["polish", LLAMAS[0], tmp_path, "--teachers", LLAMAS[1]],
    ):
        result = run(*arguments)
        assert result.exit_code == 2, arguments
        assert "already exists" in result.output
        assert "--force" in result.output
    assert file.read_text() == "mine"
    assert run("align", *LLAMAS, "--alignment", file, "--force").exit_code == 0
    assert file.read_bytes() != b"mine"


@pytest.mark.slow
def test_a_reader_that_goes_away_is_no_error():
    """`rotation-merge inspect --architectures --json | head -c 1`."""
    command = [Path(sys.executable).with_name("rotation-merge"), "inspect", "--architectures", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    said = process.stderr.read().decode()
    assert process.wait() in (0, 141, -signal.SIGPIPE)
    assert said == ""


def test_long_work_says_in_a_log_how_far_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """At most every half minute; short work says nothing."""
    now = [0.0]
    monkeypatch.setattr(show.time, "perf_counter", lambda: now[0])
    progress = show.Progress()
    for now[0], done in ((1.0, 1), (29.0, 2), (31.0, 3), (40.0, 4), (95.0, 5)):
        progress("matching", done, 8)
    progress.close()
    assert capsys.readouterr().err.splitlines() == ["matching 3 of 8, 31 s so far", "matching 5 of 8, 95 s so far"]


def test_below_the_line_is_explained():
    """A path that never rises above the line between its ends has no barrier; how far it falls below is said."""
    from rotation_merge.run.curves import Curve

    better = Curve("aligned", [0.0, 0.5, 1.0], [2.0, 1.5, 2.2], [0.0] * 3)
    assert better.barrier() == 0.0
    assert "at 0.5 the loss is 0.6000 below the straight line between its ends" in (better.verdict() or "")
    for losses in ([2.0, 3.0, 2.0], [2.0, 2.0, 2.0]):
        assert Curve("plain", [0.0, 0.5, 1.0], losses, [0.0] * 3).verdict() is None


@pytest.mark.parametrize("entry", ["tokenizer_source: ./nowhere", "tokenizer: {source: ./nowhere}"])
def test_a_tokenizer_that_is_not_there_is_a_fault_at_once(entry: str, tmp_path: Path):
    recipe = tmp_path / "recipe.yml"
    models = "".join(f"  - model: {model}\n    parameters: {{weight: 0.5}}\n" for model in LLAMAS)
    recipe.write_text(f"merge_method: rotation_merge\nbase_model: {LLAMAS[0]}\nmodels:\n{models}{entry}\n")
    done = run("check", recipe)
    assert done.exit_code == 1
    assert "recipe.yml:8:" in done.output
    assert "./nowhere: no such directory" in done.output


def test_a_tokenizer_of_the_hub_is_asked_for_once(monkeypatch: pytest.MonkeyPatch):
    from mergekit.options import MergeOptions

    from rotation_merge.mergekit_plugin import compile as compiling
    from rotation_merge.mergekit_plugin.document import Document
    from rotation_merge.mergekit_plugin.recipe import Recipe
    from rotation_merge.mergekit_plugin.session import Session

    asked = []
    monkeypatch.setattr(compiling, "fetched", lambda model, *_: asked.append(model.path) or LLAMAS[0])
    models = [{"model": model, "parameters": {"weight": 0.5}} for model in LLAMAS[:2]]
    for source in ("base", "union", LLAMAS[0], "org/name"):
        recipe = {"merge_method": "rotation_merge", "base_model": LLAMAS[0], "models": models}
        session = Session(Recipe.of(Document({**recipe, "tokenizer_source": source})), MergeOptions(quiet=True))
        compiling.compiled(session)
        session.run.end()
    assert asked == ["org/name"]


def test_models_as_strings_or_a_mapping(tmp_path: Path):
    recipe = tmp_path / "recipe.yml"
    head = f"merge_method: rotation_merge\nbase_model: {LLAMAS[0]}\n"
    for models, said in (
        (
            f"models:\n  - {LLAMAS[1]}\n",
            "4:5: models[0]: input should be a valid dictionary; write '- model: /",
        ),
        (f"models:\n  model: {LLAMAS[1]}\n", "3:1: models: input should be a valid list"),
    ):
        recipe.write_text(head + models)
        done = run("check", recipe)
        assert said in done.output
        assert "1 fault" in done.output


def test_a_full_disk_leaves_no_half_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from rotation_merge import files
    from rotation_merge.report.plots import save_barrier
    from rotation_merge.run.curves import Barrier, Curve

    found = Barrier("a", "b", "data", "class", 1, {}, [Curve("plain", [0.0, 1.0], [1.0, 1.0], [0.0, 0.0])])
    save_barrier(found, str(tmp_path / "path.svg"))
    before = (tmp_path / "path.svg").read_bytes()
    monkeypatch.setattr(files.os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        save_barrier(found, str(tmp_path / "path.svg"))
    assert [path.name for path in tmp_path.iterdir()] == ["path.svg"]
    assert (tmp_path / "path.svg").read_bytes() == before


def test_what_torch_says_of_a_full_disk():
    assert no_space(RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 24576 vs 24464"))
    assert not no_space(
        RuntimeError("PytorchStreamReader failed reading zip archive: failed finding central directory")
    )


def test_a_file_that_cannot_be_written_is_named_by_its_own_name():
    for name in ("/data/.map.safetensors.partial", "/data/map.safetensors"):
        told = line(PermissionError(13, "Permission denied", name))
        assert told.startswith("/data/map.safetensors: cannot be read or written (permission denied); ")
    with pytest.raises(RotationMergeError, match="/proc/nothing: cannot be written"), locked("/proc/nothing"):
        pass
