"""The scripts of benchmarks/papers run in seconds on what comes with the package, and go on where they were stopped."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "papers"))
apparatus = importlib.import_module("apparatus")
SCRIPTS = list(apparatus.scripts())
Journal = importlib.import_module("journal").Journal


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all scripts, so that each finds what another has kept."""
    return tmp_path_factory.mktemp("papers")


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_script_gives_the_rows_that_it_promises(script: ModuleType, folder: Path) -> None:
    found = apparatus.run(script.__name__, ["--quick", "--out", str(folder), "--checkpoints", "absent"])
    assert set(found) == set(script.TABLES)
    for table, rows in found.items():
        assert rows == json.loads((folder / f"{table}.json").read_text("utf-8"))["rows"]
        assert rows
        assert all(tuple(row) == tuple(script.TABLES[table]) for row in rows)


def test_what_is_kept_is_not_computed_again_after_a_run_was_killed(tmp_path: Path) -> None:
    file = tmp_path / "papers.json"
    first = Journal(file)
    assert first.kept("outer", lambda: 1 + first.kept("inner", lambda: 2)) == 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.replace", killed)
        with pytest.raises(KeyboardInterrupt):
            first.kept("cut off", lambda: 5)
    second = Journal(file)
    assert second.kept("outer", lambda: 0) == 3
    assert second.kept("cut off", lambda: 4) == 4
    assert Journal(file).kept("cut off", lambda: 0) == 4


def killed(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_checkpoint_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, kinds = importlib.import_module("train_checkpoints"), importlib.import_module("kinds")
    model = kinds.encoder(train.BertForSequenceClassification)
    with monkeypatch.context() as patch:
        patch.setattr(train.shutil, "copy", killed)
        with pytest.raises(KeyboardInterrupt):
            train.save(model, tmp_path / "encoder-0-c")
    assert not (tmp_path / "encoder-0-c").exists(), "what is there is not trained again"
    train.save(model, tmp_path / "encoder-0-c")
    assert [path.name for path in tmp_path.iterdir()] == ["encoder-0-c"]
