"""Benchmarks run rarely: what they import of the package must still be there."""

from __future__ import annotations

import ast
import importlib
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).resolve().parents[2] / "benchmarks").rglob("*.py"))


@pytest.mark.slow
def test_benchmarks_import_what_there_is() -> None:
    missing = []
    for script in SCRIPTS:
        for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "rotation_merge":
                module = importlib.import_module(str(node.module))
                names = [a.name for a in node.names if not hasattr(module, a.name)]
                missing += [f"{script.name}: {module.__name__}.{name}" for name in names if not _part(module, name)]
    assert not missing


def _part(module: object, name: str) -> bool:
    return hasattr(module, "__path__") and find_spec(f"{module.__name__}.{name}") is not None  # type: ignore[attr-defined]
