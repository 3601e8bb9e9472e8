"""A merge that is killed, stopped, or runs out of room never leaves a directory that loads as a model it is not."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import time
from pathlib import Path

import pytest
from interrupted_support import assert_whole_or_not_at_all, equal, forked, load, run
from plugin_support import merged, one_error, recipe_for, state, write_recipe

from rotation_merge.checkpoints import output


def test_killed_twenty_times(deep_pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Into the same directory, where an older merge lies, with other shards each time."""
    anchor, donor = deep_pair
    old_recipe = {**recipe_for("linear", anchor, donor), "merge_method": "linear", "parameters": {}}
    out = tmp_path / "work" / "out"
    old = merged(old_recipe, out, "--out-shard-size", "20000")
    recipe = write_recipe(recipe_for("linear", anchor, donor), tmp_path / "recipe.yml")
    fresh = tmp_path / "fresh" / "out"
    begin = time.perf_counter()
    assert run("mergekit-yaml", recipe, fresh, "--quiet") == 0
    usual = time.perf_counter() - begin
    new = state(fresh)
    assert not equal(old, new)
    chance = random.Random(0)
    killed = 0
    for i in range(20):
        target = out if i % 2 else tmp_path / "work" / f"new{i}"
        flags = ("--quiet", "--out-shard-size", chance.choice([4000, 9000, 10**9]))
        moment = usual * chance.uniform(0.05, 1.0)
        killed += run("mergekit-yaml", recipe, target, *flags, after=moment, signal_number=signal.SIGKILL) != 0
        assert_whole_or_not_at_all(tmp_path / "work", old, new)
    assert killed >= 5
    assert run("mergekit-yaml", recipe, out, "--quiet", "--out-shard-size", 5000) == 0
    assert equal(load(out) or {}, new)
    assert not list(out.glob(".*"))
    assert len(json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]) == len(new)


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


class Killed(BaseException):
    """Stands for SIGKILL: nothing is cleaned up afterwards."""


@pytest.mark.parametrize("shards", [1, 3])
def test_killed_at_every_step_of_the_exchange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: int, deep_pair: tuple[Path, Path]
) -> None:
    anchor, donor = deep_pair
    recipe = recipe_for("linear", anchor, donor)
    plain = {**recipe, "merge_method": "linear", "parameters": {}}
    old = merged(plain, tmp_path / "old", "--out-shard-size", "20000")
    new = merged(recipe, tmp_path / "new", "--out-shard-size", {1: "5B", 3: "15000"}[shards])
    for step in range(1, 40):
        target, staging = tmp_path / f"target{step}", tmp_path / f"staging{step}"
        subprocess.run(["cp", "-r", tmp_path / "old", target], check=True)
        subprocess.run(["cp", "-r", tmp_path / "new", staging], check=True)
        left = step

        def dying(real: object) -> object:
            def call(*arguments: object) -> object:
                nonlocal left
                left -= 1
                if not left:
                    raise Killed
                return real(*arguments)  # type: ignore[operator]

            return call

        with monkeypatch.context() as patch:
            for name in ("remove", "replace", "rename"):
                patch.setattr(output.os, name, dying(getattr(os, name)))
            try:
                output._replace(str(staging), str(target))
            except Killed:
                assert_whole_or_not_at_all(target, old, new)
                continue
        assert equal(load(target) or {}, new)
        return
    raise AssertionError("the exchange never came to its end")


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
