"""What a merge says when it is done, in a few lines."""

from __future__ import annotations

from rotation_merge.record import MergeReport

DONORS, NOTES = 5, 3
"""At most so many of either are shown; the report has them all."""


def closing(report: MergeReport, out: str) -> list[str]:
    """What was aligned and how far, what else there is to know, and where the report lies."""
    donors = report.donors()
    lines = [f"rotation_merge: aligned to {report.anchor}, averaged by {report.delegate}, {report.seconds:.0f} s"]
    lines += [f"  {donor}: {report.verdict(donor)}" for donor in donors[:DONORS]]
    if not donors:
        lines.append(f"  {report.unmoved()}")
    if len(donors) > DONORS:
        lines.append(f"  and {len(donors) - DONORS} more donors")
    lines += [f"  {note}" for note in report.notes[:NOTES]]
    lines.append(f"  report: {out}/rotation_merge.json; 'rotation-merge inspect {out} --report' shows it")
    return lines
