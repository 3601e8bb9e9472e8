"""Candidate recipes by name, the plain average first, and the files that they need."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from rotation_merge.matching.fit import fit
from rotation_merge.matching.options import FitConfig
from rotation_merge.model.open import open_model
from rotation_merge.run.data import read_samples
from rotation_merge.run.measure import MeasureConfig, measured, model_for
from rotation_merge.run.sample_kinds import SELF, SOURCES
from rotation_merge.search.job import SearchConfig
from rotation_merge.search.preparation import FAR, SHARED, Parents
from rotation_merge.workers import listener

PLAIN = {"attention": "none", "heads": "none", "ffn": "none", "scaling": False}
LOCAL = {"heads": "permutation"}

CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "task_arithmetic": ({}, {}),
    "ties": ({}, {"density": 0.5}),
    "wudi": ({}, {}),
    "tsv": ({}, {}),
    "wudi, both sides": ({"sides": "both"}, {}),
}
"""Averages of task vectors, the cheap ones first: what the recipe says beside the delegate, and under each model."""

SCALES = {"ties": 1.2, "wudi": 1.1, "tsv": 1.0, "wudi, both sides": 1.1}
"""The `lambda` that a search begins with; of sums of task vectors one over the root of their number."""

STEPS = 400
"""Of learning, where there is time."""

LAST = "wudi, both sides"
"""Tried where the budget allows: it is the costliest."""


@dataclass(frozen=True)
class Candidate:
    """One candidate merge.

    Attributes:
        name: what tables call it.
        anchor: the model that donors are aligned to, or the base of task vectors.
        models: those that are merged.
        parameters: of the whole recipe.
        of_model: of single models, by model.
        needs: what must be made before: `fit` or `statistics`; None for nothing.
        scale: `lambda`, whose best value is searched; None: the delegate has none.
    """

    name: str
    anchor: str
    models: tuple[str, ...]
    parameters: Mapping[str, Any]
    of_model: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    needs: str | None = None
    scale: float | None = None

    def with_files(self, of_model: Mapping[str, Mapping[str, Any]]) -> Candidate:
        """The candidate with the files that it needs."""
        return replace(self, of_model=of_model, needs=None)

    def recipe(self, dtype: str | None) -> str:
        """The recipe as YAML."""
        weight = round(1 / len(self.models), 6) if self.scale is None else 1.0
        of_models = [(model, {"weight": weight, **self.of_model.get(model, {})}) for model in self.models]
        content: dict[str, Any] = {
            "merge_method": "rotation_merge",
            "base_model": self.anchor,
            "models": [{"model": model, "parameters": values} for model, values in of_models],
            "parameters": {**self.parameters, **({} if self.scale is None else {"lambda": self.scale})},
            **({"dtype": dtype} if dtype else {}),
        }
        return yaml.safe_dump(content, sort_keys=False, width=1 << 20, allow_unicode=True)


@dataclass(frozen=True)
class Candidates:
    """The candidates for some models, and the files that they need, each made once.

    Attributes:
        files: folder of these files.
    """

    config: SearchConfig
    parents: Parents
    files: Path

    def all(self) -> list[Candidate]:
        """Candidates in their order: averages, averages of aligned models, what is solved or learned on samples."""
        aligned = self.parents.relation != SHARED
        moved = aligned and any(
            groups[-1] != "none" for groups in self.parents.anchor.architecture.stream_groups.values()
        )
        plain = LOCAL if aligned else PLAIN
        chosen = [self._candidate("plain", PLAIN), *self._of_changes(plain)]
        if aligned:
            chosen.append(self._candidate("heads, neurons", LOCAL))
        if moved:
            chosen.append(self._candidate("whole model", self._whole))
        chosen.append(self._candidate("regmean", {"delegate": "regmean", **plain}, needs="statistics"))
        chosen.append(self._refit("refit, plain", PLAIN))
        if moved:
            chosen.append(self._refit("refit, whole model", self._whole))
        if aligned and self.parents.training:
            chosen.append(self._candidate("learned", {"untie": True} if self.parents.tied else {}, needs="fit"))
        return sorted(chosen, key=lambda candidate: candidate.name == LAST)

    def left_out(self) -> dict[str, str]:
        """Candidates that these models exclude, and why."""
        reasons, relation = {}, self.parents.relation
        if relation == SHARED:
            reasons["aligned merges"] = "the models share their coordinates, so alignment changes nothing"
        if relation == FAR:
            reasons["averages of task vectors"] = "the models are not fine-tunes of one base"
        elif self.parents.base is None:
            reasons["averages of task vectors"] = "no base is known; name it as 'base'"
        elif len(self._tuned) == 1:
            reasons[", ".join(SCALES)] = "there is only one task vector"
        return reasons

    @property
    def _tuned(self) -> tuple[str, ...]:
        """The models without their base."""
        base = self.parents.base
        return tuple(model for model in self.config.models if base is None or model != base.name)

    def _of_changes(self, options: Mapping[str, Any]) -> Iterator[Candidate]:
        """Delegates that merge task vectors; for a single one only its scale is searched."""
        base, tuned = self.parents.base, self._tuned
        if self.parents.relation == FAR or base is None:
            return
        for name, (values, of_model) in CHANGES.items():
            if len(tuned) > 1 or name == "task_arithmetic":
                parameters = {"delegate": name.partition(",")[0], **options, **values}
                scale = SCALES.get(name, round(1 / math.sqrt(len(tuned)), 3))
                yield Candidate(name, base.name, tuned, parameters, dict.fromkeys(tuned, of_model), scale=scale)

    @property
    def _whole(self) -> dict[str, Any]:
        turned = self.parents.anchor.architecture.admitting("rotation")
        return {**LOCAL, "residual": "largest", **({"untie": True} if self.parents.tied and turned else {})}

    def _refit(self, name: str, options: Mapping[str, Any]) -> Candidate:
        data, samples = self.parents.data, self.config.samples
        apart = len(set(data.values())) > 1 or self.config.data[0] == SELF
        refit = {"delegate": "refit", "samples": samples, "targets": "own" if apart else "mean"}
        candidate = self._candidate(name, {**refit, **options})
        return candidate.with_files({model: {"data": data[model]} for model in self.config.models})

    def _candidate(self, name: str, parameters: Mapping[str, Any], needs: str | None = None) -> Candidate:
        return Candidate(name, self.config.models[0], self.config.models, parameters, needs=needs)

    def ready(self, candidate: Candidate, seconds: float) -> Candidate:
        """The candidate with its files.

        Args:
            seconds: that learning may take.
        """
        if candidate.needs == "statistics":
            return candidate.with_files({m: {"statistics": self._statistics(m)} for m in candidate.models})
        if candidate.needs == "fit":
            files = self._learned(candidate, seconds)
            return candidate.with_files({model: {"alignment": file} for model, file in files.items()})
        return candidate

    def _statistics(self, model: str) -> str:
        path = self.files / f"statistics-{self.config.models.index(model)}.safetensors"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            opened, device, source = open_model(model, any_base=True), self.config.device, self.parents.data[model]
            module = model_for(opened, MeasureConfig(), source, device, None)
            limit = self.config.samples if source in SOURCES else None
            data = read_samples(model, source, limit, *self.config.reading, module)
            measured(opened, module, data, MeasureConfig(), path, listener(), device)
        return str(path)

    def _learned(self, candidate: Candidate, seconds: float) -> dict[str, str]:
        tell = listener()
        files = {model: str(self.files / f"learned-{i}.safetensors") for i, model in enumerate(candidate.models)}
        del files[candidate.anchor]
        if all(os.path.exists(file) for file in files.values()):
            return files
        batches = [batch for data in self.parents.training for batch in data.batches]
        options = FitConfig(steps=STEPS, minutes=seconds / 60, seed=self.config.seed)
        donors, devices = candidate.models[1:], [self.config.device]
        watch = lambda done, total, _: tell("learning", done, total)  # noqa: E731
        untie = self.parents.tied
        result = fit(candidate.anchor, donors, batches, None, options, watch, untie=untie, devices=devices)
        for model, alignment in zip(donors, result.alignments, strict=True):
            alignment.write(files[model])
        return files
