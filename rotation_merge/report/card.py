"""The model card's section on the alignment."""

from __future__ import annotations

import os

from rotation_merge.report.record import MergeReport

TAGS = ("rotation_merge", "re-basin")


def section(report: MergeReport) -> str:
    """Markdown: one sentence and one table row a donor."""
    lines = ["### Alignment", "", *_done(report)]
    lines += [f"\n{note}" for note in report.notes]
    lines += fingerprints(report)
    lines += ["", "Per space: `rotation_merge.json`.", ""]
    return "\n".join(lines)


def _done(report: MergeReport) -> list[str]:
    """What was done to the donors: nothing, or a row for each that was moved."""
    tool = f"rotation_merge {report.versions.get('rotation-merge', '')}".strip()
    if not report.donors():
        return [f"No model was moved: this is the plain merge by `{report.delegate}`, planned by {tool}."]
    lines = [
        f"Before merging by `{report.delegate}`, these models were moved by symmetries of the architecture, their "
        f"functions unchanged, as near as possible to `{report.anchor}` with {tool}.",
        "",
        "| model | relative distance before | after | |",
        "|---|---|---|---|",
    ]
    matched = {row.donor for row in report.rows}
    for donor in report.donors():
        figures = report.relative_distances(donor) if donor in matched else ()
        before, after = (f"{figure:.4g}" for figure in figures) if figures else ("", "")
        lines.append(f"| {donor} | {before} | {after} | {report.verdict(donor)} |")
    return lines


def fingerprints(report: MergeReport) -> list[str]:
    """Which weights these were, as lines of Markdown."""
    if not report.fingerprints:
        return []
    rows = [f"| {model} | `{mark}` |" for model, mark in report.fingerprints.items()]
    return ["", "| model | fingerprint of config and weights |", "|---|---|", *rows]


def add_section(path: str, report: MergeReport) -> None:
    """Add the section, and tags to the card's front matter, in place; without a card nothing happens."""
    if not os.path.exists(path):
        return
    with open(path, encoding="utf-8") as file:
        card = file.read()
    if "tags:\n" in card:
        card = card.replace("tags:\n", "tags:\n" + "".join(f"- {tag}\n" for tag in TAGS), 1)
    before, marker, after = card.partition("### Configuration")
    card = f"{before}{section(report)}\n{marker}{after}"
    with open(path, "w", encoding="utf-8") as file:
        file.write(card)
