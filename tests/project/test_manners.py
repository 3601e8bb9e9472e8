"""Commands behave as a shell expects: pipes, Ctrl-C, colours, errors as JSON, nothing written over without a word."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from bad_inputs import NOWHERE
from cli_support import CHECKPOINTS, COMMANDS, output_of, run

from rotation_merge.cli import app as cli
from rotation_merge.cli import command, show
from rotation_merge.errors import RotationMergeError, no_space
from rotation_merge.files import locked
from rotation_merge.mergekit_plugin.console import line

LLAMAS = [str(CHECKPOINTS / f"llama-{seed}") for seed in (0, 1)]


def test_an_error_is_json_where_json_was_asked_for():
    result = run("align", LLAMAS[0], "nowhere", "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout) == {
        "error": {"what": "no such directory", "where": "nowhere", "remedy": "check the path"}
    }


RESUMES = ("align", "barrier", "carry", "measure", "merge", "polish")
"""Commands that continue an interrupted run."""


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_interrupted_and_read_as_a_shell_does(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    given = [] if name == "demo" else NOWHERE[name].split()

    def failing(error: BaseException):
        return lambda *_, **__: (_ for _ in ()).throw(error)

    monkeypatch.setattr(command, "checked_outputs", failing(KeyboardInterrupt()))
    interrupted = run(name, *given)
    monkeypatch.setattr(cli.os, "dup2", lambda *_: None)
    monkeypatch.setattr(cli.click.Group, "invoke", lambda *_: show.Answer({}, ["text"]))
    monkeypatch.setattr(cli.click, "echo", failing(BrokenPipeError()))
    for result, code, said in ((interrupted, 130, "Interrupted"), (run(name, *given), 141, "")):
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
        output = output_of(*arguments, code=2)
        assert "already exists" in output
        assert "--force" in output
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
    from rotation_merge.run.evaluate import Curve

    better = Curve("aligned", [0.0, 0.5, 1.0], [2.0, 1.5, 2.2], [0.0] * 3)
    assert better.barrier() == 0.0
    assert "at 0.5 the loss is 0.6000 below the straight line between its ends" in (better.verdict() or "")
    for losses in ([2.0, 3.0, 2.0], [2.0, 2.0, 2.0]):
        assert Curve("plain", [0.0, 0.5, 1.0], losses, [0.0] * 3).verdict() is None


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


@pytest.mark.usefixtures("drawn")
def test_a_full_disk_leaves_no_half_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from rotation_merge import files
    from rotation_merge.report.plots import save_barrier
    from rotation_merge.run.evaluate import Barrier, Curve

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
