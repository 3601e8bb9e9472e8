"""`rotation-merge show`: what a file of ours holds, from its head."""

from __future__ import annotations

import json
import os
from collections import Counter
from typing import Any

import click

from rotation_merge.cli.show import json_option, print_json, say, shown, table
from rotation_merge.errors import RotationMergeError, short

NEITHER, MAKES = "is neither an alignment nor statistics", "give a file that 'align', 'fit' or 'measure' wrote"
ALIGNMENT, STATISTICS = "rotation_merge.alignment.", "rotation_merge.statistics."


@click.command("show", epilog="Example: rotation-merge show transforms.safetensors")
@click.argument("file")
@json_option
@shown
def command(file: str, as_json: bool) -> int:
    """What FILE holds: an alignment, statistics, or the report of a merge (rotation_merge.json)."""
    found = described(file)
    if as_json:
        print_json(found)
        return 0
    say(f"{found['is']} ({found['format']})")
    rows = [(f"fingerprint of {name}", mark) for name, mark in found["fingerprints"].items()]
    rows += [(name, _text(value)) for name, value in found["holds"].items()]
    made = dict(found["made"])
    rows += [(name, _origin(facts)) for name, facts in made.pop("models", {}).items()]
    rows += [("learned", made.pop("learned").get("verdict", ""))] if isinstance(made.get("learned"), dict) else []
    rows += [(name, _text(value)) for name, value in made.items()]
    rows += [("figures", found["verdict"])] if found.get("verdict") else []
    table("", ("", ""), rows)
    return 0


def _origin(facts: dict[str, Any]) -> str:
    """Where a model came from, in words."""
    hub = facts.get("hub")
    words = f"{hub} at {facts.get('revision') or 'no known revision'}" if hub else "not on the hub, as far as is known"
    return words + (f", licence {facts['license']}" if facts.get("license") else "")


def described(path: str) -> dict[str, Any]:
    """A file of ours in words and numbers.

    Raises:
        RotationMergeError: it is none, or cannot be read.
    """
    if os.path.isdir(path):
        what = "is a directory"
        raise RotationMergeError(what, where=path, remedy="name the file; of a merge, its rotation_merge.json")
    return _report(path) if path.endswith(".json") else _tensors(path)


def _tensors(path: str) -> dict[str, Any]:
    from safetensors import SafetensorError, safe_open

    from rotation_merge.report.record import gained, relative, rows_in

    try:
        with safe_open(path, framework="pt") as file:
            meta, names = file.metadata() or {}, list(file.keys())
        kind = str(meta.get("format"))
        made = json.loads(meta.get("made", "{}"))
        if kind.startswith(ALIGNMENT):
            marks = {made.get("anchor", "anchor"): meta["anchor"], made.get("donor", "donor"): meta["donor"]}
            spaces = Counter(json.loads(meta["kinds"]).values())
            holds = {"architecture": meta["family"], "folded": json.loads(meta["folded"]), "spaces": dict(spaces)}
            rows = rows_in(made, path)
            left = {name: value for name, value in made.items() if name not in ("anchor", "donor", "figures")}
            found = dict(zip(("relative_before", "relative_after"), relative(rows), strict=True)) if rows else {}
            return {"is": "Alignment", "format": kind, "fingerprints": marks, "holds": holds, "made": left,
                    "figures": found, "verdict": gained(*relative(rows)) if rows else None}  # fmt: skip
        if kind.startswith(STATISTICS):
            marks = {made.get("model", "model"): made["fingerprint"]}
            kinds = Counter(name.rsplit(".", 1)[-1] for name in names)
            left = {name: value for name, value in made.items() if name not in ("model", "fingerprint")}
            return {"is": "Statistics", "format": kind, "fingerprints": marks, "holds": dict(kinds), "made": left}
    except FileNotFoundError as error:
        raise RotationMergeError("no such file", where=path, remedy="check the path") from error
    except (OSError, SafetensorError, ValueError, KeyError, AttributeError, TypeError) as error:
        if isinstance(error, SafetensorError) and not path.endswith(".safetensors"):
            raise RotationMergeError(f"{NEITHER}, nor a report (.json)", where=path, remedy=MAKES) from error
        raise RotationMergeError(f"cannot be read ({short(error)})", where=path, remedy="make it anew") from error
    raise RotationMergeError(NEITHER, where=path, remedy=MAKES)


def _report(path: str) -> dict[str, Any]:
    from rotation_merge.report.html import read_report

    report = read_report(path)
    holds = {donor: report.verdict(donor) for donor in report.donors()}
    made = {"delegate": report.delegate, "seconds": f"{report.seconds:.1f}", **report.versions, "notes": report.notes}
    marks = report.fingerprints
    return {"is": f"Report of a merge into {report.anchor}", "format": "rotation_merge.json",
            "fingerprints": marks, "holds": holds, "made": made}  # fmt: skip


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items())
    return ", ".join(map(_text, value)) if isinstance(value, list) else str(value)
