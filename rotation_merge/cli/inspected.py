"""What `rotation-merge inspect` shows, by question."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from rotation_merge.architecture import families
from rotation_merge.cli.paths import is_document
from rotation_merge.cli.show import Answer, Table, note, sentence
from rotation_merge.diagnose.donors import donors_of
from rotation_merge.diagnose.draft import draft_of as drafted
from rotation_merge.diagnose.proof import hints, prove
from rotation_merge.matching.options import NOTHING, AlignConfig
from rotation_merge.matching.pair import Pair, are_here, check_pair, open_pair
from rotation_merge.mergekit_plugin.delegates import OWN, get, names
from rotation_merge.mergekit_plugin.donors import Donor
from rotation_merge.mergekit_plugin.keys import BY_NAME, PLACES
from rotation_merge.model.contents import read_json
from rotation_merge.model.open import open_model
from rotation_merge.report.files import described
from rotation_merge.report.memory import peak_memory
from rotation_merge.report.spaces import matched_spaces
from rotation_merge.run.functions import configured_dtype


def of_aligning(target: str, options: AlignConfig, untie: bool) -> Answer:
    """What aligning a model needs, or each donor of a recipe."""
    if is_document(target) or target.endswith((".yml", ".yaml")):
        facts = list(map(_donor_facts, donors_of(target)))
    else:
        facts = [_needs(open_pair(target, target, options, untie), target, options)]
    return Answer(facts, [line for each in facts for line in _lines(each)])


def _donor_facts(donor: Donor) -> dict[str, Any]:
    """What aligning a donor of a recipe needs, checked as its merge does where its models are here."""
    base, options, warnings = donor.session.base, donor.options, list[str]()
    origin, file = donor.value("finetuned_from"), donor.value("alignment")
    if are_here(base.name, str(donor.model), *filter(None, [origin])):
        pair, warnings = donor.pair, donor.token_warnings
    else:
        pair = check_pair(base, base, options if file is None else NOTHING)
    return _needs(replace(pair, notes=(*pair.notes, *warnings)), str(donor.model), options, origin, file)


def _needs(pair: Pair, model: str, options: AlignConfig, origin: Any = None, file: Any = None) -> dict[str, Any]:
    """What is matched of two models, what stays as it is and why, and what a merge needs; from headers."""
    facts = {"model": model, "origin": origin, "alignment": file, "options": asdict(options)}
    anchor, size = pair.anchor, configured_dtype(pair.anchor.config).itemsize
    tied = anchor.tied[1] if anchor.tied is not None and not anchor.untie else None
    spaces = matched_spaces(pair.architecture, anchor.shapes, pair.options, tied)
    memory = peak_memory(pair.architecture, anchor.shapes, pair.options, size, carried=origin is not None)
    disk, warnings = size * spaces["parameters"], [*pair.warnings, *pair.notes]
    return {**facts, **spaces, "memory": memory, "disk": disk, "warnings": warnings}


def _lines(facts: dict[str, Any]) -> list[str | Table]:
    share = facts["matched"] / max(facts["parameters"], 1)
    return [
        Table(facts["lines"], f"{facts['model']}: {facts['family']}, {facts['parameters']:,} weights"),
        f"Its base {facts['origin']} is aligned; the maps are applied to the difference." if facts["origin"] else "",
        f"Nothing is matched: the transforms are read from {facts['alignment']}." if facts["alignment"] else "",
        *(f"Warning: {warning}" for warning in facts["warnings"]),
        f"Matched: {share:.0%} of the weights. Limits:",
        *(f"- {reason}" for reason in facts["unaligned"]),
        f"One donor needs {decimal(facts['memory'])} of memory and {decimal(facts['disk'])} on disk",
    ]


def of_file(path: str) -> Answer:
    """The content of one of our files."""
    contents = described(path)
    metadata = dict(contents["made"])
    verdicts = {"learned": (metadata.pop("learned", None) or {}).get("verdict"), "figures": contents.get("verdict")}
    facts = {**contents["fingerprints"], **contents["holds"], **metadata, **verdicts}
    rows = [{"": name, " ": value} for name, value in facts.items() if value is not None]
    return Answer(contents, [f"{contents['is']} ({contents['format']})", Table(rows)])


def fingerprint_of(target: str) -> Answer:
    """The fingerprint of a model, or those of the models that a file was made for."""
    if is_document(target):
        marks = described(target)["fingerprints"]
    else:
        model = open_model(target, any_base=True)
        marks = {str(model.reference): model.fingerprint}
    return Answer(marks, [f"{mark}  {name}" for name, mark in marks.items()])


def draft_of(target: str) -> Answer:
    """A draft of an architecture file; entries to check go to stderr."""
    content, doubts = drafted(target)
    for doubt in doubts:
        note(doubt)
    return Answer(content, [json.dumps(content, indent=2)])


def all_methods() -> Answer:
    """Merge methods that can be the delegate, and the parameters of recipes."""
    columns, data = ("name", "models", "base", "required", "optional"), {"delegates": delegates(), "options": options()}
    rows = [{column: delegate[column] for column in columns} for delegate in data["delegates"]]
    keys = [{**key, "text": key["text"].replace("`", "")} for key in data["options"]]
    return Answer(data, [Table(rows, "Delegates"), Table(keys, "\nrotation_merge's own parameters")])


def delegates() -> list[dict[str, Any]]:
    """Everything that can do the averaging, by name; parameters with `*` stand under each model."""
    entries = []
    for spec in (get(name).spec for name in names()):
        contract = spec.contract
        low, high = contract.min_inputs, contract.max_inputs
        models = str(low) if low == high else f"{low} or more" if high is None else f"{low} to {high}"
        if contract.min_non_base is not None and contract.min_non_base == contract.max_non_base:
            models += f", {contract.min_non_base} beside the base"
        parameters = {p.name + "*" * (p.scope.value != "shared"): p.required for p in spec.parameters}
        entry = {"name": spec.name, "title": spec.pretty_name or spec.name, "models": models}
        entry |= {"base": contract.base.value, "url": spec.reference_url, "own": spec.name in OWN}
        entry["required"] = [name for name, required in parameters.items() if required]
        entry["optional"] = [name for name, required in parameters.items() if not required]
        entries.append(entry)
    return entries


FEW = 4
"""So many delegates, at most, are named as the readers of an option."""


def options() -> list[dict[str, Any]]:
    """Every parameter of rotation_merge itself; `text` is Markdown."""
    entries = []
    for name, option in BY_NAME.items():
        few = option.delegates if len(option.delegates) <= FEW else ()  # the help of an option of many says of which
        readers = f" Delegate: {', '.join(f'`{reader}`' for reader in few)}." if few else ""
        entry = {"name": name, "where": PLACES[option.scope], "values": option.values}
        entries.append({**entry, "default": str(option.default).lower(), "text": f"{sentence(option.help)}{readers}"})
    return entries


def all_architectures() -> Answer:
    """Supported families, their classes, and limits of their groups."""
    facts = ("title", "classes", "bare", "limits")
    data = {name: {fact: getattr(spec, fact) for fact in facts} for name, spec in families().items()}
    rows = [{"family": name, "models": each["title"], "classes": each["classes"]} for name, each in data.items()]
    return Answer(data, [Table(rows)])


def proof_of(path: str, config: str | None) -> Answer:
    """Try an architecture file; hints go to stderr."""
    findings = prove(Path(path), read_json(config) if config is not None else None)
    for hint in hints(findings):
        note(f"hint: {hint}")
    data, holds = [asdict(finding) for finding in findings], all(finding.holds for finding in findings)
    rows = [{"trial": f.what, "difference": f.difference, "": "correct" if f.holds else "WRONG"} for f in findings]
    return Answer(data, [Table(rows)], 0 if holds else 1)
