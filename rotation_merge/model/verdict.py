"""A search's verdict in words and tables, for the terminal and for the model card."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from rotation_merge.model.markdown import table
from rotation_merge.record import Score, Verdict

CORRELATIONS = ("Pearson", "Spearman")
"""Figures that are no shares."""

Table = list[list[str]]
"""Rows of cells, the headers first."""


def sentences(verdict: Verdict) -> list[str]:
    """Which model to use, then notes on the figures."""
    parent, best = verdict.best_parent, verdict.best
    if not verdict.worth_it:
        scores = f"({parent.score:.4f} against {best.score:.4f})"
        return [f"Use {parent.name} alone: it is better than every merge {scores}.", *verdict.notes]
    scores = f"({best.score:.4f} against {parent.score:.4f})"
    lines = [f"Use the merge '{best.name}': it is better than each model alone {scores}."]
    shares = {parent.name: parent.accuracy for parent in verdict.parents if parent.accuracy is not None}
    most = max(shares, key=shares.__getitem__, default=None)
    if most is not None and best.accuracy is not None and best.accuracy < shares[most]:
        figures = f"{_share(verdict, best.accuracy)} against {_share(verdict, shares[most])}"
        lines.append(f"Its {verdict.figure} is lower than that of {most} ({figures}).")
    return [*lines, *verdict.notes]


def _share(verdict: Verdict, value: float | None) -> str:
    """The figure beside the scores; empty where it is unknown."""
    if value is None:
        return ""
    return f"{value:.4f}" if verdict.figure in CORRELATIONS else f"{value:.1%}"


def tables(verdict: Verdict, names: Mapping[str, str] = MappingProxyType({})) -> dict[str, Table]:
    """By caption, the scores of parents, ensemble, plain average and best merge; and of all merges that were tried.

    Args:
        names: names of models to show.
    """
    alone = [(f"{names.get(parent.name, parent.name)} alone", parent) for parent in verdict.parents]
    beside = (("ensemble of all", verdict.ensemble), ("plain average", verdict.plain))
    merges = [(words, score) for words, score in beside if score is not None]
    scores = [*alone, *merges, (f"best merge: {verdict.best.name}", verdict.best)]
    tried = [(f"{score.name}{' (stopped early)' if score.unfinished else ''}", score) for score in verdict.tried]
    return {
        f"On {verdict.samples}, less is better:": _table(verdict, scores),
        "Merges tried, with scores on the selection samples:": _table(verdict, tried, timed=True),
    }


def _table(verdict: Verdict, scores: Iterable[tuple[str, Score]], timed: bool = False) -> Table:
    """Scores by their names, with the figures that the verdict has; unknown cells are empty."""
    cells: dict[str, Callable[[Score], str]] = {verdict.unit: lambda score: f"{score.score:.4f}"}
    if verdict.best.accuracy is not None:
        cells[verdict.figure] = lambda score: _share(verdict, score.accuracy)
    if verdict.base is not None:
        own_text = f"base's own text ({verdict.base:.4f})"
        cells[own_text] = lambda score: "" if score.on_base is None else f"{score.on_base:.4f}"
    if timed:
        cells["seconds"] = lambda score: f"{score.seconds:.0f}"
    return [["", *cells], *([words, *(cell(score) for cell in cells.values())] for words, score in scores)]


def markdown(verdict: Verdict) -> list[str]:
    """The verdict as Markdown lines for a model card."""
    lines = ["", "### How this merge was chosen", "", " ".join(sentences(verdict))]
    for caption, (headers, *rows) in tables(verdict).items():
        lines += ["", caption, "", *table(headers, rows)] if rows else []
    left_out = "; ".join(f"{name} ({why})" for name, why in verdict.left_out.items())
    return [*lines, *(["", f"Not tried: {left_out}."] if left_out else [])]
