"""Draw the pictures of the pages and of the README: `python docs/make_pictures.py` writes docs/pictures/*.svg.

Colours are of middle brightness on no background, so that one file serves light and dark pages.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

BLUE, ORANGE, GREEN, RED, GREY = "#3d85c6", "#d97d1a", "#4a9d5b", "#c9504a", "#858c94"
COLOURS = (BLUE, ORANGE, GREEN, RED)
FOLDER = Path(__file__).parent / "pictures"


def picture(width: int, height: int, title: str, parts: list[str]) -> str:
    """One SVG file; the title is what screen readers say."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            'font-family="system-ui, sans-serif" font-size="14">',
            f"<title>{title}</title>",
            *parts,
            "</svg>\n",
        ]
    )


def text(x: float, y: float, words: str, colour: str = GREY, anchor: str = "middle", size: int = 14) -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{colour}" text-anchor="{anchor}" font-size="{size}">{words}</text>'


def dot(x: float, y: float, colour: str, radius: float = 9) -> str:
    return f'<circle cx="{x:g}" cy="{y:g}" r="{radius:g}" fill="{colour}"/>'


def line(x1: float, y1: float, x2: float, y2: float, colour: str = GREY, width: float = 1.5, dash: str = "") -> str:
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{colour}" stroke-width="{width:g}"{dashed}/>'


def box(x: float, y: float, width: float, height: float, colour: str, words: str, below: str) -> list[str]:
    middle = x + width / 2
    return [
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8" fill="{colour}" fill-opacity="0.12" '
        f'stroke="{colour}" stroke-width="1.5"/>',
        text(middle, y + height / 2 - 3, words, colour),
        text(middle, y + height / 2 + 16, below, GREY, size=12),
    ]


def neurons() -> str:
    """The same four neurons in two orders; averaged as they stand, and in one order."""
    orders = {"anchor": (0, 1, 2, 3), "donor": (2, 0, 3, 1), "donor, aligned": (0, 1, 2, 3)}
    parts: list[str] = []
    for column, (name, order) in enumerate(orders.items()):
        left = 90 + 210 * column
        parts += [text(left, 22, name), dot(left - 55, 100, GREY, 5), dot(left + 55, 100, GREY, 5)]
        for row, neuron in enumerate(order):
            y = 50 + 34 * row
            parts += [line(left - 50, 100, left - 10, y, COLOURS[neuron]), line(left + 10, y, left + 50, 100, GREY)]
            parts.append(dot(left, y, COLOURS[neuron]))
    for column, (name, order) in enumerate((("plain average", (2, 0, 3, 1)), ("aligned average", (0, 1, 2, 3)))):
        left = 690 + 120 * column
        parts.append(text(left, 22, name))
        for row, neuron in enumerate(order):
            y = 50 + 34 * row
            parts.append(f'<path d="M{left} {y - 9} a9 9 0 0 0 0 18z" fill="{COLOURS[row]}"/>')
            parts.append(f'<path d="M{left} {y - 9} a9 9 0 0 1 0 18z" fill="{COLOURS[neuron]}"/>')
    words = "the donor computes the same before and after: only the order of its neurons changes"
    parts.append(text(300, 196, words, size=12))
    parts.append(text(750, 196, "halves of unlike, then of like neurons", size=12))
    return picture(880, 210, "The same neurons in another order, averaged before and after alignment", parts)


def orbit() -> str:
    """The donor's orbit, its point nearest to the anchor, and the two straight paths."""
    cx, cy, radius = 500.0, 150.0, 105.0
    ax, ay = 150.0, 150.0
    angle = math.radians(125)
    dx, dy = cx - radius * math.cos(angle), cy - radius * math.sin(angle)
    nx, ny = cx - radius, cy
    turn = f"M{dx - 9:g} {dy + 7:g} A{radius - 4:g} {radius - 4:g} 0 0 0 {nx + 6:g} {ny - 14:g}"
    return picture(
        760,
        290,
        "The donor's orbit: points of equal function, one of them nearest to the anchor",
        [
            f'<circle cx="{cx:g}" cy="{cy:g}" r="{radius:g}" fill="none" stroke="{GREY}" stroke-width="1.5" '
            'stroke-dasharray="5 5"/>',
            text(cx, cy + 45, "the donor's orbit:"),
            text(cx, cy + 65, "all compute the same", size=12),
            line(ax, ay, dx, dy, RED, 1.5, "6 4"),
            line(ax, ay, nx, ny, GREEN, 2.5),
            f'<path d="{turn}" fill="none" stroke="{ORANGE}" stroke-width="2.5"/>',
            dot(ax, ay, BLUE, 11),
            text(ax, ay + 32, "anchor", BLUE),
            dot(dx, dy, ORANGE, 11),
            text(dx + 18, dy - 10, "donor", ORANGE, "start"),
            dot(nx, ny, GREEN, 11),
            text(nx + 18, ny + 5, "aligned donor", GREEN, "start"),
            dot((ax + dx) / 2, (ay + dy) / 2, RED, 6),
            text((ax + dx) / 2, (ay + dy) / 2 - 16, "plain average", RED, "end"),
            dot((ax + nx) / 2, ay, GREEN, 6),
            text((ax + nx) / 2, ay + 26, "aligned average", GREEN),
        ],
    )


def spaces() -> str:
    """One layer of a transformer and the spaces in it."""
    parts = [
        f'<rect x="20" y="200" width="860" height="46" rx="8" fill="{GREY}" fill-opacity="0.15" stroke="{GREY}"/>',
        text(450, 219, "residual stream"),
        text(450, 238, "permutations, signed permutations or rotations: one map for the whole model", size=12),
    ]
    boxes = (
        (60, 190, BLUE, "queries, keys", "a rotation in each head"),
        (270, 190, ORANGE, "values, outputs", "a rotation in each head"),
        (600, 230, GREEN, "FFN neurons", "their order and scale"),
    )
    for x, width, colour, words, below in boxes:
        parts += box(x, 75, width, 62, colour, words, below)
        parts += [
            line(x + width / 3, 200, x + width / 3, 139, GREY),
            f'<path d="M{x + width / 3 - 5:g} 147 l5 -9 l5 9z" fill="{GREY}"/>',
        ]
    for x in (425.0, 790.0):
        parts += [line(x, 137, x, 198, GREY), f'<path d="M{x - 5:g} 190 l5 9 l5 -9z" fill="{GREY}"/>']
    parts += [
        f'<rect x="40" y="36" width="440" height="116" rx="10" fill="none" stroke="{GREY}" stroke-dasharray="5 5"/>',
        text(260, 58, "attention: also the order of the heads"),
        text(65, 176, "read", size=12, anchor="end"),
        text(440, 176, "write", size=12, anchor="start"),
        text(660, 176, "read", size=12, anchor="end"),
        text(805, 176, "write", size=12, anchor="start"),
    ]
    return picture(900, 260, "The spaces of one layer and the group of each", parts)


def path() -> str:
    """Loss between two Llamas of different seeds, as `python benchmarks/independent.py groups` measured it."""
    rows = json.loads((FOLDER.parent.parent / "benchmarks" / "results" / "path.json").read_text("utf-8"))["rows"]
    curves = {name: [float(row[name]) for row in rows] for name in ("plain", "aligned")}
    low, high = min(map(min, curves.values())), max(map(max, curves.values()))

    def at(i: int, loss: float) -> tuple[float, float]:
        return 70 + 490 * i / (len(rows) - 1), 210 - 170 * (loss - low) / (high - low)

    parts = [line(60, 220, 570, 220), line(60, 30, 60, 220)]
    parts += [text(70, 242, "one model"), text(560, 242, "the other", anchor="end"), text(315, 242, "half and half")]
    parts.append(f'<g transform="translate(24 125) rotate(-90)">{text(0, 0, "loss (nats a byte)")}</g>')
    for loss in (low, high):
        parts.append(text(52, at(0, loss)[1] + 5, f"{loss:.1f}", anchor="end", size=12))
    for (name, losses), colour in zip(curves.items(), (RED, GREEN), strict=True):
        points = " ".join("{:.1f},{:.1f}".format(*at(i, loss)) for i, loss in enumerate(losses))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="3"/>')
        middle = at(len(rows) // 2, losses[len(rows) // 2])
        words = "plain average" if name == "plain" else "aligned by rotation_merge"
        parts += [dot(*middle, colour, 6), text(middle[0], middle[1] + (-16 if name == "plain" else 28), words, colour)]
    return picture(600, 256, "Loss on the straight path between two models, before and after alignment", parts)


def paths() -> str:
    """Losses on the path between two ViTs by matching, as `benchmarks/papers/figure5.py` measured them."""
    path = FOLDER.parent.parent / "benchmarks" / "results" / "papers-figure5-paths.json"
    rows = [row for row in json.loads(path.read_text("utf-8"))["rows"] if row["models"] == "ViTs"]
    curves = {row["matching"]: [float(loss) for loss in row["losses"].split()] for row in rows}
    high = max(map(max, curves.values()))
    colours = (GREY, "#a05fb5", "#b8860b", RED, BLUE, ORANGE, GREEN)
    parts = [line(60, 220, 420, 220), line(60, 20, 60, 220)]
    parts += [text(70, 242, "one model"), text(410, 242, "the other", anchor="end"), text(240, 242, "half and half")]
    parts.append(f'<g transform="translate(24 125) rotate(-90)">{text(0, 0, "loss (nats)")}</g>')
    parts += [text(52, 215 - 180 * loss / high, f"{loss:g}", anchor="end", size=12) for loss in range(int(high) + 1)]
    for place, ((name, losses), colour) in enumerate(zip(curves.items(), colours, strict=True)):
        steps = enumerate(losses)
        points = " ".join(f"{70 + 340 * i / (len(losses) - 1):.1f},{210 - 180 * loss / high:.1f}" for i, loss in steps)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        parts += [line(440, 40 + 24 * place, 464, 40 + 24 * place, colour, 2.5)]
        parts += [text(472, 45 + 24 * place, name, colour, "start")]
    return picture(600, 256, "Paths between two ViTs under several alignments", parts)


def cost() -> str:
    """Seconds of a merge by layers, width and donors, as `python benchmarks/sizes.py --curves` measured them."""
    path = FOLDER.parent.parent / "benchmarks" / "results" / "sizes-curves.json"
    rows = json.loads(path.read_text("utf-8"))["rows"]
    parts = [f'<g transform="translate(24 120) rotate(-90)">{text(0, 0, "seconds of one core")}</g>']
    for place, by in enumerate(("layers", "width", "donors")):
        parts += panel([row for row in rows if row["by"] == by], by, 70.0 + 300 * place)
    parts.append(text(78, 44, "independent models", RED, "start"))
    parts.append(text(78, 64, "near fine-tunes", GREEN, "start"))
    return picture(940, 262, "What a merge costs by layers, width and donors", parts)


def averages() -> str:
    """What averages of task vectors reach and forget, by `benchmarks/real/measure.py real merges`."""
    path = FOLDER.parent.parent / "benchmarks" / "results" / "real-merges-three.json"
    rows = json.loads(path.read_text("utf-8"))["rows"]
    named = {
        "linear": (GREY, "linear"),
        "task_arithmetic, best lambda": (ORANGE, "task_arithmetic"),
        "ties, density 0.5": (ORANGE, "ties"),
        "wudi": (GREEN, "wudi"),
        "tsv": (BLUE, "tsv"),
        "tsv, calibrated": (GREEN, "tsv, calibrated"),
        "iso": (BLUE, "iso"),
    }
    apart = {"wudi": (-6, -12), "tsv, calibrated": (-6, 24)}  # where names would meet
    values = {
        row["merge"]: [float(row[key].split()[0]) for key in ("mean", "base's own text")]
        for row in rows
        if row["merge"] in named
    }
    (low, high), (least, most) = ((min(column), max(column)) for column in zip(*values.values(), strict=True))
    parts = [line(90, 210, 560, 210), line(90, 30, 90, 210)]
    parts.append(text(325, 250, "loss on the texts that they were tuned on (left is better)"))
    parts.append(f'<g transform="translate(24 120) rotate(-90)">{text(0, 0, "loss on the base&#39;s text")}</g>')
    for name, (colour, words) in named.items():
        loss, lost = values[name]
        x, y = 120 + 370 * (loss - low) / (high - low), 190 - 140 * (lost - least) / (most - least)
        beside, down = apart.get(name, (12, 5))
        parts += [dot(x, y, colour, 6), text(x + beside, y + down, words, colour, "start")]
    for number, x, y, anchor in ((low, 120, 228, "middle"), (high, 490, 228, "middle"), (least, 82, 195, "end")):
        parts.append(text(x, y, f"{number:.3f}", anchor=anchor, size=12))
    parts.append(text(82, 55, f"{most:.3f}", anchor="end", size=12))
    return picture(600, 262, "Three fine-tunes of SmolLM2: what each average gains, and what it forgets", parts)


def panel(rows: list[dict[str, str]], by: str, left: float) -> list[str]:
    """One of three: axes that begin at zero, or, of the width, are logarithmic."""
    logarithms = by == "width"
    scale = math.log if logarithms else float
    xs, ys = ([scale(float(row[key])) for row in rows] for key in ("number", "after the start, s"))
    first, low = (min(xs), min(ys)) if logarithms else (0.0, 0.0)
    parts = [line(left - 8, 208, left + 215, 208), line(left - 8, 30, left - 8, 208)]
    parts.append(text(left + 100, 248, f"{by}{', both axes logarithmic' if logarithms else ''}"))
    for kind, colour in (("near", GREEN), ("far", RED)):
        points = [
            (left + 200 * (x - first) / (max(xs) - first), 200 - 150 * (y - low) / (max(ys) - low), row)
            for x, y, row in zip(xs, ys, rows, strict=True)
            if row["donor"] == kind
        ]
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
        parts.append(f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        parts += [dot(x, y, colour, 4) for x, y, _ in points]
        x, y, last = points[-1]
        parts.append(text(x + 8, y - 12, f"{float(last['after the start, s']):.0f} s", colour, "end", 12))
        parts += [text(x, 226, row["number"], size=12) for x, _, row in points if kind == "near"]
    return parts


PICTURES = {
    "averages.svg": averages,
    "cost.svg": cost,
    "neurons.svg": neurons,
    "orbit.svg": orbit,
    "papers-figure5-vits.svg": paths,
    "path.svg": path,
    "spaces.svg": spaces,
}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
