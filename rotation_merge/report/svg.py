"""Small SVG charts as text, coloured by the page's style sheet (classes s0 to s4), 360 units wide."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 360, 210
LEFT, RIGHT, TOP, BOTTOM = 44, 10, 10, 30


@dataclass(frozen=True)
class Line:
    """One line of a chart: `style` is its colour class, dashed lines show what was before."""

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


def heatmap(rows: Sequence[tuple[str, Sequence[float | None]]], columns: Sequence[str], x_label: str) -> str:
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
            hint = f"{name}, {x_label} {columns[j]}: {number(value)}"
            parts.append(f'<rect class="empty" {shape}/>')
            parts.append(f'<rect class="cell" {shape} opacity="{value / top:.3f}"><title>{escape(hint)}</title></rect>')
    every = max(1, -(-len(columns) // 10))
    for j in range(0, len(columns), every):
        x = left_margin + (j + 0.5) * wide
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{len(rows) * cell + 13}" text-anchor="middle">{columns[j]}</text>'
        )
    parts.append(f'<text class="axis" x="{WIDTH - RIGHT}" y="{height - 2}" text-anchor="end">{escape(x_label)}</text>')
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
