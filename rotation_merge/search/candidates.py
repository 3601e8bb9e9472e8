"""Candidate recipes by name, in their order, and the files that they need."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from rotation_merge.matching.fit import fit
from rotation_merge.matching.options import FitConfig
from rotation_merge.model.open import open_model
from rotation_merge.run.config import MeasureConfig
from rotation_merge.run.data import read_samples
from rotation_merge.run.measure import measured, model_for
from rotation_merge.run.sample_kinds import SELF, SOURCES
from rotation_merge.search.parents import FAR, SHARED, Parents
from rotation_merge.workers import listener

PLAIN = {"attention": "none", "heads": "none", "ffn": "none", "scaling": False}
LOCAL = {"heads": "permutation"}

WUDI, CALIBRATED = "wudi", "tsv, calibrated"
EARLY = (WUDI, "plain", CALIBRATED)
"""Tried first: what usually wins, the cheaper one before, and what tells how much a merge may forget."""
SCALES = {"ties": 1.2, WUDI: 1.0, "tsv": 1.0, CALIBRATED: 1.0}
"""The `lambda` that a search begins with; of sums of task vectors one over the root of their number."""
FURTHER = {CALIBRATED: {"calibrate": "svc"}}
"""Parameters beside the delegate and its scale."""
STEPS = 400
"""Of learning, where there is time."""


@dataclass(frozen=True)
class Candidate:
    """One candidate merge.

    Attributes:
        name: what tables call it.
        anchor: the model that donors are aligned to, or the base of task vectors.
        models: those that are merged.
        parameters: of the whole recipe.
        of_model: of single models, by model.
        needs: key under each model whose file must be made before: `alignment` or `statistics`; None for nothing.
        scale: `lambda`, whose best value is searched; None: the delegate has none.
    """

    name: str
    anchor: str
    models: tuple[str, ...]
    parameters: Mapping[str, Any]
    of_model: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    needs: str | None = None
    scale: float | None = None

    def recipe(self, dtype: str | None) -> str:
        """The recipe as YAML."""
        equal = sum("weight" not in self.of_model.get(model, {}) for model in self.models)
        weight = round(1 / equal, 6) if self.scale is None else 1.0
        of_models = [(model, {"weight": weight, **self.of_model.get(model, {})}) for model in self.models]
        content: dict[str, Any] = {
            "merge_method": "rotation_merge",
            "base_model": self.anchor,
            "models": [{"model": model, "parameters": values} for model, values in of_models],
            "parameters": {**self.parameters, **({} if self.scale is None else {"lambda": self.scale})},
            **({"dtype": dtype} if dtype else {}),
        }
        return yaml.safe_dump(content, sort_keys=False, width=1 << 20, allow_unicode=True)


def candidates_of(parents: Parents) -> list[Candidate]:
    """Candidates in their order: what usually wins, averages, those of aligned models, what is solved on samples."""
    models, aligned = parents.config.models, parents.relation != SHARED
    groups = parents.anchor.architecture.stream_groups.values()
    moved, plain = aligned and any(admitted[-1] != "none" for admitted in groups), LOCAL if aligned else PLAIN
    untied = {"untie": True} if parents.anchor.tied_head is not None else {}
    turned = untied if parents.anchor.architecture.admitting("rotation") else {}
    whole = {**LOCAL, "residual": "largest", **turned}
    data, samples = {model: {"data": source} for model, source in parents.data.items()}, parents.config.samples
    apart = len(set(parents.data.values())) > 1 or parents.config.data[0] == SELF
    refit = {"delegate": "refit", "samples": samples, "targets": "own" if apart else "mean"}
    changes = list(_of_changes(parents, plain))
    averages = [
        (aligned, Candidate("heads, neurons", models[0], models, LOCAL)),
        (moved, Candidate("whole model", models[0], models, whole)),
        (True, Candidate("regmean", models[0], models, {"delegate": "regmean", **plain}, needs="statistics")),
        (True, _from_changes(Candidate("refit, plain", models[0], models, {**refit, **PLAIN}, data), changes)),
        (moved, Candidate("refit, whole model", models[0], models, {**refit, **whole}, data)),
        (aligned and bool(parents.training), Candidate("learned", models[0], models, untied, needs="alignment")),
    ]
    plain_average = Candidate("plain", models[0], models, PLAIN)
    chosen = [plain_average, *changes, *(candidate for possible, candidate in averages if possible)]
    if _heads_differ(parents):
        chosen = [replace(candidate, parameters={**candidate.parameters, "untie": True}) for candidate in chosen]
    return sorted(chosen, key=lambda each: EARLY.index(each.name) if each.name in EARLY else len(EARLY))


def _from_changes(refit: Candidate, changes: Iterable[Candidate]) -> Candidate:
    """A refit of the same models from `tsv`, calibrated, where it merges their changes."""
    merge = next((change for change in changes if change.name == CALIBRATED), None)
    if merge is None:
        return refit
    of_model, models = {**refit.of_model, merge.anchor: {"weight": 0.0}}, (merge.anchor, *merge.models)
    parameters = {**refit.parameters, "start": "calibrated_tsv", "ridge": "auto"}
    return replace(refit, anchor=merge.anchor, models=models, parameters=parameters, of_model=of_model)


def _heads_differ(parents: Parents) -> bool:
    """Whether some of the models have a head of their own where others tie theirs to the embedding."""
    names = [*parents.config.models, *([] if parents.base is None else [parents.base.name])]
    return len({open_model(name, any_base=True).tied_head is None for name in names}) > 1


def _of_changes(parents: Parents, options: Mapping[str, Any]) -> Iterator[Candidate]:
    """Averages of task vectors, the cheap ones first; for a single one only its scale is searched."""
    base, tuned = parents.base, parents.tuned
    if parents.relation == FAR or base is None:
        return
    for name, scale in {"task_arithmetic": round(1 / math.sqrt(len(tuned)), 3), **SCALES}.items():
        if len(tuned) > 1 or name == "task_arithmetic":
            parameters = {"delegate": name.partition(",")[0], **options, **FURTHER.get(name, {})}
            of_model = dict.fromkeys(tuned, {"density": 0.5} if name == "ties" else {})
            yield Candidate(name, base.name, tuned, parameters, of_model, scale=scale)


def left_out(parents: Parents) -> dict[str, str]:
    """Candidates that these models exclude, and why."""
    reasons = {}
    if parents.relation == SHARED:
        reasons["aligned merges"] = "the models share their coordinates, so alignment changes nothing"
    if parents.relation == FAR or parents.base is None:
        reasons["averages of task vectors"] = "no common base of the models is known; 'base' names it"
    elif len(parents.tuned) == 1:
        reasons[", ".join(SCALES)] = "there is only one task vector"
    return reasons


def with_files(candidate: Candidate, parents: Parents, seconds: float) -> Candidate:
    """The candidate with the files that it needs, each made once.

    Args:
        seconds: that learning may take.
    """
    if candidate.needs is None:
        return candidate
    parents.files.mkdir(parents=True, exist_ok=True)
    if candidate.needs == "statistics":
        files = {model: _statistics(parents, model) for model in candidate.models}
    else:
        files = _learned(parents, candidate.models, seconds)
    return replace(candidate, of_model={model: {candidate.needs: file} for model, file in files.items()})


def _statistics(parents: Parents, model: str) -> str:
    config, source = parents.config, parents.data[model]
    path = parents.files / f"statistics-{config.models.index(model)}.safetensors"
    if not path.exists():
        view, options = open_model(model, any_base=True), MeasureConfig()
        module = model_for(view, options, source, config.device, None)
        data = read_samples(model, source, config.samples if source in SOURCES else None, *config.reading, module)
        measured(view, module, data, options, path, listener(), config.device)
    return str(path)


def _learned(parents: Parents, models: tuple[str, ...], seconds: float) -> dict[str, str]:
    """Alignment files of the donors, learned together on the training samples."""
    config = parents.config
    files = {model: str(parents.files / f"learned-{number}.safetensors") for number, model in enumerate(models[1:], 1)}
    if not all(map(os.path.exists, files.values())):
        batches = [batch for data in parents.training for batch in data.batches]
        options = FitConfig(steps=STEPS, minutes=seconds / 60, seed=config.seed)
        untie = parents.anchor.tied_head is not None
        result = fit(models[0], list(files), batches, options=options, untie=untie, devices=[config.device])
        for file, alignment in zip(files.values(), result.alignments, strict=True):
            alignment.write(file)
    return files
