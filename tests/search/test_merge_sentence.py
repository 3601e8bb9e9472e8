"""The search on sentence-transformers, with few candidates, so that it is quick."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from cli_support import error_of, parsed, run
from plugin_support import one_error
from test_sentence import everything
from test_sentence import models as models
from test_sentence import pairs as pairs


@pytest.mark.slow
def test_merge_chooses_without_scores(models: dict[str, Path], pairs: Path, tmp_path: Path, only: Callable) -> None:
    """Texts without scores are judged by how alike they are to the parents; a refit is tried."""
    only("plain", "refit, plain")
    texts, rows = tmp_path / "texts.txt", pairs.read_text().split("\n")[1:]
    texts.write_text("".join(f"{text}\n" for row in rows for text in row.split(",")[:2]))
    options = ("--data", texts, "--batch-size", "6", "--samples", "24", "--anyway")
    facts = parsed("merge", models["anchor"], models["donor"], tmp_path / "out", *options)
    assert facts["unit"] == "1 - Spearman"
    assert {tried["name"]: tried["figures"]["accuracy"] for tried in facts["tried"]} == {
        "plain": None,
        "refit, plain": None,
    }
    assert 0 < facts["ensemble"]["score"] < min(parent["score"] for parent in facts["parents"].values())
    assert "sentence1, sentence2 and score" in error_of("evaluate", models["anchor"], "--data", texts)
    single = run("merge", models["anchor"], models["donor"], tmp_path / "single", "--data", texts, "--batch-size", "1")
    assert "embeddings are compared within a batch" in one_error(single.output)


@pytest.mark.slow
def test_merge_chooses_by_scores(models: dict[str, Path], pairs: Path, tmp_path: Path, only: Callable) -> None:
    only("plain", "heads, neurons", "whole model")
    options = ("--data", pairs, "--batch-size", "2", "--anyway")
    facts = parsed("merge", models["anchor"], models["twin"], tmp_path / "out", *options)
    assert facts["figure"] == "Spearman"
    assert facts["tried"][0]["figures"]["score"] < 0.01
    assert facts["plain"]["score"] > facts["best"]["score"]
    assert everything(tmp_path / "out") >= everything(models["anchor"])
