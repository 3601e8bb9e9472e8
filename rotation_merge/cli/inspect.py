"""`rotation-merge inspect`: models, recipes, our files, reports, methods and architectures."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from rotation_merge.cli.options import config_of, given, matching_options
from rotation_merge.cli.paths import MODELS_OR_RECIPE, Reads, is_document, read_recipe
from rotation_merge.cli.show import Answer, bytes_text, note, say, shown, table
from rotation_merge.diagnose.donors import RecipeDonor, donors_of, last_recipe
from rotation_merge.errors import RotationMergeError, nearest_path
from rotation_merge.matching.options import NOTHING, AlignConfig
from rotation_merge.model.gguf import is_gguf
from rotation_merge.model.hub import is_hub_name
from rotation_merge.model.open import open_model, parse_reference
from rotation_merge.record import REPORT_FILE
from rotation_merge.report.files import described, is_own_file
from rotation_merge.report.memory import averaging_memory, itemsize_of, peak_memory
from rotation_merge.report.spaces import matched_spaces


@click.command(
    epilog="""Examples: rotation-merge inspect org/model --residual rotation; rotation-merge inspect recipe.yml;
    rotation-merge inspect ./merged --report"""
)
@click.argument("target", type=MODELS_OR_RECIPE, required=False, metavar="[MODEL | RECIPE | FILE]")
@click.option("--fingerprint", is_flag=True, help="Fingerprint of a model, or of the models in a file.")
@click.option("--report", is_flag=True, help="Report of the merge in a folder.")
@click.option("--draft", is_flag=True, help="Draft an architecture file for a model from its names and shapes.")
@click.option("--methods", is_flag=True, help="Merge methods that can be the delegate, and all recipe parameters.")
@click.option("--architectures", is_flag=True, help="Supported architectures and their classes.")
@click.option(
    "--prove", type=Reads("architecture file"), metavar="FILE", help="Try an architecture file on a tiny model."
)
@click.option(
    "--config", type=Reads("config"), metavar="FILE", help="With --prove: keys of the tiny model's config, as JSON."
)
@matching_options
@shown
@click.pass_context
def command(context: click.Context, target: str | None, config: str | None, untie: bool, **values: Any) -> Answer:
    """Spaces, sizes and groups of a model, what stays unaligned and why, and the memory and disk that aligning needs.

    A model is taken as a donor under these options; a recipe shows each of its donors under its own options. Reads only
    configs and headers. Memory does not include Python and its libraries. For FILE (an alignment, statistics, or a
    merge's rotation_merge.json), shows its content.

    Reports, cards and files identify models by fingerprints. These tell weights apart; they do not protect against
    forgery.
    """
    questions = {name: value for name in (*ABOUT, *ALONE) if (value := values.pop(name))}
    if len(questions) > 1:
        first, second, *_ = questions
        raise RotationMergeError(f"--{first} and --{second} cannot be combined", remedy="use one at a time")
    question = next(iter(questions), "")
    if config is not None and question != "prove":
        raise RotationMergeError("--config needs --prove", remedy="leave it out, or add --prove FILE")
    if question in ALONE:
        if target is not None:
            raise RotationMergeError(f"--{question} takes no model", where=target, remedy="leave it out")
        return ALONE[question](questions[question], config)
    if target is None:
        remedy = "name a model, a recipe or a file, or ask for --methods, --architectures or --prove FILE"
        raise RotationMergeError("no model, recipe or file is given", remedy=remedy)
    _check_target(context, target, aligns=not question and not is_document(target))
    return ABOUT[question](target) if question else _about(target, config_of(AlignConfig, values), untie)


def _check_target(context: click.Context, target: str, aligns: bool) -> None:
    """Refuse a name of nothing here that is no name of the hub either; with the ending of a file it is that of one.

    Args:
        aligns: whether options of aligning mean anything.

    Raises:
        RotationMergeError: names the nearest file or folder, or the option.
    """
    reference = parse_reference(target)
    path = reference.model.path
    elsewhere = reference.lora is not None or is_gguf(path) or is_hub_name(path)
    if not os.path.exists(path) and (not elsewhere or path.endswith((".yml", ".yaml", ".json", ".safetensors"))):
        remedy = nearest_path(path, of=os.path.exists)
        raise RotationMergeError("no such file or directory", where=target, remedy=remedy)
    if not aligns and (flags := given(context, *AlignConfig.options(), "untie")):
        raise RotationMergeError(f"{flags[0]} is an option of aligning a model", where=target, remedy="leave it out")


def _about(target: str, options: AlignConfig, untie: bool) -> Answer:
    """What aligning a model needs, or each donor of a recipe; or the content of one of our files."""
    if not is_document(target):
        named, averaging = [RecipeDonor(target, target, options, untie)], None
    elif is_own_file(target):
        return _file(target)
    else:
        read_recipe(Path(target))
        named, averaging = donors_of(target), _averaging(target)
    donors = [_inspected(donor) for donor in named]

    def show() -> None:
        for donor, facts in zip(named, donors, strict=True):
            _show(donor, facts)
        if len(donors) > 1:
            say(f"All {len(donors)} donors: {bytes_text(max(donor['memory'] for donor in donors))} of memory")
        if averaging is not None:
            say(f"Delegate {averaging['delegate']}: {bytes_text(averaging['memory'])} of memory for its largest map")

    more = {} if averaging is None else {"averaging": averaging}
    return Answer([{**donor, **more} for donor in donors], show)


def _averaging(path: str) -> dict[str, Any] | None:
    """Name and memory of a delegate that merges task vectors; None for other delegates."""
    from rotation_merge.averaging.task_vectors import TaskVectorMethod
    from rotation_merge.mergekit_plugin.recipe import Recipe

    recipe = Recipe.of(last_recipe(path, "give two models instead"))
    method = recipe.delegate
    if not isinstance(method, TaskVectorMethod):
        return None
    base = open_model(str(recipe.base), any_base=True)
    models = sum(model.model != recipe.base for model in recipe.config.models or [])
    tied = base.tied_head is not None and not recipe.value("untie")
    memory = averaging_memory(base.architecture, base.shapes, models, tied)
    return {"delegate": method.spec.name, "memory": memory}


def _inspected(donor: RecipeDonor) -> dict[str, Any]:
    """A donor (or its base) as its config and the headers of its files show it, opened and checked as a merge does."""
    from rotation_merge.matching.pair import are_here, open_pair

    options, warnings = donor.options, list[str]()
    checks: dict[str, Any] = {"unsupported": donor.unsupported, "shapes": False}
    if are_here(donor.anchor, donor.matched):
        excluded, words = donor.excluded, donor.words
        pair = open_pair(donor.anchor, donor.matched, options, donor.untie, words=words, excluded=excluded, **checks)
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


def _show(donor: RecipeDonor, facts: dict[str, Any]) -> None:
    columns = ("space", "kind", "sizes", "blocks", "group")
    rows = [[line[column] for column in columns] for line in facts["lines"]]
    caption = f"{donor.title}: {facts['family']}, {facts['parameters']:,} weights"
    table(caption, ("space", "kind", "size", "where", "group"), rows)
    if donor.origin is not None:
        say(f"{donor.origin} is aligned to {donor.anchor}; the maps are applied to {donor.name} minus {donor.origin}.")
    if donor.file is not None:
        say(f"Nothing is matched: the transforms are read from {donor.file}.")
    for warning in facts["warnings"]:
        say(f"Warning: {warning}", "yellow")
    share = facts["matched"] / facts["parameters"] if facts["parameters"] else 0.0
    say(f"Matched: {share:.0%} of the weights. Limits:")
    for reason in facts["unaligned"]:
        say(f"- {reason}")
    say(f"One donor needs {bytes_text(facts['memory'])} of memory and {bytes_text(facts['disk'])} on disk")


def _file(path: str) -> Answer:
    """The content of one of our files."""
    contents = described(path)

    def show() -> None:
        say(f"{contents['is']} ({contents['format']})")
        rows = [(f"fingerprint of {name}", mark) for name, mark in contents["fingerprints"].items()]
        rows += [(name, _text(value)) for name, value in contents["holds"].items()]
        facts = dict(contents["made"])
        rows += [(name, _origin(origin)) for name, origin in facts.pop("models", {}).items()]
        if isinstance(facts.get("learned"), dict):
            rows.append(("learned", facts.pop("learned").get("verdict", "")))
        rows += [(name, _text(value)) for name, value in facts.items()]
        rows += [("figures", contents["verdict"])] if contents.get("verdict") else []
        table("", ("", ""), rows)

    return Answer(contents, show)


def _origin(facts: dict[str, Any]) -> str:
    """The origin of a model in words."""
    hub = facts.get("hub")
    words = f"{hub} at {facts.get('revision') or 'no known revision'}" if hub else "not known to be on the hub"
    return words + (f", licence {facts['license']}" if facts.get("license") else "")


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items())
    return ", ".join(map(_text, value)) if isinstance(value, list) else str(value)


def _fingerprint(target: str) -> Answer:
    """The fingerprint of a model, or those of the models that a file was made for."""
    if is_document(target):
        marks = described(target)["fingerprints"]
    else:
        model = open_model(target, any_base=True)
        marks = {str(model.reference): model.fingerprint}
    return Answer(marks, lambda: say("\n".join(f"{mark}  {name}" for name, mark in marks.items())))


def _report(target: str) -> Answer:
    """Report of the merge in a folder."""
    return _file(target if is_document(target) else os.path.join(target, REPORT_FILE))


def _draft(target: str) -> Answer:
    """A draft of an architecture file; entries to check go to stderr."""
    from rotation_merge.diagnose.draft import draft_of

    content, doubts = draft_of(target)
    for doubt in doubts:
        note(doubt)
    return Answer(content, lambda: click.echo(json.dumps(content, indent=2)))


def _methods(*_: Any) -> Answer:
    """Merge methods that can be the delegate, and the parameters of recipes."""

    def show() -> None:
        names = ("name", "models", "base", "required", "optional")
        rows = [[_text(delegate[name]) for name in names] for delegate in delegates()]
        table("Delegates", ("delegate", "models", "base_model", "must be given", "may be given"), rows)
        say("")
        rows = [[_text(o[name]).replace("`", "") for name in ("name", "where", "values", "default", "text")]
                for o in options()]  # fmt: skip
        table("rotation_merge's own parameters", ("parameter", "stands", "values", "default", "meaning"), rows)

    return Answer({"delegates": delegates(), "options": options()}, show)


def delegates() -> list[dict[str, Any]]:
    """Everything that can do the averaging, by name; parameters with `*` stand under each model."""
    from rotation_merge.mergekit_plugin.delegates import OWN, get, names

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
    from rotation_merge.mergekit_plugin.keys import BY_NAME, PLACES

    entries = []
    for name, spec in BY_NAME.items():
        option = spec.option
        readers = f" Delegate: {', '.join(f'`{reader}`' for reader in option.delegates)}." if option.delegates else ""
        text = f"{option.help[:1].upper()}{option.help[1:]}.{readers}"
        where, default = PLACES[option.scope], str(spec.default).lower()
        entries.append({"name": name, "where": where, "values": option.values, "default": default, "text": text})
    return entries


def _architectures(*_: Any) -> Answer:
    """Supported families, their classes, and limits of their groups."""
    from rotation_merge.architecture import families

    known, facts = families(), ("title", "classes", "bare", "limits")
    rows = [(name, spec.title, ", ".join(spec.classes)) for name, spec in known.items()]
    data = {name: {fact: getattr(spec, fact) for fact in facts} for name, spec in known.items()}
    return Answer(data, lambda: table("", ("family", "models", "classes"), rows))


def _prove(path: str, config: str | None) -> Answer:
    """Try an architecture file; hints go to stderr."""
    from rotation_merge.diagnose.proof import hints, prove
    from rotation_merge.model.contents import read_json

    for name in (path, config):
        if name is not None and not os.path.isfile(name):
            raise RotationMergeError("no such file", where=name, remedy="check the path")
    findings = prove(Path(path), read_json(config) if config is not None else None)
    for hint in hints(findings):
        note(f"hint: {hint}")
    words = {True: "correct", False: "WRONG"}
    rows = [(f.what, "refused" if f.difference is None else f"{f.difference:.1e}", words[f.holds]) for f in findings]
    holds = all(finding.holds for finding in findings)
    data = [asdict(finding) for finding in findings]
    return Answer(data, lambda: table("", ("trial", "largest difference", ""), rows), 0 if holds else 1)


ABOUT: dict[str, Callable[[str], Answer]] = {"fingerprint": _fingerprint, "report": _report, "draft": _draft}
"""Questions about a model, a recipe, a file or a merged folder."""

ALONE: dict[str, Callable[..., Answer]] = {"methods": _methods, "architectures": _architectures, "prove": _prove}
"""Questions about none of these."""
