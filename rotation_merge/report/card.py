"""The model card's section on the alignment."""

from __future__ import annotations

import os

from rotation_merge.report.record import MergeReport

TAGS = ("rotation_merge", "re-basin")


def section(report: MergeReport) -> str:
    """Markdown: one sentence and one table row a donor."""
    lines = [
        "### Alignment",
        "",
        f"Before merging by `{report.delegate}`, each donor was moved, its function unchanged, as near as possible to "
        f"`{report.anchor}` with rotation_merge {report.versions.get('rotation-merge', '')}.",
        "",
        "| donor | relative distance before | after | |",
        "|---|---|---|---|",
    ]
    for donor in report.donors():
        before, after = report.relative_distances(donor)
        lines.append(f"| {donor} | {before:.4g} | {after:.4g} | {report.verdict(donor)} |")
    lines += [f"\n{note}" for note in report.notes]
    lines += fingerprints(report)
    lines += ["", "Per space: `rotation_merge.json`.", ""]
    return "\n".join(lines)


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
