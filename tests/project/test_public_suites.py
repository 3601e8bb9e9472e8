"""Laws call only what is public, so that they still prove something when the code behind them is rewritten.

Public are the names of `rotation_merge` itself, the command line, recipes that mergekit runs, and the errors that the
docstrings of public calls name.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
ROOMS = {path.stem for path in (TESTS.parent / "rotation_merge").iterdir() if not path.stem.startswith("__")}
LAWS = sorted((TESTS / "laws").glob("*.py"))


def rooms_of(path: Path) -> set[str]:
    """The rooms of the package that a file imports, or names in strings that may be imported or replaced."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            modules |= set(re.findall(r"\brotation_merge(?:\.\w+)+", node.value))
    steps = (module.split(".") for module in modules)
    named = {step[1] for step in steps if step[0] == "rotation_merge" and len(step) > 1}
    return named & ROOMS - {"errors"}


@pytest.mark.parametrize("file", LAWS, ids=lambda path: path.stem)
def test_laws_call_only_what_is_public(file: Path) -> None:
    assert not rooms_of(file), "call rotation_merge's public names"


def test_imports_inside_functions_and_by_string_count(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    for text in (
        "def f():\n    from rotation_merge.model.fold import Fold",
        "import rotation_merge.model.fold",
        "from rotation_merge import model",
        "patch.setattr('rotation_merge.model.fold.Fold', None)",
    ):
        file.write_text(text)
        assert rooms_of(file) == {"model"}, text
    file.write_text(
        "import rotation_merge as rm\nfrom rotation_merge import align\nfrom rotation_merge.errors import E"
    )
    assert not rooms_of(file)
