"""Tries candidates within a budget and writes the best merge with its recipe."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from rotation_merge.errors import RotationMergeError
from rotation_merge.files import Store, write_text
from rotation_merge.mergekit_plugin.console import OneLineError, line
from rotation_merge.mergekit_plugin.run_recipe import merge_recipe
from rotation_merge.model.card import class_of, updated_card
from rotation_merge.model.headers import reason
from rotation_merge.model.writing import staged
from rotation_merge.record import REPORT_FILE
from rotation_merge.report.files import read_report
from rotation_merge.run.data import data_hash
from rotation_merge.run.evaluate import keep_figures
from rotation_merge.run.generated_samples import SELF, SYNTHETIC
from rotation_merge.search.candidates import FIRST_PART, Candidate, CandidateFiles, Planner, with_models
from rotation_merge.search.forgetting import Forgetting, sentences
from rotation_merge.search.job import SearchConfig
from rotation_merge.search.judge import Figures
from rotation_merge.search.outcome import Outcome, Trial
from rotation_merge.search.preparation import Preparation
from rotation_merge.search.scaling import best_scale

MARKED = re.compile(r"[0-9a-f]{8}")
"""Names of the folders of searches beside OUT; other folders there are not ours."""
RECIPE, CARD = "recipe.yml", "README.md"
MERGED, JUDGED = "merged", "judged"
"""What the records beside a candidate merge say: its recipe, once it is complete, and its figures."""
WRITING = "writing"
"""Name of the record of a search that has begun to write OUT."""
MEASURES = {"loss (nats)": "loss", "squared error": "mse"}
"""The hub's names of the measures, by unit."""


class Search:
    """One search. Finished candidates are stored in `OUT.unfinished`, so that an interrupted search continues.

    Args:
        say: shows a line.
        began: when the budget began, of `time.perf_counter`; None: now.
    """

    def __init__(self, config: SearchConfig, say: Callable[[str], None], began: float | None = None) -> None:
        self.config, self.say = config, say
        self.deadline = (time.perf_counter() if began is None else began) + config.seconds
        self.work = Store(config.out)
        self.mark = config.key()
        self.files = Path(f"{os.path.abspath(config.out)}-samples") / self.mark
        self.left_out: dict[str, str] = {}
        self.searched: set[str] = set()
        self.forgetting: Forgetting | None = None
        self.plain: Figures | None = None
        self.linear: Figures | None = None

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Create the folder of the candidates before the work; remove it again if it has no results.

        Raises:
            RotationMergeError: nothing can be written there, or no run wrote the folder.
        """
        try:
            self.work.begin(self.mark)
        except OSError as error:
            problem = f"cannot be written ({reason(error)})"
            raise RotationMergeError(problem, where=self.config.out, remedy="write somewhere else") from error
        try:
            yield
        except RotationMergeError:
            if self.work.is_empty():
                self.clean(written=False)
            raise

    def outcome_of(self, force: bool = False) -> Outcome:
        """Try candidates within the budget, without writing to OUT.

        Args:
            force: whatever lies there may be replaced.

        Raises:
            RotationMergeError: something lies there, models do not fit together, or data are of no use.
        """
        out = self.config.out
        if not force and not self.goes_on() and os.path.isdir(out) and os.listdir(out):
            if self.work.path.is_dir() and self.work.is_empty():
                self.work.remove()  # it was killed while it cleaned up after OUT was written
            raise RotationMergeError(
                "already exists", where=out, remedy="write somewhere else (the command replaces it with --force)"
            )
        with self.begun():
            self.prepare()
            return self.run()

    def goes_on(self) -> bool:
        """Whether this search was interrupted while it wrote OUT."""
        return self.work.is_of(self.mark) and self._record(WRITING) is not None

    def prepare(self) -> None:
        """Open and measure the models.

        Raises:
            RotationMergeError: models that do not fit together, data without use.
        """
        config = self.config
        self.parents = parents = Preparation(config, self.files, self.say).run()
        self.data, self.deciding, self.reporting = parents.data, parents.deciding, parents.reporting
        self.candidate_files = CandidateFiles(config, parents.data, parents.training, self.files, parents.tied)
        self.forgetting = parents.forgetting
        judges = [self.deciding, *([self.forgetting.judge] if self.forgetting else [])]
        self.samples_mark = data_hash([batch for judge in judges for data in judge.sets for batch in data.batches])

    # --- candidates --------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Try candidates within the budget, and measure the best one on the reporting samples."""
        tried: list[tuple[Candidate, Trial]] = []
        planner = self._planner()
        planned = planner.candidates()
        self.left_out |= planner.left_out()
        for name, why in self.left_out.items():
            self.say(f"left out: {name} ({why})")
        parts = next((i for i, candidate in enumerate(planned) if candidate.name == FIRST_PART), len(planned))
        for number, candidate in enumerate(planned):
            if candidate.scale is None and number and planned[number - 1].scale is not None:
                self._search_scales(tried, 1)
            if number == parts:
                self._soup(tried)
            self._try(candidate, tried)
        self._search_scales(tried)
        if parts == len(planned):
            self._soup(tried)
        if not tried:
            raise RotationMergeError("no merge could be made", remedy=next(iter(self.left_out.values()), "check"))
        best, figures = self._best(tried)
        reported = self.plain if best.name == "plain" and self.plain else self._report(best, figures)
        notes = sentences(self.forgetting, [(t.name, t.figures) for _, t in tried], figures.figures)
        if best.draws:
            notes.append(f"The merge is random: 'mergekit-yaml --random-seed {self.config.seed}' reproduces it.")
        outcome = Outcome(
            self.reporting.labelled,
            sorted((t for _, t in tried), key=lambda t: (t.figures.unfinished, *self._rank(t.figures))),
            dict(self.parents.figures),
            self.parents.ensemble,
            reported,
            self.plain,
            self.left_out,
            dict(self.parents.relations),
            self.reporting.unit,
            self.reporting.figure,
            self._samples_words(),
            notes,
            None if self.forgetting is None else self.forgetting.base,
        )
        self.best, self.text, self.outcome = best, figures.recipe, outcome
        return outcome

    def _planner(self) -> Planner:
        own_samples, parents = len(set(self.data.values())) > 1 or self.config.data[0] == SELF, self.parents
        return Planner(
            self.config.models,
            parents.architecture,
            parents.tied,
            self.data,
            {"samples": self.config.samples, "targets": "own" if own_samples else "mean"},
            bool(parents.training),
            parents.relation,
            parents.base,
            sum(parents.relations.values()) / len(parents.relations),
        )

    def _samples_words(self) -> str:
        """The reporting samples in words."""
        count = sum(data.examples for data in self.reporting.sets)
        sources = ", ".join(os.path.basename(source.rstrip("/")) for source in self.config.data)
        origin = {SELF: "written by the models", SYNTHETIC: "of noise"}.get(self.config.data[0], f"of {sources}")
        return f"{count} held-out samples {origin}"

    def _best(self, tried: Sequence[tuple[Candidate, Trial]]) -> tuple[Candidate, Trial]:
        """The candidate with the lowest score among those that do not forget too much; else among all."""
        whole = [pair for pair in tried if not pair[1].figures.unfinished]
        return min(whole, key=lambda pair: self._rank(pair[1].figures))

    def _rank(self, figures: Figures) -> tuple[float, float]:
        """The sort key of merges: the best one first."""
        return self._excess(figures), figures.score

    def _excess(self, figures: Figures) -> float:
        """Excess forgetting of a merge."""
        return 0.0 if self.forgetting is None else self.forgetting.excess(figures, self.linear)

    def _place(self, candidate: Candidate) -> Path:
        """The folder of a candidate merge."""
        mark = hashlib.blake2b(json.dumps([candidate.title, candidate.models]).encode(), digest_size=4).hexdigest()
        return self.work.file("".join(c if c.isalnum() else "-" for c in candidate.title)[:60] + f"-{mark}")

    def _soup(self, tried: list[tuple[Candidate, Trial]]) -> None:
        """Greedy soup: add models in the order of their scores, and keep those that help."""
        if len(self.parents.order) < 3 or not tried:
            return
        best, members, score = self._best(tried)[0], self.parents.order[:1], math.inf
        for model in self.parents.order[1:]:
            models = [*members, model]
            if len(models) == len(self.parents.order):
                return  # that one has been tried
            result = self._try(with_models(best, models), tried)
            if result is not None and result.figures.score < score:
                members, score = models, result.figures.score

    def _search_scales(self, tried: list[tuple[Candidate, Trial]], limit: int | None = None) -> None:
        """Search `lambda` for merged task vectors, the best ones first, and keep better merges."""
        changes = [pair for pair in tried if pair[0].scale is not None and not pair[1].figures.unfinished]
        due = [pair for pair in changes if pair[0].name not in self.searched]
        for pair in sorted(due, key=lambda pair: self._rank(pair[1].figures))[:limit]:
            self.searched.add(pair[0].name)
            result = self._try(replace(pair[0], searched=True), tried)
            if result is None:
                return
            result.seconds += pair[1].seconds
            tried.remove(pair)

    def _try(self, candidate: Candidate, tried: list[tuple[Candidate, Trial]]) -> Trial | None:
        """Try a candidate, unless the budget is spent; the first one is always tried."""
        if tried and time.perf_counter() >= self.deadline:
            self.left_out[candidate.title] = "the budget was spent"
            return None
        self.say(f"{candidate.title} ...")
        try:
            result = self._tried(candidate, tried)
            if candidate.name == "plain":
                self.linear, self.plain = result.figures, self._report(candidate, result)
        except (RotationMergeError, OneLineError) as error:
            self.left_out[candidate.title] = str(error)
        except torch.OutOfMemoryError as error:
            self.left_out[candidate.title] = line(error)
        else:
            tried.append((candidate if result.scale is None else candidate.scaled(result.scale), result))
            self.say(self._words(result))
            return result
        self.say(f"{candidate.title}: left out, {self.left_out[candidate.title]}")
        return None

    def _words(self, tried: Trial) -> str:
        figures = tried.figures
        words = f"{figures.score:.4f} {self.deciding.unit}"
        words += "" if figures.accuracy is None else f", {self.deciding.figure} {figures.accuracy:.3f}"
        words += "" if figures.on_base is None else f", on the base's text {figures.on_base:.4f}"
        words += " estimated from its first samples, stopped early" if figures.unfinished else ""
        return f"{tried.name}: {words} ({tried.seconds:.0f} s)"

    def _tried(self, candidate: Candidate, tried: Sequence[tuple[Candidate, Trial]]) -> Trial:
        """The result of a candidate, from an interrupted search or tried now."""
        begin = time.perf_counter()
        ready = self.candidate_files.ready(candidate, max((self.deadline - begin) / 2, 1.0))
        text, best = ready.recipe(self.config.dtype), self._best(tried)[1].figures if tried else None
        key = self._key(text, self.samples_mark)
        if (result := self._kept(candidate, key)) is not None:
            return result
        if ready.searched:
            first = next(result.figures for other, result in tried if other.name == candidate.name)
            ready, figures = self._scaled(ready, first)
            text = ready.recipe(self.config.dtype)
            if best is None or self._rank(figures) < self._rank(best):  # else only its scale is of interest
                self._make(ready, text)
        else:
            self._make(ready, text)
            figures = self._measured(self.config.load(str(self._place(ready))), best)
        result = Trial(candidate.name, figures, time.perf_counter() - begin, text, ready.scale)
        self._keep_record(f"{self._place(candidate).name}.{JUDGED}", {"key": key, **asdict(result)})
        return result

    def _make(self, candidate: Candidate, text: str) -> None:
        """Merge a recipe into the candidate's folder, unless it is done."""
        place = self._place(candidate)
        if self._is_merged(place, text):
            return
        shutil.rmtree(place, ignore_errors=True)
        seed = self.config.seed if candidate.draws else None
        merge_recipe(text, str(place), tokenizer=True, seed=seed, device=self.config.device)
        self._keep_record(f"{place.name}.{MERGED}", {"key": self._key(text)})

    def _scaled(self, candidate: Candidate, first: Figures) -> tuple[Candidate, Figures]:
        """A merge of task vectors with its best `lambda`, and its figures; `first`: those of the present `lambda`."""
        candidate = replace(candidate, searched=False)
        self._make(candidate, candidate.recipe(self.config.dtype))

        def measure(model: Any, best: Figures | None) -> tuple[float, Figures]:
            figures = self.deciding.measure(model, best)
            if best is not None and (figures.unfinished or figures.score >= best.score):
                return 0.0, figures  # not better, whatever it forgets
            figures = figures if self.forgetting is None else self.forgetting.measured(model, figures)
            return self._excess(figures), figures

        merged, base = self.config.load(str(self._place(candidate))), self.config.load(candidate.anchor)
        scale, figures = best_scale(merged, base, candidate.scale or 1.0, (self._excess(first), first), measure)
        return candidate.scaled(scale), figures

    def _measured(self, model: Any, best: Figures | None) -> Figures:
        """Measure the score and the forgetting of a merge."""
        figures = self.deciding.measure(model, best)
        return figures if self.forgetting is None or figures.unfinished else self.forgetting.measured(model, figures)

    def _kept(self, candidate: Candidate, key: str) -> Trial | None:
        """The result of an interrupted search for the same recipe and samples, or None."""
        record = self._record(f"{self._place(candidate).name}.{JUDGED}", key)
        try:
            return None if record is None else Trial(**{**record, "figures": Figures(**record["figures"])})
        except (KeyError, TypeError):  # of another version
            return None

    def _is_merged(self, place: Path, text: str) -> bool:
        """Whether an interrupted search has completed this merge."""
        return place.is_dir() and self._record(f"{place.name}.{MERGED}", self._key(text)) is not None

    def _keep_record(self, name: str, facts: dict[str, Any]) -> None:
        """Store what an interrupted search continues with."""
        self.work.put(name, facts)

    def _record(self, name: str, key: str | None = None) -> dict[str, Any] | None:
        """The facts that a search with the same options stored; None if there are none, or those of another key."""
        facts = self.work.get(name)
        if facts is None or facts.get("key") != key:
            return None
        return {name: value for name, value in facts.items() if name != "key"}

    def _key(self, *of: str) -> str:
        return hashlib.blake2b(json.dumps([self.mark, *of]).encode(), digest_size=16).hexdigest()

    def _report(self, candidate: Candidate, tried: Trial) -> Figures:
        """Figures of a merge on the reporting samples."""
        self._make(candidate, tried.recipe)
        figures = self.reporting.measure(self.config.load(str(self._place(candidate))))
        return replace(figures, on_base=tried.figures.on_base)

    # --- the end -----------------------------------------------------------------------------------------------

    def reporting_figures(self, model: str) -> Figures:
        """Figures of a model on the reporting samples."""
        return self.reporting.measure(self.config.load(model))

    def write(self) -> None:
        """Write the best merge, as mergekit-yaml made it, and its recipe, atomically.

        Until it is complete, OUT holds the previous merge, or none.
        """
        self._keep_record(WRITING, {})
        with staged(self.config.out) as staging:
            shutil.copytree(self._place(self.best), staging, dirs_exist_ok=True)
            self._complete(Path(staging))

    def _complete(self, folder: Path) -> None:
        """Write the files beside the weights: recipe, figures, and the verdict in report and card."""
        write_text(folder / RECIPE, self.text)
        if self.reporting.labelled:
            self._keep_figures(folder)
        report = replace(read_report(str(folder / REPORT_FILE)), search=self.outcome.verdict)
        write_text(folder / REPORT_FILE, report.text())
        card, name = folder / CARD, Path(self.config.out).name
        if card.exists():
            title = f"# {self._place(self.best).name}\n"
            text = card.read_text(encoding="utf-8").replace(title, f"# {name}\n", 1)
            write_text(card, updated_card(text, report, name, class_of(str(folder))))

    def _keep_figures(self, folder: Path) -> None:
        """Store the merge's figures on the reporting samples for its card."""
        sets, best = self.reporting.sets, self.outcome.best
        figures = {} if best.accuracy is None else {self.reporting.figure.lower(): best.accuracy}
        if name := MEASURES.get(self.reporting.unit):
            figures[name] = best.score
        facts = {"data": ", ".join(self.config.data), "task": sets[0].task, "examples": sum(d.examples for d in sets)}
        keep_figures(str(folder), "pixel_values" in sets[0].batches[0], facts, figures)

    def clean(self, written: bool) -> None:
        """Remove the state of the search, and files that the recipe does not need.

        A recipe needs the files that it names, and the samples that these were made from.
        """
        self.work.remove()
        named = _words(self.text) if written else set()
        if any(str(file) in named for file in self.files.rglob("*")):
            named |= set(self.data.values())
        searches = [folder for folder in self.files.parent.glob("*") if MARKED.fullmatch(folder.name)]
        for folder in searches if written else [self.files]:  # another merge may need the files of its search
            for file in sorted(folder.rglob("*")):
                if file.is_file() and str(file) not in named:
                    file.unlink()
        for folder in (*searches, self.files.parent):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()


def _words(recipe: str) -> set[str]:
    """All words in a recipe, as YAML reads them."""
    return {event.value for event in yaml.parse(recipe) if isinstance(event, yaml.ScalarEvent)}
