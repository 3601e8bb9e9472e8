"""A merge that is killed, stopped, or runs out of room never leaves a directory that loads as a model it is not."""

from __future__ import annotations

import itertools
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from interrupted_support import assert_whole_or_not_at_all, equal, forked, load, run
from plugin_support import files_of, merged, one_error, recipe_for, write_recipe

from rotation_merge.model import output


@pytest.mark.slow
def test_a_stale_index_cannot_win(deep_pair: tuple[Path, Path], tmp_path: Path) -> None:
    anchor, donor = deep_pair
    out = tmp_path / "out"
    plain = {**recipe_for("linear", anchor, donor), "merge_method": "linear", "parameters": {}}
    old = merged(plain, out, "--out-shard-size", "9000")
    (out / "notes.txt").write_text("mine")
    new = merged(recipe_for("linear", anchor, donor), out)
    assert sorted(path.name for path in out.glob("*.safetensors*")) == ["model.safetensors"]
    assert not equal(old, new)
    assert equal(load(out) or {}, new)
    assert (out / "notes.txt").read_text() == "mine"
    pickled = merged(recipe_for("linear", anchor, donor), out, "--no-safe-serialization")
    assert pickled == {}
    assert equal(load(out) or {}, new)


def exchanged(new: Path, target: Path, step: int) -> bool:
    """Put a folder in the place of another in a process of its own, which kills itself before its move of this number;
    whether it lived."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    moves = itertools.count(1)

    def dying(real: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **options: object) -> object:
            if next(moves) == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        return call

    with output.staged(str(target)) as staging:
        shutil.copytree(new, staging, dirs_exist_ok=True)
        for name in ("remove", "replace", "rename", "unlink", "rmdir"):
            setattr(os, name, dying(getattr(os, name)))
    os._exit(0)


@pytest.mark.slow
def test_killed_at_every_step_of_the_exchange(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    """What loads meanwhile is one of the two; the next run finds the folder as it was, or as it was to be, each file of
    it, before it writes anything itself."""
    recipe = recipe_for("linear", *pair)
    plain = {**recipe, "merge_method": "linear", "parameters": {}}
    old = merged(plain, tmp_path / "old", "--out-shard-size", "16000")
    new = merged(recipe, tmp_path / "new", "--out-shard-size", "12000")
    for place, text in (("old/notes.txt", "mine"), ("old/sub/mine.txt", "mine"), ("old/sub/both", "old")):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).write_text(text)
    (tmp_path / "new" / "sub").mkdir()
    (tmp_path / "new" / "sub" / "both").write_text("new")
    before = files_of(tmp_path / "old")
    others = {name: content for name, content in before.items() if not output.is_of_a_model(name)}
    after, undone = {**others, **files_of(tmp_path / "new")}, 0
    for step in range(1, 200):
        target = tmp_path / f"target{step}"
        shutil.copytree(tmp_path / "old", target)
        lived = exchanged(tmp_path / "new", target, step)
        assert_whole_or_not_at_all(target, old, new)
        with pytest.raises(KeyError), output.staged(str(target)):
            raise KeyError
        assert files_of(target) in (before, after), step
        undone += files_of(target) == before
        assert [path.name for path in tmp_path.glob(".*")] == []
        if lived:
            assert files_of(target) == after
            assert undone > 12
            return
    raise AssertionError("the exchange never came to its end")


@pytest.mark.slow
def test_interrupted_by_the_user(deep_pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Ctrl-C: nothing is left, not even the directories above the output."""
    recipe = write_recipe(recipe_for("linear", *deep_pair), tmp_path / "recipe.yml")
    outcomes = []
    for delay in (0.05, 0.15, 0.3):
        out = tmp_path / "deep" / "er" / "out"
        outcomes.append(run("mergekit-yaml", recipe, out, "--quiet", after=delay, signal_number=signal.SIGINT))
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
