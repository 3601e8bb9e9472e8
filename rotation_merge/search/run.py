"""Tries candidates within a budget and writes the best merge with its recipe."""

from __future__ import annotations

import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from rotation_merge.errors import RecipeError, RotationMergeError
from rotation_merge.files import ELSEWHERE, FOLDER, Output, Store, check_output, write_text
from rotation_merge.mergekit_plugin.console import OneLineError, line
from rotation_merge.mergekit_plugin.run import merge_recipe
from rotation_merge.model.card import updated_card
from rotation_merge.model.contents import Contents
from rotation_merge.model.naming import check_different
from rotation_merge.model.open import on_base, paths_of, whole_path
from rotation_merge.model.verdict import sentences
from rotation_merge.model.writing import staged
from rotation_merge.record import DISTANCES, REPORT_FILE, Score, Verdict
from rotation_merge.report.files import read_report
from rotation_merge.run.batches import data_hash
from rotation_merge.run.evaluate import keep_figures, margin
from rotation_merge.run.functions import read_config
from rotation_merge.run.sample_kinds import SELF, SYNTHETIC
from rotation_merge.search.candidates import Candidate, candidates_of, left_out, with_files
from rotation_merge.search.config import MergeConfig, seconds, words_of
from rotation_merge.search.judge import ENSEMBLE, Figures, forgetting
from rotation_merge.search.parents import Parents, SearchConfig

LOG = logging.getLogger(__name__)

MARKED = re.compile(r"[0-9a-f]{8}")
"""Names of the folders of searches beside OUT; other folders there are not ours."""
RECIPE, CARD, PLAIN = "recipe.yml", "README.md", "plain"
WRITING = "writing"
"""Name of the record of a search that has begun to write OUT."""
MEASURES = {"loss (nats)": "loss", "squared error": "mse"}
"""The hub's names of the measures, by unit."""
STEP = 1.25
"""Two scales that are tried side by side differ by this factor, in the end by its root."""
MOST = 8
"""So many scales are measured, at the most."""
FIRST, SCALE, VERDICT = 1 / 24, 1 / 12, 1 / 3
"""Shares of the budget: for the first measurement, which says on how many samples all candidates are judged; at most
for the search of a scale, and for the verdict."""
ROOM = 3
"""The scale of a merge is searched while there is room for so many merges as long as it."""
PACE = "pace"
"""Name of the record of how many batches judge candidates, and of their time."""
SPENT = "the budget was spent"


@dataclass(frozen=True)
class Trial:
    """A candidate and its figures on the selection samples.

    Attributes:
        scale: its `lambda`; None: it has none.
        searched: whether the best scale was searched.
    """

    name: str
    figures: Figures
    seconds: float
    recipe: str
    scale: float | None = None
    searched: bool = False

    @property
    def score(self) -> Score:
        """The candidate as a row of report and card."""
        name = self.name if self.scale is None else f"{self.name}, lambda {self.scale:g}"
        return _score(name, self.figures, self.seconds)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a search.

    Attributes:
        tried: all merges, the best first; then those that forget too much.
        relations: of every other model: mean cosine of its matrices to the first one's.
        labelled: whether labels judged.
        base: figures of the base, if it writes text.
        written: whether the best merge was written.
    """

    verdict: Verdict
    tried: list[Trial]
    relations: dict[str, float]
    labelled: bool = True
    base: Figures | None = None
    written: bool = False

    def __repr__(self) -> str:
        return f"Outcome({' '.join(sentences(self.verdict))})"


def _score(name: str, figures: Figures, seconds: float = 0.0) -> Score:
    return Score(name, figures.score, figures.accuracy, figures.on_base, seconds)


def _usual_data(model: str) -> str:
    """Default data: texts written by the models, or random images; a model that can make up neither is refused."""
    config = read_config(model)
    name = str((config.get("architectures") or [""])[0])
    if name.endswith(("ForCausalLM", "LMHeadModel")):
        return SELF
    if "image_size" in config or "vision_config" in config:
        return SYNTHETIC
    raise RotationMergeError(f"{name or 'the model'} cannot write samples", where=model, remedy="give 'data'")


def merge(
    models: Iterable[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    data: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] = (),
    config: MergeConfig | None = None,
    *,
    device: str = "cpu",
    force: bool = False,
    anyway: bool = False,
    watch: Callable[[str], None] | None = None,
) -> Outcome:
    """Look for the best merge of two or more checkpoints, and write it with its recipe.

    Args:
        models: folders or names of the hub; the anchor first. An adapter's folder stands for the adapter on its base.
        out: a folder, new or empty.
        data: a source of samples for all models, or a list with one for each; empty: samples that the models write.
        force: whatever lies at `out` may be replaced.
        anyway: write the best merge even if one parent alone is better.
        watch: called with each line of progress.

    Returns:
        What was tried and found; `verdict.worth_it` tells whether the best merge is better than every model alone.

    Raises:
        RotationMergeError: models, data or the folder are of no use.
    """
    named, place, say = list(map(whole_path, paths_of(models))), os.path.abspath(out), watch or LOG.info
    if len(named) < 2:
        raise RecipeError(f"{len(named)} models are given", remedy="name two or more")
    check_different(named)
    config = MergeConfig.of(config)
    sources = tuple(paths_of([data] if isinstance(data, str | os.PathLike) else data, "data source"))
    base = config.base and whole_path(config.base)
    whole = tuple(on_base(name, base) for name in named)
    if not set(named) & set(whole):
        say("Merging full models out of adapters; 'rotation-merge lora' merges them into one adapter.")
    values = {**vars(config), "base": base, "data": sources or (_usual_data(whole[0]),)}
    search = Search(SearchConfig(models=whole, out=place, device=device, **values), say)
    search.begin(named, force)
    try:
        outcome = search.run()
    except RotationMergeError:
        if search.work.is_empty():
            search.clean()
        raise
    written = outcome.verdict.worth_it or anyway
    if written:
        search.write(outcome)
    search.clean(outcome.tried[0].recipe if written else "")
    return replace(outcome, written=written)


class Search:
    """One search. Finished candidates are stored in `OUT.unfinished`, so that an interrupted search continues."""

    parents: Parents
    samples: str

    def __init__(self, config: SearchConfig, say: Callable[[str], None]) -> None:
        self.config, self.say = config, say
        self.deadline = time.perf_counter() + seconds(config.budget)
        self.work, self.mark = Store(config.out), config.key()
        self.files = Path(f"{os.path.abspath(config.out)}-samples") / self.mark
        self.tried: dict[str, Trial] = {}
        self.left_out: dict[str, str] = {}
        self.merging: dict[str, float] = {}
        self.pace: float | None = None

    def begin(self, inputs: Sequence[str], force: bool) -> None:
        """Begin the work beside OUT, or continue with it.

        Raises:
            RotationMergeError: something lies at OUT that this search did not write, or nothing can be written there.
        """
        out, continues = self.config.out, self.work.is_of(self.mark) and self.work.get(WRITING) is not None
        remedy = f"{ELSEWHERE} (the command replaces it with --force)"
        check_output(Output(out, FOLDER, remedy=remedy), inputs, force or continues)
        self.work.begin(self.mark)

    def run(self) -> Outcome:
        """Try candidates within the budget, and measure the best one on the reporting samples."""
        self.parents = Parents(self.config, self.files, self.say)
        judge = self.parents.deciding
        texts = [] if judge.texts is None else [judge.texts]
        self.samples = data_hash([batch for data in [*judge.sets, *texts] for batch in data.batches])
        record = self.work.get(PACE) or {}
        if record.get("samples") == self.samples:
            judge.rounds, self.pace = record["rounds"], record["pace"]
        self.left_out |= left_out(self.parents)
        for name, why in self.left_out.items():
            self.say(f"left out: {name} ({why})")
        candidates = candidates_of(self.parents)
        self._try_all(candidates)
        if not self.tried:
            why = next((self.left_out[candidate.name] for candidate in candidates), "check the models")
            raise RotationMergeError("no merge could be made", remedy=why)
        return self._outcome(sorted(self.tried.values(), key=lambda trial: self._rank(trial.figures)))

    def _try_all(self, candidates: Sequence[Candidate]) -> None:
        """Try candidates in their order while there is time; scales once the plain average shows how much to forget."""
        names, waiting = [candidate.name for candidate in candidates], list[Candidate]()
        for candidate in candidates:
            if self.tried and self._left() <= 0:
                self.left_out[candidate.name] = SPENT
                continue
            self._try(candidate)
            waiting += [candidate] * (candidate.name in self.tried and candidate.scale is not None)
            if PLAIN not in names or PLAIN in {*self.tried, *self.left_out}:
                for scaled in waiting:
                    self._search_scale(scaled)
                waiting = []

    def _left(self) -> float:
        """Seconds left to try candidates, as the verdict, and making the best merge again at its scale, take some."""
        verdict = (self.pace or 0.0) * self.parents.reporting.rounds * (len(self.config.models) + 1)
        best = min(self.tried.values(), key=lambda trial: self._rank(trial.figures))
        again = 0.0 if self._is_made(best.name, best.recipe) else self.merging.get(best.name, 0.0)
        return self.deadline - time.perf_counter() - min(verdict, VERDICT * seconds(self.config.budget)) - again

    def _forgetting(self, figures: Figures) -> tuple[float, float]:
        """See `forgetting`; zeros where the base writes no text."""
        base = self.parents.base_figures
        plain = self.tried.get(PLAIN)
        return (0.0, 0.0) if base is None else forgetting(figures, None if plain is None else plain.figures, base)

    def _rank(self, figures: Figures) -> tuple[float, float]:
        """The sort key of merges: those that forget too much come last."""
        more, allowed = self._forgetting(figures)
        return max(more - allowed, 0.0), figures.score

    def _try(self, candidate: Candidate) -> None:
        """Try a candidate, unless it was tried before an interruption; it is left out if it cannot be made."""
        self.say(f"{candidate.name} ...")
        try:
            trial = self._trial(candidate)
        except (RotationMergeError, OneLineError, torch.OutOfMemoryError) as error:
            self.left_out[candidate.name] = str(error) if isinstance(error, OneLineError) else line(error)
            self.say(f"{candidate.name}: left out, {self.left_out[candidate.name]}")
            return
        self._keep(trial)

    def _keep(self, trial: Trial) -> None:
        """Keep and show the result of a candidate."""
        self.tried[trial.name] = trial
        figures, judge = trial.figures, self.parents.deciding
        words = f"{figures.score:.4f} {judge.unit}"
        words += "" if trial.scale is None else f" at lambda {trial.scale:g}"
        words += "" if figures.accuracy is None else f", {judge.figure} {figures.accuracy:.3f}"
        words += "" if figures.on_base is None else f", on the base's text {figures.on_base:.4f}"
        self.say(f"{trial.name}: {words} ({trial.seconds:.0f} s)")

    def _trial(self, candidate: Candidate) -> Trial:
        """The result of a candidate at the scale that it begins with, or at its best one from an interrupted search."""
        began = time.perf_counter()
        candidate = with_files(candidate, self.parents, max((self.deadline - began) / 2, 1.0))
        text, record = candidate.recipe(self.config.dtype), self.work.get(candidate.name) or {}
        if record.pop("key", None) == self._key(text):
            return Trial(**{**record, "figures": Figures(**record["figures"])})
        folder = self._made(candidate.name, text)
        self.merging[candidate.name] = time.perf_counter() - began
        figures = self._measured(self.config.load(folder))
        trial = Trial(candidate.name, figures, time.perf_counter() - began, text, candidate.scale)
        self.work.put(candidate.name, {"key": self._key(text), **asdict(trial)})
        return trial

    def _key(self, text: str) -> list[Any]:
        """What a stored result belongs to: the candidate's first recipe, and the samples."""
        return [text, self.samples, self.parents.deciding.rounds]

    def _measured(self, model: Any) -> Figures:
        """Measure a merge on the selection samples: the first one on few, if it is slow, and all others on the same."""
        judge, began = self.parents.deciding, time.perf_counter()
        if self.pace is not None:
            return judge.measure(model)
        figures = judge.measure(model, lambda: time.perf_counter() - began < FIRST * seconds(self.config.budget))
        self.pace = (time.perf_counter() - began) / judge.rounds
        self.work.put(PACE, {"samples": self.samples, "rounds": judge.rounds, "pace": self.pace})
        self.say(f"judging by {judge.examples} samples")
        return figures

    def _search_scale(self, candidate: Candidate) -> None:
        """Search the best scale of a candidate, if there is time and it was not searched before an interruption."""
        began, trial = time.perf_counter(), self.tried[candidate.name]
        room, most = ROOM * self.merging.get(candidate.name, 0.0), SCALE * seconds(self.config.budget)

        def over() -> bool:
            return self._left() <= room or time.perf_counter() - began > most

        if candidate.scale is None or trial.searched or over():
            return
        load, measure = self.config.load, self.parents.deciding.measure
        try:
            merged, base = load(self._made(candidate.name, trial.recipe)), load(candidate.anchor)
            scale, figures = best_scale(merged, base, candidate.scale, measure, self._rank, over, trial.figures)
        except torch.OutOfMemoryError as error:  # of two models on a GPU; the merge stays as it is
            self.say(f"{candidate.name}: lambda is not searched, {line(error)}")
            return
        recipe, spent = replace(candidate, scale=scale).recipe(self.config.dtype), time.perf_counter() - began
        best = Trial(candidate.name, figures, trial.seconds + spent, recipe, scale, searched=True)
        self.work.put(candidate.name, {"key": self._key(trial.recipe), **asdict(best)})
        self._keep(best)

    def _folder(self, name: str) -> Path:
        return self.work.path / "".join(c if c.isalnum() else "-" for c in name)

    def _is_made(self, name: str, text: str) -> bool:
        """Whether a candidate's merge by this recipe lies in its folder."""
        return Contents(str(self._folder(name))).text("mergekit_config.yml") == text

    def _made(self, name: str, text: str) -> str:
        """The folder with a candidate's merge, made by this recipe."""
        folder = self._folder(name)
        if not self._is_made(name, text):
            shutil.rmtree(folder, ignore_errors=True)
            merge_recipe(text, str(folder), tokenizer=True, device=self.config.device)
        return str(folder)

    def _outcome(self, tried: list[Trial]) -> Outcome:
        """The outcome, from all candidates, the best one first, and as many reporting samples as there is time for."""
        parents, judge, best = self.parents, self.parents.reporting, tried[0]
        figures, reported = self._reported(best)
        count, sources = judge.examples, (Path(source).name for source in self.config.data)
        scores = {name: _score(name, of_model) for name, of_model in figures.items()}
        verdict = Verdict(
            judge.unit,
            judge.figure,
            f"{count} held-out samples of {', '.join(sources)}",
            [scores[name] for name in self.config.models],
            _score(best.name, reported[best.name]),
            _score(PLAIN, reported[PLAIN]) if PLAIN in reported else None,
            scores[ENSEMBLE],
            [trial.score for trial in tried],
            self.left_out,
            [*self._only(best), *(self._why(trial) for trial in tried if trial.figures.score < best.figures.score)],
            None if parents.base_figures is None else parents.base_figures.on_base,
        )
        half_interval = margin(reported[best.name].losses, figures[verdict.best_parent.name].losses)
        verdict = replace(verdict, margin=half_interval)
        if not verdict.clear:
            verdict = replace(verdict, remedy=self._remedy(count))
        return Outcome(verdict, tried, dict(parents.relations), judge.labelled, parents.base_figures)

    def _reported(self, best: Trial) -> tuple[dict[str, Figures], dict[str, Figures]]:
        """Figures on the reporting samples: of parents and ensemble, and of the best and, in time, the plain merge."""
        parents, plain = self.parents, self.tried.get(PLAIN)
        merges = [best, *([plain] if plain not in (None, best) else [])]
        self._made(best.name, best.recipe)
        count, began = len(self.config.models), time.perf_counter()
        allowed = (self.deadline - began) * count / (count + len(merges))
        self.say(f"measuring {count} models and the merge ...")
        figures, reported = parents.measure(lambda: time.perf_counter() - began < allowed), dict[str, Figures]()
        for trial in merges:
            if trial is best or time.perf_counter() < self.deadline:
                folder = self._made(trial.name, trial.recipe)
                (measured,) = parents.reporting.compare({trial.name: self.config.load(folder)}).values()
                reported[trial.name] = replace(measured, on_base=trial.figures.on_base)
        return figures, reported

    def _only(self, best: Trial) -> list[str]:
        """A note, if the deadline left nothing to choose."""
        alone = len(self.tried) == 1 and SPENT in self.left_out.values()
        return [f"No other merge than '{best.name}' was tried before the deadline."] if alone else []

    def _remedy(self, count: int) -> str:
        """How to make a difference clear that is not.

        Args:
            count: of the samples that were measured.
        """
        in_time = sum(data.examples for data in self.parents.reporting.sets) == count
        if in_time and SPENT not in self.left_out.values():
            return f"give more samples (--samples {2 * self.config.samples})"
        return f"give --budget {words_of(2 * seconds(self.config.budget))} or more samples"

    def _why(self, trial: Trial) -> str:
        """The reason for rejecting a merge with a better score."""
        more, allowed = self._forgetting(trial.figures)
        return (
            f"Not chosen: '{trial.name}' ({trial.figures.score:.4f} on the selection samples) forgets too much. On the "
            f"base's own text it loses {more:.4f} nats more than the plain average; {allowed:.4f} is allowed: a tenth "
            "of its gain over the base, and the standard error."
        )

    def write(self, outcome: Outcome) -> None:
        """Write the best merge, as mergekit-yaml made it, and its recipe, atomically.

        Until it is complete, OUT holds the previous merge, or none.
        """
        best = outcome.tried[0]
        self.work.put(WRITING, {})
        with staged(self.config.out) as staging:
            shutil.copytree(self._made(best.name, best.recipe), staging, dirs_exist_ok=True)
            self._complete(Path(staging), outcome)

    def _complete(self, folder: Path, outcome: Outcome) -> None:
        """Write the files beside the weights: recipe, figures, and the verdict in report and card."""
        best = outcome.tried[0]
        write_text(folder / RECIPE, best.recipe)
        if self.parents.reporting.labelled:
            self._keep_figures(folder, outcome.verdict)
        report = replace(read_report(str(folder / REPORT_FILE)), search=outcome.verdict)
        write_text(folder / REPORT_FILE, report.text())
        card, name = folder / CARD, Path(self.config.out).name
        if card.exists():
            title = f"# {Path(self._made(best.name, best.recipe)).name}\n"
            text = card.read_text(encoding="utf-8").replace(title, f"# {name}\n", 1)
            picture = DISTANCES if (folder / DISTANCES).exists() else None
            write_text(card, updated_card(text, report, name, Contents(str(folder)).config, picture=picture))

    def _keep_figures(self, folder: Path, verdict: Verdict) -> None:
        """Store the merge's figures on the reporting samples for its card."""
        sets, best = self.parents.reporting.sets, verdict.best
        figures = {} if best.accuracy is None else {verdict.figure.lower(): best.accuracy}
        figures |= {MEASURES[verdict.unit]: best.score} if verdict.unit in MEASURES else {}
        facts = {"data": ", ".join(self.config.data), "task": sets[0].task, "examples": sum(d.examples for d in sets)}
        keep_figures(str(folder), "pixel_values" in sets[0].batches[0], facts, figures)

    def clean(self, recipe: str = "") -> None:
        """Remove the state of the search, and files that the recipe does not need.

        Args:
            recipe: of the merge that was written, if any. It needs the files that it names, and the samples that these
                were made from; files of other searches are needed where none was written.
        """
        self.work.remove()
        named = {event.value for event in yaml.parse(recipe) if isinstance(event, yaml.ScalarEvent)}
        if any(str(file) in named for file in self.files.glob("*")):
            named |= set(self.parents.data.values())
        everything = self.files.parent
        searches = [folder for folder in everything.glob("*") if MARKED.fullmatch(folder.name)]
        for folder in searches if recipe else [self.files]:
            for file in (file for file in folder.glob("*") if str(file) not in named):
                file.unlink()
        for folder in (*searches, everything):
            with suppress(OSError):  # it is not empty, or not there
                folder.rmdir()


# --- `lambda`, on the line from the base through a merge, without merging again --------------------------------------


def best_scale(
    merged: Any,
    base: Any,
    scale: float,
    measure: Callable[[Any], Figures],
    rank: Callable[[Figures], tuple[float, float]],
    over: Callable[[], bool] = lambda: False,
    first: Figures | None = None,
) -> tuple[float, Figures]:
    """Search the scale of a merged change with the lowest score, in steps from the first one.

    Args:
        merged: the base with `scale` times the merged change; left as the base with some multiple of it.
        measure: the figures of a model.
        rank: the sort key of merges, the best one first.
        over: whether no more scales may be measured.
        first: the figures of `merged`, if they are known.

    Returns:
        The scale and its figures.
    """
    starts, place, best = base.state_dict(), 0.0, 0.0
    measured = {place: first or measure(merged)}
    for move in (1.0, -1.0, 0.5, -0.5):
        while (step := best + move) not in measured and len(measured) < MOST and not over():
            _scale(merged, starts, STEP ** (step - place))
            place, measured[step] = step, measure(merged)
            if rank(measured[step]) >= rank(measured[best]):
                break
            best = step
    return round(scale * STEP**best, 3), measured[best]


@torch.no_grad()
def _scale(merged: Any, starts: Mapping[str, Tensor], factor: float) -> None:
    """Move a model along the line from the starts, each tensor once: tied ones move in place."""
    for name, tensor in (*merged.named_parameters(), *merged.named_buffers()):
        if name in starts and tensor.is_floating_point():
            tensor.copy_(torch.lerp(starts[name].to(tensor), tensor, factor))
