r"""Task vectors: the changes of fine-tunes of one base, which a rule merges map by map without data.

Directions: a change D_t is W_t - W_0 of one map, shape (outputs, inputs), in the base's coordinates; all work is done
in float64, but for large Grams of `wudi`. An embedding that is the head, too, is such a map. Under ``D -> L D R^T``
with orthogonal L and R every rule gives ``L f(D) R^T``: an alignment may come before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from mergekit.merge_methods.base import BasePolicy, InputContract, MergeMethodSpec, ParameterScope, ParameterSpec
from torch import Tensor

from rotation_merge.architecture.model import TensorInfo
from rotation_merge.averaging.methods import OwnMethod, Source, mean, weighted_sum
from rotation_merge.averaging.parameters import parameter
from rotation_merge.averaging.sliced import Part, SlicedMatrix, combined
from rotation_merge.model.vocabulary import row_slices

SLICE = 1 << 22
"""Entries of a slice of a long vocabulary."""

RATIO = 2.0
"""Where the lengths of a tensor's changes differ by more than this factor, the long ones are shortened."""

SHORTENED = "shortened to the length of the shortest, or to their share in the mean"
"""What `lengths: auto` does, in words."""

NEARER = 0.9
"""A change from the rounded base is this much shorter, where a model was trained from it."""

COMMON = (
    ParameterSpec("weight", float, ParameterScope.INPUT, 1.0, "importance of each model"),
    parameter("lambda", 1.0, "factor of the merged change"),
    parameter(
        "others",
        "mean",
        "changes of norms, biases and embeddings (but of an embedding that is the head, too): their mean or their sum",
        Literal["mean", "sum"],
    ),
    parameter(
        "lengths",
        "auto",
        "auto: shorten long changes where lengths differ by a factor of more than two; keep: leave them",
        Literal["auto", "keep"],
    ),
)


def spec_of(name: str, title: str, paper: str | None, *parameters: ParameterSpec) -> MergeMethodSpec:
    """What mergekit is told about a method (of an arXiv paper), with parameters of its own beside the common ones."""
    return MergeMethodSpec(
        name=name,
        pretty_name=title,
        reference_url=paper and f"https://arxiv.org/abs/{paper}",
        parameters=(*COMMON, *parameters),
        contract=InputContract(base=BasePolicy.REQUIRED, min_non_base=1),
    )


class TaskVectorMethod(OwnMethod):
    """A method that merges the changes of each linear map, and adds the result to the base's map."""

    needs_base = True
    tied = True

    def change(
        self, changes: Sequence[SlicedMatrix], weights: Sequence[float], parameters: Mapping[str, Any]
    ) -> SlicedMatrix:
        """The merged change of one map, before `lambda`.

        Args:
            changes: of the models, (outputs, inputs) each, float64; none is zero.
            weights: importances, positive.
            parameters: of the method; and `size`: the smaller side of the map, where the changes are given in smaller
                orthonormal bases.
        """
        raise NotImplementedError

    def head_change(
        self, changes: Sequence[SlicedMatrix], weights: Sequence[float], parameters: Mapping[str, Any]
    ) -> SlicedMatrix:
        """The same of a map onto a vocabulary; rows of a long one are in several slices."""
        return self.change(changes, weights, parameters)

    def merge(self, sources: Sequence[Source], info: TensorInfo, parameters: Mapping[str, Any], linear: bool) -> Tensor:
        base, *tuned_sources = sources
        start, weights = base.weight, [source.share for source in tuned_sources]
        parts, keeps = map_parts(start, info.vocabulary_axis is not None), parameters["lengths"] == "keep"
        changes, ratio = changes_of(start, [source.weight for source in tuned_sources], parts, keeps)
        counting = [number for number, change in enumerate(changes) if change.norm]
        if not counting:
            return start
        if linear:
            self.note("ratios", ratio)
            self.note("lengths", parameters["lengths"])
            rule = self.change if info.vocabulary_axis is None else self.head_change
            change = rule([changes[i] for i in counting], [weights[i] for i in counting], parameters)
        else:
            self.note("others", parameters["others"])
            average = weighted_sum if parameters["others"] == "sum" else mean
            change = combined(changes, lambda rows: average(rows, weights))
        merged = torch.empty(start.shape, dtype=torch.float64, device=start.device)
        for part in parts:
            merged[part] = start[part].double() + parameters["lambda"] * change.rows(part)
        return merged

    def words(self) -> list[str]:
        models, log = self.models, self.models.log
        ratios, rule = log["ratios"], " or ".join(sorted(set(log["others"]))) or "mean"
        tied = "" if models.tied_head is None else ", the embedding among them, which is the head, too"
        merged = f"merged the changes of {len(ratios)} linear maps{tied}, relative to {models.views[models.base].name}"
        heads = "".join(f", heads by {name}" for name in dict.fromkeys(log["heads"]))
        line = f"Delegate {self.spec.name} {merged}{heads}; other tensors got the {rule} of their changes."
        uneven = sum(ratio > RATIO for ratio in ratios)
        if ratios:
            line += f" Lengths of changes of one map differ by a factor of up to {max(ratios):.3g}"
            keep = "kept ('lengths: keep')" if "keep" in log["lengths"] else SHORTENED
            line += f", in {uneven} maps by more than {RATIO:g}: long ones are {keep}." if uneven else "."
        return [line]


def map_parts(base: Tensor, vocabulary: bool) -> list[Part]:
    """The slices of rows in which changes of a tensor are computed: several of a long vocabulary."""
    return [*row_slices(base.shape, 0, SLICE)] if vocabulary else [...]


def changes_of(
    base: Tensor, tuned: Sequence[Tensor], parts: Sequence[Part], keeps: bool
) -> tuple[list[SlicedMatrix], float]:
    """The changes of several models' tensors from a base, and the ratio of the longest to the shortest.

    Args:
        keeps: whether long ones stay as they are; else they are shortened by `shortening`.
    """
    changes = [change_of(base, tensor, parts) for tensor in tuned]
    factors, ratio = shortening([change.norm for change in changes])
    if keeps:
        return changes, ratio
    return [c if factor == 1.0 else c.scaled(factor) for c, factor in zip(changes, factors, strict=True)], ratio


def change_of(base: Tensor, tuned: Tensor, parts: Sequence[Part] = (...,)) -> SlicedMatrix:
    """The change of a model's tensor from a base, in float64; in several parts it is computed when it is asked for.

    A model may be stored in a narrower type than its base, and have been trained from the base in that type. Where it
    is nearer to the rounded base, by more than a tenth, the base's rounding is no part of its change.
    """

    def since(start: torch.dtype) -> SlicedMatrix:
        def rows(part: Part) -> Tensor:
            return (tuned[part].double() - base[part].to(start)).contiguous()  # no copy of all in float64

        error = rounding_error(tuned)
        return SlicedMatrix(rows, parts, error) if len(parts) > 1 else SlicedMatrix.of(rows(parts[0]), error)

    exact = since(base.dtype)
    if torch.promote_types(base.dtype, tuned.dtype) == tuned.dtype:
        return exact
    from_rounded = since(tuned.dtype)
    return from_rounded if from_rounded.norm < NEARER * exact.norm else exact


def rounding_error(weight: Tensor) -> float:
    """Bound on the largest singular value of the errors that rounding to float32 (or float64) left in a matrix.

    Errors of at most ``eps / 2`` of each entry, without correlation, have a norm of about a fifth of this.
    """
    share = sum(size**-0.5 for size in weight.shape[-2:])
    norm = float(torch.linalg.vector_norm(weight, dtype=torch.float64))  # without a copy in float64
    return torch.finfo(torch.promote_types(weight.dtype, torch.float32)).eps * share * norm


def shortening(lengths: Sequence[float]) -> tuple[list[float], float]:
    """Factors that shorten changes to the length of the shortest if lengths differ by more than `RATIO`.

    Also returns the ratio of the longest to the shortest.

    No change is divided by more than the number of changes, its share in their mean. So none is longer than in the
    mean, or than the shortest: beside others that are added in full, a longer one would take the result further from
    the base than the mean goes. Zero changes do not count.

    Args:
        lengths: norms of the changes of one tensor.
    """
    counting = [length for length in lengths if length > 0.0]
    ratio = max(counting) / min(counting) if counting else 1.0
    if ratio <= RATIO:
        return [1.0] * len(lengths), ratio
    return [max(min(counting) / length, 1 / len(counting)) if length else 1.0 for length in lengths], ratio
