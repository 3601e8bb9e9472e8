"""What is said at info and debug: what was decided, for each donor and block; -v means something in every command."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_support import run
from plugin_support import merged, recipe_for, write_recipe

Pair = tuple[Path, Path]


@pytest.fixture(autouse=True)
def levels() -> Iterator[None]:
    """Loggers as they were."""
    kept = {logger: logger.level for logger in (logging.getLogger(), logging.getLogger("rotation_merge"))}
    yield
    for logger, level in kept.items():
        logger.setLevel(level)


def said(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name.startswith("rotation_merge") and r.levelno == level]


def test_a_merge_says_what_was_decided_for_each_donor_and_block(
    pair: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And nothing unless asked."""
    merged(recipe_for("linear", *pair), tmp_path / "silent")
    assert not said(caplog, logging.INFO)
    caplog.set_level(logging.DEBUG, "rotation_merge")
    merged(recipe_for("linear", *pair), tmp_path / "out")
    info, debug = said(caplog, logging.INFO), said(caplog, logging.DEBUG)
    for block in ("model.layers.0", "model.layers.1"):
        (line,) = [text for text in info if text.startswith(f"{pair[1]}, {block}: ")]
        assert "attn by" in line
        assert "ffn by" in line
        assert "->" in line
        assert [
            text for text in debug if f"{block.removeprefix('model.')}.ffn: " in text and "from the identity" in text
        ]
    assert [text for text in info if text.startswith(f"{pair[1]} is aligned block by block: AlignConfig(")]
    assert [text for text in info if text.startswith(f"{pair[0]}: llama, ")]


@pytest.mark.parametrize("before", [True, False])
def test_before_and_after_the_command(
    pair: Pair, before: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = write_recipe(recipe_for("linear", *pair), tmp_path / "recipe.yml")
    assert run(*(("-v", "check", recipe) if before else ("check", recipe, "-v"))).exit_code == 0
    info = said(caplog, logging.INFO)
    assert any("mergekit 0" in text for text in info)
    assert any(text.startswith(f"{pair[1]} is aligned") for text in info)
    assert any(text.startswith("done in ") for text in info)


def test_twice_gives_tracebacks(tmp_path: Path) -> None:
    assert run("check", tmp_path / "none.yml").exit_code == 2
    done = run("check", tmp_path / "none.yml", "-vv")
    assert not isinstance(done.exception, SystemExit)
