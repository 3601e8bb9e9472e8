"""A search's verdict in words and tables, for the terminal and for the model card."""

from __future__ import annotations

from collections.abc import Mapping

from rotation_merge.record import Score, Verdict

CORRELATIONS = ("Pearson", "Spearman")
"""Figures that are no shares."""


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


def headers(verdict: Verdict) -> list[str]:
    """Headers of a table with one row for each model."""
    beside = [verdict.figure] if verdict.best.accuracy is not None else []
    own_text = [] if verdict.base is None else [f"base's own text ({verdict.base:.4f})"]
    return ["", verdict.unit, *beside, *own_text]


def rows(verdict: Verdict, names: Mapping[str, str]) -> list[list[str]]:
    """Rows of that table: parents, ensemble, plain average and the best merge.

    Args:
        names: names of models to show.
    """
    scores = [(f"{names.get(parent.name, parent.name)} alone", parent) for parent in verdict.parents]
    beside = (("ensemble of all", verdict.ensemble), ("plain average", verdict.plain))
    scores += [(words, score) for words, score in beside if score is not None]
    scores.append((f"best merge: {verdict.best.name}", verdict.best))
    return [_row(verdict, words, score) for words, score in scores]


def attempt_rows(verdict: Verdict) -> list[list[str]]:
    """Rows of a table of all attempts: `headers`, and seconds."""
    names = [f"{attempt.name}{' (stopped early)' if attempt.unfinished else ''}" for attempt in verdict.tried]
    attempts = zip(names, verdict.tried, strict=True)
    return [[*_row(verdict, name, attempt), f"{attempt.seconds:.0f}"] for name, attempt in attempts]


def _row(verdict: Verdict, words: str, score: Score) -> list[str]:
    """One row of a table with `headers`; unknown cells are empty."""
    row = [words, f"{score.score:.4f}"]
    if verdict.best.accuracy is not None:
        row.append(_share(verdict, score.accuracy))
    if verdict.base is not None:
        row.append("" if score.on_base is None else f"{score.on_base:.4f}")
    return row


def markdown(verdict: Verdict) -> list[str]:
    """The verdict as Markdown lines for a model card."""
    table = [headers(verdict), ["---"] * len(headers(verdict)), *rows(verdict, {})]
    lines = ["", "### How this merge was chosen", "", " ".join(sentences(verdict)), ""]
    lines += [f"On {verdict.samples}, less is better:", "", *(f"| {' | '.join(row)} |" for row in table)]
    return [*lines, "", " ".join(_attempts(verdict))]


def _attempts(verdict: Verdict) -> list[str]:
    """Sentences on the merges that were tried and those that were not."""
    tried = "; ".join(map(_words, verdict.tried))
    left_out = "; ".join(f"{name} ({why})" for name, why in verdict.left_out.items())
    lines = [f"Merges tried, with scores on the selection samples: {tried}."] if tried else []
    return [*lines, *([f"Not tried: {left_out}."] if left_out else [])]


def _words(attempt: Score) -> str:
    early = " estimated from its first samples, stopped early" if attempt.unfinished else ""
    return f"{attempt.name} {attempt.score:.4f}{early}"
