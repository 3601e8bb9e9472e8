"""Reports as data: their words, older ones, and those that are none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rotation_merge import RotationMergeError
from rotation_merge.model.card import updated_card
from rotation_merge.record import DISTANCES, MergeReport, SpaceRow, gained
from rotation_merge.report.files import read_report
from rotation_merge.report.plots import save_distances


def row(layer: int | None, kind: str, before: float, after: float) -> SpaceRow:
    order = [1, 0, 2] if kind == "attention" else None
    return SpaceRow("donor", f"layers.{layer}", layer, f"layers.{layer}.{kind}", kind, "permutation",
                    before, after, 2.0, {"qk": 0.5}, 0.1, order, [])  # fmt: skip


def report(*rows: SpaceRow, notes: list[str] | None = None) -> MergeReport:
    return MergeReport("anchor", "linear", "a: <b> & c", list(rows), {}, notes or [], 1.0, {"torch": "2"})


def test_a_report_prints_as_a_few_lines():
    rows = [row(i, kind, 2.0, 1.0) for i in range(40) for kind in ("attention", "ffn")]
    assert str(report(*rows, notes=["a tokenizer is missing"])).splitlines() == [
        "anchor: anchor",
        "donor: relative distance 1 before, 0.5 after alignment (50% less)",
        "note: a tokenizer is missing",
    ]
    assert str(report()).splitlines() == ["anchor: anchor", "No model was moved: this is the plain merge by `linear`"]


def test_distances_by_layer_are_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [row(layer, kind, 2.0, 1.0) for layer in (0, 1) for kind in ("attention", "ffn")]
    for name in ("first", "again"):
        (tmp_path / name).mkdir()
        assert save_distances(report(*rows), str(tmp_path / name)) == DISTANCES
    first, again = ((tmp_path / name / DISTANCES).read_bytes() for name in ("first", "again"))
    assert first == again
    assert first.startswith(b"\x89PNG")
    odd = [replace(line, donor="models/a$^$b") for line in rows]  # no formula
    assert save_distances(report(*odd), str(tmp_path)) == DISTANCES
    for without in (row(None, "stream", 2.0, 1.0), row(0, "ffn", 2.0, 2.0)):
        assert save_distances(report(without), str(tmp_path)) is None
    assert f"]({DISTANCES})" in updated_card("# x\n", report(*rows), "x", {}, picture=DISTANCES)
    assert DISTANCES not in updated_card("# x\n", report(*rows), "x", {})


def test_reports_written_before_fingerprints_can_be_read():
    data = report(row(0, "ffn", 2.0, 1.0)).to_dict()
    del data["fingerprints"]
    assert MergeReport.from_dict(data).fingerprints == {}


def test_a_gain_of_nothing_is_called_nothing():
    assert "next to nothing" in report(row(0, "ffn", 2.0, 1.999)).verdict("donor")


def test_a_map_that_leads_away_is_not_called_nothing() -> None:
    """Learned maps serve a loss, not nearness."""
    assert "next to nothing" in gained(0.5, 0.5)
    assert "50% less" in gained(0.5, 0.25)
    assert gained(0.1, 1.0).startswith("the transforms increase the distance")


def test_no_report_is_one_line(tmp_path: Path):
    path = tmp_path / "rotation_merge.json"
    with pytest.raises(RotationMergeError, match="no such file"):
        read_report(str(path))
    path.write_text('{"rows": 3}')
    with pytest.raises(RotationMergeError, match="is not a report"):
        read_report(str(path))
