"""`rotation-merge inspect`: models, recipes, our files, reports, methods and architectures."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from rotation_merge.cli.options import config_of, matching_options
from rotation_merge.cli.paths import MODELS_OR_RECIPE, Reads, is_document, read_recipe
from rotation_merge.cli.show import bytes_text, json_option, note, print_json, say, shown, table
from rotation_merge.diagnose.donors import RecipeDonor
from rotation_merge.errors import RotationMergeError, nearest_path
from rotation_merge.matching.options import NOTHING, AlignConfig
from rotation_merge.mergekit_plugin.document import documents
from rotation_merge.model.gguf import is_gguf
from rotation_merge.model.hub import is_hub_name
from rotation_merge.model.open import parse_reference
from rotation_merge.record import REPORT_FILE
from rotation_merge.report.files import described, is_own_file
from rotation_merge.report.memory import averaging_memory, itemsize_of, peak_memory
from rotation_merge.report.spaces import MatchedSpaces, matched_spaces

ARCHITECTURE, CONFIG = Reads("architecture file"), Reads("config")


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
@click.option("--prove", type=ARCHITECTURE, metavar="FILE", help="Try an architecture file on a tiny model.")
@click.option("--config", type=CONFIG, metavar="FILE", help="With --prove: keys of the tiny model's config, as JSON.")
@matching_options
@json_option
@shown
@click.pass_context
def command(
    context: click.Context, target: str | None, config: str | None, untie: bool, as_json: bool, **values: Any
) -> int:
    """Spaces, sizes and groups of a model, what stays unaligned and why, and the memory and disk that aligning needs.

    A model is taken as a donor under these options; a recipe shows each of its donors under its own options. Reads only
    configs and headers. Memory does not include Python and its libraries. For FILE (an alignment, statistics, or a
    merge's rotation_merge.json), shows its content.

    Reports, cards and files identify models by fingerprints. These tell weights apart; they do not protect against
    forgery.
    """
    questions = {name: value for name in (*ABOUT, *ALONE, "prove") if (value := values.pop(name))}
    if len(questions) > 1:
        first, second, *_ = questions
        raise RotationMergeError(f"--{first} and --{second} cannot be combined", remedy="use one at a time")
    question, value = next(iter(questions.items()), ("", None))
    if config is not None and question != "prove":
        raise RotationMergeError("--config needs --prove", remedy="leave it out, or add --prove FILE")
    if question in (*ALONE, "prove"):
        if target is not None:
            raise RotationMergeError(f"--{question} takes no model", where=target, remedy="leave it out")
        return _prove(str(value), config, as_json) if question == "prove" else ALONE[question](as_json)
    if target is None:
        remedy = "name a model, a recipe or a file, or ask for --methods, --architectures or --prove FILE"
        raise RotationMergeError("no model, recipe or file is given", remedy=remedy)
    _check_there(target)
    of_model = not question and not is_document(target)
    names = (*AlignConfig.options(), "untie")
    options = [name for name in names if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    if options and not of_model:
        option = options[0].replace("_", "-")
        raise RotationMergeError(f"--{option} is an option of aligning a model", where=target, remedy="leave it out")
    if question:
        return ABOUT[question](target, as_json)
    if not of_model and is_own_file(target):
        return _show_file(described(target), as_json)
    return _needs(target, config_of(AlignConfig, values), untie, as_json)


def _check_there(target: str) -> None:
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


def _needs(target: str, options: AlignConfig, untie: bool, as_json: bool) -> int:
    """What aligning a model needs, or each donor of a recipe."""
    donors = []
    for donor in _donors(target, options, untie, as_json):
        donors.append(_inspected(donor))
        if not as_json:
            _show(donors[-1])
    averaging = _averaging(target) if is_document(target) else None
    if as_json:
        more = {} if averaging is None else {"averaging": averaging}
        print_json([{**donor.facts(), **more} for donor in donors])
        return 0
    if len(donors) > 1:
        say(f"All {len(donors)} donors: {bytes_text(max(donor.memory for donor in donors))} of memory")
    if averaging is not None:
        say(f"Delegate {averaging['delegate']}: {bytes_text(averaging['memory'])} of memory for its largest map")
    return 0


def _averaging(path: str) -> dict[str, Any] | None:
    """Name and memory of a delegate that merges task vectors; None for other delegates."""
    from rotation_merge.averaging.task_vectors import TaskVectorMethod
    from rotation_merge.diagnose.donors import last_recipe
    from rotation_merge.mergekit_plugin.recipe import Recipe
    from rotation_merge.model.open import open_model

    recipe = Recipe.of(last_recipe(path, "give two models instead"))
    method = recipe.delegate
    if not isinstance(method, TaskVectorMethod):
        return None
    base = open_model(str(recipe.base), any_base=True)
    models = sum(model.model != recipe.base for model in recipe.config.models or [])
    tied = base.tied_head is not None and not recipe.untie
    memory = averaging_memory(method, base.architecture, base.shapes, models, tied)
    return {"delegate": method.spec.name, "memory": memory}


def _donors(target: str, options: AlignConfig, untie: bool, as_json: bool) -> list[RecipeDonor]:
    """The donors of a recipe, named as soon as its text is read; or the model as its only donor."""
    if not is_document(target):
        return [RecipeDonor(target, target, options, untie)]
    text = read_recipe(Path(target))
    recipe = documents(text)[-1].value
    if not as_json and isinstance(recipe, dict):
        models = recipe.get("models")
        names = [str(m["model"]) for m in models if isinstance(m, dict) and "model" in m] if models is not None else []
        say(f"Donors of {target}: {', '.join(n for n in names if n != str(recipe.get('base_model')))}")
    from rotation_merge.diagnose import donors_of

    return donors_of(target)


@dataclass(frozen=True)
class _InspectedDonor:
    """A donor (or its base) as its config and the headers of its files show it.

    Attributes:
        memory, disk: bytes at the peak beyond Python and its libraries, and bytes written.
        warnings: reasons to doubt a merge.
    """

    donor: RecipeDonor
    spaces: MatchedSpaces
    memory: int
    disk: int
    warnings: list[str]

    def facts(self) -> dict[str, Any]:
        """The facts for JSON."""
        donor = self.donor
        facts = {"model": donor.name, "origin": donor.origin, "alignment": donor.file, "options": asdict(donor.options)}
        needs = {"memory": self.memory, "disk": self.disk, "warnings": self.warnings}
        return {**facts, **asdict(self.spaces), **needs}


def _inspected(donor: RecipeDonor) -> _InspectedDonor:
    """Open anchor and donor as a merge does, which checks their files, too."""
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
    return _InspectedDonor(donor, spaces, memory, size * spaces.parameters, warnings)


def _show(inspected: _InspectedDonor) -> None:
    donor, spaces = inspected.donor, inspected.spaces
    rows = [(x.space, x.kind, x.sizes, x.blocks, x.group) for x in spaces.lines]
    table(
        f"{donor.title}: {spaces.family}, {spaces.parameters:,} weights",
        ("space", "kind", "size", "where", "group"),
        rows,
    )
    if donor.origin is not None:
        say(f"{donor.origin} is aligned to {donor.anchor}; the maps are applied to {donor.name} minus {donor.origin}.")
    if donor.file is not None:
        say(f"Nothing is matched: the transforms are read from {donor.file}.")
    for warning in inspected.warnings:
        say(f"Warning: {warning}", "yellow")
    share = spaces.matched / spaces.parameters if spaces.parameters else 0.0
    say(f"Matched: {share:.0%} of the weights. Limits:")
    for reason in spaces.unaligned:
        say(f"- {reason}")
    say(f"One donor needs {bytes_text(inspected.memory)} of memory and {bytes_text(inspected.disk)} on disk")


def _show_file(contents: dict[str, Any], as_json: bool) -> int:
    """Print the content of one of our files."""
    if as_json:
        print_json(contents)
        return 0
    say(f"{contents['is']} ({contents['format']})")
    rows = [(f"fingerprint of {name}", mark) for name, mark in contents["fingerprints"].items()]
    rows += [(name, _text(value)) for name, value in contents["holds"].items()]
    facts = dict(contents["made"])
    rows += [(name, _origin(origin)) for name, origin in facts.pop("models", {}).items()]
    rows += [("learned", facts.pop("learned").get("verdict", ""))] if isinstance(facts.get("learned"), dict) else []
    rows += [(name, _text(value)) for name, value in facts.items()]
    rows += [("figures", contents["verdict"])] if contents.get("verdict") else []
    table("", ("", ""), rows)
    return 0


def _origin(facts: dict[str, Any]) -> str:
    """The origin of a model in words."""
    hub = facts.get("hub")
    words = f"{hub} at {facts.get('revision') or 'no known revision'}" if hub else "not known to be on the hub"
    return words + (f", licence {facts['license']}" if facts.get("license") else "")


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items())
    return ", ".join(map(_text, value)) if isinstance(value, list) else str(value)


def _fingerprint(target: str, as_json: bool) -> int:
    """The fingerprint of a model, or those of the models that a file was made for."""
    if is_document(target):
        marks = described(target)["fingerprints"]
    else:
        from rotation_merge.model.open import open_model

        model = open_model(target, any_base=True)
        marks = {str(model.reference): model.fingerprint}
    if as_json:
        print_json(marks)
        return 0
    for name, mark in marks.items():
        say(f"{mark}  {name}")
    return 0


def _report(target: str, as_json: bool) -> int:
    """Report of the merge in a folder."""
    return _show_file(described(target if is_document(target) else os.path.join(target, REPORT_FILE)), as_json)


def _draft(target: str, as_json: bool) -> int:
    """Print a draft of an architecture file; entries to check go to stderr."""
    from rotation_merge.diagnose.draft import draft_of

    content, doubts = draft_of(target)
    click.echo(json.dumps(content, indent=2))
    for doubt in doubts:
        note(doubt)
    return 0


def _methods(as_json: bool) -> int:
    """Merge methods that can be the delegate, and the parameters of recipes."""
    if as_json:
        print_json({"delegates": delegates(), "options": options()})
        return 0
    rows = [
        (d["name"], d["models"], d["base"], ", ".join(d["required"]), ", ".join(d["optional"])) for d in delegates()
    ]
    table("Delegates", ("delegate", "models", "base_model", "must be given", "may be given"), rows)
    say("")
    rows = [
        (o["name"], o["where"], ", ".join(o["values"]), o["default"], o["text"].replace("`", "")) for o in options()
    ]
    table("rotation_merge's own parameters", ("parameter", "stands", "values", "default", "meaning"), rows)
    return 0


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
        option = BY_NAME[name].option
        readers = f" Delegate: {', '.join(f'`{reader}`' for reader in option.delegates)}." if option.delegates else ""
        text = f"{option.help[:1].upper()}{option.help[1:]}.{readers}"
        where, default = PLACES[option.scope], str(spec.default).lower()
        entries.append({"name": name, "where": where, "values": option.values, "default": default, "text": text})
    return entries


def _architectures(as_json: bool) -> int:
    """Supported families, their classes, and limits of their groups."""
    from rotation_merge.architecture import families

    known = families()
    if as_json:
        facts = ("title", "classes", "bare", "limits")
        print_json({name: {fact: getattr(spec, fact) for fact in facts} for name, spec in known.items()})
        return 0
    rows = [(name, spec.title, ", ".join(spec.classes)) for name, spec in known.items()]
    table("", ("family", "models", "classes"), rows)
    return 0


def _prove(path: str, config: str | None, as_json: bool) -> int:
    """Try an architecture file; exit code 1 if it is wrong."""
    from rotation_merge.diagnose.proof import hints, prove
    from rotation_merge.model.headers import read_json

    for name in (path, config):
        if name is not None and not os.path.isfile(name):
            raise RotationMergeError("no such file", where=name, remedy="check the path")
    findings = prove(Path(path), read_json(config) if config is not None else None)
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        words = {True: "correct", False: "WRONG"}
        rows = [
            (f.what, "refused" if f.difference is None else f"{f.difference:.1e}", words[f.holds]) for f in findings
        ]
        table("", ("trial", "largest difference", ""), rows)
    for hint in hints(findings):
        note(f"hint: {hint}")
    return 0 if all(finding.holds for finding in findings) else 1


ABOUT: dict[str, Callable[[str, bool], int]] = {
    "fingerprint": _fingerprint,
    "report": _report,
    "draft": _draft,
}
"""Questions about a model, a recipe, a file or a merged folder."""

ALONE: dict[str, Callable[[bool], int]] = {"methods": _methods, "architectures": _architectures}
"""Questions about none of these."""
