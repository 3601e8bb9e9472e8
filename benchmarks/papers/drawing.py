"""Small SVGs for light and dark pages, the same bytes for the same figures: bars, lines and shaded planes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from html import escape

GREY = "#858c94"
COLOURS = (GREY, "#3a9d5d", "#d97d1a", "#3d85c6", "#a05fb5", "#c0504d", "#2ca6a4", "#b8860b")
LEFT, RIGHT, TOP = 46, 10, 24


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


def bars(groups: Mapping[str, Mapping[str, float]], y_label: str, width: int = 640) -> str:
    """Bars side by side, in groups: value by name of the bar, by name of the group. All groups have the same bars."""
    names = list(next(iter(groups.values())))
    y1 = max(value for group in groups.values() for value in group.values())
    frame = _Frame(width, 210, (0.0, len(groups)), (0.0, y1))
    parts = frame.axes(y_label, f"{y_label} by {', '.join(groups)}")
    step = 0.8 / len(names)
    for index, (title, group) in enumerate(groups.items()):
        parts.append(frame.text(index + 0.5, f"{escape(title)}", frame.height + 16, "middle"))
        for place, (name, value) in enumerate(group.items()):
            x, top = frame.at(index + 0.1 + place * step, value)
            wide = frame.at(index + 0.1 + (place + 1) * step, 0)[0] - x - 1
            hint = f"<title>{escape(title)}, {escape(name)}: {number(value)}</title>"
            box = f'x="{x:.1f}" y="{top:.1f}" width="{wide:.1f}" height="{frame.height - top:.1f}"'
            parts.append(f'<rect {box} fill="{COLOURS[place]}">{hint}</rect>')
    return frame.done(parts, names)


def lines(
    found: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    x_label: str,
    y_label: str,
    room: float = 0.0,
) -> str:
    """One line a name, of (xs, ys); all ys are finite. `room`: a share of their range that is left free above them."""
    xs, ys = ([value for line in found.values() for value in line[side]] for side in (0, 1))
    frame = _Frame(520, 230, (min(xs), max(xs)), (min(ys), max(ys) + room * (max(ys) - min(ys))))
    parts = frame.axes(y_label, f"{y_label} by {x_label}")
    for x in ticks(min(xs), max(xs), 8):
        parts.append(frame.text(x, number(x), frame.height + 16, "middle"))
    parts.append(frame.text(max(xs), escape(x_label), frame.height + 30, "end"))
    for colour, (name, (across, up)) in zip(COLOURS, found.items(), strict=False):
        points = " ".join("{:.1f},{:.1f}".format(*frame.at(x, y)) for x, y in zip(across, up, strict=True))
        hint = f"<title>{escape(name)}</title>"
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2">{hint}</polyline>')
    return frame.done(parts, list(found))


Panel = tuple[Sequence[float], Sequence[Sequence[float]], Mapping[str, tuple[float, float]]]
"""Edges of a plane (x from, x to, y from, y to), values by row from below and column, points by name."""
SHADES, FINE, LEAST, SIDE = 12, 48, 0.01, 290
"""Shades, places across a side, the value below which all are one shade, and the length of a side."""


def plane(panels: Mapping[str, Panel], label: str) -> str:
    """Values over planes, side by side: the darker a place, the larger its value, on one logarithmic scale."""
    every = [max(value, LEAST) for _, rows, _ in panels.values() for row in rows for value in row]
    low, high = math.log(min(every)), math.log(max(every))
    parts = [f"<title>{escape(label)}, over planes: {escape('; '.join(panels))}</title>"]
    for index, (title, (edges, rows, marks)) in enumerate(panels.items()):
        left, top = index * (SIDE + 24), 20
        x0, x1, y0, y1 = edges
        parts.append(f'<text x="{left}" y="13">{escape(title)}</text>')
        parts += [
            f'<g transform="translate({left} {top}) scale({SIDE / FINE:.4f})" shape-rendering="crispEdges">',
            *(f'<path {_fill(shade)} d="{runs}"/>' for shade, runs in sorted(_shades(rows, low, high).items())),
            "</g>",
        ]
        at = {
            name: (left + SIDE * (x - x0) / (x1 - x0), top + SIDE * (y1 - y) / (y1 - y0))
            for name, (x, y) in marks.items()
        }
        for end, colour in (("B", COLOURS[5]), ("B'", COLOURS[2])):
            (ax, ay), (bx, by) = at["A"], at[end]
            parts.append(f'<path d="M{ax:.1f} {ay:.1f}L{bx:.1f} {by:.1f}" stroke="{colour}" stroke-width="1.5"/>')
        for name, (x, y) in at.items():
            colour = COLOURS[1] if name == "A" else COLOURS[2] if "'" in name else COLOURS[5]
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{5 if len(name.strip(chr(39))) == 1 else 4}" fill="{colour}"/>'
            )
            parts.append(
                f'<text x="{x + 8:.1f}" y="{y - 6:.1f}" fill="{colour}" font-weight="bold">{escape(name)}</text>'
            )
    width, y = max(len(panels) * (SIDE + 24) - 24, 560), SIDE + 42
    for shade in range(SHADES + 1):
        parts.append(f'<rect x="{20 * shade}" y="{y - 10}" width="20" height="12" {_fill(shade)}/>')
    words = f"{label}: from {number(math.exp(low))} to {number(math.exp(high))}, logarithmic"
    parts.append(f'<text x="{20 * SHADES + 30}" y="{y}">{escape(words)}</text>')
    return "\n".join([_head(width, y + 10), *parts, "</svg>\n"])


def _fill(shade: int) -> str:
    return f'fill="{COLOURS[3]}" fill-opacity="{shade / SHADES:.2f}"'


def _shades(rows: Sequence[Sequence[float]], low: float, high: float) -> dict[int, str]:
    """Runs of one shade, row by row from above, of values interpolated between those that are known; by shade."""
    found: dict[int, str] = {}
    for i in range(FINE):
        values = [max(_between(rows, (FINE - i - 0.5) / FINE, (j + 0.5) / FINE), LEAST) for j in range(FINE)]
        shades = [round(SHADES * (math.log(value) - low) / ((high - low) or 1.0)) for value in values]
        start = 0
        for shade, run in itertools.groupby(shades):
            wide = len(list(run))
            found[shade] = found.get(shade, "") + f"M{start} {i}h{wide}v1h-{wide}z"
            start += wide
    return found


def _between(rows: Sequence[Sequence[float]], v: float, u: float) -> float:
    """Bilinear interpolation at a place in the unit square."""
    y, x = v * (len(rows) - 1), u * (len(rows[0]) - 1)
    i, j = min(int(y), len(rows) - 2), min(int(x), len(rows[0]) - 2)
    a, b = y - i, x - j
    upper = (1 - b) * rows[i + 1][j] + b * rows[i + 1][j + 1]
    return (1 - a) * ((1 - b) * rows[i][j] + b * rows[i][j + 1]) + a * upper


def _head(width: float, height: float) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="{GREY}">'
    )


class _Frame:
    """Axes of a picture whose plot ends `height` below the top; a legend of as many lines as it needs stands below."""

    def __init__(self, width: int, height: int, xs: tuple[float, float], ys: tuple[float, float]) -> None:
        self.width, self.height = width, height
        self.x, self.y = (xs[0], xs[1] if xs[1] > xs[0] else xs[0] + 1), (ys[0], ys[1] if ys[1] > ys[0] else ys[0] + 1)

    def at(self, x: float, y: float) -> tuple[float, float]:
        across = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        return LEFT + across * (self.width - LEFT - RIGHT), self.height - up * (self.height - TOP)

    def text(self, x: float, words: str, y: float, anchor: str) -> str:
        return f'<text x="{self.at(x, 0)[0]:.1f}" y="{y:.0f}" text-anchor="{anchor}">{words}</text>'

    def axes(self, y_label: str, title: str) -> list[str]:
        parts = [f"<title>{escape(title)}</title>", f'<text x="4" y="11">{escape(y_label)}</text>']
        for value in ticks(*self.y):
            y = self.at(self.x[0], value)[1]
            parts.append(
                f'<path d="M{LEFT} {y:.1f}H{self.width - RIGHT}" stroke="{GREY}" stroke-opacity="0.3"/>'
                f'<text x="{LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{number(value)}</text>'
            )
        return parts

    def done(self, parts: list[str], names: Sequence[str]) -> str:
        """The whole SVG, with the names in their colours below."""
        x, y = LEFT, self.height + 48
        for colour, name in zip(COLOURS, names, strict=False):
            if x > LEFT and x + 7 * len(name) + 24 > self.width:
                x, y = LEFT, y + 17
            parts.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{colour}"/>')
            parts.append(f'<text x="{x + 15}" y="{y}">{escape(name)}</text>')
            x += 7 * len(name) + 32
        return "\n".join([_head(self.width, y + 10), *parts, "</svg>\n"])
