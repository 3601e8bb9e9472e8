"""Plots as files, with matplotlib (the optional extra `report`)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rotation_merge.errors import RotationMergeError
from rotation_merge.files import replacing
from rotation_merge.record import DISTANCES, MergeReport, relative_distance
from rotation_merge.run.evaluate import Barrier

COLOURS = ("#8a8f98", "#2f6fde", "#d9822b", "#3a9d5d", "#c9504a", "#8a5fc7", "#1f9aa5", "#b5872b")
MOST_CURVES = len(COLOURS)
"""Curves in one picture."""


def check_plot(path: str) -> None:
    """Check that `save_barrier` can write the file.

    Raises:
        RotationMergeError: matplotlib is not installed, or does not know the file's ending.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        raise RotationMergeError("plots need matplotlib", remedy="pip install 'rotation-merge[report]'") from error
    known = FigureCanvasAgg.get_supported_filetypes()
    if Path(path).suffix[1:].lower() not in known:
        problem = f"this ending is not supported; plots are written as {', '.join(known)}"
        raise RotationMergeError(problem, where=path, remedy="end the name in .png, .svg or .pdf")


def _axes(width: float, height: float, labels: tuple[str, str], layout: Any = None) -> tuple[Any, Any]:
    """A figure of so many inches, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout=layout)
    axes = figure.add_subplot()
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save_barrier(barrier: Barrier, path: str) -> None:
    """Write a barrier's curves, up to `MOST_CURVES`, to a PNG, SVG or PDF file, completely or not at all."""
    place = f"from {_short(barrier.anchor)} (0) to {_short(barrier.donor)} (1)"
    figure, axes = _axes(5.5, 3.6, (place, "loss (nats)"), "constrained")
    for curve, colour in zip(barrier.curves, COLOURS, strict=False):
        label = f"{curve.name} (barrier {curve.barrier():.3g})"
        axes.plot(curve.t, curve.loss, marker="o", markersize=3, color=colour, label=label)
    axes.legend(frameon=False)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=160, format=Path(path).suffix[1:].lower())


def save_distances(report: MergeReport, folder: str) -> str | None:
    """Draw each donor's relative distance to the anchor by layer, before and after alignment, for the card of a merge.

    Returns:
        The picture's name in the folder; None where alignment brought no layer nearer, as among fine-tunes of one base,
        or matplotlib is not installed.
    """
    distances = {donor: pairs for donor in report.donors() if (pairs := _layer_distances(report, donor))}
    if all(after > 0.999 * before for pairs in distances.values() for before, after in pairs.values()):
        return None
    try:
        from matplotlib.ticker import MaxNLocator

        figure, axes = _axes(6, 3.2, ("layer", "relative distance to the anchor"))
    except ImportError:
        return None
    for (donor, pairs), colour in zip(distances.items(), COLOURS, strict=False):
        for number, (style, words) in enumerate((("--", "before"), ("-", "after"))):
            values = [pair[number] for pair in pairs.values()]
            axes.plot([*pairs], values, style, color=colour, marker=".", label=f"{words}: {_short(donor)}")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False)
    figure.savefig(os.path.join(folder, DISTANCES), dpi=120, bbox_inches="tight", metadata={"Software": None})
    return DISTANCES


def _layer_distances(report: MergeReport, donor: str) -> dict[int, tuple[float, float]]:
    """A donor's relative distances before and after alignment, by layer."""
    rows = [row for row in report.rows if row.donor == donor]
    layers = sorted({row.layer for row in rows if row.layer is not None})
    return {layer: relative_distance([row for row in rows if row.layer == layer]) for layer in layers}


def _short(name: str) -> str:
    """A model's name for an axis: the last piece of its path; between two dollars matplotlib would read formulas."""
    return (name if "(" in name else name.rstrip("/").rpartition("/")[2]).replace("$", r"\$")
