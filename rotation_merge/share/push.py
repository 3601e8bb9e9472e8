"""Publishing a merge: its files staged with local names replaced, then uploaded as a folder."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from glob import escape, glob
from typing import Any

from rotation_merge.errors import RotationMergeError, named, short
from rotation_merge.files import TemporaryFolder
from rotation_merge.model.card import kept_figures, licence, shown_names, updated_card
from rotation_merge.model.contents import Contents
from rotation_merge.model.folder import folder_of
from rotation_merge.model.gguf import is_gguf
from rotation_merge.model.hub import HubFile, no_answer, reachable
from rotation_merge.model.markdown import plain
from rotation_merge.model.naming import Renaming
from rotation_merge.model.open import open_model, parse_reference
from rotation_merge.record import DISTANCES, REPORT_FILE, MergeReport
from rotation_merge.report.files import read_report
from rotation_merge.report.integrity import check_folder
from rotation_merge.run.sample_kinds import SOURCES
from rotation_merge.run.statistics import Statistics
from rotation_merge.share.contents import PART, chosen_files, included, is_statistics, published_name
from rotation_merge.share.names import STATISTICS as MEASURED
from rotation_merge.share.names import (
    check_no_local_path,
    completed,
    files_in,
    given_names,
    is_local,
    known_names,
    models_in,
    parts_of,
    written_in,
)

CARD, RECIPE, CONFIG = "README.md", "recipe.yml", "mergekit_config.yml"
STATISTICS = "statistics"
TEXTS = (".json", ".yml", ".yaml", ".md", ".txt", ".html", ".svg", ".jinja", ".csv")
"""Endings of files that are looked through for local names."""
UNKNOWN = "REVISION"
"""Stands in a dry run for the commit that the first upload will make."""
NAMED = 4
"""So many names that have to be mapped are written out."""
OPTIONS = ("samples", "seed", "length", "batch_size", "labels")
"""What the head of a file of statistics says of its measurement, by the options of `measure`."""
CHUNK = 1 << 22
"""Bytes of a file that are in memory at once."""


@dataclass(frozen=True)
class Draft:
    """A folder that is to be published.

    Attributes:
        files: of the folder that are published, by their places in it.
        left_out: those that stay here.
        names: names on the hub of local models (and data).
        beside: files from elsewhere that the recipe reads, by name; the place that each gets.
        unpublished: statistics that the recipe reads, and samples that they were measured on, which are not published,
            with their published names.
        recipe: as it was run.
    """

    folder: str
    repo: str
    files: Mapping[str, str]
    left_out: Sequence[str]
    report: MergeReport
    names: Mapping[str, str]
    beside: Mapping[str, str]
    unpublished: Mapping[str, str]
    recipe: str

    def renaming(self, commit: str) -> Renaming:
        """Published names of everything local.

        Args:
            commit: of the files that the recipe reads.
        """
        travelling = {name: f"{self.repo}/{place}@{commit}" for name, place in self.beside.items()}
        written = {name: os.path.basename(name) for name in written_in(self.recipe)}
        known = {**written, **self.unpublished, **self.names, **travelling}
        known |= {plain(name): target for name, target in known.items()}  # as cards have them
        whole = {os.path.abspath(name): target for name, target in known.items() if os.path.exists(name)}
        return Renaming({**whole, **known, os.path.abspath(self.folder): self.repo})

    def stage_early(self, folder: str) -> dict[str, str]:
        """Write the files that the recipe reads, which are uploaded first: the recipe names their commit."""
        return self._staged(folder, {place: name for name, place in self.beside.items()}, self.renaming("main"), {})

    def stage(self, folder: str, commit: str) -> dict[str, str]:
        """Write everything else, recipe and card last; gives the files by their places.

        Args:
            folder: replaced.

        Raises:
            RotationMergeError: a file still names a path of this machine.
        """
        renaming, early = self.renaming(commit), set(self.beside.values())
        texts = {REPORT_FILE: f"{json.dumps(renaming.value(self._facts()), indent=1)}\n"}
        if self.recipe and self.report.relation == "merge":
            texts[RECIPE] = renaming.text(self.recipe)
        texts[CARD] = self._card(renaming)
        anew = {*early, REPORT_FILE, RECIPE, CARD}
        files = {place: path for place, path in self.files.items() if place not in anew}
        return self._staged(folder, files, renaming, texts)

    def _staged(
        self, folder: str, files: Mapping[str, str], renaming: Renaming, texts: Mapping[str, str]
    ) -> dict[str, str]:
        """Links to files, or copies without local names, and texts, by their places in a folder."""
        shutil.rmtree(folder, ignore_errors=True)
        staged = {place: os.path.join(folder, place) for place in (*files, *texts)}
        for place, path in staged.items():
            os.makedirs(os.path.dirname(path), exist_ok=True)
            if place in texts:
                _write(path, texts[place])
            else:
                _stage(files[place], path, renaming)
            local = [*self.names, *self.beside, *self.unpublished, os.path.abspath(self.folder)]
            check_no_local_path(place, text_in(path), local)
        return staged

    def _card(self, renaming: Renaming) -> str:
        """The card, its metadata and our section written anew, with figures that are of these very weights.

        Raises:
            RotationMergeError: the hub refuses its metadata.
        """
        path, name = os.path.join(self.folder, CARD), self.repo.partition("/")[2]
        text = f"# {name}\n"
        if os.path.exists(path):
            old = re.escape(os.path.basename(os.path.abspath(self.folder)))
            text = re.sub(rf"(?m)^# {old}$", f"# {name}", text_in(path), count=1)
        figures = kept_figures(self.folder)
        if figures:
            mark = open_model(self.folder, any_base=True).fingerprint
            figures = [renaming.value(figure) for figure in figures if figure["fingerprint"] == mark]
        report, first = MergeReport.from_dict(renaming.value(self._facts())), list(self.measurements(renaming))
        shown = {short: renaming.names.get(path, short) for path, short in shown_names(self.report).items()}
        text = Renaming(renaming.names | shown).text(text)
        picture = DISTANCES if DISTANCES in self.files else None
        card = updated_card(text, report, self.repo, Contents(self.folder).config, figures, first, picture)
        _check_card(card)
        return card

    def _facts(self) -> dict[str, Any]:
        """The report, with the names on the hub of models that were read from folders."""
        content = self.report.to_dict()
        for name, origin in parts_of(content["models"]):
            if name in self.names and not origin.get("hub"):
                hub, _, revision = self.names[name].partition("@")
                origin.update(hub=hub, revision=revision or None)
                origin["license"] = origin.get("license") or _licence(hub, revision or None)
        return content

    def measurements(self, renaming: Renaming) -> Iterator[str]:
        """Commands that measure unpublished statistics of the recipe.

        Raises:
            RotationMergeError: a file of them does not say how.
        """
        models = {mark: name for name, mark in self.report.fingerprints.items()}
        for path in files_in(self.recipe):
            if path not in self.unpublished:
                continue
            head = Statistics.open(path).metadata
            if absent := [name for name in ("kinds", "samples", "seed") if not isinstance(head.get(name), int | list)]:
                problem = f"its header does not say how it was measured ('{absent[0]}')"
                raise RotationMergeError(problem, where=path, remedy="measure again, or add --with-data")
            model = renaming.value(models.get(str(head.get("fingerprint")), str(head.get("model"))))
            words = ["rotation-merge", "measure", model, "--data", renaming.value(str(head.get("data")))]
            measured = {name: head[name] for name in OPTIONS if head.get(name) is not None}
            options = [word for name, value in measured.items() for word in (f"--{name.replace('_', '-')}", str(value))]
            yield shlex.join([*words, "--kinds", ",".join(head["kinds"]), *options, "--out", self.unpublished[path]])


@dataclass(frozen=True)
class Publication:
    """What was published or, without a revision, would be.

    Attributes:
        revision: the commit.
        sizes: of the files in bytes, by their places; those that the recipe reads come first.
        rewritten: places of files that differ from the local ones.
        card, recipe: their texts; an aligned model has no recipe.
    """

    plan: Draft
    revision: str | None
    sizes: dict[str, int]
    rewritten: list[str]
    card: str
    recipe: str | None


def push(
    folder: str,
    repo: str,
    targets: Sequence[str] = (),
    with_data: bool = False,
    include: Sequence[str] = (),
    private: bool = False,
    yes: bool = False,
) -> Publication:
    """Publish the folder of a merge.

    Args:
        repo: org/name.
        targets: `LOCAL=org/name@revision`, for names that mean nothing elsewhere.
        with_data: samples and statistics that the recipe reads travel, too.
        include: patterns of files that are published although a merge has no such files.
        private: make a private repository.
        yes: send it; otherwise nothing is sent.

    Raises:
        RotationMergeError: there is no report; a local name is left that nothing is known of; a link leads out; the
            folder is damaged; the hub refuses, or cannot be reached.
    """
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):  # before the hub is asked
        raise RotationMergeError(f"'{repo}' names no repository", remedy="write org/name")
    plan = draft(folder, repo, targets, with_data, include)
    with TemporaryFolder() as staging:
        early = plan.stage_early(os.path.join(staging, "early"))
        main = plan.stage(os.path.join(staging, "main"), UNKNOWN)  # what it refuses is refused before anything is sent
        revision = _upload(plan, staging, private) if yes else None
        files = {**early, **main}
        sizes = {place: os.stat(path).st_size for place, path in files.items()}
        rewritten = [place for place, path in files.items() if not os.path.islink(path)]
        recipe = text_in(main[RECIPE]) if RECIPE in main else None
        return Publication(plan, revision, sizes, rewritten, text_in(main[CARD]), recipe)


def text_in(path: str) -> str:
    """The text in a file that may name local files; of safetensors the head, of other binary files nothing."""
    if path.endswith(".safetensors"):
        return json.dumps(_head(path)[0].get("__metadata__", {}))
    if not path.endswith(TEXTS):
        return ""
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return file.read()


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(text)


def _stage(source: str, path: str, renaming: Renaming) -> None:
    """A link to a file or, if it has local names, a copy without them."""
    os.symlink(os.path.abspath(source), path)
    if path.endswith(".safetensors"):
        _rename_in_head(path, renaming)
        return
    text = text_in(path)
    changed = renaming.text(text)
    if changed != text and os.path.basename(path) == "adapter_config.json":  # peft keeps base and revision apart
        content = renaming.value(json.loads(text))
        hub, _, revision = str(content["base_model_name_or_path"]).partition("@")
        pinned = {"revision": revision} if revision else {}
        changed = json.dumps({**content, "base_model_name_or_path": hub, **pinned}, indent=2) + "\n"
    if changed != text:
        os.remove(path)
        _write(path, changed)


def _head(path: str) -> tuple[dict[str, Any], int]:
    """The head of a safetensors file, and where the tensors begin."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return dict(json.loads(file.read(length))), 8 + length


def _rename_in_head(path: str, renaming: Renaming) -> None:
    """Replace a link to one of our files by a copy without local names in its head, if there are any there."""
    head, begin = _head(path)
    entries = head.get("__metadata__", {})
    is_ours = str(entries.get("format")).startswith("rotation_merge.")
    changed = {name: _entry(text, renaming) for name, text in entries.items()} if is_ours else entries
    if changed == entries:
        return
    text = json.dumps({**head, "__metadata__": changed}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "rb") as source:
        os.remove(path)
        with open(path, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            source.seek(begin)
            shutil.copyfileobj(source, file, CHUNK)  # statistics may be larger than memory


def _entry(text: str, renaming: Renaming) -> str:
    """An entry of a file's head, local names in it replaced: JSON, or a word."""
    try:
        value = json.loads(text)
    except ValueError:
        return renaming.text(text)
    renamed = renaming.value(value)
    return text if renamed == value else json.dumps(renamed)


def draft(
    folder: str, repo: str, targets: Sequence[str], with_data: bool = False, include: Sequence[str] = ()
) -> Draft:
    """The plan of publishing a folder; see `push`."""
    report = _report(folder)
    published, left_out = chosen_files(folder, include)
    recipe = completed(_recipe(folder, report), report.data)
    models, files = models_in(recipe, report.models), files_in(recipe)
    read = {str(used["source"]): "data" for used in report.data if os.path.exists(str(used["source"]))} | files
    names = {**known_names(report.models), **given_names(targets, [*models, *read])}
    unpublished: dict[str, str] = {}
    if not with_data:
        unpublished = _unpublished(report, files, names)
        left_out += [place for place in published if is_statistics(place) and not included(place, include)]
        published = {place: path for place, path in published.items() if place not in left_out}
    read = {name: kind for name, kind in read.items() if name not in names and name not in unpublished}
    beside: dict[str, str] = {}
    for name, kind in read.items():
        inside = os.path.relpath(name, folder)
        beside[name] = inside if inside in published else published_name(kind, len(beside), os.path.basename(name))
    samples = [name for name, kind in read.items() if kind == "data" and os.path.isfile(name) and not with_data]
    hubless = {name for name, origin in report.models.items() if not origin.get("hub")}
    missing = [name for name in read if not os.path.isfile(name)]
    missing += [name for name in models if (is_local(name) or name in hubless) and name not in names]
    if missing or samples:
        raise _unknown(folder, list(dict.fromkeys(missing)), samples)
    pinned = {name: _pinned(target) for name, target in names.items()}
    _check_whole(folder, report)
    return Draft(folder, repo, published, left_out, report, pinned, beside, unpublished, recipe)


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
            return text_in(path)
    return report.recipe if report.relation == "merge" else ""


def _unpublished(report: MergeReport, read: Mapping[str, str], names: Mapping[str, str]) -> dict[str, str]:
    """Unpublished statistics that a recipe reads, and their samples, by their published names.

    Args:
        read: files that the recipe reads, with the key that each stands under.
        names: names on the hub.
    """
    files = [name for name, kind in read.items() if kind == STATISTICS and name not in names and os.path.isfile(name)]
    published = [published_name(STATISTICS, i, os.path.basename(name)) for i, name in enumerate(files)]
    unpublished = {name: place.partition("/")[2] for name, place in zip(files, published, strict=True)}
    of_others = {str(used["source"]) for used in report.data if not str(used["of"]).startswith(MEASURED)}
    for source in (str(used["source"]) for used in report.data if files):
        anywhere = source in SOURCES or source.startswith("demo:") or HubFile.of(source) is not None
        if not anywhere and source not in {*names, *read, *of_others}:
            name = re.sub(r"[^\w.@+ -]", "-", re.split(r"[/\\]", source.rstrip("/\\"))[-1])
            unpublished[source] = name if PART.fullmatch(name) else f"file{name}"
    return unpublished


def _unknown(folder: str, missing: Sequence[str], samples: Sequence[str]) -> RotationMergeError:
    """Local names without a name on the hub, and the remedy for each."""
    words = " ".join(f"--as {name}=org/name@revision" for name in missing[:NAMED])
    upload = f"{words} (not on the hub yet: 'hf upload org/name {missing[-1]}')" if missing else ""
    data = "--with-data to publish samples, or --as FILE=datasets/org/name/file@revision" if samples else ""
    further_names = [*missing[NAMED:], *samples]
    problem = "local paths need a name on the hub" + (f": {named(further_names)}" if further_names else "")
    return RotationMergeError(problem, where=folder, remedy=f"add {' and '.join(filter(None, (upload, data)))}")


def _pinned(target: str) -> str:
    """A model of the hub at a revision, by default the newest.

    Raises:
        RotationMergeError: the hub does not say.
    """
    if "@" in target or target.count("/") != 1:
        return target
    from huggingface_hub import HfApi

    try:
        if not reachable():
            raise OSError(no_answer()[0])
        return f"{target}@{HfApi().model_info(target).sha}"
    except Exception as error:  # of the client of HTTP below, which is another each year
        problem = f"its revision is unknown ({short(error)})"
        raise RotationMergeError(problem, where=target, remedy=f"write {target}@REVISION") from error


def _check_whole(folder: str, report: MergeReport) -> None:
    """Refuse a folder that programs would refuse, or load as another model than was merged.

    Raises:
        RotationMergeError: names the first defect.
    """
    if Contents(folder).opened is None:
        return
    places = (_parent(name, facts) for name, facts in parts_of(report.models))
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


def _licence(hub: str, revision: str | None) -> str | None:
    """The licence on a repository's card, if it can be fetched."""
    from huggingface_hub import hf_hub_download

    if not reachable():
        return None
    try:
        return licence(os.path.dirname(hf_hub_download(hub, "README.md", revision=revision)))
    except Exception:  # of the client of HTTP below, which is another each year
        return None


def _check_card(text: str) -> None:
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


def _upload(plan: Draft, staging: str, private: bool) -> str:
    """Upload everything that is staged in the folders `early` and `main`; gives the commit.

    Raises:
        RotationMergeError: the hub refuses, or cannot be reached.
    """
    from huggingface_hub import HfApi

    api, early, main = HfApi(), os.path.join(staging, "early"), os.path.join(staging, "main")

    def send(folder: str, message: str) -> str:
        commit = _asked(plan.repo, api.upload_folder, repo_id=plan.repo, folder_path=folder, commit_message=message)
        return str(commit.oid)

    if not reachable():
        problem = f"cannot be published: {no_answer()[0]}"
        raise RotationMergeError(problem, where=plan.repo, remedy="check the connection")
    _asked(plan.repo, api.create_repo, repo_id=plan.repo, private=private, exist_ok=True)
    if plan.beside:
        plan.stage(main, send(early, "What the recipe reads"))
    return send(main, "Merge, recipe, report and card")


def _asked(repo: str, function: Callable[..., Any], **arguments: Any) -> Any:
    """The hub's answer.

    Raises:
        RotationMergeError: it refuses, or cannot be reached.
    """
    try:
        return function(**arguments)
    except Exception as error:  # of huggingface_hub, and of the client of HTTP below it, which is another each year
        remedy = "log in with 'hf auth login', and check the repository's name"
        raise RotationMergeError(f"cannot be published ({short(error)})", where=repo, remedy=remedy) from error
