"""The content of one of our files from its header: an alignment, statistics, or a merge's report."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from safetensors import SafetensorError, safe_open

from rotation_merge.errors import RotationMergeError, short
from rotation_merge.matching.alignment import opened_file
from rotation_merge.record import MergeReport, gained, relative_distance
from rotation_merge.run.statistics import Statistics, has_format

ALIGNMENT, STATISTICS = "rotation_merge.alignment.", "rotation_merge.statistics."
ENDINGS = (".json", ".safetensors")


def read_report(path: str) -> MergeReport:
    """The report that a merge wrote.

    Raises:
        RotationMergeError: there is none, or it is damaged.
    """
    try:
        with open(path, encoding="utf-8") as file:
            return MergeReport.from_dict(json.load(file))
    except (FileNotFoundError, NotADirectoryError) as error:
        remedy = "name the directory of a model that rotation_merge wrote"
        raise RotationMergeError("no such file", where=path, remedy=remedy) from error
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise RotationMergeError(f"is not a report ({error})", where=path, remedy="merge again") from error


def is_own_file(path: str) -> bool:
    """Whether a file is to be read as an alignment, statistics or a report, rather than as a recipe."""
    return path.endswith(ENDINGS) or has_format(path, ALIGNMENT) or has_format(path, STATISTICS)


def described(path: str) -> dict[str, Any]:
    """A file of ours in words and numbers.

    Raises:
        RotationMergeError: it is none, or cannot be read.
    """
    if path.endswith(".json"):
        return _report(path)
    try:
        with safe_open(path, framework="pt") as file:
            form = str((file.metadata() or {}).get("format"))
    except (OSError, SafetensorError) as error:
        form = short(error)
    if form.startswith(ALIGNMENT):
        return _alignment(path, form)
    if form.startswith(STATISTICS):
        return _statistics(path, form)
    words = f"cannot be read: it is neither an alignment nor statistics ({form}), nor a report (.json)"
    raise RotationMergeError(words, where=path, remedy="give a file that 'align' or 'measure' wrote")


def _facts(kind: str, form: str, marks: Mapping[str, str], holds: Any, origin: Any, **more: Any) -> dict[str, Any]:
    return {"is": kind, "format": form, "fingerprints": marks, "holds": holds, "made": origin, **more}


def _statistics(path: str, form: str) -> dict[str, Any]:
    statistics = Statistics.open(path)
    marks = {statistics.metadata.pop("model", "model"): statistics.metadata.pop("fingerprint", None)}
    holds = dict(Counter(name.rpartition(".")[2] for name in statistics.tensors))
    return _facts("Statistics", form, marks, holds, statistics.metadata)


def _alignment(path: str, form: str) -> dict[str, Any]:
    with opened_file(path) as (head, _):
        metadata, (rows, _summary) = dict(head.made), head.figures
    marks = {metadata.pop(role, role): model[1] for role, model in zip(("anchor", "donor"), head.models, strict=True)}
    spaces = dict(Counter(filter(None, head.kinds.values())))
    holds = {"architecture": head.family, "folded": list(head.folded), "spaces": spaces}
    distances = relative_distance(rows) if rows else ()
    figures = dict(zip(("relative_before", "relative_after"), distances, strict=False))
    verdict = gained(*distances) if distances else None
    return _facts("Alignment", form, marks, holds, metadata, figures=figures, verdict=verdict)


def _report(path: str) -> dict[str, Any]:
    report = read_report(path)
    holds = {donor: report.verdict(donor) for donor in report.donors()}
    origin = {"delegate": report.delegate, "seconds": f"{report.seconds:.1f}", **report.versions, "notes": report.notes}
    return _facts(f"Report of a merge into {report.anchor}", "rotation_merge.json", report.fingerprints, holds, origin)
