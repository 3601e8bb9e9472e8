"""What may be tried: recipes by name, from the plain average on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from rotation_merge.architectures import Architecture
from rotation_merge.matching.options import BOTH

PLAIN = {"attention": "none", "heads": "none", "ffn": "none", "rescale": False}
LOCAL = {"heads": "permutation"}


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
    """

    name: str
    anchor: str
    models: tuple[str, ...]
    parameters: Mapping[str, Any]
    of_model: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    needs: str | None = None

    @property
    def kind(self) -> str:
        """What takes its time: learning, refit, regmean, matching on samples, or on weights alone."""
        if "match_on" in self.parameters:
            return "seen"
        return "learned" if self.needs == "fit" else str(self.parameters.get("delegate", "matching"))

    def recipe(self, dtype: str | None) -> str:
        """The recipe as YAML."""
        share = round(1 / len(self.models), 6)
        content: dict[str, Any] = {
            "merge_method": "rotation_merge",
            "base_model": self.anchor,
            "models": [{"model": m, "parameters": {"weight": share, **self.of_model.get(m, {})}} for m in self.models],
            "parameters": dict(self.parameters),
        }
        return yaml.safe_dump({**content, **({"dtype": dtype} if dtype else {})}, sort_keys=False)


def candidates(
    models: Sequence[str],
    architecture: Architecture,
    tied: bool,
    refit: Mapping[str, Any] | None,
    data: Mapping[str, str],
    learned: bool,
    near: bool = True,
) -> list[Candidate]:
    """What may be tried, the most telling first.

    Args:
        models: the anchor first.
        tied: whether the output shares the embeddings' tensor, which a rotation of the stream has to part.
        refit: what a refit is told beside its data; None: do not try it.
        data: for each model the samples that a refit uses.
        learned: whether an alignment can be learned on the samples.
        near: whether the models share their coordinates; where not, what moves the whole model comes early.
    """
    anchor, turned, all_of = models[0], architecture.admitting("rotation"), tuple(models)
    whole = {**LOCAL, "residual": "largest", **({"untie": True} if tied and turned else {})}
    own = {model: {"data": data[model]} for model in models}
    told = {"delegate": "refit", **(refit or {})}
    found = {
        "plain": Candidate("plain", anchor, all_of, PLAIN),
        "local": Candidate("heads, neurons", anchor, all_of, LOCAL),
        "regmean": Candidate("regmean", anchor, all_of, {"delegate": "regmean", **LOCAL}, needs="statistics"),
    }
    if any(groups[-1] != "none" for groups in architecture.stream_groups.values()):
        found["whole"] = Candidate("whole model", anchor, all_of, whole)
        seen = {**whole, "match_on": BOTH}
        found["seen"] = Candidate("whole model, by activations", anchor, all_of, seen, own)
    if refit is not None:
        found["refit"] = Candidate("refit, plain", anchor, all_of, {**told, **PLAIN}, own)
        found["refit whole"] = Candidate("refit, whole model", anchor, all_of, {**told, **whole}, own)
    if learned:
        found["learned"] = Candidate("learned", anchor, all_of, {"untie": True} if tied else {}, needs="fit")
    order = [found[name] for name in (NEAR if near else FAR) if name in found]
    order.append(Candidate(FIRST_PART, anchor, all_of, {**whole, "ffn": "none"}))
    order.append(Candidate("FFN alone", anchor, all_of, {**whole, "attention": "none", "heads": "none"}))
    order += [Candidate(name, anchor, all_of, {**whole, "layers": layers}) for name, layers in _parts(architecture)]
    for other in models[1:]:
        rest = (other, *(model for model in models if model != other))
        order.append(Candidate(f"whole model, anchor {shortened(models)[other]}", other, rest, whole))
    return order


FIRST_PART = "attention alone"
"""The first of the candidates that align parts; a soup of fewer models goes before them."""

NEAR = ("plain", "local", "refit", "regmean", "whole", "refit whole", "learned", "seen")
FAR = ("plain", "whole", "refit whole", "seen", "learned", "local", "refit", "regmean")
"""The order in which candidates are tried, for models that share their coordinates and for those that do not."""


def shortened(models: Sequence[str]) -> dict[str, str]:
    """The last parts of models' names, as many as tell them apart."""
    for count in range(1, 9):
        found = {m: "+".join("/".join(p.rstrip("/").split("/")[-count:]) for p in m.split("+")) for m in models}
        if len(set(found.values())) == len(set(models)):
            return found
    return {model: model for model in models}


def _parts(architecture: Architecture) -> list[tuple[str, str]]:
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
    return Candidate(name, anchor, ordered, best.parameters, of_model, best.needs)
