"""Code that comes with a checkpoint is never run: how the package is written (laws/test_bad_inputs.py tries it)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "rotation_merge"


@pytest.mark.slow
def test_only_what_the_user_said_is_handed_on() -> None:
    """`trust_remote_code` is nowhere set; where it is passed, it is mergekit's option or our argument of that name."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            keywords = node.keywords if isinstance(node, ast.Call) else []
            values = [k.value for k in keywords if k.arg == "trust_remote_code"]
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                assert "trust_remote_code" not in " ".join(map(ast.unparse, targets)), path
            found += [(path.name, ast.unparse(value)) for value in values]
    assert found
    for name, value in found:
        assert value in ("self.options.trust_remote_code", "options.trust_remote_code", "trust_remote_code", "False"), (
            name
        )


@pytest.mark.slow
def test_pickles_are_only_read_as_weights() -> None:
    """Every torch.load says weights_only=True; nothing else unpickles, but cluster workers what the command sent."""
    loads = 0
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                modules = [alias.name for alias in node.names] + [str(getattr(node, "module", ""))]
                allowed = {"pickle", "cloudpickle", "joblib"} if path == PACKAGE / "workers.py" else set()
                assert not {"pickle", "dill", "cloudpickle", "joblib"} & set(modules) - allowed, path
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("pickle.load", "joblib.load")):
                raise AssertionError(f"{path}: {ast.unparse(node)}")
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                loads += 1
                given = {k.arg: ast.unparse(k.value) for k in node.keywords}
                assert given.get("weights_only") == "True", f"{path}: {ast.unparse(node)}"
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                assert ast.unparse(node.value) == "False", path
    assert loads
