"""Python's collector is held while a command of mergekit's starts, and works again afterwards."""

from __future__ import annotations

import atexit
import gc
import sys
from types import ModuleType
from typing import Any

import pytest

from rotation_merge.mergekit_plugin.hooks import without_collector

MODULE = ModuleType("mergekit.scripts.run_yaml")


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was frozen, and what is to be done when Python ends."""
    found: list[Any] = []
    monkeypatch.setattr(gc, "freeze", lambda: found.append("frozen"))
    monkeypatch.setattr(atexit, "register", lambda work: found.append(("at exit", work)))
    assert gc.isenabled()
    return found


@pytest.mark.parametrize("error", [None, ImportError])
def test_it_is_held_in_a_command_and_works_again_after_that(
    error: type[Exception] | None, monkeypatch: pytest.MonkeyPatch, done: list[Any]
) -> None:
    def execute(module: ModuleType) -> None:
        done.append(gc.isenabled())
        if error is not None:
            raise error

    monkeypatch.setattr(sys, "argv", ["/bin/mergekit-yaml", "recipe.yml"])
    if error is None:
        without_collector(execute, MODULE)
    else:
        with pytest.raises(error):
            without_collector(execute, MODULE)
    assert gc.isenabled()
    assert done == [False, "frozen", ("at exit", gc.freeze)]


def test_other_programs_import_as_ever(monkeypatch: pytest.MonkeyPatch, done: list[Any]) -> None:
    monkeypatch.setattr(sys, "argv", ["/bin/python"])
    without_collector(lambda module: done.append(gc.isenabled()), MODULE)
    assert done == [True]
