"""The model card: metadata as the hub reads them, and the section on what was done, which is written anew by a push."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from rotation_merge.durable import write_text
from rotation_merge.errors import RotationMergeError, short
from rotation_merge.report.record import MergeReport

BEGIN, END = "<!-- rotation-merge: written by the tool, and anew by 'push' -->", "<!-- /rotation-merge -->"
"""What stands between these in a card is ours; the rest is left as it is."""

TAGS = {
    "merge": ("mergekit", "merge", "rotation-merge"),
    "finetune": ("mergekit", "rotation-merge"),
    "adapter": ("lora", "rotation-merge"),
}
"""By relation to the parents."""

TOLERANCE = 6e-6
"""How far most weights of a merge are off where CPU kernels sum in another order. The demo's two Llamas, merged with
the residual stream turned: under MKL_CBWR=COMPATIBLE 440712 of 443232 weights differ, by up to 5.8e-6."""

MEASURED = "evaluation.json"
"""What `rotation-merge evaluate --keep` writes beside a model."""

_FIGURES = ("data", "examples", "pipeline", "figures", "fingerprint")


def front_matter(text: str) -> tuple[dict[str, Any], str]:
    """The metadata of a card, and the rest of it."""
    found = re.match(r"\A---\r?\n(.*?)\r?\n?---[ \t]*(?:\r?\n|\Z)", text, re.DOTALL)
    try:
        metadata = yaml.safe_load(found[1]) if found else None
    except yaml.YAMLError:
        metadata = None
    return (metadata, text[found.end() :]) if found and isinstance(metadata, dict) else ({}, text)


def with_metadata(metadata: Mapping[str, Any], body: str) -> str:
    """A card, its metadata as YAML in front."""
    return f"---\n{yaml.safe_dump(dict(metadata), sort_keys=False, allow_unicode=True)}---\n{body}"


def metadata(
    report: MergeReport,
    kept: Mapping[str, Any] | None = None,
    measured: Sequence[Mapping[str, Any]] = (),
    name: str = "",
) -> dict[str, Any]:
    """A card's metadata: parents, relation, licence, tags, datasets, and figures that were measured.

    Args:
        kept: what the card says already; what is not ours stays.
        measured: what `evaluate` wrote.
        name: of the model, among its figures.
    """
    found = dict(kept or {})
    if parents := _hub_ids(report):
        found["base_model"] = parents if report.relation == "merge" else parents[0]
    elif not found.get("base_model"):
        found.pop("base_model", None)
    found["base_model_relation"] = report.relation
    found["library_name"] = "peft" if report.relation == "adapter" else "transformers"
    found |= _licence(report, found)
    own = [tag for tag in found.get("tags") or [] if isinstance(tag, str)]
    found["tags"] = list(dict.fromkeys([*TAGS[report.relation], *own]))
    sets = [*(found.get("datasets") or []), *map(_dataset, (str(used["source"]) for used in report.data))]
    if known := list(dict.fromkeys(filter(None, sets))):
        found["datasets"] = known
    if measured:
        found["model-index"] = [{"name": name, "results": [_result(one) for one in measured]}]
    return found


def _parents(report: MergeReport) -> dict[str, dict[str, Any]]:
    """Where each parent came from, adapters after their bases."""
    names = [report.base] if report.base is not None else list(report.models)
    found = {}
    for name in names:
        facts = report.models.get(name, {})
        adapter = facts.get("adapter")
        found[name if adapter is None else name.partition("+")[0]] = facts
        if adapter is not None:
            found[str(adapter.get("name"))] = adapter
    return found


def _hub_ids(report: MergeReport) -> list[str]:
    return list(dict.fromkeys(facts["hub"] for facts in _parents(report).values() if facts.get("hub")))


def _licence(report: MergeReport, kept: Mapping[str, Any]) -> dict[str, str]:
    """The parents' licence where they share one; `other` where they differ, or one states none. A card's own stays."""
    stated = _stated(report)
    if kept.get("license") not in (None, "other") or not any(stated):
        return {}
    if len(set(stated)) == 1:
        return {"license": str(stated[0])}
    return {"license": "other", "license_name": "licences-of-the-parents"}


def _stated(report: MergeReport) -> list[str | None]:
    """The licences of the parents, and of what was carried onto them."""
    carried = [facts for facts in report.models.values() if facts.get("carried")]
    return [facts.get("license") for facts in (*_parents(report).values(), *carried)]


def _dataset(source: str) -> str | None:
    """A dataset of the hub, out of what names one of its files."""
    found = re.match(r"datasets/([\w.-]+/[\w.-]+)/", source)
    return found[1] if found else None


def _result(one: Mapping[str, Any]) -> dict[str, Any]:
    source = str(one["data"])
    figures = {name: value for name, value in one["figures"].items() if isinstance(value, int | float)}
    return {
        "task": {"type": one["pipeline"]},
        "dataset": {"type": _dataset(source) or os.path.basename(source), "name": os.path.basename(source)},
        "metrics": [{"type": figure, "value": value} for figure, value in figures.items()],
    }


def section(report: MergeReport, name: str = "", model_class: str | None = None) -> str:
    """Markdown between our marks: what was moved and how far, the models and their licences, data, how to run it.

    Args:
        name: what the model is loaded by.
        model_class: of transformers.
    """
    lines = [BEGIN, "### Models"]
    if report.relation == "merge":
        lines = [BEGIN, "### Alignment", "", *_done(report), *(f"\n{note}" for note in report.notes)]
        lines += ["", "Per space: `rotation_merge.json`."]
    lines += [*origins(report), *_data(report), *(running(report, name, model_class) if name else [])]
    return "\n".join([*lines, "", END, ""])


def _done(report: MergeReport) -> list[str]:
    """What was done to the donors: nothing, or a row for each that was moved."""
    tool = f"rotation_merge {report.versions.get('rotation-merge', '')}".strip()
    if not report.donors():
        return [f"No model was moved: this is the plain merge by `{report.delegate}`, planned by {tool}."]
    near = f", as near as possible to `{report.anchor}`" if set(report.donors()) - set(report.files) else ""
    lines = [
        f"Before merging by `{report.delegate}`, these models were moved by symmetries of the architecture, their "
        f"functions unchanged{near}, with {tool}.",
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


def origins(report: MergeReport) -> list[str]:
    """Which weights these were, and under which licences, as lines of Markdown."""
    parts = {**{name: report.models.get(name, {}) for name in report.fingerprints}, **report.models}
    rows = []
    for name, facts in parts.items():
        mark = report.fingerprints.get(name, "")
        rows.append((_linked(name, facts), facts, f"`{mark}`" if mark else ""))
        if facts.get("adapter"):
            rows.append((_linked(str(facts["adapter"].get("name")), facts["adapter"]), facts["adapter"], ""))
    if not rows:
        return []
    lines = ["", "| model | revision | licence | fingerprint of config and weights |", "|---|---|---|---|"]
    for name, facts, mark in rows:
        lines.append(f"| {name} | {facts.get('revision') or ''} | {facts.get('license') or 'not stated'} | {mark} |")
    if len(set(_stated(report))) > 1:
        lines += ["", "The parents' licences are not all the same: what each of them asks holds here, too."]
    return lines


def _linked(name: str, facts: Mapping[str, Any]) -> str:
    hub = facts.get("hub")
    return f"[{hub}](https://huggingface.co/{hub})" if hub else name


def _data(report: MergeReport) -> list[str]:
    if not report.data:
        return []
    rows = [f"| {used['of']} | {used['samples'] or ''} | {used['source']} |" for used in report.data]
    return ["", "### Data", "", "| used for | samples | source |", "|---|---|---|", *rows]


def running(report: MergeReport, name: str, model_class: str | None) -> list[str]:
    """How to run the model, how to make it again, and how without the plugin."""
    if report.relation == "adapter":
        base = next(iter(_hub_ids(report)), report.base or report.anchor)
        loading = [
            "from peft import PeftModel",
            "from transformers import AutoModelForCausalLM",
            "",
            f'base = AutoModelForCausalLM.from_pretrained("{base}")',
            f'model = PeftModel.from_pretrained(base, "{name}")',
        ]
    else:
        kind = model_class or "AutoModel"
        loading = [f"from transformers import {kind}", "", f'model = {kind}.from_pretrained("{name}")']
    runs = "adapter: nothing beside peft" if report.relation == "adapter" else "model: nothing beside transformers"
    lines = ["", "### How to run it", "", f"As any {runs} is needed.", "", "```python"]
    lines += [*loading, "```"]
    return lines if report.relation != "merge" else [*lines, *_again(report, name)]


def _again(report: MergeReport, name: str) -> list[str]:
    """How to make a merge again, with the plugin and without."""
    made = ", ".join(f"{n} {v}" for n, v in report.versions.items() if n in ("rotation-merge", "mergekit", "torch"))
    turned = any(row.kind == "stream" and row.group == "orthogonal" for row in report.rows)
    here = os.path.basename(name)
    commands = [f"mergekit-yaml {here}/mergekit_config.yml again"]
    if name.count("/") == 1:
        commands = [f"rotation-merge pull {name} {here}", f"mergekit-yaml {here}/recipe.yml again"]
    lines = ["", "### How to make it again", "", f"With {made}:", "", "```bash", *commands, "```", ""]
    lines.append(
        "On the same machine with the same versions the bytes are the same; with other CPU kernels most weights differ "
        f"by up to {TOLERANCE:g}, and `rotation-merge verify {here} again` decides."
    )
    without = (
        "Without the plugin: `rotation-merge align` writes each donor in the anchor's coordinates as a normal "
        f"checkpoint, once; mergekit alone merges these by `{report.delegate}`, where that is a method of its own."
    )
    if not report.donors():
        without = (
            f"Without the plugin: mergekit alone makes it by `{report.delegate}`, where that is a method of its own."
        )
    if turned:
        without = "Without the plugin it runs, but cannot be made: the gains of both models' norms were folded for it."
    return [*lines, "", without]


def measured_in(folder: str) -> list[dict[str, Any]]:
    """What `evaluate --keep` wrote beside a model.

    Raises:
        RotationMergeError: it is damaged.
    """
    path = os.path.join(folder, MEASURED)
    if not os.path.exists(path):
        return []
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
        return [{**one, **{name: one[name] for name in _FIGURES}} for one in found]
    except (OSError, ValueError, KeyError, TypeError) as error:
        remedy = "measure again with 'rotation-merge evaluate --keep'"
        raise RotationMergeError(f"is damaged ({short(error)})", where=path, remedy=remedy) from error


def class_of(folder: str) -> str | None:
    """The class of transformers that a checkpoint's config names."""
    try:
        with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
            found = json.load(file).get("architectures")
    except (OSError, ValueError, AttributeError):
        return None
    return str(found[0]) if isinstance(found, list) and found else None


def add_section(path: str, report: MergeReport) -> None:
    """Add section and metadata to the card that mergekit wrote, in place; without a card nothing happens."""
    if not os.path.exists(path):
        return
    with open(path, encoding="utf-8") as file:
        text = file.read()
    folder = os.path.dirname(os.path.abspath(path))
    name = os.path.basename(folder)
    write_text(path, renewed(text, report, name, class_of(folder)))


def renewed(
    text: str,
    report: MergeReport,
    name: str,
    model_class: str | None = None,
    measured: Sequence[Mapping[str, Any]] = (),
) -> str:
    """A card with metadata and our section as the report has them now, everything else as it was."""
    kept, body = front_matter(text)
    own = section(report, name, model_class)
    before, found, after = body.partition(BEGIN)
    if found:
        body = f"{before}{own}{after.partition(END)[2].removeprefix(chr(10))}"
    else:
        before, marker, after = body.partition("### Configuration")
        body = f"{before}{own}\n{marker}{after}" if marker else f"{before.rstrip()}\n\n{own}"
    return with_metadata(metadata(report, kept, measured, name), body)
