"""A search's verdict in words and tables, for the terminal and for the model card."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rotation_merge.model.markdown import table
from rotation_merge.record import Score, Verdict

CORRELATIONS = ("Pearson", "Spearman")
"""Figures that are no shares."""

TRIED = "Merges tried, with scores on the selection samples:"

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


def results(verdict: Verdict, names: Mapping[str, str]) -> Table:
    """Parents, ensemble, plain average and the best merge, with their scores.

    Args:
        names: names of models to show.
    """
    scores = [(f"{names.get(parent.name, parent.name)} alone", parent) for parent in verdict.parents]
    beside = (("ensemble of all", verdict.ensemble), ("plain average", verdict.plain))
    scores += [(words, score) for words, score in beside if score is not None]
    return _table(verdict, [*scores, (f"best merge: {verdict.best.name}", verdict.best)])


def attempts(verdict: Verdict) -> Table:
    """All merges that were tried, with their scores and seconds."""
    names = (f"{attempt.name}{' (stopped early)' if attempt.unfinished else ''}" for attempt in verdict.tried)
    headers, *rows = _table(verdict, zip(names, verdict.tried, strict=True))
    seconds = (f"{attempt.seconds:.0f}" for attempt in verdict.tried)
    return [[*headers, "seconds"], *([*row, time] for row, time in zip(rows, seconds, strict=True))]


def _table(verdict: Verdict, scores: Iterable[tuple[str, Score]]) -> Table:
    """Scores by their names, with the figures that the verdict has; unknown cells are empty."""
    rows = [["", verdict.unit, verdict.figure, f"base's own text ({verdict.base or 0:.4f})"]]
    for words, score in scores:
        on_base = "" if score.on_base is None else f"{score.on_base:.4f}"
        rows.append([words, f"{score.score:.4f}", _share(verdict, score.accuracy), on_base])
    columns = [0, 1] + [2] * (verdict.best.accuracy is not None) + [3] * (verdict.base is not None)
    return [[row[column] for column in columns] for row in rows]


def markdown(verdict: Verdict) -> list[str]:
    """The verdict as Markdown lines for a model card."""
    lines = ["", "### How this merge was chosen", "", " ".join(sentences(verdict))]
    tables = {f"On {verdict.samples}, less is better:": results(verdict, {}), TRIED: attempts(verdict)}
    for caption, (headers, *rows) in tables.items():
        lines += ["", caption, "", *table(headers, rows)] if rows else []
    left_out = "; ".join(f"{name} ({why})" for name, why in verdict.left_out.items())
    return [*lines, *(["", f"Not tried: {left_out}."] if left_out else [])]
