"""What other libraries' errors become, and what is logged."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cli_support import run
from plugin_support import merged, recipe_for, write_recipe
from safetensors import SafetensorError

from rotation_merge.mergekit_plugin.console import line

ERRORS: list[tuple[Exception, str]] = [
    (SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"), "the disk is full"),
    (SafetensorError("serializing: IoError(Os { code: 28, kind: StorageFull, message: x })"), "the disk is full"),
    (SafetensorError("Error while serializing: I/O error: File too large (os error 27)"), "grew over the limit"),
    (SafetensorError("serializing: IoError(Os { code: 27, kind: FileTooLarge, message: x })"), "grew over the limit"),
    (SafetensorError("serializing: IoError(Os { code: 13, kind: PermissionDenied, message: x })"), "permissions"),
    (SafetensorError("Error while deserializing header: InvalidHeaderDeserialization"), "corrupt"),
    (SafetensorError("deserializing header: incomplete metadata, file not fully covered"), "corrupt"),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "(tried to allocate 2.00 GiB)"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes."), "64 bytes)"),
    (MemoryError(), "this machine ran out of memory"),
]


@pytest.mark.parametrize(("error", "means"), ERRORS, ids=lambda x: None if isinstance(x, str) else str(x)[:70])
def test_errors_of_other_libraries(error: Exception, means: str) -> None:
    assert means in line(error)


@pytest.fixture(autouse=True)
def levels() -> Iterator[None]:
    """Loggers as they were."""
    before = {logger: logger.level for logger in (logging.getLogger(), logging.getLogger("rotation_merge"))}
    yield
    for logger, level in before.items():
        logger.setLevel(level)


def logged(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name.startswith("rotation_merge") and r.levelno == level]


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


@pytest.mark.parametrize("before", [True, False])
def test_verbosity_stands_before_or_behind_the_command(
    pair: tuple[Path, Path], before: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = write_recipe(recipe_for("linear", *pair), tmp_path / "recipe.yml")
    assert run(*(("-v", "check", recipe) if before else ("check", recipe, "-v"))).exit_code == 0
    info = "\n".join(logged(caplog, logging.INFO))
    assert all(words in info for words in ("mergekit 0", f"{pair[1]} is aligned", "done in "))


def test_twice_gives_tracebacks(tmp_path: Path) -> None:
    assert run("check", tmp_path / "none.yml").exit_code == 2
    assert not isinstance(run("check", tmp_path / "none.yml", "-vv").exception, SystemExit)
