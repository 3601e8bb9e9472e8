"""Python's collector is held while a command with a recipe of ours starts, and for no other."""

from __future__ import annotations

import atexit
import gc
import sys

import pytest

from rotation_merge.mergekit_plugin import start
from rotation_merge.mergekit_plugin.document import METHOD


@pytest.fixture
def done(monkeypatch):
    """What was frozen, and what is to be done when Python ends."""
    found = []
    monkeypatch.setattr(gc, "freeze", lambda: found.append("frozen"))
    monkeypatch.setattr(atexit, "register", lambda work: found.append(("at exit", work)))
    assert gc.isenabled()
    return found


def started(monkeypatch, *arguments):
    """Whether the collector worked while a command with these arguments started."""
    monkeypatch.setattr(sys, "argv", ["mergekit-yaml", *map(str, arguments)])
    with start.collector_held():
        return gc.isenabled()


def test_it_is_held_for_a_recipe_of_ours_and_works_again_after_that(monkeypatch, tmp_path, done):
    recipe = tmp_path / "recipe.yml"
    recipe.write_text(f"merge_method: {METHOD}\n")
    assert not started(monkeypatch, recipe, tmp_path / "out")
    assert gc.isenabled()
    assert done == ["frozen", ("at exit", gc.freeze)]


def test_other_merges_start_as_ever(monkeypatch, tmp_path, done):
    recipe = tmp_path / "recipe.yml"
    recipe.write_text("merge_method: linear\n")
    assert started(monkeypatch, recipe, tmp_path, "--cuda", "\0")
    assert not done


def test_it_works_again_where_the_start_fails(monkeypatch, tmp_path, done):
    recipe = tmp_path / "recipe.yml"
    recipe.write_text(f"merge_method: {METHOD}\n")
    monkeypatch.setattr(sys, "argv", ["mergekit-yaml", str(recipe)])
    with pytest.raises(ImportError), start.collector_held():
        raise ImportError
    assert gc.isenabled()
