"""Plots as files, with matplotlib (the optional extra `report`), and a picture of a curve in text."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from rotation_merge.errors import RotationMergeError
from rotation_merge.files import replacing
from rotation_merge.record import DISTANCES, MergeReport, relative_distance
from rotation_merge.run.curves import Barrier

COLOURS = ("#8a8f98", "#2f6fde", "#d9822b", "#3a9d5d", "#c9504a", "#8a5fc7", "#1f9aa5", "#b5872b")
MARKS = "ox+*#@%="
MOST_CURVES = len(COLOURS)
"""Curves in one picture."""


def check_plot(path: str) -> None:
    """Check that `save_barrier` can write the file.

    Raises:
        RotationMergeError: matplotlib is not installed, or does not know the file's ending.
    """
    _pyplot()
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    known = FigureCanvasAgg.get_supported_filetypes()
    if os.path.splitext(path)[1][1:].lower() not in known:
        problem = f"this ending is not supported; plots are written as {', '.join(known)}"
        raise RotationMergeError(problem, where=path, remedy="end the name in .png, .svg or .pdf")


def _pyplot() -> Any:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise RotationMergeError("plots need matplotlib", remedy="pip install 'rotation-merge[report]'") from error
    return pyplot


def save_barrier(barrier: Barrier, path: str) -> None:
    """Write a barrier's curves, up to `MOST_CURVES`, to a PNG, SVG or PDF file, completely or not at all.

    Raises:
        RotationMergeError: matplotlib is not installed.
    """
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(5.5, 3.6), layout="constrained")
    for curve, colour in zip(barrier.curves, COLOURS, strict=False):
        label = f"{curve.name} (barrier {curve.barrier():.3g})"
        axes.plot(curve.t, curve.loss, marker="o", markersize=3, color=colour, label=label)
    axes.set_xlabel(f"from {_short(barrier.anchor)} (0) to {_short(barrier.donor)} (1)")
    axes.set_ylabel("loss (nats)")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=160, format=os.path.splitext(path)[1][1:].lower())
    pyplot.close(figure)


def save_distances(report: MergeReport, folder: str) -> str | None:
    """Draw each donor's relative distance to the anchor by layer, before and after alignment, for the card of a merge.

    Returns:
        The picture's name in the folder; None where alignment brought no layer nearer, as among fine-tunes of one base,
        or matplotlib is not installed.
    """
    distances = {donor: by_layer for donor in report.donors() if (by_layer := _layer_distances(report, donor))}
    pairs = [pair for by_layer in distances.values() for pair in by_layer.values()]
    if all(after > 0.999 * before for before, after in pairs):
        return None
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        return None
    figure = Figure(figsize=(6, 3.2))
    axes = figure.add_subplot()
    for (donor, by_layer), colour in zip(distances.items(), COLOURS, strict=False):
        for number, (style, words) in enumerate((("--", "before"), ("-", "after"))):
            values = [pair[number] for pair in by_layer.values()]
            axes.plot([*by_layer], values, style, color=colour, marker=".", label=f"{words}: {_short(donor)}")
    axes.set_xlabel("layer")
    axes.set_ylabel("relative distance to the anchor")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(os.path.join(folder, DISTANCES), dpi=120, bbox_inches="tight", metadata={"Software": None})
    return DISTANCES


def _layer_distances(report: MergeReport, donor: str) -> Mapping[int, tuple[float, float]]:
    """A donor's relative distances before and after alignment, by layer."""
    rows = [row for row in report.rows if row.donor == donor and row.layer is not None]
    return {
        layer: relative_distance([row for row in rows if row.layer == layer])
        for layer in sorted({row.layer for row in rows if row.layer is not None})
    }


def _short(name: str) -> str:
    """A model's name for an axis: the last piece of its path; between two dollars matplotlib would read formulas."""
    return (name if "(" in name else name.rstrip("/").rpartition("/")[2]).replace("$", r"\$")


def text_plot(barrier: Barrier) -> str:
    """The curves drawn with characters, for a terminal."""
    from numpy import interp

    height, width = 12, 56
    values = [loss for curve in barrier.curves for loss in curve.loss]
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    grid = [[" "] * width for _ in range(height)]
    for curve, mark in zip(barrier.curves, MARKS, strict=False):
        for x in range(width):
            t = x / (width - 1)
            row = round((high - float(interp(t, curve.t, curve.loss))) / span * (height - 1))
            grid[row][x] = mark
    lines = []
    for i, cells in enumerate(grid):
        label = f"{high:8.3f}" if i == 0 else f"{low:8.3f}" if i == height - 1 else " " * 8
        lines.append(f"{label} |{''.join(cells)}".rstrip())
    lines.append(" " * 9 + "+" + "-" * width)
    lines.append(" " * 10 + "anchor" + "donor".rjust(width - 6))
    lines.append(" " * 10 + "   ".join(f"{m} {c.name}" for c, m in zip(barrier.curves, MARKS, strict=False)))
    return "\n".join(lines)
