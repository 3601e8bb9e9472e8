"""The content of one of our files from its header: an alignment, statistics, or a merge's report."""

from __future__ import annotations

import json
import os
from collections import Counter
from typing import Any

from safetensors import SafetensorError, safe_open

from rotation_merge.errors import RotationMergeError, short
from rotation_merge.matching.alignment import opened_file
from rotation_merge.record import MergeReport, gained, relative_distance

NEITHER, MAKES = "is neither an alignment nor statistics", "give a file that 'align' or 'measure' wrote"
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
        absent = isinstance(error, FileNotFoundError)
        problem, place = ("no such file", path) if absent else ("is a file", os.path.dirname(path))
        remedy = "name the directory of a model that rotation_merge wrote"
        raise RotationMergeError(problem, where=place, remedy=remedy) from error
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise RotationMergeError(f"is not a report ({error})", where=path, remedy="merge again") from error


def is_own_file(path: str) -> bool:
    """Whether a file is to be read as an alignment, statistics or a report, rather than as a recipe."""
    if path.endswith(ENDINGS):
        return True
    try:
        with open(path, "rb") as file:
            head = file.read(9)
    except OSError:
        return False
    return head[8:] == b"{" and int.from_bytes(head[:8], "little") < os.path.getsize(path)  # as safetensors begin


def described(path: str) -> dict[str, Any]:
    """A file of ours in words and numbers.

    Raises:
        RotationMergeError: it is none, or cannot be read.
    """
    return _report(path) if path.endswith(".json") else _tensors(path)


def _tensors(path: str) -> dict[str, Any]:
    try:
        with safe_open(path, framework="pt") as file:
            meta, names = file.metadata() or {}, list(file.keys())
        kind = str(meta.get("format"))
        if kind.startswith(ALIGNMENT):
            return _alignment(path, kind)
        if kind.startswith(STATISTICS):
            metadata = json.loads(meta.get("made", "{}"))
            marks = {metadata.get("model", "model"): metadata["fingerprint"]}
            kinds = Counter(name.rsplit(".", 1)[-1] for name in names)
            facts = {name: value for name, value in metadata.items() if name not in ("model", "fingerprint")}
            return {"is": "Statistics", "format": kind, "fingerprints": marks, "holds": dict(kinds), "made": facts}
    except FileNotFoundError as error:
        raise RotationMergeError("no such file", where=path, remedy="check the path") from error
    except (OSError, SafetensorError, ValueError, KeyError, AttributeError, TypeError) as error:
        if isinstance(error, SafetensorError) and not path.endswith(".safetensors"):
            raise RotationMergeError(f"{NEITHER}, nor a report (.json)", where=path, remedy=MAKES) from error
        raise RotationMergeError(f"cannot be read ({short(error)})", where=path, remedy="write it again") from error
    raise RotationMergeError(NEITHER, where=path, remedy=MAKES)


def _alignment(path: str, kind: str) -> dict[str, Any]:
    with opened_file(path) as (head, _):
        metadata, (rows, _summary) = head.made, head.figures
    marks = {metadata.get(role, role): x[1] for role, x in zip(("anchor", "donor"), head.models, strict=True)}
    spaces = dict(Counter(filter(None, head.kinds.values())))
    holds = {"architecture": head.family, "folded": list(head.folded), "spaces": spaces}
    facts = {name: value for name, value in metadata.items() if name not in ("anchor", "donor")}
    distances = relative_distance(rows) if rows else ()
    figures = dict(zip(("relative_before", "relative_after"), distances, strict=False))
    return {"is": "Alignment", "format": kind, "fingerprints": marks, "holds": holds, "made": facts,
            "figures": figures, "verdict": gained(*distances) if distances else None}  # fmt: skip


def _report(path: str) -> dict[str, Any]:
    report = read_report(path)
    holds = {donor: report.verdict(donor) for donor in report.donors()}
    origin = {"delegate": report.delegate, "seconds": f"{report.seconds:.1f}", **report.versions, "notes": report.notes}
    marks = report.fingerprints
    return {"is": f"Report of a merge into {report.anchor}", "format": "rotation_merge.json",
            "fingerprints": marks, "holds": holds, "made": origin}  # fmt: skip
