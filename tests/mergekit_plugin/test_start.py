"""Python's collector is held while a command of mergekit's starts, and works again afterwards."""

from __future__ import annotations

import atexit
import gc
import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rotation_merge.mergekit_plugin import hooks
from rotation_merge.mergekit_plugin.hooks import extend_after

HELD = ["at exit", False, "frozen"]


@pytest.mark.parametrize(
    ("program", "error", "steps"),
    [("mergekit-yaml", None, HELD), ("mergekit-yaml", ImportError, HELD), ("python", None, [True])],
)
def test_it_is_held_in_commands_alone(
    program: str, error: type[Exception] | None, steps: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Any] = []

    def execute(module: ModuleType) -> None:
        done.append(gc.isenabled())
        if error is not None:
            raise error

    monkeypatch.setattr(gc, "freeze", freeze := lambda: done.append("frozen"))
    monkeypatch.setattr(atexit, "register", lambda work: done.append(work is freeze and "at exit"))
    monkeypatch.setattr(hooks, "extend", lambda module, name: None)
    monkeypatch.setattr(sys, "argv", [f"/bin/{program}", "recipe.yml"])
    extend_after(loader := SimpleNamespace(exec_module=execute), "mergekit.scripts.run_yaml")  # type: ignore[arg-type]
    with pytest.raises(error) if error is not None else nullcontext():
        loader.exec_module(ModuleType("mergekit.scripts.run_yaml"))
    assert gc.isenabled()
    assert done == steps
