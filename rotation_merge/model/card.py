"""The model card: metadata for the hub, the origins of models, and the section on the merge, which a push rewrites."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import yaml
from mergekit.common import ModelPath, ModelReference

from rotation_merge.errors import RotationMergeError, printable, short
from rotation_merge.model.contents import Contents
from rotation_merge.model.folder import place_of
from rotation_merge.model.hub import is_hub_name
from rotation_merge.model.markdown import code, encoded, plain, prose, table
from rotation_merge.model.naming import Renaming, shortened
from rotation_merge.model.verdict import markdown
from rotation_merge.record import MergeReport

BEGIN, END = "<!-- rotation-merge: written by the tool, and anew by 'push' -->", "<!-- /rotation-merge -->"
"""Marks around our section of a card; the rest of the card is never changed."""

TAGS = {
    "merge": ("mergekit", "merge", "rotation-merge"),
    "finetune": ("mergekit", "rotation-merge"),
    "adapter": ("lora", "rotation-merge"),
}
"""By relation to the parents."""

MEASURED = "evaluation.json"
"""File that `rotation-merge evaluate --keep` writes beside a model."""

_FIGURES = ("data", "examples", "pipeline", "figures", "fingerprint")

_SNAPSHOT = re.compile(r"[/\\]models--([^/\\]+?)--([^/\\]+)[/\\]snapshots[/\\]([0-9a-f]{40})(?=[/\\]|$)")

RUN = """
### How to run it

Like any {noun}: nothing beside {library} is needed.

```python
from {library} import {kind}

model = {kind}.from_pretrained({name})
```"""

MAKE_AGAIN = """
### How to make it again

With {makers}:

```bash
{commands}
```

{statistics}On the same machine with the same versions and samples the bytes are the same. With other CPU kernels most \
weights differ by up to 6e-06; {compare} tells you whether both models compute the same.

{without_plugin}"""
"""The demo's two Llamas, merged with the residual stream turned: under MKL_CBWR=COMPATIBLE 440712 of 443232 weights
differ, by up to 5.8e-6."""

STATISTICS = "Its statistics are not published. They are measured first, on the same samples.\n\n"


# --- metadata --------------------------------------------------------------------------------------------------------


def front_matter(text: str) -> tuple[dict[str, Any], str]:
    """The metadata of a card, and the rest of it."""
    header = re.match(r"\A---\r?\n(.*?)\r?\n?---[ \t]*(?:\r?\n|\Z)", text, re.DOTALL)
    try:
        metadata = yaml.safe_load(header[1]) if header else None
    except (yaml.YAMLError, RecursionError):
        metadata = None
    return (metadata, text[header.end() :]) if header and isinstance(metadata, dict) else ({}, text)


def metadata_in(folder: str) -> dict[str, Any]:
    """The metadata of the card in a folder; empty if there is none."""
    return front_matter(Contents(folder).text("README.md") or "")[0]


def with_metadata(metadata: Mapping[str, Any], body: str) -> str:
    """A card, its metadata as YAML in front."""
    readable = yaml.safe_dump(dict(metadata), sort_keys=False, allow_unicode=True)
    text = readable if printable(readable) == readable else yaml.safe_dump(dict(metadata), sort_keys=False)
    return f"---\n{text}---\n{body}"


def metadata(
    report: MergeReport,
    existing: Mapping[str, Any] | None = None,
    measured: Sequence[Mapping[str, Any]] = (),
    name: str = "",
) -> dict[str, Any]:
    """A card's metadata: parents, relation, licence, tags, datasets, and figures that were measured.

    Args:
        existing: metadata of the existing card; entries of others stay.
        measured: figures of `evaluate`.
        name: of the model, among its figures.
    """
    card = {key: value for key, value in (existing or {}).items() if key != "base_model" or value}
    if parents := list(dict.fromkeys(facts["hub"] for facts in _parents(report).values() if facts.get("hub"))):
        card["base_model"] = parents if report.relation == "merge" else parents[0]
    card["base_model_relation"] = report.relation
    card["library_name"] = "peft" if report.relation == "adapter" else "transformers"
    stated = _licences(report)
    if card.get("license") in (None, "other") and any(stated):
        common = {"license": stated[0]} if len(set(stated)) == 1 else {}
        card |= common or {"license": "other", "license_name": "licences-of-the-parents"}
    user_tags = [tag for tag in card.get("tags") or [] if isinstance(tag, str)]
    card["tags"] = list(dict.fromkeys([*TAGS[report.relation], *user_tags]))
    sets = [*(card.get("datasets") or []), *(_dataset(str(used["source"])) for used in report.data)]
    if known := list(dict.fromkeys(filter(None, sets))):
        card["datasets"] = known
    if measured:
        card["model-index"] = [{"name": name, "results": [_result(measurement) for measurement in measured]}]
    return card


def _parents(report: MergeReport) -> dict[str, dict[str, Any]]:
    """The origin of each parent, adapters after their bases."""
    origins = {}
    for name in [report.base] if report.base is not None else list(report.models):
        facts = report.models.get(name, {})
        adapter = facts.get("adapter")
        origins[name if adapter is None else name.partition("+")[0]] = facts
        if adapter is not None:
            origins[str(adapter.get("name"))] = adapter
    return origins


def _licences(report: MergeReport) -> list[str | None]:
    """The licences of the parents and of fine-tunes carried onto them."""
    carried = [facts for facts in report.models.values() if facts.get("carried")]
    return [facts.get("license") for facts in (*_parents(report).values(), *carried)]


def _dataset(source: str) -> str | None:
    """The hub's dataset that a file name belongs to."""
    match = re.match(r"datasets/([\w.-]+/[\w.-]+)/", source)
    return match[1] if match else None


def _result(measurement: Mapping[str, Any]) -> dict[str, Any]:
    source = str(measurement["data"])
    figures = {name: value for name, value in measurement["figures"].items() if isinstance(value, int | float)}
    return {
        "task": {"type": measurement["pipeline"]},
        "dataset": {"type": _dataset(source) or os.path.basename(source), "name": os.path.basename(source)},
        "metrics": [{"type": figure, "value": value} for figure, value in figures.items()],
    }


def kept_figures(folder: str) -> list[dict[str, Any]]:
    """The figures that `evaluate --keep` wrote beside a model.

    Raises:
        RotationMergeError: it is damaged.
    """
    path = os.path.join(folder, MEASURED)
    if not os.path.exists(path):
        return []
    try:
        with open(path, encoding="utf-8") as file:
            return [{**entry, **{name: entry[name] for name in _FIGURES}} for entry in json.load(file)]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        remedy = "measure again with 'rotation-merge evaluate --keep'"
        raise RotationMergeError(f"is damaged ({short(error)})", where=path, remedy=remedy) from error


# --- the section -----------------------------------------------------------------------------------------------------


def section(
    report: MergeReport, name: str, config: Mapping[str, Any], first: Sequence[str], picture: str | None
) -> str:
    """Markdown between our marks: moved donors with distances, models and licences, data, usage.

    The arguments are those of `updated_card`.
    """
    lines = [BEGIN, "### Models"]
    if report.relation == "merge":
        lines = [BEGIN, "### Alignment", "", *_done(report), *(f"\n{note}" for note in notes(report))]
        lines += [f"\n![Relative distance by layer, before and after alignment]({picture})"] if picture else []
        lines += ["", "Per space: `rotation_merge.json`."]
    lines += [] if report.search is None else markdown(report.search)
    lines += _origins(report)
    if rows := [[plain(used["of"]), str(used["samples"] or ""), plain(used["source"])] for used in report.data]:
        lines += ["", "### Data", "", *table(["used for", "samples", "source"], rows)]
    classes = config.get("architectures")
    kind = str(classes[0]) if isinstance(classes, list) and classes else ""
    usage = {"noun": "model", "library": "transformers", "kind": kind if kind.isidentifier() else "AutoModel"}
    if report.relation == "adapter":
        usage = {"noun": "adapter", "library": "peft", "kind": "AutoPeftModelForCausalLM"}
    lines.append(RUN.format(**usage, name=json.dumps(name)))
    if report.relation == "merge":
        lines.append(_again(report, name, first))
    return "\n".join([*lines, "", END, ""])


def notes(report: MergeReport) -> list[str]:
    """The report's notes as Markdown."""
    names = [report.anchor, *report.donors(), *report.models, *_parents(report), *report.files.values()]
    return [prose(note, [*names, *(str(used["source"]) for used in report.data)]) for note in report.notes]


def _done(report: MergeReport) -> list[str]:
    """Card lines on the donors: one row for each moved donor."""
    tool = plain(f"rotation_merge {report.versions.get('rotation-merge', '')}")
    if not report.donors():
        return [f"{prose(report.unmoved(), [report.delegate])}, planned by {tool}."]
    near = f" and line up with {code(report.anchor)}" if set(report.donors()) - set(report.files) else ""
    matched, rows = {row.donor for row in report.rows}, []
    for donor in report.donors():
        distances = [f"{x:.4g}" for x in report.relative_distances(donor)] if donor in matched else ["", ""]
        rows.append([plain(donor), *distances, plain(report.verdict(donor))])
    words = f"{tool} rewrote the weights of these models: they keep their outputs{near}."
    columns = ["model", "relative distance before", "after", ""]
    return [f"Before the merge by {code(report.delegate)}, {words}", "", *table(columns, rows)]


def _origins(report: MergeReport) -> list[str]:
    """Card lines on the models: where they come from, their licences and fingerprints."""
    rows = []
    for name, facts in {**{key: {} for key in report.fingerprints}, **report.models}.items():
        mark, adapter = report.fingerprints.get(name, ""), facts.get("adapter")
        rows.append([*_origin(name, facts), code(mark) if mark else ""])
        rows += [[*_origin(str(adapter.get("name")), adapter), ""]] if adapter else []
    lines = ["", *table(["model", "revision", "licence", "fingerprint of config and weights"], rows)] if rows else []
    differ = rows and len(set(_licences(report))) > 1
    return [*lines, *(["", "The parents have different licences; all of them apply."] if differ else [])]


def _origin(name: str, facts: Mapping[str, Any]) -> list[str]:
    """Cells: a model's name, revision and licence."""
    hub = facts.get("hub")
    known = isinstance(hub, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", hub)
    link = f"[{hub}](https://huggingface.co/{hub})" if known else plain(hub or name)
    return [link, plain(facts.get("revision") or ""), plain(facts.get("license") or "not stated")]


def _again(report: MergeReport, name: str, first: Sequence[str]) -> str:
    """Making a merge again, with and without the plugin; a `name` with a slash is one of the hub."""
    folder, delegate = os.path.basename(name), code(report.delegate)
    commands = [shlex.join(["mergekit-yaml", f"{folder}/mergekit_config.yml", "again"])]
    compare = shlex.join(["rotation-merge", "verify", folder, "again"])
    if name.count("/") == 1:
        commands = [f"hf download {name} --local-dir {folder}", f"cd {folder}", *first]
        commands, compare = [*commands, "mergekit-yaml recipe.yml ../again"], "rotation-merge verify . ../again"
    makers = [f"{n} {plain(v)}" for n, v in report.versions.items() if n in ("rotation-merge", "mergekit", "torch")]
    rotated = any(row.kind == "stream" and row.group == "rotation" for row in report.rows)
    without_plugin = "It runs without the plugin. To make it again you need the plugin: "
    if report.own_method or (report.donors() and rotated):
        without_plugin += f"{delegate} is a method of it." if report.own_method else "it folds the norm gains."
    elif report.donors():
        without_plugin = "To merge without the plugin, write each donor in the anchor's coordinates with "
        without_plugin += f"`rotation-merge align`; mergekit alone then merges them by {delegate}."
    else:
        without_plugin = f"mergekit alone makes it, too, by {delegate}."
    return MAKE_AGAIN.format(
        makers=", ".join(makers),
        commands="\n".join(commands),
        statistics=STATISTICS if first else "",
        compare=code(compare),
        without_plugin=without_plugin,
    )


def updated_card(
    text: str,
    report: MergeReport,
    name: str,
    config: Mapping[str, Any],
    measured: Sequence[Mapping[str, Any]] = (),
    first: Sequence[str] = (),
    picture: str | None = None,
) -> str:
    """A card, old or new, with the report's metadata and section; everything else unchanged.

    The card of a merge names no path of this machine that the report knows.

    Args:
        text: of the card; of a new one what comes before the section.
        name: to load the model by.
        config: of the model.
        measured: figures of `evaluate`.
        first: commands that make the recipe's unpublished inputs.
        picture: file beside the card that shows the distances.
    """
    existing, body = front_matter(text)
    before, begin_mark, after = body.partition(BEGIN)
    if begin_mark:
        after = after.partition(END)[2].removeprefix("\n")
    else:
        before, marker, after = body.partition("### Configuration")
        before, after = (before, f"\n{marker}{after}") if marker else (f"{before.rstrip()}\n\n", "")
    body = f"{before}{section(report, name, config, first, picture)}{after}"
    body = Renaming(shown_names(report)).text(body)
    return with_metadata(metadata(report, existing, measured, name), body)


# --- names -----------------------------------------------------------------------------------------------------------


def shown_names(report: MergeReport) -> dict[str, str]:
    """The names in a merge's card of what lies on this machine: models, samples, files, by the report's names."""
    known = set(_local_names(report)) if report.relation == "merge" else set()
    paths = [name for name in known if name.startswith((".", "~", "/")) or ("/" in name and os.path.exists(name))]
    hub = {name: facts["hub"] for name, facts in _parents(report).items() if facts.get("hub")}
    shown = {path: hub.get(path, short) for path, short in shortened(paths).items()}
    return {form(path): form(short) for path, short in shown.items() for form in (encoded, plain, str)}


def _local_names(report: MergeReport) -> Iterator[str]:
    """Every model, adapter and file that a report and its recipe name; may hold duplicates."""
    adapters = [str(facts["adapter"]["name"]) for facts in report.models.values() if facts.get("adapter")]
    searched = [] if report.search is None else [parent.name for parent in report.search.parents]
    names = [report.anchor, *report.models, *report.fingerprints, *searched, *adapters]
    yield from (part for name in names for part in name.split("+"))
    yield from report.files.values()
    yield from (str(used[key]) for used in report.data for key in ("source", "file") if used.get(key))
    try:
        scalars = (event.value for event in yaml.parse(report.recipe) if isinstance(event, yaml.ScalarEvent))
        yield from (value for value in scalars if os.path.isabs(value))
    except yaml.YAMLError:
        return


def origins(models: Iterable[ModelReference], cache: str | None = None) -> dict[str, dict[str, Any]]:
    """Origin of each model and its adapter, by the model's name in a report.

    Its entries are `hub` (org/name), `revision` (the commit that was read) and `license`. Unknown values are None;
    nothing is fetched.
    """
    facts_by_name = {}
    for reference in models:
        facts = _facts(reference.model, cache)
        if reference.lora is not None:
            facts["adapter"] = {"name": str(reference.lora), **_facts(reference.lora, cache)}
        facts_by_name[str(reference)] = facts
    return facts_by_name


def _facts(part: ModelPath, cache: str | None) -> dict[str, Any]:
    place = os.path.abspath(place_of(part, cache) or os.devnull)
    folder = place if os.path.isdir(place) else os.path.dirname(place)
    if (snapshot := _SNAPSHOT.search(folder)) is not None:
        return {"hub": f"{snapshot[1]}/{snapshot[2]}", "revision": snapshot[3], "license": licence(folder)}
    repo = part.path.partition(":")[0]
    hub = repo if is_hub_name(repo) and not os.path.exists(part.path) else None
    return {"hub": hub, "revision": part.revision if hub else None, "license": licence(folder)}


def licence(folder: str) -> str | None:
    """The licence in the card beside a model; None if it states none."""
    stated = metadata_in(folder).get("license")
    return stated if isinstance(stated, str) and stated.strip() else None
