"""Reports as data: their words, their picture, and older ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rotation_merge.model.card import updated_card
from rotation_merge.record import DISTANCES, MergeReport, SpaceRow, gained
from rotation_merge.report.plots import save_distances


def row(layer: int | None, kind: str, before: float, after: float) -> SpaceRow:
    places = ("donor", f"layers.{layer}", layer, f"layers.{layer}.{kind}", kind, "permutation")
    return SpaceRow(*places, before, after, 2.0, {"qk": 0.5}, 0.1, None, [])


def report(*rows: SpaceRow, notes: list[str] | None = None) -> MergeReport:
    return MergeReport("anchor", "linear", "a: <b> & c", list(rows), {}, notes or [], 1.0, {"torch": "2"})


def test_a_report_prints_as_a_few_lines_and_can_be_older() -> None:
    rows = [row(i, kind, 2.0, 1.0) for i in range(40) for kind in ("attention", "ffn")]
    assert str(report(*rows, notes=["a tokenizer is missing"])).splitlines() == [
        "anchor: anchor",
        "donor: relative distance 1 before, 0.5 after alignment (50% less)",
        "note: a tokenizer is missing",
    ]
    assert "this is the plain merge by `linear`" in str(report())
    data = report(*rows).to_dict()
    del data["fingerprints"]
    assert MergeReport.from_dict(data).fingerprints == {}


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [(0.5, 0.5, "next to nothing"), (2.0, 1.999, "next to nothing"), (0.5, 0.25, "50% less"), (0.1, 1.0, "increase")],
)
def test_gains_in_words(before: float, after: float, words: str) -> None:
    """Learned maps serve a loss, not nearness: they may lead away."""
    assert words in gained(before, after)


@pytest.mark.usefixtures("drawn")
def test_distances_by_layer_are_a_picture(tmp_path: Path) -> None:
    rows, pictures = [row(layer, kind, 2.0, 1.0) for layer in (0, 1) for kind in ("attention", "ffn")], []
    for _ in range(2):
        assert save_distances(report(*rows), str(tmp_path)) == DISTANCES
        pictures.append((tmp_path / DISTANCES).read_bytes())
    assert pictures[0] == pictures[1]
    assert pictures[0].startswith(b"\x89PNG")
    odd = [replace(line, donor="models/a$^$b") for line in rows]  # no formula
    assert save_distances(report(*odd), str(tmp_path)) == DISTANCES
    for without in (row(None, "stream", 2.0, 1.0), row(0, "ffn", 2.0, 2.0)):
        assert save_distances(report(without), str(tmp_path)) is None
    assert f"]({DISTANCES})" in updated_card("# x\n", report(*rows), "x", {}, picture=DISTANCES)
    assert DISTANCES not in updated_card("# x\n", report(*rows), "x", {})
