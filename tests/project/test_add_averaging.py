"""docs/add-averaging.md, followed to the letter: its rule obeys the law, and merges in a recipe."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import test_task_vectors as laws
import torch

from rotation_merge.averaging.registry import METHODS
from rotation_merge.averaging.task_vectors import TaskVectorMethod
from rotation_merge.mergekit_plugin.delegates import OWN

PAGE = (Path(__file__).parents[2] / "docs" / "add-averaging.md").read_text(encoding="utf-8")
CLASS, LINE = re.findall(r"```python title=\"[^\"]*\"\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.fixture
def method(monkeypatch: pytest.MonkeyPatch) -> TaskVectorMethod:
    """The page's rule, added by the page's line."""
    namespace: dict[str, Any] = {"__name__": "page", "METHODS": METHODS}
    exec(compile(CLASS, "docs/add-averaging.md", "exec", dont_inherit=True), namespace)
    exec(LINE, namespace)
    added: TaskVectorMethod = namespace["METHODS"][-1]
    monkeypatch.setitem(OWN, added.spec.name, added)
    monkeypatch.setitem(laws.RULES, added.spec.name, added)
    return added


def test_the_rule_follows_rotations(method: TaskVectorMethod) -> None:
    laws.test_merged_changes_follow_rotations("balanced", (6, 9))
    alone = laws.random(5, 7)
    torch.testing.assert_close(laws.change("balanced", [alone]), alone, atol=1e-10, rtol=1e-10)
    changes = [laws.random(4, 5, seed=seed) for seed in range(2)]
    torch.testing.assert_close(laws.change("balanced", changes, power=0.0), changes[0] + changes[1])


def test_the_rule_merges_in_a_recipe(method: TaskVectorMethod, tmp_path: Path) -> None:
    base, *models = laws.fine_tunes("llama", "llama", tmp_path)
    result = laws.merged(laws.of([base, *models], "balanced"), tmp_path / "out")
    name = "model.layers.0.mlp.up_proj.weight"
    changes = [(m.state[name] - base.state[name]).double() for m in models]
    expected = base.state[name].double() + laws.change("balanced", changes)
    torch.testing.assert_close(result[name].double(), expected, atol=1e-5, rtol=1e-5)
