"""The search on sentence-transformers, with few candidates, so that it is quick."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_support import parsed, run
from plugin_support import one_error
from test_sentence import everything
from test_sentence import models as models
from test_sentence import pairs as pairs
from test_sentence import texts as texts

from rotation_merge.search.candidates import Candidates


@pytest.mark.slow
def test_merge_chooses_without_scores(
    models: dict[str, Path], texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Texts without scores are judged by how alike they are to the parents; a refit is tried."""
    real = Candidates.all
    wanted = ("plain", "refit, plain")
    monkeypatch.setattr(Candidates, "all", lambda self: [c for c in real(self) if c.name in wanted])
    options = ("--data", texts, "--batch-size", "6", "--samples", "24", "--anyway")
    found = parsed("merge", models["anchor"], models["donor"], tmp_path / "out", *options)
    assert not found["labelled"]
    assert found["unit"] == "1 - Spearman"
    assert {tried["name"] for tried in found["tried"]} == set(wanted)
    first, second = found["parents"].values()
    assert [first["each"][0], second["each"][1]] == pytest.approx([0, 0], abs=1e-6)
    assert 0 < found["ensemble"]["score"] < first["score"]
    assert "give pairs of texts" in one_error(run("evaluate", models["anchor"], "--data", texts).output)
    one = run("merge", models["anchor"], models["donor"], tmp_path / "one", "--data", texts, "--batch-size", "1")
    assert "embeddings are compared within a batch" in one_error(one.output)


@pytest.mark.slow
def test_merge_chooses_by_it(models: dict[str, Path], pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    real = Candidates.all
    monkeypatch.setattr(Candidates, "all", lambda self: real(self)[:3])
    options = ("--data", pairs, "--batch-size", "2", "--anyway")
    found = parsed("merge", models["anchor"], models["twin"], tmp_path / "out", *options)
    assert found["labelled"]
    assert found["tried"][0]["figures"]["score"] < 0.01
    assert found["plain"]["score"] > found["best"]["score"]
    assert everything(tmp_path / "out") >= everything(models["anchor"])
