"""Candidate recipes by name, the plain average first, and the files that they need."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from rotation_merge.architecture import Architecture
from rotation_merge.averaging.task_vectors import RATIO
from rotation_merge.matching.fit import fit
from rotation_merge.matching.fit_records import FitConfig
from rotation_merge.matching.options import BOTH
from rotation_merge.model.naming import shortened
from rotation_merge.model.open import open_model
from rotation_merge.run.data import Data, read_batches
from rotation_merge.run.functions import load
from rotation_merge.run.generated_samples import SOURCES
from rotation_merge.run.measure import MeasureConfig
from rotation_merge.run.measuring import measured, model_for
from rotation_merge.search.base import TaskVectorBase
from rotation_merge.search.job import SearchConfig
from rotation_merge.workers import listener

PLAIN = {"attention": "none", "heads": "none", "ffn": "none", "scaling": False}
LOCAL = {"heads": "permutation"}

SHARED, NEAR, FAR = "shared", "near", "far"
"""How models lie to each other: in the same coordinates, so that alignment leaves them where they are; as fine-tunes of
one base that alignment brings nearer; or in other coordinates."""

CHANGES = {
    "task_arithmetic": {},
    "dare_ties": {"density": 0.5},
    "ties": {"density": 0.5},
    "wudi": {},
    "iso": {},
    "tsv": {},
}
"""Delegates that merge changes of a base, the cheap ones first, with what stands under each model."""

KEPT = {"wudi": "wudi, lengths kept", "tsv": "tsv, lengths kept"}
"""Tried as well, right after the delegate, where lengths of changes differ so much that it shortens the longer ones."""

OF_CHANGES = tuple(name for delegate in CHANGES for name in (delegate, KEPT.get(delegate)) if name is not None)

SCALES = {"wudi": 1.1, "ties": 1.2}
SUMS = ("task_arithmetic", "dare_ties")
"""The first `lambda` that is tried: of sums of changes, one over the root of their number; of all others 1."""

ORDER = ("plain", "slerp", *OF_CHANGES, "local", "whole", "regmean", "refit", "refit whole", "learned", "seen")
"""The order in which candidates are tried, the cheap ones first: averages, averages of models that are aligned on
weights, and what is solved or learned on samples."""

ALIGNED = ("local", "whole", "refit whole", "learned", "seen")
"""Candidates that equal others where models share their coordinates."""

PARALLEL = 0.98
"""Models whose matrices have a larger mean cosine are averaged by slerp as by linear, up to half a percent."""

DRAWING = ("dare_ties",)
"""Delegates that draw at random, from the seed that mergekit is given."""

FIRST_PART = "attention alone"
"""The first of the candidates that align parts; a soup of fewer models goes before them."""


@dataclass(frozen=True)
class Candidate:
    """One candidate merge.

    Attributes:
        name: what tables call it.
        anchor: the model that donors are aligned to.
        models: those that are merged, the anchor among them, or where changes are merged the models beside the base.
        parameters: of the whole recipe.
        of_model: of single models, by model.
        needs: what must be made before: `fit` or `statistics`; None for nothing.
        weights: of the models: equal shares, one for each, or none.
        scale: `lambda`; None: the delegate has none.
        searched: whether the best `lambda` is searched, from `scale` on.
    """

    name: str
    anchor: str
    models: tuple[str, ...]
    parameters: Mapping[str, Any]
    of_model: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    needs: str | None = None
    weights: Literal["share", "one", "none"] = "share"
    scale: float | None = None
    searched: bool = False

    @property
    def title(self) -> str:
        """The candidate's name in tables."""
        return f"{self.name}, best lambda" if self.searched else self.name

    @property
    def draws(self) -> bool:
        """Whether the method draws at random."""
        return self.parameters.get("delegate") in DRAWING

    def scaled(self, scale: float) -> Candidate:
        """The candidate with a fixed `lambda`."""
        return replace(self, parameters={**self.parameters, "lambda": scale}, scale=scale, searched=False)

    def with_files(self, of_model: Mapping[str, Mapping[str, Any]]) -> Candidate:
        """The candidate with the files that it needs."""
        return replace(self, of_model=of_model, needs=None)

    def recipe(self, dtype: str | None) -> str:
        """The recipe as YAML."""
        weight = {"share": {"weight": round(1 / len(self.models), 6)}, "one": {"weight": 1.0}, "none": {}}[self.weights]
        models = [(model, {**weight, **self.of_model.get(model, {})}) for model in self.models]
        content: dict[str, Any] = {
            "merge_method": "rotation_merge",
            "base_model": self.anchor,
            "models": [{"model": m, **({"parameters": values} if values else {})} for m, values in models],
            "parameters": dict(self.parameters),
            **({"dtype": dtype} if dtype else {}),
        }
        return yaml.safe_dump(content, sort_keys=False, width=1 << 20, allow_unicode=True)


@dataclass(frozen=True)
class Planner:
    """Lists the candidates for some models.

    Attributes:
        models: the anchor first.
        tied: whether the output shares the embeddings' tensor, which a rotation of the stream has to part.
        data: for each model the samples that a refit uses.
        refit: what a refit is told beside its data.
        learned: whether an alignment can be learned on the samples.
        relation: how the models lie to each other: shared, near or far.
        base: what they were tuned from.
        cosine: mean of the models' matrices to those of the first one.
    """

    models: Sequence[str]
    architecture: Architecture
    tied: bool
    data: Mapping[str, str]
    refit: Mapping[str, Any]
    learned: bool = False
    relation: str = NEAR
    base: TaskVectorBase | None = None
    cosine: float = 0.0

    def candidates(self) -> list[Candidate]:
        """Candidates to try, in their order; those that align parts of the model last."""
        shared, known = self.relation == SHARED, self._named()
        chosen = [known[name] for name in ORDER if name in known and not (shared and name in ALIGNED)]
        return [*chosen, *([] if shared else self._parts())]

    def left_out(self) -> dict[str, str]:
        """Candidates that these models exclude, and why."""
        reasons = {}
        if self.relation == SHARED:
            reasons["aligned merges"] = "the models share their coordinates, so alignment changes nothing"
        if why := self._no_changes():
            reasons["averages of task vectors"] = why
        elif len(self._tuned) == 1:
            reasons[", ".join(name for name in CHANGES if name != "task_arithmetic")] = "there is only one task vector"
        if len(self.models) == 2 and self.relation != FAR and self.cosine >= PARALLEL:
            reasons["slerp"] = f"between matrices with a cosine of {self.cosine:.2f} it is the plain average"
        return reasons

    def _no_changes(self) -> str:
        """The reason why no changes of a base are merged; empty if they are."""
        if self.relation == FAR:
            return "the models are not fine-tunes of one base"
        return "" if self.base is not None else "no base is known; name it as 'base'"

    @property
    def _tuned(self) -> list[str]:
        """The models without their base."""
        return [model for model in self.models if self.base is None or model != self.base.name]

    def _of_changes(self, options: Mapping[str, Any]) -> dict[str, Candidate]:
        """Delegates that merge task vectors; for a single one only its scale is searched."""
        if self._no_changes() or self.base is None:
            return {}
        tuned = self._tuned
        candidates = {}
        for name, values in CHANGES.items():
            if len(tuned) > 1 or name == "task_arithmetic":
                scale = SCALES.get(name, 1 / math.sqrt(len(tuned)) if name in SUMS else 1.0)
                candidate = self._candidate(name, {"delegate": name, **options}, dict.fromkeys(tuned, values))
                variant = replace(candidate, anchor=self.base.name, models=tuple(tuned), weights="one")
                candidates[name] = variant.scaled(round(scale, 3))
        if self.base.changes.ratio > RATIO and len(tuned) > 1:
            for name, title in KEPT.items():
                whole = {**candidates[name].parameters, "lengths": "keep"}
                candidates[title] = replace(candidates[name], name=title, parameters=whole)
        return candidates

    def _named(self) -> dict[str, Candidate]:
        data_options = {model: {"data": self.data[model]} for model in self.models}
        plain = PLAIN if self.relation == SHARED else LOCAL
        candidates = {
            "plain": self._candidate("plain", PLAIN),
            "local": self._candidate("heads, neurons", LOCAL),
            "regmean": self._candidate("regmean", {"delegate": "regmean", **plain}, needs="statistics"),
            **self._of_changes(plain),
        }
        if len(self.models) == 2 and self.relation != FAR and self.cosine < PARALLEL:
            slerp = self._candidate("slerp", {"delegate": "slerp", "t": 0.5, **plain})
            candidates["slerp"] = replace(slerp, weights="none")
        moves = any(groups[-1] != "none" for groups in self.architecture.stream_groups.values())
        if moves:
            candidates["whole"] = self._candidate("whole model", self._whole)
            candidates["seen"] = self._candidate(
                "whole model, by activations", {**self._whole, "match_on": BOTH}, data_options
            )
        refit = {"delegate": "refit", **self.refit}
        candidates["refit"] = self._candidate("refit, plain", {**refit, **PLAIN}, data_options)
        if moves:
            candidates["refit whole"] = self._candidate("refit, whole model", {**refit, **self._whole}, data_options)
        if self.learned:
            candidates["learned"] = self._candidate("learned", {"untie": True} if self.tied else {}, needs="fit")
        return candidates

    def _parts(self) -> list[Candidate]:
        """Alignments of one part of the model, and with another anchor."""
        parts = {FIRST_PART: {"ffn": "none"}, "FFN alone": {"attention": "none", "heads": "none"}}
        parts |= {name: {"layers": layers} for name, layers in _halves(self.architecture)}
        candidates = [self._candidate(name, {**self._whole, **options}) for name, options in parts.items()]
        short = shortened(self.models)
        for anchor in self.models[1:]:
            ordered = (anchor, *(model for model in self.models if model != anchor))
            candidates.append(
                replace(
                    self._candidate(f"whole model, anchor {short[anchor]}", self._whole), anchor=anchor, models=ordered
                )
            )
        return candidates

    @property
    def _whole(self) -> dict[str, Any]:
        turned = self.architecture.admitting("rotation")
        return {**LOCAL, "residual": "largest", **({"untie": True} if self.tied and turned else {})}

    def _candidate(
        self,
        name: str,
        parameters: Mapping[str, Any],
        of_model: Mapping[str, Mapping[str, Any]] | None = None,
        needs: str | None = None,
    ) -> Candidate:
        return Candidate(name, self.models[0], tuple(self.models), parameters, of_model or {}, needs)


def _halves(architecture: Architecture) -> list[tuple[str, str]]:
    """Subsets of layers: the lower and the upper half."""
    last = max((block.index for block in architecture.blocks if block.index is not None), default=0)
    middle = (last + 1) // 2
    return [("lower layers", f"0-{middle - 1}"), ("upper layers", f"{middle}-{last}")] if last else []


def with_models(best: Candidate, models: Sequence[str]) -> Candidate:
    """A candidate's method with fewer models, for a greedy soup (Wortsman 2022)."""
    outside = best.anchor not in best.models  # a base whose changes are merged
    anchor = best.anchor if outside or best.anchor in models else models[0]
    first = () if outside else (anchor,)
    ordered = (*first, *(m for m in models if m != anchor))
    of_model = {m: values for m, values in best.of_model.items() if m in models}
    name = f"{best.name} of {' and '.join(shortened(models).values())}"
    return replace(best, name=name, anchor=anchor, models=ordered, of_model=of_model)


STEPS = 400
"""Of learning, where there is time."""


@dataclass(frozen=True)
class CandidateFiles:
    """Makes the files that candidates need, each once.

    Attributes:
        data: for each model the samples to merge with.
        training: these samples, read.
        files: folder of the results.
        tied: whether the output shares the embeddings' tensor.
    """

    config: SearchConfig
    data: Mapping[str, str]
    training: Sequence[Data]
    files: Path
    tied: bool

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
        number = self.config.models.index(model)
        path = self.files / f"statistics-{number}.safetensors"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            opened, device, source = open_model(model, any_base=True), self.config.device, self.data[model]
            module = model_for(opened, MeasureConfig(), source, device, None)
            measured(opened, module, self._data(model, module), MeasureConfig(), path, listener(), device)
        return str(path)

    def _data(self, model: str, loaded: object) -> Data:
        config, source = self.config, self.data[model]
        limit = config.samples if source in SOURCES else None
        return read_batches(source, model, loaded, limit, config.batch_size, config.length, config.seed)

    def _learned(self, candidate: Candidate, seconds: float) -> dict[str, str]:
        place, tell = self.config.models.index, listener()
        stem = f"learned-{place(candidate.anchor)}"
        files = {m: str(self.files / f"{stem}-{place(m)}.safetensors") for m in candidate.models[1:]}
        if all(os.path.exists(file) for file in files.values()):
            return files
        loaded = [load(model, like=candidate.anchor).to(self.config.device) for model in candidate.models]
        batches = [batch for data in self.training for batch in data.batches]
        options = FitConfig(steps=STEPS, minutes=seconds / 60, seed=self.config.seed)
        result = fit(
            loaded[0], loaded[1:], batches, None, options, lambda done, total, _: tell("learning", done, total)
        )
        result.write(candidate.anchor, {file: model for model, file in files.items()}, self.tied)
        return files
