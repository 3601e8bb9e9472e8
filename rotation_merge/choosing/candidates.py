"""What may be tried: recipes by name, from the plain average on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from rotation_merge.architectures import Architecture

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
) -> list[Candidate]:
    """What may be tried, the most telling first.

    Args:
        models: the anchor first.
        tied: whether the output shares the embeddings' tensor, which a rotation of the stream has to part.
        refit: what a refit is told beside its data; None: do not try it.
        data: for each model the samples that a refit uses.
        learned: whether an alignment can be learned on the samples.
    """
    anchor, turned = models[0], architecture.admitting("rotation")
    whole = {**LOCAL, "residual": "largest", **({"untie": True} if tied and turned else {})}
    found = [
        Candidate("plain", anchor, tuple(models), PLAIN),
        Candidate("heads, neurons", anchor, tuple(models), LOCAL),
    ]
    if any(groups[-1] != "none" for groups in architecture.stream_groups.values()):
        found.append(Candidate("whole model", anchor, tuple(models), whole))
    own = {model: {"data": data[model]} for model in models}
    if refit is not None:
        told = {"delegate": "refit", **refit}
        found.append(Candidate("refit, plain", anchor, tuple(models), {**told, **PLAIN}, own))
        found.append(Candidate("refit, whole model", anchor, tuple(models), {**told, **whole}, own))
    regmean = {"delegate": "regmean", **LOCAL}
    found.append(Candidate("regmean", anchor, tuple(models), regmean, needs="statistics"))
    if learned:
        found.append(Candidate("learned", anchor, tuple(models), {"untie": True} if tied else {}, needs="fit"))
    found.append(Candidate("attention alone", anchor, tuple(models), {**whole, "ffn": "none"}))
    found.append(Candidate("FFN alone", anchor, tuple(models), {**whole, "attention": "none", "heads": "none"}))
    for other in models[1:]:
        rest = (other, *(model for model in models if model != other))
        found.append(Candidate(f"whole model, anchor {other}", other, rest, whole))
    return found


def soup(best: Candidate, order: Sequence[str]) -> list[Candidate]:
    """The best candidate's way with the first two, three, ... models of an order (greedy soup, Wortsman 2022)."""
    if len(order) < 3:
        return []
    found = []
    for count in range(2, len(order)):
        models = tuple(order[:count])
        anchor = best.anchor if best.anchor in models else models[0]
        models = (anchor, *(m for m in models if m != anchor))
        found.append(
            Candidate(f"{best.name}, the best {count}", anchor, models, best.parameters, best.of_model, best.needs)
        )
    return found
