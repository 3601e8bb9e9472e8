"""Code that comes with a checkpoint is never run: how the package is written (laws/test_bad_inputs.py tries it)."""

from __future__ import annotations

import ast

import pytest
from test_layering import FILES, imports

SAID = ("self.options.trust_remote_code", "options.trust_remote_code", "trust_remote_code", "False")
"""What the user said: mergekit's option, or our argument of that name."""
PICKLES = {"pickle", "dill", "cloudpickle", "joblib"}


@pytest.mark.slow
def test_no_code_is_run_but_what_the_user_said() -> None:
    """`trust_remote_code` is nowhere set, only passed on; every torch.load says weights_only=True; nothing else
    unpickles, but cluster workers what the command sent."""
    loads = passed = 0
    for path in FILES:
        modules = {module.split(".")[0] for module in imports(path)}
        assert path.name == "workers.py" or not modules & PICKLES, path
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                assert "trust_remote_code" not in ast.unparse(node).partition("=")[0], path
            if not isinstance(node, ast.Call):
                continue
            function, values = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
            assert not function.endswith(("pickle.load", "joblib.load")), path
            assert values.get("trust_remote_code", "False") in SAID, path
            assert values.get("allow_pickle", "False") == "False", path
            assert function != "torch.load" or values.get("weights_only") == "True", path
            passed += "trust_remote_code" in values
            loads += function == "torch.load"
    assert loads
    assert passed
