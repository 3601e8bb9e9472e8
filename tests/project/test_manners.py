"""Commands behave as a shell expects: pipes, Ctrl-C, what is logged; errors of other libraries are one line."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from bad_inputs import NOWHERE
from cli_support import CHECKPOINTS, COMMANDS, run
from mergekit.options import MergeOptions
from plugin_support import merged, recipe_for, write_recipe
from safetensors import SafetensorError

from rotation_merge import files
from rotation_merge.cli import app as cli
from rotation_merge.cli import command, show
from rotation_merge.mergekit_plugin import compile as compiling
from rotation_merge.mergekit_plugin.console import line
from rotation_merge.mergekit_plugin.document import Document
from rotation_merge.mergekit_plugin.recipe import Recipe
from rotation_merge.mergekit_plugin.session import Session
from rotation_merge.report.plots import save_barrier
from rotation_merge.run.evaluate import Barrier, Curve

LLAMAS = [str(CHECKPOINTS / f"llama-{seed}") for seed in (0, 1)]
RESUMES = ("align", "barrier", "carry", "measure", "merge", "polish")
"""Commands that continue an interrupted run."""


def failing(error: BaseException) -> Callable[..., object]:
    return lambda *_, **__: (_ for _ in ()).throw(error)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_interrupted_and_read_as_a_shell_does(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [] if name == "demo" else NOWHERE[name].split()
    monkeypatch.setattr(command, "checked_outputs", failing(KeyboardInterrupt()))
    interrupted = run(name, *words)
    monkeypatch.setattr(cli.os, "dup2", lambda *_: None)
    monkeypatch.setattr(cli.click.Group, "invoke", lambda *_: show.Answer({}, ["text"]))
    monkeypatch.setattr(cli.click, "echo", failing(BrokenPipeError()))
    unread = run(name, *words)
    assert (unread.exit_code, unread.output) == (141, "")
    assert (interrupted.exit_code, interrupted.stdout) == (130, "")
    assert interrupted.stderr.startswith("Interrupted")
    assert ("run the same command to continue" in interrupted.stderr) == (name in RESUMES)


def test_ctrl_c_while_libraries_come_up_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "import_module", failing(KeyboardInterrupt()))
    result = run("check", "recipe.yml")
    assert (result.exit_code, result.stderr) == (130, "Interrupted.\n")


@pytest.mark.slow
def test_a_reader_that_goes_away_is_no_error() -> None:
    """`rotation-merge inspect --architectures --json | head -c 1`."""
    program = [Path(sys.executable).with_name("rotation-merge"), "inspect", "--architectures", "--json"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode in (0, 141, -signal.SIGPIPE)


def test_long_work_says_in_a_log_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At most every half minute; short work says nothing."""
    now = [0.0]
    monkeypatch.setattr(show.time, "perf_counter", lambda: now[0])
    progress = show.Progress()
    for now[0], done in ((1.0, 1), (29.0, 2), (31.0, 3), (40.0, 4), (95.0, 5)):
        progress("matching", done, 8)
    progress.close()
    assert capsys.readouterr().err.splitlines() == ["matching 3 of 8, 31 s so far", "matching 5 of 8, 95 s so far"]


def test_sentences_of_a_list_are_joined_as_sentences() -> None:
    assert show.words(["Two words.", "A line."]) == "Two words. A line."
    assert show.words(["a", "b."]) == "a, b."


def test_a_tokenizer_of_the_hub_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(compiling, "fetched", lambda model, *_: asked.append(model.path) or LLAMAS[0])
    for source in ("base", "union", LLAMAS[0], "org/name"):
        recipe = recipe_for("linear", *map(Path, LLAMAS)) | {"tokenizer_source": source}
        session = Session(Recipe.of(Document(recipe)), MergeOptions(quiet=True))
        compiling.compiled(session)
        session.run.end()
    assert asked == ["org/name"]


@pytest.mark.usefixtures("drawn")
def test_a_full_disk_leaves_no_half_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    barrier = Barrier("a", "b", "data", "class", 1, {}, [Curve("plain", [0.0, 1.0], [1.0, 1.0], [0.0, 0.0])])
    save_barrier(barrier, str(tmp_path / "path.svg"))
    before = (tmp_path / "path.svg").read_bytes()
    monkeypatch.setattr(files.os, "fsync", failing(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        save_barrier(barrier, str(tmp_path / "path.svg"))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"path.svg": before}


NAMED = "/data/map.safetensors: cannot be read or written (permission denied); "
ERRORS: list[tuple[Exception, str]] = [
    (SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"), "the disk is full"),
    (SafetensorError("serializing: IoError(Os { code: 28, kind: StorageFull, message: x })"), "the disk is full"),
    (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 24576 vs 24464"), "the disk is full"),
    (RuntimeError("PytorchStreamReader failed reading zip archive: failed finding central directory"), "Pytorch"),
    (SafetensorError("Error while serializing: I/O error: File too large (os error 27)"), "grew over the limit"),
    (SafetensorError("serializing: IoError(Os { code: 27, kind: FileTooLarge, message: x })"), "grew over the limit"),
    (SafetensorError("serializing: IoError(Os { code: 13, kind: PermissionDenied, message: x })"), "permissions"),
    (SafetensorError("Error while deserializing header: InvalidHeaderDeserialization"), "corrupt"),
    (SafetensorError("deserializing header: incomplete metadata, file not fully covered"), "corrupt"),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "(tried to allocate 2.00 GiB)"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes."), "64 bytes)"),
    (MemoryError(), "this machine ran out of memory"),
    (PermissionError(13, "Permission denied", "/data/.map.safetensors.partial"), NAMED),
    (PermissionError(13, "Permission denied", "/data/map.safetensors"), NAMED),
]


@pytest.mark.parametrize(("error", "means"), ERRORS, ids=lambda x: None if isinstance(x, str) else str(x)[:70])
def test_errors_of_other_libraries(error: Exception, means: str) -> None:
    text = line(error)
    assert text.startswith(means) if means in (NAMED, "Pytorch") else means in text


@pytest.fixture
def levels() -> Iterator[None]:
    """Loggers end as they were."""
    before = {logger: logger.level for logger in (logging.getLogger(), logging.getLogger("rotation_merge"))}
    yield
    for logger, level in before.items():
        logger.setLevel(level)


def logged(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name.startswith("rotation_merge") and r.levelno == level]


@pytest.mark.usefixtures("levels")
def test_warnings_of_libraries_stay_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless they are asked for by -vv."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    for flags, shown in (((), False), (("-vv",), True)):
        run("check", "nowhere.yml", *flags)
        (handler,) = logging.getLogger().handlers
        for name, expected in (("mergekit.architecture", shown), ("root", shown), ("rotation_merge.files", True)):
            record = logging.LogRecord(name, logging.WARNING, "", 0, "", (), None)
            assert bool(handler.filter(record)) == expected, name


@pytest.mark.usefixtures("levels")
def test_a_merge_logs_what_was_decided_for_each_donor_and_block(
    pair: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And nothing unless asked."""
    merged(recipe_for("linear", *pair), tmp_path / "silent")
    assert not logged(caplog, logging.INFO)
    caplog.set_level(logging.DEBUG, "rotation_merge")
    merged(recipe_for("linear", *pair), tmp_path / "out")
    info, debug = logged(caplog, logging.INFO), logged(caplog, logging.DEBUG)
    for block in ("layers.0", "layers.1"):
        (text,) = [text for text in info if text.startswith(f"{pair[1]}, model.{block}: ")]
        assert all(words in text for words in ("attn by", "ffn by", "->"))
        assert any(f"{block}.ffn: " in text and "from the identity" in text for text in debug)
    assert any(text.startswith(f"{pair[1]} is aligned block by block: AlignConfig(") for text in info)
    assert any(text.startswith(f"{pair[0]}: llama, ") for text in info)


@pytest.mark.usefixtures("levels")
def test_verbosity_stands_before_or_behind_the_command(
    pair: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Twice gives tracebacks."""
    recipe = write_recipe(recipe_for("linear", *pair), tmp_path / "recipe.yml")
    for words in (("-v", "check", recipe), ("check", recipe, "-v")):
        caplog.clear()
        assert run(*words).exit_code == 0
        info = "\n".join(logged(caplog, logging.INFO))
        assert all(words in info for words in ("mergekit 0", f"{pair[1]} is aligned", "done in "))
        logging.getLogger("rotation_merge").setLevel(logging.WARNING)
    assert run("check", tmp_path / "none.yml").exit_code == 2
    assert not isinstance(run("check", tmp_path / "none.yml", "-vv").exception, SystemExit)
