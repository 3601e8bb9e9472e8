"""What may be tried: recipes by name, from the plain average on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from rotation_merge.architecture import Architecture
from rotation_merge.matching.options import BOTH
from rotation_merge.model.naming import shortened

PLAIN = {"attention": "none", "heads": "none", "ffn": "none", "rescale": False}
LOCAL = {"heads": "permutation"}

SHARED, NEAR, FAR = "shared", "near", "far"
"""How models lie to each other: in the same coordinates, so that alignment leaves them where they are; as fine-tunes of
one base that alignment brings nearer; or in other coordinates."""

ORDER = {
    SHARED: ("plain", "refit", "regmean"),
    NEAR: ("plain", "refit", "regmean", "local", "whole", "refit whole", "learned", "seen"),
    FAR: ("plain", "whole", "refit whole", "seen", "learned", "local", "refit", "regmean"),
}
"""The order in which candidates are tried, the likeliest to win first."""

FIRST_PART = "attention alone"
"""The first of the candidates that align parts; a soup of fewer models goes before them."""


@dataclass(frozen=True)
class Candidate:
    """One merge that may be tried.

    Attributes:
        name: what tables call it.
        anchor: the model that donors are aligned to.
        models: those that are merged, the anchor among them.
        parameters: of the whole recipe.
        of_model: of single models, by model.
        needs: what must be made before: `fit` or `statistics`; None for nothing.
        other_ids: whether token ids of the models differ, so that tokens are matched by name.
    """

    name: str
    anchor: str
    models: tuple[str, ...]
    parameters: Mapping[str, Any]
    of_model: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    needs: str | None = None
    other_ids: bool = False

    @property
    def kind(self) -> str:
        """What takes its time: learning, refit, regmean, matching on samples, or on weights alone."""
        if "match_on" in self.parameters:
            return "seen"
        return "learned" if self.needs == "fit" else str(self.parameters.get("delegate", "matching"))

    def with_files(self, of_model: Mapping[str, Mapping[str, Any]]) -> Candidate:
        """The same once what it needs is there."""
        return replace(self, of_model=of_model, needs=None)

    def recipe(self, dtype: str | None) -> str:
        """The recipe as YAML."""
        share = round(1 / len(self.models), 6)
        content: dict[str, Any] = {
            "merge_method": "rotation_merge",
            "base_model": self.anchor,
            "models": [{"model": m, "parameters": {"weight": share, **self.of_model.get(m, {})}} for m in self.models],
            "parameters": dict(self.parameters),
            **({"tokenizer": {"source": "base"}} if self.other_ids else {}),
            **({"dtype": dtype} if dtype else {}),
        }
        return yaml.safe_dump(content, sort_keys=False, width=1 << 20, allow_unicode=True)


@dataclass(frozen=True)
class Planner:
    """Says what may be tried.

    Attributes:
        models: the anchor first.
        tied: whether the output shares the embeddings' tensor, which a rotation of the stream has to part.
        data: for each model the samples that a refit uses.
        refit: what a refit is told beside its data.
        learned: whether an alignment can be learned on the samples.
        relation: how the models lie to each other: shared, near or far.
        other_ids: whether their token ids differ.
    """

    models: Sequence[str]
    architecture: Architecture
    tied: bool
    data: Mapping[str, str]
    refit: Mapping[str, Any]
    learned: bool = False
    relation: str = NEAR
    other_ids: bool = False

    def candidates(self) -> list[Candidate]:
        """What may be tried, the likeliest to win first."""
        known = self._named()
        chosen = [known[name] for name in ORDER[self.relation] if name in known]
        return [*chosen, *([] if self.relation == SHARED else self._parts())]

    def left_out(self) -> dict[str, str]:
        """What is not tried whatever time there is, and why."""
        found = {}
        if self.relation == SHARED:
            found["aligned merges"] = "the models share their coordinates, alignment leaves them where they are"
        if self.other_ids:
            kinds = ("refits",) if self.relation == SHARED else ("refits", "learned alignments", "matching on samples")
            found[", ".join(kinds)] = "the models' token ids differ"
        return found

    def _named(self) -> dict[str, Candidate]:
        own = {model: {"data": self.data[model]} for model in self.models}
        plain = PLAIN if self.relation == SHARED else LOCAL
        found = {
            "plain": self._candidate("plain", PLAIN),
            "local": self._candidate("heads, neurons", LOCAL),
            "regmean": self._candidate("regmean", {"delegate": "regmean", **plain}, needs="statistics"),
        }
        moves = any(groups[-1] != "none" for groups in self.architecture.stream_groups.values())
        if moves:
            found["whole"] = self._candidate("whole model", self._whole)
        if self.other_ids:
            return found
        if moves:
            found["seen"] = self._candidate("whole model, by activations", {**self._whole, "match_on": BOTH}, own)
        refit = {"delegate": "refit", **self.refit}
        found["refit"] = self._candidate("refit, plain", {**refit, **PLAIN}, own)
        if moves:
            found["refit whole"] = self._candidate("refit, whole model", {**refit, **self._whole}, own)
        if self.learned:
            found["learned"] = self._candidate("learned", {"untie": True} if self.tied else {}, needs="fit")
        return found

    def _parts(self) -> list[Candidate]:
        """The whole model's alignment in one part of it, and the other way round."""
        parts = {FIRST_PART: {"ffn": "none"}, "FFN alone": {"attention": "none", "heads": "none"}}
        parts |= {name: {"layers": layers} for name, layers in _halves(self.architecture)}
        found = [self._candidate(name, {**self._whole, **options}) for name, options in parts.items()]
        short = shortened(self.models)
        for other in self.models[1:]:
            rest = (other, *(model for model in self.models if model != other))
            found.append(
                replace(self._candidate(f"whole model, anchor {short[other]}", self._whole), anchor=other, models=rest)
            )
        return found

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
        return Candidate(name, self.models[0], tuple(self.models), parameters, of_model or {}, needs, self.other_ids)


def _halves(architecture: Architecture) -> list[tuple[str, str]]:
    """Subsets of layers: the lower and the upper half."""
    last = max((block.index for block in architecture.blocks if block.index is not None), default=0)
    middle = (last + 1) // 2
    return [("lower layers", f"0-{middle - 1}"), ("upper layers", f"{middle}-{last}")] if last else []


def with_models(best: Candidate, models: Sequence[str]) -> Candidate:
    """A candidate's way with fewer models, as a greedy soup tries them (Wortsman 2022)."""
    anchor = best.anchor if best.anchor in models else models[0]
    ordered = (anchor, *(m for m in models if m != anchor))
    of_model = {m: values for m, values in best.of_model.items() if m in models}
    name = f"{best.name} of {' and '.join(shortened(models).values())}"
    return replace(best, name=name, anchor=anchor, models=ordered, of_model=of_model)
