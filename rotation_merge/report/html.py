"""The report as one self-contained HTML page: no script, no network, light and dark, readable on a phone.

Its sections are functions that return HTML text; its charts are small SVGs (classes s0 to s4, 360 units wide).
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from rotation_merge.files.durable import write_text
from rotation_merge.model.naming import shortened
from rotation_merge.record import REPORT_FILE, MergeReport, SpaceRow, Verdict
from rotation_merge.report.files import read_report
from rotation_merge.run.curves import FILE as BARRIER_FILE
from rotation_merge.run.curves import Barrier, read_barriers

KINDS = {
    "attention": ("attention", "s0"),
    "ffn": ("FFN", "s1"),
    "experts": ("experts", "s2"),
    "stream": ("stream", "s3"),
}
PARTS = {
    "heads": "head order",
    "qk": "query/key",
    "vo": "value/output",
    "neurons": "neuron order",
    "scale": "neuron scale",
    "experts": "expert order",
    "stream": "stream",
}


def card(title: str, hint: str, content: str, wide: bool = False) -> str:
    kind = "card wide" if wide else "card"
    return f'<section class="{kind}"><h3>{escape(title)}</h3><p class="hint">{escape(hint)}</p>{content}</section>'


def sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def header_section(report: MergeReport, title: str) -> str:
    """Title, and one sentence for each donor."""
    done = f"merged by {report.delegate}" if report.delegate != "none" else "aligned, not merged"
    done = done if report.relation == "merge" or report.donors() else "trained, not merged"
    lines = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">Anchor <code>{escape(report.anchor)}</code>, {escape(done)}.</p>',
    ]
    for name in report.donors():
        prefix = f"<code>{escape(name)}</code>: " if len(report.donors()) > 1 else ""
        lines.append(f'<p class="lead">{prefix}{escape(sentence(report.verdict(name)))}</p>')
    if report.relation == "merge" and not report.donors():
        lines.append(f'<p class="lead">{escape(sentence(report.unmoved()))}</p>')
    lines += [f"<p>{escape(note)}</p>" for note in report.notes]
    return "\n".join([*lines, search(report.search)])


def search(verdict: Verdict | None) -> str:
    """The reasons for choosing this merge, if a search chose it."""
    if verdict is None:
        return ""
    names = shortened([parent.name for parent in verdict.parents])
    rows = "".join(_row("td", row) for row in verdict.rows(names))
    return (
        f"<h2>How this merge was chosen</h2><p>{escape(' '.join(verdict.sentences()))}</p>"
        f'<div class="scroll"><table>{_row("th", verdict.headers)}{rows}</table></div>'
        f'<p class="soft">On {escape(verdict.samples)}; less is better. {escape(" ".join(verdict.attempts()))}</p>'
    )


def _row(tag: str, texts: Sequence[str]) -> str:
    """A row of a table, numbers behind its first cell."""
    cells = (f"<{tag}{' class=n' if i else ''}>{escape(text)}</{tag}>" for i, text in enumerate(texts))
    return f"<tr>{''.join(cells)}</tr>"


def donor_section(report: MergeReport, name: str) -> str:
    """Everything about one donor."""
    rows = [row for row in report.rows if row.donor == name]
    before, after = report.relative_distances(name)
    gain = 1 - after / before if before else 0.0
    figures = [
        (f"{before:.4g}", "relative distance before"),
        (f"{after:.4g}", "after alignment"),
        (f"{gain:.0%}", "less"),
        (f"{len(rows)}", "spaces matched"),
    ]
    if not any(row.kind == "stream" for row in rows):
        figures.append((f"{sum(row.seconds for row in rows):.1f} s", "matching"))
    numbers = "".join(f"<div><b>{value}</b><span>{words}</span></div>" for value, words in figures)
    layered = [row for row in rows if row.layer is not None]
    cards = [by_layer(layered), identity(layered), cumulative(layered), stream(report, name), orders(layered)]
    return "\n".join(
        [
            f"<h2>{escape(name)}</h2>",
            f'<div class="numbers">{numbers}</div>',
            f'<div class="grid-cards">{"".join(part for part in cards if part)}</div>',
            spaces(rows),
        ]
    )


def _series(rows: Sequence[SpaceRow], kind: str) -> dict[int, tuple[float, float]]:
    """Relative distances before and after of one kind of space, by layer (several in one layer: together)."""
    sums: dict[int, list[float]] = {}
    for row in rows:
        if row.kind == kind and row.layer is not None:
            total = sums.setdefault(row.layer, [0.0, 0.0, 0.0])
            for i, value in enumerate((row.distance_before, row.distance_after, row.anchor_norm)):
                total[i] += value**2
    return {
        layer: (math.sqrt(b / a) if a else 0.0, math.sqrt(c / a) if a else 0.0)
        for layer, (b, c, a) in sorted(sums.items())
    }


def by_layer(rows: Sequence[SpaceRow]) -> str:
    lines = []
    for kind, (word, style) in KINDS.items():
        series = _series(rows, kind)
        if series:
            xs = list(series)
            lines.append(Line(f"{word}, before", xs, [v[0] for v in series.values()], style, dashed=True))
            lines.append(Line(f"{word}, after", xs, [v[1] for v in series.values()], style))
    if not lines:
        return ""
    hint = "Norm of donor - anchor over the norm of the anchor, for the tensors that touch the space."
    return card("Distance by layer", hint, chart(lines, "layer", "relative distance"))


def identity(rows: Sequence[SpaceRow]) -> str:
    layers = sorted({row.layer for row in rows if row.layer is not None})
    largest: dict[str, dict[int, float]] = {}
    for row in rows:
        for part, value in row.from_identity.items():
            if row.layer is not None:
                largest.setdefault(part, {})[row.layer] = max(value, largest.get(part, {}).get(row.layer, 0.0))
    lines = [(PARTS.get(part, part), [values.get(layer) for layer in layers]) for part, values in largest.items()]
    if not lines:
        return ""
    hint = "Distance of each map from the identity; for permutations, the share of entries that move."
    return card("Distance of the maps from the identity", hint, heatmap(lines, [str(x) for x in layers]))


def cumulative(rows: Sequence[SpaceRow]) -> str:
    """The squared distance removed by alignment, summed from the first layer on."""
    total = sum(row.distance_before**2 for row in rows)
    layers = sorted({row.layer for row in rows if row.layer is not None})
    if not total or len(layers) < 2:
        return ""
    lines = []
    for kind, (word, style) in [("", ("all spaces", "s4")), *KINDS.items()]:
        chosen = [row for row in rows if not kind or row.kind == kind]
        if not chosen or (not kind and len({row.kind for row in rows}) < 2):
            continue
        gains, so_far = [], 0.0
        for layer in layers:
            so_far += sum(row.distance_before**2 - row.distance_after**2 for row in chosen if row.layer == layer)
            gains.append(100 * so_far / total)
        lines.append(Line(word, layers, gains, style))
    hint = "Squared distance removed by aligning the layers up to here, in percent of the total."
    return card("Which layers matter", hint, chart(lines, "layers aligned, from the first", "gain (%)"))


def stream(report: MergeReport, name: str) -> str:
    whole = report.whole.get(name) or {}
    objective = whole.get("objective")
    rows = [row for row in report.rows if row.donor == name and row.kind == "stream"]
    if not rows and not objective:
        return ""
    items = [f"{escape(row.space)}: {escape(row.group)}, {_parts(row)} from the identity" for row in rows]
    facts = [f"{key} {escape(str(whole[key]))}" for key in ("start", "passes") if key in whole]
    picture = ""
    if isinstance(objective, list) and len(objective) > 1:
        relative = [float(value) / float(objective[0]) for value in objective]
        line = Line("weighted squared distance", range(1, len(relative) + 1), relative, "s3")
        picture = chart([line], "pass", "share of the first", zero=False)
    text = "".join(f"<p>{item}</p>" for item in items)
    hint = "Matched in passes over the whole model" + (f" ({', '.join(facts)})." if facts else ".")
    return card("Residual stream", hint, text + picture)


def _parts(row: SpaceRow) -> str:
    return ", ".join(f"{PARTS.get(part, part)} {value:.3g}" for part, value in row.from_identity.items()) or "0"


def orders(rows: Sequence[SpaceRow]) -> str:
    """Head order as a matrix for each layer where heads moved."""
    moved = [r for r in rows if r.head_order is not None and r.head_order != list(range(len(r.head_order)))]
    if not moved:
        return ""
    pictures = "".join(order_matrix(row.head_order or [], f"layer {row.layer}") for row in moved)
    hint = "Row: aligned head; column: the donor head it was. Layers whose heads all stayed are left out."
    return card("Head order", hint, f'<div class="orders">{pictures}</div>', wide=len(moved) > 12)


def spaces(rows: Sequence[SpaceRow]) -> str:
    """Every space in a table, folded away."""
    top = max((row.distance_before / row.anchor_norm for row in rows if row.anchor_norm), default=1.0)
    lines = []
    for row in rows:
        norm = row.anchor_norm or 1.0
        before, after = row.distance_before / norm, row.distance_after / norm
        notes = "; ".join(row.notes) + (f" certified gap {row.gap:.1g}" if row.gap else "")
        block = "model" if row.kind == "stream" else row.block
        texts = (block, row.space.rsplit(".", 1)[-1], row.group)
        lines.append(
            "<tr>"
            + "".join(f"<td>{escape(text)}</td>" for text in texts)
            + f"<td class=n>{before:.4f}</td><td class=n>{after:.4f}</td><td>{bar(before, after, top)}</td>"
            + f"<td>{escape(_parts(row))}</td><td class=n>{row.seconds:.3f}</td><td>{escape(notes)}</td></tr>"
        )
    heads = ("block", "space", "group", "before", "after", "", "map, from the identity", "seconds", "notes")
    head = "".join(f"<th{' class=n' if h in ('before', 'after', 'seconds') else ''}>{h}</th>" for h in heads)
    table = f'<div class="scroll"><table><tr>{head}</tr>{"".join(lines)}</table></div>'
    return f"<details><summary>All {len(rows)} spaces</summary>{table}</details>"


def barrier_section(paths: Barrier) -> str:
    """Loss along the path, where it was measured."""
    styles = [("s4", True), *((f"s{i % 4}", i >= 4) for i in range(len(paths.curves)))]
    drawn = list(zip(paths.curves, styles, strict=False))
    losses = [Line(f"{c.name} (barrier {c.barrier():.3g} nats)", c.t, c.loss, *style) for c, style in drawn]
    rates = [Line(c.name, c.t, [100 * a for a in c.accuracy], *style) for c, style in drawn]
    x = "from the first (0) to the second (1)"
    hint = f"{paths.task}, {paths.examples} examples of {paths.data}"
    cards = card("Loss on the path (nats)", hint, chart(losses, x, "loss", whole_x=False))
    cards += card("Accuracy on the path (%)", hint, chart(rates, x, "accuracy", whole_x=False))
    title = f"Barrier: {escape(paths.anchor)} to {escape(paths.donor)}"
    verdicts = "".join(f"<p>{escape(words)}.</p>" for words in paths.words())
    return f'<h2>{title}</h2><div class="grid-cards">{cards}</div>{verdicts}'


def footer_section(report: MergeReport) -> str:
    """The recipe, the time, the versions, the fingerprints."""
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    return (
        f"<h2>How it was made</h2><pre>{escape(report.recipe.strip()) or 'no recipe'}</pre>"
        f'<p class="soft">{report.seconds:.1f} s in all. {escape(versions)}.</p>{fingerprints(report)}'
    )


def fingerprints(report: MergeReport) -> str:
    """A table of the models' fingerprints."""
    if not report.fingerprints:
        return ""
    lines = "".join(
        f"<dt><code>{escape(model)}</code></dt><dd><code>{escape(mark)}</code></dd>"
        for model, mark in report.fingerprints.items()
    )
    hint = "Of config and weights: another checkpoint under the same name has another fingerprint."
    return f'<h3 class="after">Fingerprints</h3><p class="hint">{hint}</p><dl class="marks">{lines}</dl>'


WIDTH, HEIGHT = 360, 210
LEFT, RIGHT, TOP, BOTTOM = 44, 10, 10, 30


@dataclass(frozen=True)
class Line:
    """One line of a chart: `style` is its colour class, dashed lines are values before alignment."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    style: str
    dashed: bool = False


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from low to high, about `count` of them."""
    span = high - low
    if span <= 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(span / count))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor * count >= span)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def number(value: float) -> str:
    return f"{value:.4g}"


def chart(lines: Sequence[Line], x_label: str, y_label: str, whole_x: bool = True, zero: bool = True) -> str:
    """A line chart with axes, hover text on every point, and a legend below.

    Args:
        whole_x: x values are whole numbers (layers).
        zero: start the y axis at zero.
    """
    xs = [x for line in lines for x in line.xs]
    ys = [y for line in lines for y in line.ys]
    if not xs:
        return ""
    x0, x1 = min(xs), max(xs)
    y0, y1 = min([0.0] if zero else ys, default=0.0), max(ys)
    y0 = min(y0, min(ys))
    x1, y1 = (x1 if x1 > x0 else x0 + 1), (y1 if y1 > y0 else y0 + 1)

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            LEFT + (x - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - (y - y0) / (y1 - y0) * (HEIGHT - TOP - BOTTOM),
        )

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(y_label)} by {escape(x_label)}">']
    for value in ticks(y0, y1):
        _, y = at(x0, value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{number(value)}</text>')
    shown = [value for value in ticks(x0, x1, 6) if not whole_x or value == int(value)]
    for value in shown:
        x, _ = at(value, y0)
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{HEIGHT - BOTTOM + 14}" text-anchor="middle">{number(value)}</text>'
        )
    parts.append(f'<text class="axis" x="{WIDTH - RIGHT}" y="{HEIGHT - 3}" text-anchor="end">{escape(x_label)}</text>')
    for line in lines:
        points = [at(x, y) for x, y in zip(line.xs, line.ys, strict=True)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashed = " dashed" if line.dashed else ""
        parts.append(f'<polyline class="line {line.style}{dashed}" points="{path}"/>')
        for (x, y), x_value, y_value in zip(points, line.xs, line.ys, strict=True):
            hint = f"{line.name}, {x_label} {number(x_value)}: {number(y_value)}"
            dot = f'<circle class="dot {line.style}{dashed}" cx="{x:.1f}" cy="{y:.1f}" r="2.6">'
            parts.append(f"{dot}<title>{escape(hint)}</title></circle>")
    parts.append("</svg>")
    return "".join(parts) + legend([(line.name, line.style, line.dashed) for line in lines])


def legend(entries: Sequence[tuple[str, str, bool]]) -> str:
    items = "".join(
        f'<span><i class="key {style}{" dashed" if dashed else ""}"></i>{escape(name)}</span>'
        for name, style, dashed in entries
    )
    return f'<div class="legend">{items}</div>'


def heatmap(rows: Sequence[tuple[str, Sequence[float | None]]], columns: Sequence[str]) -> str:
    """Rows of cells coloured from 0 (page colour) to the largest value; hover text gives the value."""
    top = max((value for _, values in rows for value in values if value is not None), default=0.0) or 1.0
    left_margin, cell = 92, 22
    wide = (WIDTH - left_margin - RIGHT) / max(len(columns), 1)
    height = len(rows) * cell + 28
    parts = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="distance from the identity">']
    for i, (name, values) in enumerate(rows):
        parts.append(
            f'<text class="tick" x="{left_margin - 6}" y="{i * cell + 15}" text-anchor="end">{escape(name)}</text>'
        )
        for j, value in enumerate(values):
            if value is None:
                continue
            x = left_margin + j * wide
            shape = f'x="{x:.2f}" y="{i * cell + 1}" width="{max(wide - 0.8, 0.6):.2f}" height="{cell - 2}"'
            hint = f"{name}, layer {columns[j]}: {number(value)}"
            parts.append(f'<rect class="empty" {shape}/>')
            parts.append(f'<rect class="cell" {shape} opacity="{value / top:.3f}"><title>{escape(hint)}</title></rect>')
    every = max(1, -(-len(columns) // 10))
    for j in range(0, len(columns), every):
        x = left_margin + (j + 0.5) * wide
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{len(rows) * cell + 13}" text-anchor="middle">{columns[j]}</text>'
        )
    parts.append(f'<text class="axis" x="{WIDTH - RIGHT}" y="{height - 2}" text-anchor="end">layer</text>')
    return "".join(parts) + f'</svg><p class="hint">Full colour: {number(top)}; no colour: the identity.</p>'


def order_matrix(order: Sequence[int], name: str) -> str:
    """A permutation as a square of cells: row i (aligned head) has its mark in column order[i] (donor head)."""
    n = len(order)
    parts = [f'<figure class="order"><svg viewBox="0 0 {n} {n}" role="img" aria-label="head order, {escape(name)}">']
    parts.append(f'<rect class="empty" x="0" y="0" width="{n}" height="{n}"/>')
    for i, j in enumerate(order):
        moved = "cell" if i != j else "still"
        parts.append(
            f'<rect class="{moved}" x="{j + 0.08}" y="{i + 0.08}" width="0.84" height="0.84">'
            f"<title>aligned head {i} is donor head {j}</title></rect>"
        )
    return "".join(parts) + f"</svg><figcaption>{escape(name)}</figcaption></figure>"


def bar(before: float, after: float, top: float) -> str:
    """A pair of bars in one line: before behind, after in front."""
    width = 100 / (top or 1.0)
    return (
        f'<div class="bar"><i class="was" style="width:{before * width:.1f}%"></i>'
        f'<i class="now" style="width:{after * width:.1f}%"></i></div>'
    )


PAGE_FILE = "report.html"
GENERATOR = '<meta name="generator" content="rotation_merge">'


def page(report: MergeReport, barriers: list[Barrier] | None = None, name: str = "") -> str:
    """The whole page."""
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    title = f"Alignment report: {name}" if name else "Alignment report"
    body = [header_section(report, title)]
    for donor in dict.fromkeys(row.donor for row in report.rows):
        body.append(donor_section(report, donor))
    body += [barrier_section(barrier) for barrier in barriers or []]
    body.append(footer_section(report))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"{GENERATOR}"
        f"<title>{escape(title)}</title>\n<style>\n{style}</style></head>\n<body><main>\n"
        + "\n".join(part for part in body if part)
        + "\n</main></body></html>\n"
    )


def is_page(path: str) -> bool:
    """Whether a file is a page that we wrote."""
    try:
        with open(path, encoding="utf-8") as file:
            return GENERATOR in file.read(1000)
    except (OSError, UnicodeDecodeError):
        return False


def write_page(directory: str, out: str | None = None) -> str:
    """Write the page for a merged (or aligned) model from the files beside it.

    Args:
        directory: holds rotation_merge.json and, where it was measured, barrier.json.
        out: where to; `report.html` in the directory if not given.

    Returns:
        The page's path.

    Raises:
        RotationMergeError: there is no report, or it is damaged.
    """
    path = os.path.join(directory, REPORT_FILE)
    measured = os.path.join(directory, BARRIER_FILE)
    barriers = read_barriers(measured) if os.path.exists(measured) else []
    name = os.path.basename(os.path.abspath(directory))
    text = page(read_report(path), barriers, name)
    target = out or os.path.join(directory, PAGE_FILE)
    write_text(target, text)
    return target
