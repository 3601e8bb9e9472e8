"""`rotation-merge inspect`: models, recipes, our files, reports, methods and architectures."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from rich.filesize import decimal

from rotation_merge.architecture import families
from rotation_merge.averaging.task_vectors import TaskVectorMethod
from rotation_merge.cli.command import cli_command, given, refuse_given
from rotation_merge.cli.paths import MODELS_OR_RECIPE, Reads, is_document, read_recipe
from rotation_merge.cli.show import Answer, Table, note, words
from rotation_merge.diagnose.donors import RecipeDonor, donors_of, last_recipe
from rotation_merge.diagnose.draft import draft_of
from rotation_merge.diagnose.proof import hints
from rotation_merge.diagnose.proof import prove as proof_of
from rotation_merge.errors import RotationMergeError, nearest_path
from rotation_merge.matching.options import NOTHING, AlignConfig, MatchConfig
from rotation_merge.matching.pair import are_here, open_pair
from rotation_merge.mergekit_plugin.delegates import OWN, get, names
from rotation_merge.mergekit_plugin.keys import BY_NAME, PLACES
from rotation_merge.mergekit_plugin.recipe import Recipe
from rotation_merge.model.contents import read_json
from rotation_merge.model.gguf import is_gguf
from rotation_merge.model.hub import is_hub_name
from rotation_merge.model.open import open_model, parse_reference
from rotation_merge.record import REPORT_FILE
from rotation_merge.report.files import described, is_own_file
from rotation_merge.report.memory import averaging_memory, itemsize_of, peak_memory
from rotation_merge.report.spaces import matched_spaces

ABOUT, ALONE = ("fingerprint", "report", "draft"), ("methods", "architectures", "prove")
"""Questions about a model or a file, and about neither."""


@cli_command(
    "rotation-merge inspect org/model --residual rotation",
    "rotation-merge inspect recipe.yml",
    "rotation-merge inspect ./merged --report",
)
def command(
    target: Annotated[str | None, MODELS_OR_RECIPE, "[MODEL | RECIPE | FILE]"] = None,
    /,
    *,
    fingerprint: Annotated[bool, "fingerprint of a model, or of the models in a file"] = False,
    report: Annotated[bool, "report of the merge in a folder"] = False,
    draft: Annotated[bool, "draft an architecture file for a model from its names and shapes"] = False,
    methods: Annotated[bool, "merge methods that can be the delegate, and all recipe parameters"] = False,
    architectures: Annotated[bool, "supported architectures and their classes"] = False,
    prove: Annotated[str | None, Reads("file"), "try an architecture file on a tiny model"] = None,
    config: Annotated[str | None, Reads("file"), "with --prove: keys of the tiny model's config, as JSON"] = None,
    options: AlignConfig,
    opening: Annotated[MatchConfig, ("untie",)],
) -> Answer:
    """Spaces, sizes and groups of a model, what stays unaligned and why, and the memory and disk that aligning needs.

    A model is taken as a donor under these options; a recipe shows each of its donors under its own options. Reads only
    configs and headers. Memory does not include Python and its libraries. For FILE (an alignment, statistics, or a
    merge's rotation_merge.json), shows its content.

    Reports, cards and files identify models by fingerprints. These tell weights apart; they do not protect against
    forgery.
    """
    if len(asked := given(*ABOUT, *ALONE)) > 1:
        raise RotationMergeError(f"{asked[0]} and {asked[1]} cannot be combined", remedy="use one at a time")
    refuse_given((prove is None, ["config"], "{} needs --prove", "leave it out, or add --prove FILE"))
    if given(*ALONE) and target is not None:
        raise RotationMergeError(f"{asked[0]} takes no model", where=target, remedy="leave it out")
    if prove is not None:
        return _proof(prove, config)
    if methods or architectures:
        return _methods() if methods else _architectures()
    if target is None:
        remedy = "name a model, a recipe or a file, or ask for --methods, --architectures or --prove FILE"
        raise RotationMergeError("no model, recipe or file is given", remedy=remedy)
    _check_exists(target)
    aligning, problem = (*AlignConfig.options(), "untie"), "{} is an option of aligning a model"
    refuse_given((bool(asked) or is_document(target), aligning, problem, "leave it out"))
    if fingerprint:
        return _fingerprint(target)
    if draft:
        content, doubts = draft_of(target)
        for doubt in doubts:
            note(doubt)
        return Answer(content, [json.dumps(content, indent=2)])
    if report and not is_document(target):
        target = os.path.join(target, REPORT_FILE)
    if report or (is_document(target) and is_own_file(target)):
        return _file(target)
    return _aligning(target, options, opening.untie)


def _check_exists(target: str) -> None:
    """Refuse a name of nothing here that is no name of the hub either; with the ending of a file it is that of one.

    Raises:
        RotationMergeError: names the nearest file or folder.
    """
    reference = parse_reference(target)
    path = reference.model.path
    elsewhere = reference.lora is not None or is_gguf(path) or is_hub_name(path)
    if not os.path.exists(path) and (not elsewhere or path.endswith((".yml", ".yaml", ".json", ".safetensors"))):
        remedy = nearest_path(path, of=os.path.exists)
        raise RotationMergeError("no such file or directory", where=target, remedy=remedy)


def _aligning(target: str, options: AlignConfig, untie: bool) -> Answer:
    """What aligning a model needs, or each donor of a recipe."""
    donors, averaging = [RecipeDonor(target, target, options, untie)], dict[str, Any]()
    if is_document(target):
        read_recipe(target)
        donors, averaging = donors_of(target), _averaging(target)
    facts = [{**_inspected(donor), **averaging} for donor in donors]
    lines = [line for donor, each in zip(donors, facts, strict=True) for line in _lines(donor, each)]
    if len(donors) > 1:
        lines.append(f"All {len(donors)} donors: {decimal(max(each['memory'] for each in facts))} of memory")
    if averaging:
        delegate, memory = averaging["averaging"].values()
        lines.append(f"Delegate {delegate}: {decimal(memory)} of memory for its largest map")
    return Answer(facts, lines)


def _averaging(path: str) -> dict[str, Any]:
    """Name and memory of a delegate that merges task vectors; empty for other delegates."""
    recipe = Recipe.of(last_recipe(path, "give two models instead"))
    method = recipe.delegate
    if not isinstance(method, TaskVectorMethod):
        return {}
    base = open_model(str(recipe.base), any_base=True)
    count = sum(model.model != recipe.base for model in recipe.config.models or [])
    tied = base.tied_head is not None and not recipe.value("untie")
    memory = averaging_memory(base.architecture, base.shapes, count, tied)
    return {"averaging": {"delegate": method.spec.name, "memory": memory}}


def _inspected(donor: RecipeDonor) -> dict[str, Any]:
    """A donor (or its base) as its config and the headers of its files show it, opened and checked as a merge does."""
    checks: dict[str, Any] = {"unsupported": donor.unsupported, "shapes": False}
    options, warnings = donor.options, list[str]()
    if are_here(donor.anchor, donor.matched):
        copied: dict[str, Any] = {"words": donor.words, "excluded": donor.excluded}
        pair = open_pair(donor.anchor, donor.matched, options, donor.untie, **copied, **checks)
        warnings = [*pair.warnings, *pair.notes]
    if donor.matched != donor.name and are_here(donor.matched, donor.name):
        open_pair(donor.matched, donor.name, NOTHING, excluded=donor.excluded, any_base=True, **checks)
    pair = open_pair(donor.anchor, donor.anchor, options, donor.untie, **checks)
    anchor, size = pair.anchor, itemsize_of(pair.anchor.config)
    options = pair.options if donor.file is None else NOTHING
    tied = pair.anchor.tied[1] if pair.anchor.tied is not None and not donor.untie else None
    spaces = matched_spaces(pair.architecture, anchor.shapes, options, tied)
    memory = peak_memory(pair.architecture, anchor.shapes, options, size, carried=donor.origin is not None)
    facts = {"model": donor.name, "origin": donor.origin, "alignment": donor.file, "options": asdict(donor.options)}
    return {**facts, **spaces, "memory": memory, "disk": size * spaces["parameters"], "warnings": warnings}


def _lines(donor: RecipeDonor, facts: dict[str, Any]) -> list[str | Table]:
    columns = ("space", "kind", "sizes", "blocks", "group")
    rows = [[line[column] for column in columns] for line in facts["lines"]]
    share = facts["matched"] / facts["parameters"] if facts["parameters"] else 0.0
    moved = f"{donor.origin} is aligned to {donor.anchor}; the maps are applied to {donor.name} minus {donor.origin}."
    return [
        Table(columns, rows, f"{donor.title}: {facts['family']}, {facts['parameters']:,} weights"),
        moved if donor.origin is not None else "",
        f"Nothing is matched: the transforms are read from {donor.file}." if donor.file is not None else "",
        *(f"Warning: {warning}" for warning in facts["warnings"]),
        f"Matched: {share:.0%} of the weights. Limits:",
        *(f"- {reason}" for reason in facts["unaligned"]),
        f"One donor needs {decimal(facts['memory'])} of memory and {decimal(facts['disk'])} on disk",
    ]


def _file(path: str) -> Answer:
    """The content of one of our files."""
    contents = described(path)
    made = dict(contents["made"])
    learned = made.pop("learned", None) or {}
    rows = [(f"fingerprint of {name}", mark) for name, mark in contents["fingerprints"].items()]
    rows += [*contents["holds"].items(), *made.items()]
    rows += [("learned", learned.get("verdict")), ("figures", contents.get("verdict"))]
    table = Table(("", ""), [row for row in rows if row[1] is not None])
    return Answer(contents, [f"{contents['is']} ({contents['format']})", table])


def _fingerprint(target: str) -> Answer:
    """The fingerprint of a model, or those of the models that a file was made for."""
    if is_document(target):
        marks = described(target)["fingerprints"]
    else:
        model = open_model(target, any_base=True)
        marks = {str(model.reference): model.fingerprint}
    return Answer(marks, [f"{mark}  {name}" for name, mark in marks.items()])


def _methods() -> Answer:
    """Merge methods that can be the delegate, and the parameters of recipes."""
    columns = ("name", "models", "base", "required", "optional")
    rows = [[delegate[column] for column in columns] for delegate in delegates()]
    keys = ("name", "where", "values", "default", "text")
    own_rows = [[words(key[column]).replace("`", "") for column in keys] for key in options()]
    tables = Table(columns, rows, "Delegates"), Table(keys, own_rows, "\nrotation_merge's own parameters")
    return Answer({"delegates": delegates(), "options": options()}, tables)


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
        entries.append(
            {
                "name": spec.name,
                "title": spec.pretty_name or spec.name,
                "models": models,
                "base": contract.base.value,
                "required": [name for name, required in parameters.items() if required],
                "optional": [name for name, required in parameters.items() if not required],
                "url": spec.reference_url,
                "own": spec.name in OWN,
            }
        )
    return entries


def options() -> list[dict[str, Any]]:
    """Every parameter of rotation_merge itself; `text` is Markdown."""
    entries = []
    for name, spec in BY_NAME.items():
        option = spec.option
        readers = f" Delegate: {', '.join(f'`{reader}`' for reader in option.delegates)}." if option.delegates else ""
        text = f"{option.help[:1].upper()}{option.help[1:]}.{readers}"
        where, default = PLACES[option.scope], str(spec.default).lower()
        entries.append({"name": name, "where": where, "values": option.values, "default": default, "text": text})
    return entries


def _architectures() -> Answer:
    """Supported families, their classes, and limits of their groups."""
    facts, known = ("title", "classes", "bare", "limits"), families()
    rows = [(name, spec.title, spec.classes) for name, spec in known.items()]
    data = {name: {fact: getattr(spec, fact) for fact in facts} for name, spec in known.items()}
    return Answer(data, [Table(("family", "models", "classes"), rows)])


def _proof(path: str, config: str | None) -> Answer:
    """Try an architecture file; hints go to stderr."""
    for name in (path, config):
        if name is not None and not os.path.isfile(name):
            raise RotationMergeError("no such file", where=name, remedy="check the path")
    findings = proof_of(Path(path), read_json(config) if config is not None else None)
    for hint in hints(findings):
        note(f"hint: {hint}")
    results = {True: "correct", False: "WRONG"}
    rows = [(f.what, "refused" if f.difference is None else f"{f.difference:.1e}", results[f.holds]) for f in findings]
    holds = all(finding.holds for finding in findings)
    return Answer(list(map(asdict, findings)), [Table(("trial", "largest difference", ""), rows)], 0 if holds else 1)
