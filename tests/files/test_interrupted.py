"""A merge that is stopped or runs out of room never leaves a directory that loads as a model it is not."""

from __future__ import annotations

import resource
import signal
import subprocess
from pathlib import Path

import pytest
from interrupted_support import forked, run
from plugin_support import one_error, recipe_for, write_recipe


@pytest.mark.slow
def test_interrupted_by_the_user(deep_pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Ctrl-C: nothing is left, not even the directories above the output."""
    recipe = write_recipe(recipe_for("linear", *deep_pair), tmp_path / "recipe.yml")
    outcomes = []
    for delay in (0.0, 0.005, 0.02):
        out = tmp_path / "deep" / "er" / "out"
        arguments, staging = ("mergekit-yaml", recipe, out, "--quiet"), out.with_name(".out.partial")
        outcomes.append(run(*arguments, watched=staging, after=delay, signal_number=signal.SIGINT))
        if outcomes[-1]:
            assert not (tmp_path / "deep").exists()
        else:
            subprocess.run(["rm", "-r", tmp_path / "deep"], check=True)
    assert 1 in outcomes


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--no-safe-serialization",), ("--async-write",)])
def test_files_that_cannot_grow(deep_pair: tuple[Path, Path], tmp_path: Path, flags: tuple[str, ...]) -> None:
    recipe = write_recipe(recipe_for("linear", *deep_pair), tmp_path / "recipe.yml")
    result = forked(
        "mergekit-yaml",
        *(recipe, tmp_path / "out", "--quiet", *flags),
        prepare=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000)),
    )
    assert result.returncode == 2, result.stderr
    error = one_error(result.stderr)
    assert "grew over the limit" in error or "disk" in error, error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["recipe.yml"]


@pytest.mark.slow
def test_full_disk(deep_pair: tuple[Path, Path], tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=60k", "tmpfs", small], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a small file system")
    try:
        recipe = write_recipe(recipe_for("linear", *deep_pair), tmp_path / "recipe.yml")
        result = forked("mergekit-yaml", recipe, small / "out", "--quiet")
        assert result.returncode == 2, result.stderr
        assert "disk is full" in one_error(result.stderr)
        assert list(small.iterdir()) == []
    finally:
        subprocess.run(["umount", small], check=True)
