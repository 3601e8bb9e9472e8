"""Trying candidates within a budget, and writing the best: from models and samples to a merge with its recipe."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from rotation_merge.averaging.record import checkpoint_of, keep_figures
from rotation_merge.checkpoints.headers import reason
from rotation_merge.checkpoints.pair import Pair, open_pair
from rotation_merge.choosing.candidates import FIRST_PART, Candidate, candidates, shortened, with_models
from rotation_merge.choosing.costs import Costs
from rotation_merge.choosing.judge import Figures, Judge, Sets, answers, fits, split, write_data
from rotation_merge.choosing.making import Maker, Wish
from rotation_merge.choosing.outcome import Outcome, Tried, mark_of
from rotation_merge.durable import write_text
from rotation_merge.errors import DataError, RotationMergeError
from rotation_merge.matching.options import NOTHING
from rotation_merge.planning.presets import RELATED, likeness
from rotation_merge.recipe.delegates import OWN
from rotation_merge.samples.data import Data, read_batches
from rotation_merge.samples.functions import load
from rotation_merge.samples.written import SELF, SOURCES
from rotation_merge.seam.console import OneLineError
from rotation_merge.seam.merging import merge_recipe

RECIPE, FIGURES = "recipe.yml", ".json"
"""A merge's recipe in its folder, and the end of the name of what it is worth, beside the folder."""
WRITTEN = "written.json"
"""Says which of the merges that were tried is on its way to OUT, and of which search."""
MEASURES = {"loss (nats)": "loss", "squared error": "mse"}
"""Units of scores that are measures, by what the hub calls them."""
WRITTEN_APART = 7919
"""Added to the seed for held-out samples that models write themselves, so that no merge has seen them."""
Say = Callable[[str], None]


class Choice:
    """One search. Finished candidates are kept in `OUT.unfinished`, so that an interrupted search goes on."""

    def __init__(self, wish: Wish, say: Say) -> None:
        self.wish, self.say = wish, say
        self.work = Path(f"{wish.out}.unfinished")
        self.mark = mark_of(wish)
        self.files = Path(f"{os.path.abspath(wish.out)}-samples") / self.mark
        self.began = time.perf_counter()
        self.left_out: dict[str, str] = {}

    @contextmanager
    def begun(self) -> Iterator[None]:
        """The place for what is tried is there before anything takes time; if nothing comes of it, it goes again.

        Raises:
            RotationMergeError: nothing can be written there.
        """
        try:
            self.work.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            what = f"cannot be written ({reason(error)})"
            raise RotationMergeError(what, where=self.wish.out, remedy="write somewhere else") from error
        try:
            yield
        except RotationMergeError:
            if not any(self.work.iterdir()):
                self.clean(written=False)
            raise

    def goes_on(self) -> bool:
        """Whether this search was interrupted once it had begun to write OUT."""
        return bool(self._written())

    def _written(self) -> dict[str, str]:
        """Which merge this search has written, or was writing, to OUT: its name and recipe."""
        try:
            found = json.loads((self.work / WRITTEN).read_text(encoding="utf-8"))
            return dict(found) if found["mark"] == self.mark else {}
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def _moved(self, place: Path) -> bool:
        """Whether a merge lies in OUT by now."""
        found, recipe = self._written(), Path(self.wish.out) / RECIPE
        named = found.get("name") == place.name and not place.exists() and recipe.is_file()
        return named and recipe.read_text(encoding="utf-8") == found["recipe"]

    # --- samples -----------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Open the parents one after the other: samples, their answers, what they are worth.

        Raises:
            RotationMergeError: models that do not fit together, data without use.
        """
        wish = self.wish
        self.say("opening the models, measuring them ...")
        self.relations: dict[str, float] = {}
        for model in wish.models[1:]:
            self._relate(open_pair(wish.models[0], model, NOTHING), model)
        anchor = checkpoint_of(wish.models[0])
        self.architecture, self.tied = anchor.architecture, anchor.tied_head is not None
        self.written = wish.data[0] in SOURCES
        loaded = [self._load(model) for model in wish.models]
        begin = time.perf_counter()
        sets = self._sampled(loaded) if self.written else self._given(loaded[0])
        wrote = (time.perf_counter() - begin) / sum(data.examples for data in (*sets.deciding, *sets.reported))
        self.labelled = not self.written and all(data.task != "none" for data in sets.deciding)
        self.training = sets.training
        self.data = self._files(sets.training)
        judges = []
        for part in (sets.deciding, sets.reported):
            parents = [] if self.labelled else [self._own(model, part, k) for k, model in enumerate(loaded)]
            judges.append(Judge(part if self.labelled or len(part) > 1 else part * len(loaded), self.labelled, parents))
        self.deciding, self.reporting = judges
        begin = time.perf_counter()
        self.parents = {n: self.reporting.measure(m) for n, m in zip(wish.models, loaded, strict=True)}
        self.costs = Costs(self.architecture, anchor.shapes, (time.perf_counter() - begin) / len(loaded))
        self.costs.writing = wrote * wish.samples if self.written else 0.0
        chosen = {n: self.deciding.measure(m) for n, m in zip(wish.models, loaded, strict=True)}
        self.ensemble = self.reporting.ensemble([self.reporting.everywhere(m) for m in loaded])
        self.order = sorted(wish.models, key=lambda n: chosen[n].score)

    def _relate(self, pair: Pair, model: str) -> None:
        """Say how a model lies to the first one: coordinates, and configs that differ."""
        cosine = self.relations[model] = likeness(pair.anchor, pair.donor)
        kind = "a fine-tune of one base" if cosine >= RELATED else "other coordinates, or another base"
        names = shortened(self.wish.models)
        anchor = names[self.wish.models[0]]
        self.say(f"{names[model]}: {kind} (mean cosine of its matrices to those of {anchor}: {cosine:.2f})")
        for warning in pair.checked.warnings:
            self.say(f"warning: {warning}")

    def _load(self, model: str | Path) -> Any:
        """A model, its classes in the order that the samples are read in."""
        return load(str(model), like=self.wish.models[0])

    def _own(self, model: Any, part: Sequence[Data], k: int) -> Any:
        data = part[k % len(part)]
        found = [answers(model, batch, data.task)[0] for batch in data.batches]
        fits([data], found[0].shape[-1])
        return found

    def _sampled(self, loaded: Sequence[Any]) -> Sets:
        """Held-out samples that the models write (or noise), apart from those that the merges are made with."""
        wish = self.wish
        parts: tuple[list[Data], list[Data]] = ([], [])
        for k, (model, name) in enumerate(zip(loaded, wish.models, strict=True)):
            for i, part in enumerate(parts):
                seed = wish.seed + WRITTEN_APART * (1 + i) + k
                count = max(wish.samples // 4, wish.batch_size)
                data = read_batches(wish.data[0], name, model, count, wish.batch_size, wish.length, seed)
                part.append(Data(data.batches, data.task, data.examples))
        return Sets([], *parts)

    def _given(self, model: Any) -> Sets:
        wish = self.wish
        if len(wish.data) not in (1, len(wish.models)):
            raise DataError(f"{len(wish.data)} data for {len(wish.models)} models", remedy="give one, or one for each")
        limit = wish.samples * 2 if wish.samples else None
        found = [
            read_batches(source, wish.models[0], model, limit, wish.batch_size, wish.length, wish.seed, mixed=True)
            for source in wish.data
        ]
        return split(found, wish.seed)

    def _files(self, training: Sequence[Data]) -> dict[str, str]:
        """For each model, where its samples to merge with lie (or the word that makes them)."""
        if not training:
            return dict.fromkeys(self.wish.models, self.wish.data[0])
        paths = [str(write_data(data, self.files / f"{i}.safetensors")) for i, data in enumerate(training)]
        return {model: paths[i % len(paths)] for i, model in enumerate(self.wish.models)}

    # --- candidates --------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Try what the budget allows, and measure the best one on the samples that only report."""
        tried: list[tuple[Candidate, Tried]] = []
        refit = {
            "samples": self.wish.samples,
            "targets": "own" if len(set(self.data.values())) > 1 or self.wish.data[0] == SELF else "mean",
        }
        planned = candidates(
            self.wish.models,
            self.architecture,
            self.tied,
            refit if "refit" in OWN and self.deciding.sets[0].task != "similarity" else None,
            self.data,
            learned=bool(self.training),
            near=all(cosine >= RELATED for cosine in self.relations.values()),
        )
        for number, candidate in enumerate(planned):
            if candidate.name == FIRST_PART:
                self._soup(tried)
            self._try(candidate, tried, len(planned) - number - 1)
        if not tried:
            raise RotationMergeError("no merge could be made", remedy=next(iter(self.left_out.values()), "check"))
        best, figures = self._best(tried)
        plain = next((c for c, t in tried if t.name == "plain"), None)
        outcome = Outcome(
            self.labelled,
            sorted((t for _, t in tried), key=lambda t: t.figures.score),
            self.parents,
            self.ensemble,
            self.reporting.measure(self._load(self._place(best))),
            None if plain is None else self.reporting.measure(self._load(self._place(plain))),
            self.left_out,
            self.relations,
            self.reporting.unit,
            self.reporting.figure,
        )
        self.best, self.text, self.outcome = best, figures.recipe, outcome
        return outcome

    @staticmethod
    def _best(tried: Sequence[tuple[Candidate, Tried]]) -> tuple[Candidate, Tried]:
        return min(tried, key=lambda pair: pair[1].figures.score)

    def _name(self, candidate: Candidate) -> Path:
        mark = hashlib.blake2b(json.dumps([candidate.name, candidate.models]).encode(), digest_size=4).hexdigest()
        return self.work / ("".join(c if c.isalnum() else "-" for c in candidate.name)[:60] + f"-{mark}")

    def _place(self, candidate: Candidate) -> Path:
        """Where a merge lies: among those that were tried, or where it was moved to."""
        place = self._name(candidate)
        return Path(self.wish.out) if self._moved(place) else place

    def _figures(self, candidate: Candidate) -> Path:
        """Where it stands what a merge is worth, once it is whole."""
        return Path(f"{self._name(candidate)}{FIGURES}")

    def _soup(self, tried: list[tuple[Candidate, Tried]]) -> None:
        """Of three and more models: add one after the other, in the order of their worth, and keep those that help."""
        if len(self.order) < 3 or not tried:
            return
        best, kept, score = self._best(tried)[0], self.order[:1], math.inf
        for model in self.order[1:]:
            models = [*kept, model]
            if len(models) == len(self.order):
                return  # that one has been tried
            found = self._try(with_models(best, models), tried, 0)
            if found is not None and found.figures.score < score:
                kept, score = models, found.figures.score

    def _try(self, candidate: Candidate, tried: list[tuple[Candidate, Tried]], behind: int) -> Tried | None:
        left = self.wish.budget - (time.perf_counter() - self.began)
        expected = self.costs.expected(candidate, left)
        if tried and expected is not None and expected > left:
            self.left_out[candidate.name] = f"would take {expected:.0f} s, {max(left, 0):.0f} s of the budget are left"
            return None
        begin = time.perf_counter()
        try:
            text = self._ready(candidate, announced=(expected, behind, left))
            found = self._kept(candidate, text) or self._made(candidate, text, begin)
        except (RotationMergeError, OneLineError) as error:
            self.left_out[candidate.name] = str(error)
            self.say(f"{candidate.name}: left out, {error}")
            return None
        found.expected = expected
        self.costs.took(candidate, found.seconds)
        words = f"{found.figures.score:.4f} {self.deciding.unit}"
        words += "" if found.figures.accuracy is None else f", {self.deciding.figure} {found.figures.accuracy:.3f}"
        self.say(f"{candidate.name}: {words} ({found.seconds:.0f} s)")
        tried.append((candidate, found))
        return found

    def _made(self, candidate: Candidate, text: str, begin: float) -> Tried:
        place = self._name(candidate)
        merge_recipe(text, str(place), tokenizer=True)
        figures = self.deciding.measure(self._load(place))
        found = Tried(candidate.name, figures, time.perf_counter() - begin, text)
        write_text(self._figures(candidate), json.dumps({"key": self._key(text), **asdict(found)}))
        return found

    def _kept(self, candidate: Candidate, text: str) -> Tried | None:
        """What an interrupted search found for the same recipe and samples."""
        try:
            kept = json.loads(self._figures(candidate).read_text(encoding="utf-8"))
            if kept.pop("key") != self._key(text) or not self._place(candidate).is_dir():
                return None
            return Tried(**{**kept, "figures": Figures(**kept["figures"])})
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _key(self, text: str) -> str:
        return hashlib.blake2b(json.dumps([text, self.mark]).encode(), digest_size=16).hexdigest()

    def _ready(self, candidate: Candidate, announced: tuple[float | None, int, float]) -> str:
        """The candidate's recipe, once what must be made before it is there."""
        expected, behind, left = announced
        words = "" if expected is None else f", about {expected:.0f} s"
        more = f", {behind} more to try in {left:.0f} s" if behind else ""
        self.say(f"{candidate.name}{words}{more} ...")
        made = Maker(self.wish, self.data, self.training, self.files, self.tied)
        return made.ready(candidate, max(left / 2, 1.0)).recipe(self.wish.dtype)

    # --- the end -----------------------------------------------------------------------------------------------

    def worth(self, model: str) -> Figures:
        """What a model is worth on the samples that only report."""
        return self.reporting.measure(self._load(model))

    def write(self) -> None:
        """The best merge, which its recipe made as stock mergekit-yaml does, and the recipe beside it.

        What is there before it is whole is the merge that was there before, or none.
        """
        place, made, out = self._place(self.best), self._name(self.best), Path(self.wish.out)
        write_text(self.work / WRITTEN, json.dumps({"mark": self.mark, "name": made.name, "recipe": self.text}))
        if place == made and out.exists():
            (out / RECIPE).unlink(missing_ok=True)  # of the merge that was there
            merge_recipe(self.text, str(out), tokenizer=True)  # which exchanges what is there
            self._complete(out)
        elif place == made:
            self._complete(made)
            out.parent.mkdir(parents=True, exist_ok=True)
            os.replace(made, out)

    def _complete(self, folder: Path) -> None:
        """What stands beside the weights; the card is headed by the name of OUT."""
        card = folder / "README.md"
        if card.exists():
            text = card.read_text(encoding="utf-8")
            write_text(card, text.replace(f"# {folder.name}\n", f"# {Path(self.wish.out).name}\n", 1))
        write_text(folder / RECIPE, self.text)
        if self.labelled:
            self._keep_figures(folder)

    def _keep_figures(self, folder: Path) -> None:
        """What the merge is worth on the samples that only report, for its card."""
        sets, best = self.reporting.sets, self.outcome.best
        figures = {} if best.accuracy is None else {self.reporting.figure.lower(): best.accuracy}
        if name := MEASURES.get(self.reporting.unit):
            figures[name] = best.score
        facts = {"data": ", ".join(self.wish.data), "task": sets[0].task, "examples": sum(d.examples for d in sets)}
        keep_figures(str(folder), "pixel_values" in sets[0].batches[0], facts, figures)

    def clean(self, written: bool) -> None:
        """Remove what an interrupted search would have gone on from, and samples that the recipe does not name."""
        shutil.rmtree(self.work, ignore_errors=True)
        named = yaml.safe_dump(yaml.safe_load(self.text)) if written else ""
        every = self.files.parent if written else self.files  # those of another search may be what its merge names
        for file in sorted(every.rglob("*")):
            if file.is_file() and str(file) not in named:
                file.unlink()
        for folder in (*self.files.parent.glob("*"), self.files.parent):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
