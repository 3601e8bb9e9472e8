"""docs/tour.ipynb: ten cells that run from top to bottom, and show pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

NOTEBOOK = Path(__file__).parents[2] / "docs" / "tour.ipynb"
CELLS = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


@pytest.mark.slow
@pytest.mark.usefixtures("drawn")
def test_every_cell_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib.pyplot as plt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plt, "show", lambda: plt.close("all"))
    plt.switch_backend("Agg")
    namespace: dict[str, Any] = {"__name__": "tour"}
    for number, cell in enumerate(CELLS, 1):
        exec(compile("".join(cell["source"]), f"cell {number}", "exec"), namespace)
    assert namespace["aligned"] < namespace["plain"]
    assert list(tmp_path.iterdir()) == []


def test_the_notebook_shows_what_it_did() -> None:
    assert len(CELLS) == 10
    outputs = [output for cell in CELLS for output in cell["outputs"]]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 3
    assert [cell["execution_count"] for cell in CELLS] == list(range(1, 11))
    assert not [output for output in outputs if output["output_type"] == "error"]
