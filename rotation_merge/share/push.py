"""The files to publish from a merge's folder, local names replaced."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from glob import escape, glob
from typing import Any

from rotation_merge.errors import RotationMergeError, named, short
from rotation_merge.files import TemporaryFolder
from rotation_merge.model.card import class_of, kept_figures, licence, shown_names, updated_card
from rotation_merge.model.contents import Contents
from rotation_merge.model.folder import folder_of
from rotation_merge.model.gguf import is_gguf
from rotation_merge.model.hub import no_answer, reachable
from rotation_merge.model.markdown import plain
from rotation_merge.model.naming import Renaming
from rotation_merge.model.open import open_model, parse_reference
from rotation_merge.record import REPORT_FILE, MergeReport
from rotation_merge.report.files import read_report
from rotation_merge.report.integrity import check_folder
from rotation_merge.run.statistics import Statistics
from rotation_merge.share.contents import chosen_files, included, is_statistics, published_name
from rotation_merge.share.names import STATISTICS as MEASURED
from rotation_merge.share.names import (
    completed,
    files_in,
    given_names,
    is_local,
    known_names,
    models_in,
    remaining_local_path,
    same_places,
    written_in,
)
from rotation_merge.share.remeasure import Measurement, base_name, is_source

CARD, RECIPE, CONFIG = "README.md", "recipe.yml", "mergekit_config.yml"
STATISTICS = "statistics"
WORDS = (".json", ".yml", ".yaml", ".md", ".txt", ".html", ".svg", ".jinja", ".csv")
"""Endings of files that are looked through for local names."""
UNKNOWN = "REVISION"
"""Stands in a dry run for the commit that the first upload will make."""


NAMED = 4
"""So many names that have to be mapped are written out."""


@dataclass(frozen=True)
class Item:
    """A file to publish: the local file, or its changed content."""

    place: str
    source: str | bytes

    @property
    def size(self) -> int:
        return len(self.source) if isinstance(self.source, bytes) else os.path.getsize(self.source)

    @property
    def changed(self) -> bool:
        return isinstance(self.source, bytes)

    @property
    def text(self) -> str:
        assert isinstance(self.source, bytes)
        return self.source.decode("utf-8")


@dataclass(frozen=True)
class Draft:
    """A folder that is to be published.

    Attributes:
        files: of the folder that are published, by their places in it.
        kept_back: those that stay here.
        names: names on the hub of local models (and data).
        beside: files from elsewhere that the recipe reads, by name; the place that each gets.
        unpublished: statistics that the recipe reads, and samples that they were measured on, which are not published,
            with their published names.
        recipe: as it was run.
        work: where files whose head had to change are put together.
    """

    folder: str
    repo: str
    files: Mapping[str, str]
    kept_back: Sequence[str]
    report: MergeReport
    names: Mapping[str, str]
    beside: Mapping[str, str]
    unpublished: Mapping[str, str]
    recipe: str
    work: TemporaryFolder = field(default_factory=TemporaryFolder, repr=False)

    def _renaming(self, commit: str) -> Renaming:
        travelling = {name: f"{self.repo}/{place}@{commit}" for name, place in self.beside.items()}
        written = {name: os.path.basename(name) for name in written_in(self.recipe)}
        known = {**written, **self.unpublished, **self.names, **travelling}
        known |= {plain(name): target for name, target in known.items()}  # as cards have them
        whole = {os.path.abspath(name): target for name, target in known.items() if os.path.exists(name)}
        return Renaming({**whole, **known, os.path.abspath(self.folder): self.repo})

    def first(self) -> list[Item]:
        """Files named by the recipe, which are published first: the recipe names their commit."""
        renaming = self._renaming("main")
        return [self._item(place, name, renaming) for name, place in self.beside.items()]

    def items(self, commit: str) -> list[Item]:
        """Everything else, recipe and card last."""
        renaming, early = self._renaming(commit), self.first()
        placed = {item.place for item in early} | {CARD, RECIPE}
        items = [self._item(place, path, renaming) for place, path in self.files.items() if place not in placed]
        if self.recipe and self.report.relation == "merge":
            items.append(Item(RECIPE, renaming.text(self.recipe).encode()))
        items.append(Item(CARD, self.card(renaming, self.statistics(renaming)).encode()))
        self._check([*early, *items])
        return items

    def statistics(self, renaming: Renaming) -> list[Measurement]:
        """Commands that measure unpublished statistics of the recipe.

        Raises:
            RotationMergeError: a file of them does not say it.
        """
        models = {mark: name for name, mark in self.report.fingerprints.items()}
        entries = []
        for path in files_in(self.recipe):
            if path not in self.unpublished:
                continue
            metadata = Statistics.open(path).metadata
            model = renaming.text(models.get(str(metadata.get("fingerprint")), str(metadata.get("model"))))
            data = renaming.value(str(metadata.get("data")))
            try:
                entries.append(Measurement.of(metadata, self.unpublished[path], model, data))
            except (KeyError, TypeError) as error:
                problem = f"its header does not say how it was measured ({short(error)})"
                raise RotationMergeError(problem, where=path, remedy="measure again, or add --with-data") from error
        return entries

    def card(self, renaming: Renaming, statistics: Sequence[Measurement] = ()) -> str:
        """The card, its metadata and our section written anew, with figures that are of these very weights."""
        try:
            with open(os.path.join(self.folder, CARD), encoding="utf-8") as file:
                text = file.read()
        except FileNotFoundError:
            text = f"# {self.repo.partition('/')[2]}\n"
        report = MergeReport.from_dict(renaming.value(self._facts()))
        figures = kept_figures(self.folder)
        if figures:
            mark = open_model(self.folder, any_base=True).fingerprint
            figures = [renaming.value(figure) for figure in figures if figure["fingerprint"] == mark]
        old, new = (os.path.basename(os.path.abspath(self.folder)), self.repo.partition("/")[2])
        text = re.sub(rf"(?m)^# {re.escape(old)}$", f"# {new}", text, count=1)
        shown = {short: renaming.names.get(path, short) for path, short in shown_names(self.report).items()}
        text, first = Renaming(renaming.names | shown).text(text), [measurement.command for measurement in statistics]
        card = updated_card(text, report, self.repo, class_of(self.folder), figures, first)
        check_card(card)
        return card

    def _facts(self) -> dict[str, Any]:
        """The report, models known by their new names too."""
        content = self.report.to_dict()
        models = {name: dict(facts) for name, facts in self.report.models.items()}
        for name, facts in models.items():
            parts = [(name.partition("+")[0] if facts.get("adapter") else name, facts)]
            if facts.get("adapter"):
                facts["adapter"] = dict(facts["adapter"])
                parts.append((str(facts["adapter"].get("name")), facts["adapter"]))
            for part, origin in parts:
                target = self.names.get(part)
                if target and not origin.get("hub"):
                    hub, _, revision = target.partition("@")
                    origin.update(hub=hub, revision=revision or None)
                    origin["license"] = origin.get("license") or _licence(hub, revision or None)
        return {**content, "models": models}

    def _item(self, place: str, path: str, renaming: Renaming) -> Item:
        if place == REPORT_FILE:
            content = json.dumps(renaming.value(self._facts()), indent=1) + "\n"
            return Item(place, content.encode())
        if place.endswith(".safetensors"):
            return Item(place, _with_header(path, renaming, self.work.path) or path)
        if not place.endswith(WORDS):
            return Item(place, path)
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            text = file.read()
        adapter = os.path.basename(place) == "adapter_config.json"
        changed = _adapter_config(text, renaming) if adapter else renaming.text(text)
        return Item(place, path if changed == text else changed.encode("utf-8", errors="surrogateescape"))

    def _check(self, items: Sequence[Item]) -> None:
        """
        Raises:
            RotationMergeError: a file still names a path of this machine.
        """
        local = [*self.names, *self.beside, *self.unpublished, os.path.abspath(self.folder)]
        for item in items:
            if isinstance(item.source, bytes):
                text = item.source.decode("utf-8", errors="replace")
            elif item.place.endswith(".safetensors"):
                text = json.dumps(_head(item.source).get("__metadata__", {}))
            elif item.place.endswith(WORDS):
                with open(item.source, encoding="utf-8", errors="replace") as file:
                    text = file.read()
            else:
                continue
            if local_path := remaining_local_path(text, local):
                raise RotationMergeError(
                    f"names '{local_path}', a path on this machine",
                    where=item.place,
                    remedy=f"add --as {local_path}=org/name@revision, or remove the path",
                )


def draft(
    folder: str, repo: str, targets: Sequence[str], with_data: bool = False, include: Sequence[str] = ()
) -> Draft:
    """The plan of publishing a folder.

    Args:
        targets: `LOCAL=org/name@revision`, for names that mean nothing elsewhere.
        with_data: samples and statistics that the recipe reads travel, too.
        include: patterns of files that are published although a merge has no such files.

    Raises:
        RotationMergeError: there is no report; a local name is left that nothing is known of; a link leads out.
    """
    published, kept_back = (
        chosen_files(folder, include) if os.path.exists(os.path.join(folder, REPORT_FILE)) else ({}, [])
    )
    report = _report(folder)
    recipe = completed(_recipe(folder, report), report.data)
    facts = report.to_dict()
    used = [str(data_used["source"]) for data_used in report.data]
    models = models_in(recipe, facts)
    read = {name: "data" for name in used if os.path.exists(name)} | files_in(recipe)
    names = {**known_names(facts), **same_places(given_names(targets), [*models, *read])}
    unpublished = {} if with_data else _unpublished(report, files_in(recipe), names)
    if not with_data:
        kept_back += [place for place in published if is_statistics(place) and not included(place, include)]
        published = {place: path for place, path in published.items() if place not in kept_back}
    beside: dict[str, str] = {}
    missing: list[str] = []
    for name, kind in read.items():
        if name in names or name in unpublished:
            continue
        if not os.path.isfile(name) or (kind == "data" and not with_data):
            missing.append(name)
        else:
            inside = os.path.relpath(name, folder)
            is_published = inside in published
            beside[name] = inside if is_published else published_name(kind, len(beside), os.path.basename(name))
    local_models = {name for name, origin in report.models.items() if not origin.get("hub")}
    missing += [name for name in models if (is_local(name) or name in local_models) and name not in names]
    if missing:
        raise _unknown(folder, missing, [n for n in missing if read.get(n) == "data" and os.path.isfile(n)])
    pinned = {name: _pinned(target) for name, target in names.items()}
    check_whole(folder, report)
    return Draft(folder, repo, published, kept_back, report, pinned, beside, unpublished, recipe)


def check_whole(folder: str, report: MergeReport) -> None:
    """Refuse a folder that programs would refuse, or load as another model than was merged.

    Raises:
        RotationMergeError: names the first defect.
    """
    if Contents(folder).opened is None:
        return
    models = report.models.items()
    places = [_parent(name, facts) for name, facts in models]
    fatal = [defect for defect in check_folder(folder, list(filter(None, places))) if defect.fatal]
    if fatal:
        more = f" (and {len(fatal) - 1} more)" if len(fatal) > 1 else ""
        problem = f"is damaged: {fatal[0].kind}: {fatal[0].what}{more}"
        raise RotationMergeError(
            problem, where=folder, remedy=f"run 'rotation-merge doctor {folder}'; --mend corrects some defects"
        )


def _parent(name: str, facts: Mapping[str, Any]) -> str | None:
    """The folder of a merged model, if it is here."""
    hub = f"{facts.get('hub')}@{facts.get('revision')}" if facts.get("revision") else str(facts.get("hub"))
    return folder_of(parse_reference(name if os.path.exists(name) or is_gguf(name) else hub).model)


def check_card(text: str) -> None:
    """Refuse a card with metadata that the hub's class refuses.

    Raises:
        RotationMergeError: with the hub class's message.
    """
    from huggingface_hub import ModelCard

    try:
        ModelCard(text, ignore_metadata_errors=False)
    except Exception as error:  # of its parser, of YAML's, and of the hub's class
        problem = f"its metadata are refused ({short(error)})"
        raise RotationMergeError(problem, where=CARD, remedy="correct them") from error


def _unpublished(report: MergeReport, read: Mapping[str, str], names: Mapping[str, str]) -> dict[str, str]:
    """Unpublished statistics that a recipe reads, and their samples, by their published names.

    Args:
        read: files that the recipe reads, with the key that each stands under.
        names: names on the hub.
    """
    files = [name for name, kind in read.items() if kind == STATISTICS and name not in names]
    unpublished = {}
    for number, name in enumerate(files):
        if os.path.isfile(name):
            unpublished[name] = published_name(STATISTICS, number, os.path.basename(name)).partition("/")[2]
    other_sources = {str(used["source"]) for used in report.data if not str(used["of"]).startswith(MEASURED)}
    for used in report.data:
        source = str(used["source"])
        elsewhere = source in names or source in read or source in other_sources or is_source(source)
        if not elsewhere and unpublished:
            unpublished[source] = base_name(source)
    return unpublished


def _unknown(folder: str, missing: Sequence[str], data: Sequence[str]) -> RotationMergeError:
    """Local names without a name on the hub, and the remedy for each; `data`: the samples among them."""
    names = list(dict.fromkeys(missing))
    model_names = [name for name in names if name not in data]
    words = " ".join(f"--as {name}=org/name@revision" for name in model_names[:NAMED])
    upload = f" (not on the hub yet: 'hf upload org/name {model_names[-1]}')" if model_names else ""
    samples = "--with-data to publish samples, or --as FILE=datasets/org/name/file@revision" if data else ""
    remedy = f"add {' and '.join(filter(None, (f'{words}{upload}', samples)))}"
    others = [name for name in names if name not in model_names[:NAMED]]
    problem = "local paths need a name on the hub" + (f": {named(others)}" if others else "")
    return RotationMergeError(problem, where=folder, remedy=remedy)


def _report(folder: str) -> MergeReport:
    """
    Raises:
        RotationMergeError: there is none; names folders inside that have one.
    """
    inside = sorted(glob(os.path.join(escape(folder), "*", REPORT_FILE)))
    if inside and not os.path.exists(os.path.join(folder, REPORT_FILE)):
        first = os.path.dirname(inside[0])
        raise RotationMergeError(f"holds {len(inside)} models", where=folder, remedy=f"push each, as {first}")
    return read_report(os.path.join(folder, REPORT_FILE))


def _recipe(folder: str, report: MergeReport) -> str:
    for name in (RECIPE, CONFIG):
        path = os.path.join(folder, name)
        if os.path.isfile(path):
            with open(path, encoding="utf-8") as file:
                return file.read()
    return report.recipe if report.relation == "merge" else ""


def _pinned(target: str) -> str:
    """A model of the hub at a revision, by default the newest.

    Raises:
        RotationMergeError: the hub does not say.
    """
    if "@" in target or target.count("/") != 1:
        return target
    from huggingface_hub import HfApi

    remedy = f"write {target}@REVISION"
    if not reachable():
        raise RotationMergeError(f"its revision is unknown ({no_answer()[0]})", where=target, remedy=remedy)
    try:
        return f"{target}@{HfApi().model_info(target).sha}"
    except Exception as error:  # of the client of HTTP below, which is another each year
        problem = f"its revision is unknown ({short(error)})"
        raise RotationMergeError(problem, where=target, remedy=remedy) from error


def _licence(hub: str, revision: str | None) -> str | None:
    """The licence on a repository's card, if it can be fetched."""
    from huggingface_hub import hf_hub_download

    if not reachable():
        return None
    try:
        return licence(os.path.dirname(hf_hub_download(hub, "README.md", revision=revision)))
    except Exception:  # of the client of HTTP below, which is another each year
        return None


def _head(path: str) -> dict[str, Any]:
    """The head of a safetensors file."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return dict(json.loads(file.read(length)))


def _with_header(path: str, renaming: Renaming, work: str) -> str | None:
    """A copy of one of our files with local names in its header replaced; None if there are none.

    Tensors are not changed.
    """
    head = _head(path)
    entries = head.get("__metadata__", {})
    changed = {name: _entry(text, renaming) for name, text in entries.items()} if "made" in entries else entries
    if changed == entries:
        return None
    head["__metadata__"] = changed
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    copy = os.path.join(work, hashlib.sha256(f"{path} {changed}".encode()).hexdigest())
    if not os.path.exists(copy):
        with open(path, "rb") as file, open(copy, "wb") as out:
            (length,) = struct.unpack("<Q", file.read(8))
            file.seek(8 + length)
            out.write(struct.pack("<Q", len(text)) + text)
            shutil.copyfileobj(file, out, 1 << 22)
    return copy


def _entry(text: str, renaming: Renaming) -> str:
    """An entry of a file's head, local names in it replaced: JSON, or a word."""
    try:
        value = json.loads(text)
    except ValueError:
        return renaming.text(text)
    renamed = renaming.value(value)
    return text if renamed == value else json.dumps(renamed)


def _adapter_config(text: str, renaming: Renaming) -> str:
    """peft keeps a base and its revision apart."""
    content = json.loads(text)
    base = renaming.text(str(content.get("base_model_name_or_path")))
    hub, _, revision = base.partition("@")
    if renaming.text(text) == text or not revision:
        return text
    return (
        json.dumps({**renaming.value(content), "base_model_name_or_path": hub, "revision": revision}, indent=2) + "\n"
    )


def publish(plan: Draft, private: bool) -> str:
    """Upload everything; gives the commit.

    Raises:
        RotationMergeError: the hub refuses, or cannot be reached.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    api, commit = HfApi(), ""

    def send(items: Sequence[Item], message: str) -> str:
        operations = [CommitOperationAdd(item.place, item.source) for item in items]
        return str(_asked(plan.repo, api.create_commit, plan.repo, operations, commit_message=message).oid)

    early = plan.first()
    plan.items(UNKNOWN)  # what it refuses is refused before anything is sent
    if not reachable():
        raise RotationMergeError(
            f"cannot be published: {no_answer()[0]}", where=plan.repo, remedy="check the connection"
        )
    _asked(plan.repo, api.create_repo, plan.repo, private=private, exist_ok=True)
    if early:
        commit = send(early, "What the recipe reads")
    return send(plan.items(commit), "Merge, recipe, report and card")


def _asked(repo: str, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """The hub's answer.

    Raises:
        RotationMergeError: it refuses, or cannot be reached.
    """
    try:
        return function(*arguments, **named)
    except Exception as error:  # of huggingface_hub, and of the client of HTTP below it, which is another each year
        remedy = "log in with 'hf auth login', and check the repository's name"
        raise RotationMergeError(f"cannot be published ({short(error)})", where=repo, remedy=remedy) from error
