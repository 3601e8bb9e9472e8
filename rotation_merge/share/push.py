"""Publishing a merge: its files staged with local names replaced, then uploaded as a folder."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from safetensors import SafetensorError, safe_open

from rotation_merge.diagnose.doctor.case import open_case
from rotation_merge.errors import RotationMergeError, named, short
from rotation_merge.files import TemporaryFolder
from rotation_merge.model.card import kept_figures, shown_names, updated_card
from rotation_merge.model.contents import Contents
from rotation_merge.model.hub import HubFile, no_answer, reachable
from rotation_merge.model.markdown import plain
from rotation_merge.model.naming import Renaming
from rotation_merge.model.open import open_model
from rotation_merge.record import DISTANCES, REPORT_FILE, MergeReport
from rotation_merge.report.files import read_report
from rotation_merge.run.statistics import Statistics
from rotation_merge.share.contents import chosen_files, published_name
from rotation_merge.share.names import (
    MEASURED,
    check_no_local_path,
    completed,
    inputs_of,
    is_local,
    origins_of,
    pinned,
    targets_of,
)

CARD, RECIPE = "README.md", "recipe.yml"
TEXTS = (".json", ".yml", ".yaml", ".md", ".txt", ".html", ".svg", ".jinja", ".csv")
"""Endings of files that are looked through for local names."""
OPTIONS = ("samples", "seed", "length", "batch_size", "labels")
"""What the head of a file of statistics says of its measurement, by the options of `measure`."""


class Publication:
    """What is published of a merge's folder or, without a revision, would be.

    Attributes:
        files: of the folder that are published, by their places in it.
        left_out: those that stay here.
        recipe: as it was run; empty of a model that is no merge.
        names: names on the hub of local models (and data).
        beside: files from elsewhere that the recipe reads, by name; the place that each gets.
        unpublished: statistics that the recipe reads and that are not published, with their published names.
        facts: the report as data, with the names on the hub and licences of local models.
        texts: report, recipe and card as they are published, by their places.
        sizes: of all files in bytes, by their places; those that the recipe reads come first.
        revision: the commit.
    """

    def __init__(
        self, folder: str, repo: str, targets: Sequence[str], with_data: bool = False, include: Sequence[str] = ()
    ) -> None:
        self.folder, self.repo = folder, repo
        self.report = report = read_report(os.path.join(folder, REPORT_FILE))
        self.files, self.left_out = chosen_files(folder, include, with_data)
        self.recipe = completed(report.recipe, report.data) if report.relation == "merge" else ""
        self.facts, sources = report.to_dict(), [str(used["source"]) for used in report.data]
        origins, (models, files) = origins_of(self.facts["models"]), inputs_of(self.recipe)
        measured_on = {str(used["source"]) for used in report.data if str(used["of"]).startswith(MEASURED)}
        unread = set() if with_data else measured_on  # the card names them, as the statistics stay here
        read = {source: "data" for source in sources if os.path.exists(source) and source not in unread} | files
        models = list(dict.fromkeys([*models, *origins]))
        names = {n: f"{x['hub']}@{x['revision']}" for n, x in origins.items() if x.get("hub") and x.get("revision")}
        names |= targets_of(targets, [*models, *read, *sources])
        self.beside, self.unpublished = self._places({n: kind for n, kind in read.items() if n not in names}, with_data)
        missing = [name for name in models if name not in names and is_local(name, origins)]
        missing += [name for name in read if name not in {*names, *self.beside, *self.unpublished}]
        if missing:
            words = " ".join(f"--as {name}=org/name@revision" for name in missing[:4])
            remedy = f"add {words} (not on the hub yet: 'hf upload org/name {missing[-1]}'), or for samples --with-data"
            problem = f"local paths need a name on the hub: {named(missing)}"
            raise RotationMergeError(problem, where=folder, remedy=remedy)
        self.names = pinned(names, origins)
        _check_whole(folder, list(origins))
        self.texts: dict[str, str] = {}
        self.sizes: dict[str, int] = {}
        self.revision: str | None = None

    def _places(self, read: Mapping[str, str], with_data: bool) -> tuple[dict[str, str], dict[str, str]]:
        """The places of files that the recipe reads and that are published, and the names of statistics that are not.

        Args:
            read: the kinds of files that are not on the hub, by name.
        """
        beside, unpublished = {}, {}
        for number, (name, kind) in enumerate((n, kind) for n, kind in read.items() if os.path.isfile(n)):
            inside, place = os.path.relpath(name, self.folder), published_name(kind, number, name)
            if with_data or kind == "alignment" or inside in self.files:
                beside[name] = inside if inside in self.files else place
            elif kind == "statistics":
                unpublished[name] = os.path.basename(place)
        return beside, unpublished

    def renaming(self, commit: str) -> Renaming:
        """Published names of everything local.

        Args:
            commit: of the files that the recipe reads.
        """
        sources = (source for used in self.report.data if HubFile.of(source := str(used["source"])) is None)
        known = {source: re.split(r"[/\\]", source.rstrip("/\\"))[-1] for source in sources}
        known |= {name: f"{self.repo}/{place}@{commit}" for name, place in self.beside.items()}
        known |= {**self.unpublished, **self.names}
        known |= {plain(name): target for name, target in known.items()}  # as cards have them
        whole = {os.path.abspath(name): target for name, target in known.items() if os.path.exists(name)}
        return Renaming({**whole, **known, os.path.abspath(self.folder): self.repo})

    def stage(self, folder: str, commit: str | None = None) -> dict[str, str]:
        """Write what is published into a new folder; gives the paths.

        Args:
            commit: of the files that the recipe reads, which are left out; None: they are not uploaded yet.

        Raises:
            RotationMergeError: a file still names a path of this machine.
        """
        renaming = self.renaming(commit or "main")
        report = MergeReport.from_dict(renaming.value(self.facts))
        self.texts = {REPORT_FILE: report.text(), **({RECIPE: renaming.text(self.recipe)} if self.recipe else {})}
        self.texts[CARD] = self._card(report, renaming)
        files = {place: path for path, place in self.beside.items()}
        files |= {place: path for place, path in self.files.items() if place not in (*files, *self.texts, RECIPE)}
        uploaded = self.beside.values() if commit else ()
        staged = {place: os.path.join(folder, place) for place in (*files, *self.texts) if place not in uploaded}
        for place, path in staged.items():
            os.makedirs(os.path.dirname(path), exist_ok=True)
            if place in self.texts:
                _write(path, self.texts[place])
            else:
                _stage(files[place], path, renaming)
            check_no_local_path(place, text_in(path), renaming.names)
        self.sizes |= {place: os.stat(path).st_size for place, path in staged.items()}
        return staged

    def send(self, folder: str, private: bool) -> None:
        """Upload what is staged in a folder, first what the recipe reads, as the recipe names its commit.

        Raises:
            RotationMergeError: the hub refuses, or cannot be reached.
        """
        from huggingface_hub import HfApi

        api, early = HfApi(), list(self.beside.values())
        upload = partial(api.upload_folder, repo_id=self.repo)
        try:
            if not reachable():
                raise OSError(no_answer()[0])
            api.create_repo(self.repo, private=private, exist_ok=True)
            if early:
                first = upload(folder_path=folder, allow_patterns=early, commit_message="What the recipe reads")
                folder = f"{folder}-{first.oid}"
                self.stage(folder, str(first.oid))
            self.revision = str(upload(folder_path=folder, commit_message="Merge, recipe, report and card").oid)
        except RotationMergeError:
            raise
        except Exception as error:  # of huggingface_hub, and of the client of HTTP below it, which is another each year
            remedy = "log in with 'hf auth login', and check the connection and the repository's name"
            raise RotationMergeError(f"cannot be published ({short(error)})", where=self.repo, remedy=remedy) from error

    def _card(self, report: MergeReport, renaming: Renaming) -> str:
        """The card, its metadata and our section written anew, with figures that are of these very weights.

        Raises:
            RotationMergeError: the hub's class refuses its metadata.
        """
        from huggingface_hub import ModelCard

        title, name = (os.path.basename(os.path.abspath(path)) for path in (self.folder, self.repo))
        text = text_in(self.files[CARD]) if CARD in self.files else f"# {title}\n"
        text = re.sub(rf"(?m)^# {re.escape(title)}$", f"# {name}", text, count=1)
        shown = {short: renaming.names.get(path, short) for path, short in shown_names(self.report).items()}
        text = Renaming(renaming.names | shown).text(text)
        if figures := kept_figures(self.folder):
            mark = open_model(self.folder, any_base=True).fingerprint
            figures = [renaming.value(figure) for figure in figures if figure["fingerprint"] == mark]
        first, picture = list(self.measurements(renaming)), DISTANCES if DISTANCES in self.files else None
        text = updated_card(text, report, self.repo, Contents(self.folder).config, figures, first, picture)
        try:
            ModelCard(text, ignore_metadata_errors=False)
        except Exception as error:  # of its parser, of YAML's, and of the hub's class
            problem = f"its metadata are refused ({short(error)})"
            raise RotationMergeError(problem, where=CARD, remedy="correct them") from error
        return text

    def measurements(self, renaming: Renaming) -> Iterator[str]:
        """Commands that measure unpublished statistics of the recipe.

        Raises:
            RotationMergeError: a file of them does not say how.
        """
        models = {mark: name for name, mark in self.report.fingerprints.items()}
        for path, place in self.unpublished.items():
            head = Statistics.open(path).metadata
            if absent := [name for name in ("kinds", "samples", "seed") if not isinstance(head.get(name), int | list)]:
                problem = f"its header does not say how it was measured ('{absent[0]}')"
                raise RotationMergeError(problem, where=path, remedy="measure again, or add --with-data")
            model = renaming.value(models.get(str(head.get("fingerprint")), str(head.get("model"))))
            words = ["rotation-merge", "measure", model, "--data", renaming.value(str(head.get("data")))]
            measured = {name: head[name] for name in OPTIONS if head.get(name) is not None}
            options = [word for name, value in measured.items() for word in (f"--{name.replace('_', '-')}", str(value))]
            yield shlex.join([*words, "--kinds", ",".join(head["kinds"]), *options, "--out", place])


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
    publication = Publication(folder, repo, targets, with_data, include)
    with TemporaryFolder() as temporary:
        staging = os.path.join(temporary, "files")
        publication.stage(staging)  # what it refuses is refused before anything is sent
        if yes:
            publication.send(staging, private)
    return publication


def _check_whole(folder: str, models: Sequence[str]) -> None:
    """Refuse a folder that programs would refuse, or load as another model than was merged.

    Raises:
        RotationMergeError: names the first defect.
    """
    if Contents(folder).opened is None:
        return
    if fatal := [defect for defect in open_case(folder, models).defects if defect.fatal]:
        problem = f"is damaged: {fatal[0].kind}: {fatal[0].what}"
        remedy = f"run 'rotation-merge doctor {folder}'; --mend corrects some defects"
        raise RotationMergeError(problem, where=folder, remedy=remedy)


def text_in(path: str, place: str = "") -> str:
    """The text in a file (published at `place`) that may name local files; of safetensors the head, not more."""
    if (place or path).endswith(".safetensors"):
        return json.dumps(_entries(path))
    if not (place or path).endswith(TEXTS):
        return ""
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return file.read()


def _entries(path: str) -> dict[str, str]:
    """The entries at the head of a safetensors file."""
    try:
        with safe_open(path, "pt") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError) as error:
        remedy = "write it again, or remove it"
        raise RotationMergeError(f"is damaged ({short(error)})", where=path, remedy=remedy) from error


def _stage(source: str, path: str, renaming: Renaming) -> None:
    """A link to a file or, if it has local names, a copy without them."""
    if path.endswith(".safetensors"):
        entries = _entries(source)
        renamed = {name: _entry(text, renaming) for name, text in entries.items()}
        if renamed != entries and str(entries.get("format")).startswith("rotation_merge."):
            return _copy_with_head(source, path, renamed)
    elif (changed := renaming.text(text := text_in(source, path))) != text:
        if os.path.basename(path) == "adapter_config.json":  # peft keeps base and revision apart
            content = renaming.value(json.loads(text))
            hub, _, revision = str(content["base_model_name_or_path"]).partition("@")
            pinned = {"revision": revision} if revision else {}
            changed = json.dumps({**content, "base_model_name_or_path": hub, **pinned}, indent=2) + "\n"
        return _write(path, changed)
    return os.symlink(os.path.abspath(source), path)


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(text)


def _entry(text: str, renaming: Renaming) -> str:
    """An entry of a file's head, local names in it replaced: JSON, or a word."""
    try:
        value = json.loads(text)
    except ValueError:
        return renaming.text(text)
    renamed = renaming.value(value)
    return text if renamed == value else json.dumps(renamed)


def _copy_with_head(path: str, copy: str, entries: Mapping[str, str]) -> None:
    """Copy a safetensors file with other entries; its tensors may be larger than memory."""
    with open(path, "rb") as source, open(copy, "wb") as file:
        (length,) = struct.unpack("<Q", source.read(8))
        head = {**json.loads(source.read(length)), "__metadata__": entries}
        text = json.dumps(head, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        file.write(struct.pack("<Q", len(text)) + text)
        shutil.copyfileobj(source, file)
