"""A search's verdict in words and tables, for the terminal and for the model card."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from rotation_merge.model.markdown import table
from rotation_merge.record import Score, Verdict, with_margin

CORRELATIONS = ("Pearson", "Spearman")
"""Figures that are no shares."""

Row = dict[str, str]
"""Cells of a table by their headers."""


def sentences(verdict: Verdict) -> list[str]:
    """Which model to use, then notes on the figures."""
    parent, best = verdict.best_parent, verdict.best
    by = f": {with_margin(f'{abs(best.score - parent.score):.4f}', verdict.margin)}"
    if not verdict.clear:
        scores = f"({best.score:.4f} against {parent.score:.4f}{by})"
        line = (
            f"No clear difference between the merge '{best.name}' and {parent.name} alone {scores}; {verdict.remedy}."
        )
        return [line, *verdict.notes]
    if not verdict.worth_it:
        scores = f"({parent.score:.4f} against {best.score:.4f}{by})"
        return [f"Use {parent.name} alone: it is better than every merge {scores}.", *verdict.notes]
    scores = f"({best.score:.4f} against {parent.score:.4f}{by})"
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


def tables(verdict: Verdict, names: Mapping[str, str] = MappingProxyType({})) -> dict[str, list[Row]]:
    """By caption, the scores of parents, ensemble, plain average and best merge; and of all merges that were tried.

    Args:
        names: names of models to show.
    """
    scores = {f"{names.get(parent.name, parent.name)} alone": parent for parent in verdict.parents}
    beside = {"ensemble of all": verdict.ensemble, "plain average": verdict.plain}
    scores |= {words: score for words, score in beside.items() if score is not None}
    scores[f"best merge: {verdict.best.name}"] = verdict.best
    tried = {score.name: score for score in verdict.tried}
    timed = [{**_row(verdict, words, score), "seconds": f"{score.seconds:.0f}"} for words, score in tried.items()]
    return {
        f"On {verdict.samples}, less is better:": [_row(verdict, words, score) for words, score in scores.items()],
        "Merges tried, with scores on the selection samples:": timed,
    }


def _row(verdict: Verdict, words: str, score: Score) -> Row:
    """A score by its name, with the figures that the verdict has; unknown cells are empty."""
    row = {"": words, verdict.unit: f"{score.score:.4f}"}
    if verdict.best.accuracy is not None:
        row[verdict.figure] = _share(verdict, score.accuracy)
    if verdict.base is not None:
        row[f"base's own text ({verdict.base:.4f})"] = "" if score.on_base is None else f"{score.on_base:.4f}"
    return row


def markdown(verdict: Verdict) -> list[str]:
    """The verdict as Markdown lines for a model card."""
    lines = ["", "### How this merge was chosen", "", " ".join(sentences(verdict))]
    for caption, rows in tables(verdict).items():
        lines += ["", caption, "", *table(list(rows[0]), [list(row.values()) for row in rows])] if rows else []
    left_out = "; ".join(f"{name} ({why})" for name, why in verdict.left_out.items())
    return [*lines, *(["", f"Not tried: {left_out}."] if left_out else [])]
