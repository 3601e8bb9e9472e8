"""The HTML report: whole, self-contained, and honest about what it was given."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from cli_support import run
from click.testing import CliRunner
from plugin_support import make, twin

from rotation_merge import RotationMergeError
from rotation_merge.record import MergeReport, SpaceRow, gained
from rotation_merge.report.html import Line, chart, page, ticks, write_page
from rotation_merge.run.curves import Barrier, Curve

VOID = ("meta", "br", "rect", "line", "circle", "polyline", "img")


class Balanced(HTMLParser):
    """Fails where a tag is closed that is not open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def row(layer: int | None, kind: str, before: float, after: float, **more: object) -> SpaceRow:
    order = [1, 0, 2] if kind == "attention" else None
    values = {
        "group": "permutation",
        "from_identity": {"qk": 0.5},
        "seconds": 0.1,
        "gap": None,
        "head_order": order,
        "notes": [],
    }
    values.update(more)
    return SpaceRow("donor", f"layers.{layer}", layer, f"layers.{layer}.{kind}", kind, distance_before=before,
                    distance_after=after, anchor_norm=2.0, **values)  # fmt: skip


def report(*rows: SpaceRow, **more: object) -> MergeReport:
    values = {
        "anchor": "anchor",
        "delegate": "linear",
        "recipe": "a: <b> & c",
        "whole": {},
        "notes": [],
        "seconds": 1.0,
    }
    values.update(more)
    return MergeReport(rows=list(rows), versions={"torch": "2"}, **values)  # type: ignore[arg-type]


def checked(text: str) -> Balanced:
    parser = Balanced()
    parser.feed(text)
    assert not parser.open
    return parser


def test_one_page_without_network_or_script():
    rows = [row(i, kind, 2.0, 1.0) for i in range(3) for kind in ("attention", "ffn")]
    text = page(report(*rows), name="merged")
    assert "script" not in checked(text).seen
    assert not re.search(r"https?://|@import|src=|url\(", text)
    assert "prefers-color-scheme: dark" in text
    assert "width=device-width" in text
    for words in (
        "50% less",
        "Distance by layer",
        "Which layers matter",
        "Head order",
        "All 6 spaces",
        "a: &lt;b&gt; &amp; c",
    ):
        assert words in text


def test_a_report_prints_as_a_few_lines():
    rows = [row(i, kind, 2.0, 1.0) for i in range(40) for kind in ("attention", "ffn")]
    assert str(report(*rows, notes=["a tokenizer is missing"])).splitlines() == [
        "anchor: anchor",
        "donor: relative distance 1 before, 0.5 after alignment (50% less)",
        "note: a tokenizer is missing",
    ]
    assert str(report()).splitlines() == ["anchor: anchor", "No model was moved: this is the plain merge by `linear`"]


def test_fingerprints_stand_at_the_end_where_the_report_has_them():
    marks = {"org/<a>": "0" * 40, "org/b": "1" * 40 + " (of the 3 of 4 tensors that were read)"}
    text = page(report(row(0, "ffn", 2.0, 1.0), fingerprints=marks))
    checked(text)
    for words in ("Fingerprints", "org/&lt;a&gt;", "0" * 40, "1" * 40 + " (of the 3 of 4"):
        assert words in text.split("How it was made")[1]
    assert "Fingerprints" not in page(report(row(0, "ffn", 2.0, 1.0)))


def test_reports_written_before_fingerprints_can_be_read():
    data = report(row(0, "ffn", 2.0, 1.0)).to_dict()
    del data["fingerprints"]
    assert MergeReport.from_dict(data).fingerprints == {}


def test_names_are_escaped():
    text = page(report(row(0, "ffn", 2.0, 1.0), anchor="<script>alert(1)</script>"))
    assert "<script>" not in text


@pytest.mark.parametrize(
    "rows", [[], [row(None, "stream", 2.0, 1.0)], [row(0, "ffn", 0.0, 0.0)]], ids=["empty", "stream", "same"]
)
def test_odd_reports_render(rows: list[SpaceRow]):
    checked(
        page(
            report(*rows, whole={"donor": {"start": "identity", "passes": 2, "objective": [2.0, 1.0]}} if rows else {})
        )
    )


def test_a_gain_of_nothing_is_called_nothing():
    assert "next to nothing" in page(report(row(0, "ffn", 2.0, 1.999)))


def test_barriers_are_drawn_where_they_were_measured():
    curves = [
        Curve(name, [0.0, 0.5, 1.0], [0.1, high, 0.1], [0.9, 0.2, 0.9])
        for name, high in (("plain", 3.0), ("aligned", 1.0))
    ]
    text = page(report(row(0, "ffn", 2.0, 1.0)), [Barrier("anchor", "donor", "demo:digits", "class", 540, {}, curves)])
    assert "barrier 2.9 nats" in text
    checked(text)


def test_report_true_writes_the_page_and_the_command_writes_it_again(tmp_path: Path):
    from mergekit.scripts.run_yaml import main as mergekit_yaml

    anchor = make("llama", tmp_path / "a")
    donor = twin(anchor, tmp_path / "b")
    (tmp_path / "r.yml").write_text(
        f"merge_method: rotation_merge\nbase_model: {anchor}\nmodels:\n- model: {donor}\n"
        "parameters: {delegate: slerp, t: 0.5, report: true}\ndtype: float32\n"
    )
    done = CliRunner().invoke(mergekit_yaml, [str(tmp_path / "r.yml"), str(tmp_path / "out"), "--quiet"])
    assert done.exit_code == 0, done.output
    first = (tmp_path / "out" / "report.html").read_text()
    checked(first)
    assert re.search(rf"<code>{re.escape(str(donor))}</code></dt><dd><code>[0-9a-f]{{40}}</code>", first)
    done = run("inspect", tmp_path / "out", "--html", tmp_path / "page.html")
    assert done.exit_code == 0
    assert "Alignment report: out" in (tmp_path / "page.html").read_text()


def test_no_report_is_one_line(tmp_path: Path):
    with pytest.raises(RotationMergeError, match="no such file"):
        write_page(str(tmp_path))
    (tmp_path / "rotation_merge.json").write_text('{"rows": 3}')
    with pytest.raises(RotationMergeError, match="is not a report"):
        write_page(str(tmp_path))


def test_ticks_are_round_and_inside():
    assert ticks(0.0, 1.0) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(0.0, 0.037) == [0.0, 0.01, 0.02, 0.03]
    assert ticks(2.0, 2.0) == [2.0]
    assert all(0.3 <= tick <= 7.7 for tick in ticks(0.3, 7.7))


def test_a_chart_of_one_point():
    assert "<circle" in chart([Line("a", [0], [1.0], "s0")], "layer", "distance")


def test_a_map_that_leads_away_is_not_called_nothing() -> None:
    """Learned maps serve a loss, not nearness."""
    assert "next to nothing" in gained(0.5, 0.5)
    assert "50% less" in gained(0.5, 0.25)
    assert gained(0.1, 1.0).startswith("the transforms increase the distance")
