"""Tries candidates within a budget and writes the best merge with its recipe."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from rotation_merge.errors import RotationMergeError
from rotation_merge.files import Store, write_text
from rotation_merge.mergekit_plugin.console import OneLineError, line
from rotation_merge.mergekit_plugin.run import merge_recipe
from rotation_merge.model.card import updated_card
from rotation_merge.model.contents import Contents, reason
from rotation_merge.model.writing import staged
from rotation_merge.record import DISTANCES, REPORT_FILE
from rotation_merge.report.files import read_report
from rotation_merge.run.batches import data_hash
from rotation_merge.run.evaluate import keep_figures
from rotation_merge.run.sample_kinds import SELF, SYNTHETIC
from rotation_merge.search.candidates import Candidate, Candidates
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


def searched(config: SearchConfig, say: Callable[[str], None], force: bool, anyway: bool) -> Outcome:
    """Search, and write the best merge if that is worth it; see `rotation_merge.merge`.

    Args:
        say: shows a line.
    """
    search = Search(config, say)
    outcome = search.outcome_of(force)
    written = outcome.verdict.worth_it or anyway
    if written:
        search.write(outcome)
    search.clean(outcome.tried[0].recipe if written else "")
    return replace(outcome, written=written)


class Search:
    """One search. Finished candidates are stored in `OUT.unfinished`, so that an interrupted search continues."""

    def __init__(self, config: SearchConfig, say: Callable[[str], None]) -> None:
        self.config, self.say = config, say
        self.deadline = time.perf_counter() + config.seconds
        self.work = Store(config.out)
        self.mark = config.key()
        self.files = Path(f"{os.path.abspath(config.out)}-samples") / self.mark
        self.left_out: dict[str, str] = {}
        self.plain: Trial | None = None

    def outcome_of(self, force: bool = False) -> Outcome:
        """Try candidates within the budget, without writing to OUT.

        Args:
            force: whatever lies there may be replaced.

        Raises:
            RotationMergeError: something lies there, models do not fit together, or data are of no use.
        """
        out = self.config.out
        goes_on = self.work.is_of(self.mark) and self.work.get(WRITING) is not None
        if not force and not goes_on and os.path.isdir(out) and os.listdir(out):
            if self.work.path.is_dir() and self.work.is_empty():
                self.work.remove()  # it was killed while it cleaned up after OUT was written
            raise RotationMergeError(
                "already exists", where=out, remedy="write somewhere else (the command replaces it with --force)"
            )
        try:
            self.work.begin(self.mark)
        except OSError as error:
            problem = f"cannot be written ({reason(error)})"
            raise RotationMergeError(problem, where=out, remedy="write somewhere else") from error
        try:
            self.prepare()
            return self.run()
        except RotationMergeError:
            if self.work.is_empty():
                self.clean()
            raise

    def prepare(self) -> None:
        """Open and measure the models.

        Raises:
            RotationMergeError: models that do not fit together, data without use.
        """
        self.parents = Preparation(self.config, self.files, self.say).run()
        self.deciding, self.reporting = self.parents.deciding, self.parents.reporting
        self.forgetting = self.parents.forgetting
        self.candidates = Candidates(self.config, self.parents, self.files)
        sets = [*self.deciding.sets, *(self.forgetting.texts if self.forgetting else [])]
        self.samples_mark = data_hash([batch for data in sets for batch in data.batches])

    # --- candidates --------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Try candidates within the budget, and measure the best one on the reporting samples."""
        self.left_out |= self.candidates.left_out()
        for name, why in self.left_out.items():
            self.say(f"left out: {name} ({why})")
        tried: list[Trial] = []
        for candidate in self.candidates.all():
            if tried and time.perf_counter() >= self.deadline:
                self.left_out[candidate.name] = "the budget was spent"
            elif (trial := self._try(candidate)) is not None:
                tried.append(trial)
        if not tried:
            raise RotationMergeError("no merge could be made", remedy=next(iter(self.left_out.values()), "check"))
        return self._outcome(sorted(tried, key=lambda trial: self._rank(trial.figures)))

    def _outcome(self, tried: list[Trial]) -> Outcome:
        """The outcome, from all candidates, the best one first."""
        best, forgetting = tried[0], self.forgetting
        reported = self._report(best)
        plain = reported if best is self.plain else None if self.plain is None else self._report(self.plain)
        better = [trial for trial in tried if trial.figures.score < best.figures.score]
        notes = [] if forgetting is None else [forgetting.why(t.name, t.figures, self._plain) for t in better]
        return Outcome(
            self.reporting.labelled,
            tried,
            dict(self.parents.figures),
            self.parents.ensemble,
            reported,
            plain,
            self.left_out,
            dict(self.parents.relations),
            self.reporting.unit,
            self.reporting.figure,
            self._samples_words(),
            notes,
            None if forgetting is None else forgetting.base,
        )

    def _samples_words(self) -> str:
        """The reporting samples in words."""
        count = sum(data.examples for data in self.reporting.sets)
        sources = ", ".join(os.path.basename(source.rstrip("/")) for source in self.config.data)
        origin = {SELF: "written by the models", SYNTHETIC: "of noise"}.get(self.config.data[0], f"of {sources}")
        return f"{count} held-out samples {origin}"

    def _rank(self, figures: Figures) -> tuple[float, float]:
        """The sort key of merges: those that forget too much come last."""
        return 0.0 if self.forgetting is None else self.forgetting.excess(figures, self._plain), figures.score

    @property
    def _plain(self) -> Figures | None:
        return None if self.plain is None else self.plain.figures

    def _try(self, candidate: Candidate) -> Trial | None:
        """Try a candidate; None if it cannot be made."""
        self.say(f"{candidate.name} ...")
        try:
            trial = self._tried(candidate)
        except (RotationMergeError, OneLineError, torch.OutOfMemoryError) as error:
            self.left_out[candidate.name] = str(error) if isinstance(error, OneLineError) else line(error)
            self.say(f"{candidate.name}: left out, {self.left_out[candidate.name]}")
            return None
        if candidate.name == "plain":
            self.plain = trial
        figures = trial.figures
        words = f"{figures.score:.4f} {self.deciding.unit}"
        words += "" if figures.accuracy is None else f", {self.deciding.figure} {figures.accuracy:.3f}"
        words += "" if figures.on_base is None else f", on the base's text {figures.on_base:.4f}"
        self.say(f"{trial.name}: {words} ({trial.seconds:.0f} s)")
        return trial

    def _tried(self, candidate: Candidate) -> Trial:
        """The result of a candidate, from an interrupted search or tried now."""
        began = time.perf_counter()
        candidate = self.candidates.ready(candidate, max((self.deadline - began) / 2, 1.0))
        text = candidate.recipe(self.config.dtype)
        key, place = [text, self.samples_mark], self._place(candidate.name)
        if (record := self._record(f"{place.name}.{JUDGED}", key)) is not None:
            return Trial(**{**record, "figures": Figures(**record["figures"])})
        self._make(candidate.name, text)
        model = self.config.load(str(place))
        if candidate.scale is None:
            figures = self._measured(model)
        else:
            scale, figures = self._scaled(model, candidate.anchor, candidate.scale)
            candidate = replace(candidate, scale=scale)
        seconds, text = time.perf_counter() - began, candidate.recipe(self.config.dtype)
        trial = Trial(candidate.name, figures, seconds, text, candidate.scale)
        self.work.put(f"{place.name}.{JUDGED}", {"key": key, **asdict(trial)})
        return trial

    def _scaled(self, merged: Any, base: str, scale: float) -> tuple[float, Figures]:
        """The best `lambda` of a merge of task vectors, and its figures; the merge moves along the line."""
        over = lambda: time.perf_counter() >= self.deadline  # noqa: E731
        return best_scale(merged, self.config.load(base), scale, self._measured, self._rank, over)

    def _make(self, name: str, text: str) -> None:
        """Merge a recipe into the candidate's folder, unless it is done."""
        place = self._place(name)
        if place.is_dir() and self._record(f"{place.name}.{MERGED}", [text]) is not None:
            return
        shutil.rmtree(place, ignore_errors=True)
        merge_recipe(text, str(place), tokenizer=True, device=self.config.device)
        self.work.put(f"{place.name}.{MERGED}", {"key": [text]})

    def _measured(self, model: Any) -> Figures:
        """Measure the score and the forgetting of a merge."""
        figures = self.deciding.measure(model)
        return figures if self.forgetting is None else self.forgetting.measured(model, figures)

    def _report(self, trial: Trial) -> Figures:
        """Figures of a merge on the reporting samples."""
        self._make(trial.name, trial.recipe)
        figures = self.reporting.measure(self.config.load(str(self._place(trial.name))))
        return replace(figures, on_base=trial.figures.on_base)

    def _place(self, name: str) -> Path:
        """The folder of a candidate merge."""
        return self.work.file("".join(c if c.isalnum() else "-" for c in name))

    def _record(self, name: str, key: list[str]) -> dict[str, Any] | None:
        """The facts that this search stored before it was interrupted; None if there are none, or those of another key.

        Args:
            key: the recipe, and the samples that judged it.
        """
        facts = self.work.get(name)
        return None if facts is None or facts.pop("key", None) != key else facts

    # --- the end -----------------------------------------------------------------------------------------------

    def write(self, outcome: Outcome) -> None:
        """Write the best merge, as mergekit-yaml made it, and its recipe, atomically.

        Until it is complete, OUT holds the previous merge, or none.
        """
        self.work.put(WRITING, {})
        with staged(self.config.out) as staging:
            shutil.copytree(self._place(outcome.tried[0].name), staging, dirs_exist_ok=True)
            self._complete(Path(staging), outcome)

    def _complete(self, folder: Path, outcome: Outcome) -> None:
        """Write the files beside the weights: recipe, figures, and the verdict in report and card."""
        best = outcome.tried[0]
        write_text(folder / RECIPE, best.recipe)
        if self.reporting.labelled:
            self._keep_figures(folder, outcome.best)
        report = replace(read_report(str(folder / REPORT_FILE)), search=outcome.verdict)
        write_text(folder / REPORT_FILE, report.text())
        card, name = folder / CARD, Path(self.config.out).name
        if card.exists():
            title = f"# {self._place(best.name).name}\n"
            text = card.read_text(encoding="utf-8").replace(title, f"# {name}\n", 1)
            picture = DISTANCES if (folder / DISTANCES).exists() else None
            write_text(card, updated_card(text, report, name, Contents(str(folder)).config, picture=picture))

    def _keep_figures(self, folder: Path, best: Figures) -> None:
        """Store the merge's figures on the reporting samples for its card."""
        sets = self.reporting.sets
        figures = {} if best.accuracy is None else {self.reporting.figure.lower(): best.accuracy}
        if name := MEASURES.get(self.reporting.unit):
            figures[name] = best.score
        facts = {"data": ", ".join(self.config.data), "task": sets[0].task, "examples": sum(d.examples for d in sets)}
        keep_figures(str(folder), "pixel_values" in sets[0].batches[0], facts, figures)

    def clean(self, recipe: str = "") -> None:
        """Remove the state of the search, and files that the recipe does not need.

        Args:
            recipe: of the merge that was written, if any. It needs the files that it names, and the samples that these
                were made from.
        """
        self.work.remove()
        named = _words(recipe)
        if any(str(file) in named for file in self.files.rglob("*")):
            named |= set(self.parents.data.values())
        searches = [folder for folder in self.files.parent.glob("*") if MARKED.fullmatch(folder.name)]
        for folder in searches if recipe else [self.files]:  # another merge may need the files of its search
            for file in sorted(folder.rglob("*")):
                if file.is_file() and str(file) not in named:
                    file.unlink()
        for folder in (*searches, self.files.parent):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()


def _words(recipe: str) -> set[str]:
    """All words in a recipe, as YAML reads them."""
    return {event.value for event in yaml.parse(recipe) if isinstance(event, yaml.ScalarEvent)}
