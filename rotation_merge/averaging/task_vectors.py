r"""Averages of task vectors: the changes of fine-tunes of one base, merged map by map without data.

Directions: a change D_t is W_t - W_0 of one map, shape (outputs, inputs), in the base's coordinates; all work is done
in float64. An embedding that is the head, too, is such a map. Under ``D -> L D R^T`` with orthogonal L and R every rule
here gives ``L f(D) R^T``: an alignment may come before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from mergekit.merge_methods.base import BasePolicy, InputContract, MergeMethodSpec, ParameterScope, ParameterSpec
from torch import Tensor

from rotation_merge.averaging.methods import TENSOR, DelegateMethod, MergeLog, Plan, Source, Target, parameter
from rotation_merge.config import NotNegative
from rotation_merge.linalg.sliced import Part, SlicedMatrix, beside, polar, weighted_sum
from rotation_merge.model.rows import row_slices

SLICE = 1 << 22
"""Entries of a slice of a long vocabulary."""

RATIO = 2.0
"""Where the lengths of a tensor's changes differ by more than this factor, the long ones are shortened."""

SHORTENED = "shortened to the length of the shortest, or to their share in the mean"
"""What `lengths: auto` does, in words."""

WUDI_RIDGE = 0.05
"""Default strength of the pull of `wudi` towards its prior, relative to the mean eigenvalue of the Grams."""

BESIDE_RIDGE = 0.3
"""The same where a change is added beside another one: more of the plain sum, which is the prior there."""

STEPS = 30
"""Of conjugate gradients, where both sides of a map are weighed."""

SVD = 24.0
"""Times as long as a product of a matrix with its transpose a thin SVD takes, in float64 on a processor."""

ZERO = 1e-9
"""Singular values below this share of the largest have no direction, in a change that is exact in float64."""

PRIOR = 0.7
"""Factor of the sum of the changes in the prior of `both` sides."""

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

CONTRACT = InputContract(base=BasePolicy.REQUIRED, min_non_base=1)


class TaskVectorMethod(DelegateMethod):
    """A delegate that merges the changes of each linear map, and adds the result to the base's map.

    Attributes:
        sees_rounding: whether its rule tells directions of a change from those that rounding made.
    """

    sees_rounding = False

    def change(
        self,
        changes: Sequence[Tensor],
        weights: Sequence[float],
        parameters: Mapping[str, Any],
        shape: tuple[int, int] | None = None,
    ) -> Tensor:
        """The merged change of one map, before `lambda`.

        Args:
            changes: of the models, (outputs, inputs) each, float64; not all zero.
            weights: importances, positive.
            parameters: of the method; and where it sees rounding, `rounding`: of each change the largest singular
                value that the rounding of its weights gives it, over its norm. Without that entry changes are exact.
            shape: of the map, where the changes are given in smaller orthonormal bases; None: theirs.
        """
        raise NotImplementedError

    def operations(self, shape: tuple[int, int], models: int, parameters: Mapping[str, Any]) -> float:
        """Approximate number of float64 operations of `change` for one map.

        Args:
            shape: (outputs, inputs).
        """
        return 2.0 * models * shape[0] * shape[1]

    def in_slices(
        self, changes: Sequence[SlicedMatrix], weights: Sequence[float], parameters: Mapping[str, Any]
    ) -> SlicedMatrix:
        """`change` of a map whose rows may be in several slices, as those of a long vocabulary; here of the whole."""
        return SlicedMatrix.of(self.change([change.whole() for change in changes], weights, parameters))

    def merges_in_slices(self) -> bool:
        """Whether `in_slices` never holds a whole change."""
        return type(self).in_slices is not TaskVectorMethod.in_slices

    def plan(self) -> Plan:
        return Plan(TENSOR, base=True, tied=True)

    def merge(self, sources: Sequence[Source], target: Target, parameters: Mapping[str, Any]) -> Tensor:
        base, *tuned_sources = sources
        start, weights = base.weight, [source.share for source in tuned_sources]
        parts: list[Part] = [...]
        if target.info.vocabulary_axis is not None:
            parts = [*row_slices(start, 0, SLICE)]
        changes = [TensorChange.of(start, source.weight, parts) for source in tuned_sources]
        lengths = [change.length for change in changes]
        if not any(lengths):
            return start
        factors, ratio = shortening(lengths)
        if parameters["lengths"] == "auto":
            changes = [change.scaled(factor) for change, factor in zip(changes, factors, strict=True)]
        matrices = [change.matrix() for change in changes]
        if target.linear:
            target.log.note("ratios", ratio)
            target.log.note("lengths", parameters["lengths"])
            if self.sees_rounding:
                parameters = {**parameters, "rounding": _rounding_shares(tuned_sources, lengths)}
            if target.info.vocabulary_axis is not None and "sides" in parameters:
                # with both sides, rows of rare tokens, which have next to no change, would grow
                parameters = {**parameters, "sides": "one"}
            change = self.in_slices(matrices, weights, parameters)
        else:
            target.log.note("others", parameters["others"])
            scale = sum(weights) if parameters["others"] == "sum" else 1.0
            change = SlicedMatrix(lambda part: scale * mean_of([each.rows(part) for each in changes], weights))
        merged = torch.empty(start.shape, dtype=torch.float64, device=start.device)
        for part in parts:
            merged[part] = start[part].double() + parameters["lambda"] * change.rows(part)
        return merged

    def words(self, log: MergeLog) -> list[str]:
        ratios = log.facts.get("ratios", [])
        rule = " or ".join(sorted(set(log.facts.get("others", [])))) or "mean"
        tied = ", the embedding among them, which is the head, too" if log.facts.get("tied") else ""
        how = f"merged the changes of {len(ratios)} linear maps{tied}, relative to {log.base}"
        scope = f"Norms, biases, {'' if tied else 'embeddings '}and other tensors got the {rule} of their changes."
        span = f" Lengths of changes of one map differ by a factor of up to {max(ratios):.3g}." if ratios else ""
        lines = [f"Delegate {self.spec.name} {how}. {scope}{span}"]
        uneven = [ratio for ratio in ratios if ratio > RATIO]
        if uneven:
            keep = "keep" in log.facts["lengths"]
            done = "they are kept ('lengths: keep')" if keep else f"the longer ones are {SHORTENED}"
            lines.append(
                f"In {len(uneven)} of {len(ratios)} linear maps they differ by a factor of more than {RATIO:g}: {done}."
            )
        return lines


class Wudi(TaskVectorMethod):
    r"""RegMean with the Grams that the changes imply, in closed form.

    ``D = (sum_t a_t D_t G_t + l M) (sum_t a_t G_t + l I)^-1`` with ``G_t = D_t^T D_t`` and M the mean of the changes; l
    is `ridge` times the mean eigenvalue of the sum, each weighted by itself. (The plain mean is next to nothing where
    the changes have low rank, as those of LoRAs, and D grows out of proportion.) `sides: both` also weighs the outputs,
    by ``L_t = D_t D_t^T``: ``sum_t L_t D G_t = sum_t L_t D_t G_t``, by conjugate gradients.

    Source: Cheng and others 2025 (WUDI-Merging, arXiv 2503.08099, equation 9, there by gradient descent).
    """

    spec = MergeMethodSpec(
        name="wudi",
        pretty_name="WUDI (closed form)",
        reference_url="https://arxiv.org/abs/2503.08099",
        parameters=(
            *COMMON,
            parameter(
                "ridge",
                WUDI_RIDGE,
                "strength of the pull towards the mean of the changes, relative to the mean eigenvalue of the Grams",
                NotNegative,
            ),
            parameter(
                "sides", "one", "Grams of one side (inputs) or both (inputs and outputs)", Literal["one", "both"]
            ),
        ),
        contract=CONTRACT,
    )

    def change(
        self,
        changes: Sequence[Tensor],
        weights: Sequence[float],
        parameters: Mapping[str, Any],
        shape: tuple[int, int] | None = None,
    ) -> Tensor:
        if parameters["sides"] == "both":
            return both_sides(changes, weights, parameters["ridge"])
        shares = _gram_shares([float(d.norm()) for d in changes], weights)
        return one_side(changes, shares, mean_of(changes, weights), parameters["ridge"])

    def in_slices(
        self, changes: Sequence[SlicedMatrix], weights: Sequence[float], parameters: Mapping[str, Any]
    ) -> SlicedMatrix:
        if len(changes[0].parts) == 1:
            return super().in_slices(changes, weights, parameters)
        grams = [change.gram() for change in changes]
        lengths = [float(gram.trace().sqrt()) for gram in grams]
        shares = _gram_shares(lengths, weights)
        total = torch.zeros_like(grams[0])
        for gram, share in zip(grams, shares, strict=True):
            total.add_(gram, alpha=share)
        solve = _ridge_solver(total, parameters["ridge"])

        def merged(part: Part) -> Tensor:
            rows = [change.rows(part) for change in changes]
            prior = mean_of(rows, weights)
            right = torch.zeros_like(prior)
            for change, gram, share in zip(rows, grams, shares, strict=True):
                right.addmm_(change - prior, gram, alpha=share)
            return prior + solve(right)

        return replace(changes[0], rows=merged)

    def operations(self, shape: tuple[int, int], models: int, parameters: Mapping[str, Any]) -> float:
        outputs, inputs = shape
        if parameters["sides"] == "both":
            small, large = sorted(shape)
            return float(STEPS * models * (4 * large * small**2 + 2 * small**3))
        products = 4 * outputs**2 * inputs if _is_wide(shape) else 2 * outputs * inputs**2
        return float(models * (2 * outputs * inputs**2 + products) + inputs**3 + 2 * outputs * inputs**2)


def _is_wide(shape: Sequence[int]) -> bool:
    """Whether ``D D^T D`` takes less time and memory by ``D D^T`` than by ``D^T D``; shape: (outputs, inputs)."""
    return 2 * shape[0] < shape[1]


def added_by_wudi(first: Tensor, second: Tensor) -> Tensor:
    """What the second of two changes of one base adds to the first, where `Wudi` merges them with their sum as M.

    Where the two read from orthogonal inputs (``second @ first^T = 0``) this is the second change itself.

    Args:
        first, second: of a map, (..., outputs, inputs), float64.
    """
    if first.ndim > 2:
        return torch.stack([added_by_wudi(*pair) for pair in zip(first, second, strict=True)])
    if not bool(first.any()) or not bool(second.any()):
        return second
    changes = [first, second]
    shares = _gram_shares([float(d.norm()) for d in changes], [1.0, 1.0])
    return one_side(changes, shares, first + second, BESIDE_RIDGE) - first


def _gram_shares(lengths: Sequence[float], weights: Sequence[float]) -> list[float]:
    """a_t: each weight over the squared norm of the change, which its Gram is divided by; none for a zero change."""
    squares = [length**2 for length in lengths]
    return [weight / square if square else 0.0 for weight, square in zip(weights, squares, strict=True)]


def one_side(changes: Sequence[Tensor], shares: Sequence[float], prior: Tensor, ridge: float) -> Tensor:
    """``(sum_t a_t D_t G_t + l M) (sum_t a_t G_t + l I)^-1``; see `Wudi`.

    Args:
        shares: a_t.
        prior: M.
        ridge: l over the mean eigenvalue of the sum, weighted by itself.
    """
    total = torch.zeros(prior.shape[1], prior.shape[1], dtype=prior.dtype, device=prior.device)
    right = torch.zeros_like(prior)
    for change, share in zip(changes, shares, strict=True):
        if _is_wide(prior.shape):
            total.addmm_(change.mT, change, alpha=share)
            right.addmm_((change - prior) @ change.mT, change, alpha=share)
        else:
            gram = change.mT @ change
            total.add_(gram, alpha=share)
            right.addmm_(change - prior, gram, alpha=share)
    return prior + _ridge_solver(total, ridge)(right)


def _ridge_solver(total: Tensor, ridge: float) -> Callable[[Tensor], Tensor]:
    """``R (G + l I)^-1`` as a function of R; l is `ridge` times G's mean eigenvalue, weighted by itself. Changes G."""
    penalty = ridge * float(total.square().sum() / total.diagonal().sum())
    if penalty == 0.0:
        return lambda right: torch.linalg.lstsq(total, right.mT, driver="gelsd").solution.mT
    total.diagonal().add_(penalty)
    factor = torch.linalg.cholesky(total)
    return lambda right: torch.cholesky_solve(right.mT, factor).mT


def both_sides(changes: Sequence[Tensor], weights: Sequence[float], ridge: float) -> Tensor:
    """``sum_t L_t D G_t = sum_t L_t D_t G_t`` with a ridge towards `PRIOR` times the sum, by conjugate gradients.

    The sum is the weighted mean times the number of changes that count, ``(sum_t w_t)^2 / sum_t w_t^2``: of equal
    weights, their plain sum.
    Each factor is divided by its trace; of the two the smaller one is formed. Both have the eigenvalues of G_t, so that
    the ridge is the sum of the squares of `ridge` times their mean, weighted by themselves.
    """
    wide = changes[0].shape[0] <= changes[0].shape[1]
    grams = [(d, d @ d.mT if wide else d.mT @ d, w) for d, w in zip(changes, weights, strict=True) if bool(d.any())]
    counting = [(d, gram, w / float(gram.trace()) ** 2) for d, gram, w in grams]
    unit = sum(w * w for _, _, w in grams) / sum(w for _, _, w in grams)
    start = PRIOR * sum((w / unit * d for d, _, w in grams), torch.zeros_like(changes[0]))
    penalty = sum(share * (ridge * float(gram.square().sum() / gram.trace())) ** 2 for _, gram, share in counting)

    def gram_product(x: Tensor, change: Tensor, gram: Tensor, share: float) -> Tensor:
        """``D D^T X D^T D``, computed with the smaller Gram of D."""
        if wide:
            return share * (gram @ (x @ change.mT) @ change)
        return share * (change @ (change.mT @ x @ gram))

    def apply(x: Tensor) -> Tensor:
        return sum((gram_product(x, *term) for term in counting), penalty * x)

    merged = start.clone()
    residual = sum((gram_product(term[0], *term) for term in counting), penalty * start) - apply(start)
    direction, size = residual.clone(), float(residual.square().sum())
    least = 1e-24 * max(size, 1e-300)
    for _ in range(STEPS):
        if size <= least:
            break
        image = apply(direction)
        step = size / float((direction * image).sum())
        merged.add_(direction, alpha=step)
        residual.sub_(image, alpha=step)
        before, size = size, float(residual.square().sum())
        direction = residual + (size / before) * direction
    return merged


class Tsv(TaskVectorMethod):
    """TSV-M: the largest singular triples of each change, directions made orthogonal to those of the others.

    Of each of T changes at most size / T triples are kept (fewer of a change of lower rank, such as a LoRA's), those of
    all stand side by side, and both sides are replaced by their polar factors. Triples that rounding to float32 may
    have made do not count; rounding to narrower types cannot be told from what training changed, and counts.

    Source: Gargiulo and others 2025 (Task Singular Vectors, arXiv 2412.00081), algorithm 1.
    """

    spec = MergeMethodSpec(
        name="tsv",
        pretty_name="TSV-M",
        reference_url="https://arxiv.org/abs/2412.00081",
        parameters=COMMON,
        contract=CONTRACT,
    )
    sees_rounding = True

    def change(
        self,
        changes: Sequence[Tensor],
        weights: Sequence[float],
        parameters: Mapping[str, Any],
        shape: tuple[int, int] | None = None,
    ) -> Tensor:
        matrices = [SlicedMatrix.of(change) for change in changes]
        return self.in_slices(matrices, weights, parameters, min(shape or changes[0].shape)).whole()

    def in_slices(
        self,
        changes: Sequence[SlicedMatrix],
        weights: Sequence[float],
        parameters: Mapping[str, Any],
        size: int | None = None,
    ) -> SlicedMatrix:
        """`size`: the smaller side of the map, where changes are given in smaller orthonormal bases."""
        lengths = [change.norm() for change in changes]
        shares = parameters.get("rounding", [0.0] * len(changes))
        counting = sum(length > 0.0 for length in lengths)
        lefts, values, rights = [], [], []
        for change, length, weight, share in zip(changes, lengths, weights, shares, strict=True):
            if length == 0.0:
                continue
            left_vectors, s, v = change.svd()
            least = max(ZERO * float(s[0]), share * length)
            rank = max(1, min((size or len(s)) // counting, int((s > least).sum())))
            lefts.append(left_vectors(rank))
            values.append(weight * s[:rank])
            rights.append(v[:rank].clone())  # or all of it stays in memory
        return (beside(lefts).polar() * torch.cat(values)) @ polar(torch.cat(rights))

    def operations(self, shape: tuple[int, int], models: int, parameters: Mapping[str, Any]) -> float:
        return (models + 2) * svd_operations(shape)


class Iso(TaskVectorMethod):
    """Iso-C: the sum of the changes with all its singular values replaced by their mean.

    Changes of low rank get the mean over the directions that they span.

    Source: Marczak and others 2025 (No Task Left Behind, arXiv 2502.04959), algorithm 1.
    """

    spec = MergeMethodSpec(
        name="iso",
        pretty_name="Iso-C",
        reference_url="https://arxiv.org/abs/2502.04959",
        parameters=COMMON,
        contract=CONTRACT,
    )
    sees_rounding = True

    def change(
        self,
        changes: Sequence[Tensor],
        weights: Sequence[float],
        parameters: Mapping[str, Any],
        shape: tuple[int, int] | None = None,
    ) -> Tensor:
        return self.in_slices([SlicedMatrix.of(d) for d in changes], weights, parameters).whole()

    def in_slices(
        self, changes: Sequence[SlicedMatrix], weights: Sequence[float], parameters: Mapping[str, Any]
    ) -> SlicedMatrix:
        weighed = [change * weight for change, weight in zip(changes, weights, strict=True)]
        left_vectors, s, v = weighted_sum(changes, weights).svd()
        shares = parameters.get("rounding", [0.0] * len(weighed))
        least = sum(share * change.norm() for share, change in zip(shares, weighed, strict=True))
        count = max(1, int((s > max(ZERO * float(s[0]), least)).sum()))
        return (left_vectors(count) * s[:count].mean()) @ v[:count]

    def operations(self, shape: tuple[int, int], models: int, parameters: Mapping[str, Any]) -> float:
        return svd_operations(shape)


def svd_operations(shape: tuple[int, int]) -> float:
    """Floating-point operations of a thin SVD."""
    small, large = sorted(shape)
    return SVD * large * small**2


@dataclass(frozen=True)
class TensorChange:
    """The change of a model's tensor, computed in float64; of a long vocabulary in slices of its rows.

    Attributes:
        start: type that the base is rounded to.
        parts: the slices.
        factor: of the change.
    """

    base: Tensor
    tuned: Tensor
    start: torch.dtype
    parts: Sequence[Part] = (...,)
    factor: float = 1.0

    @classmethod
    def of(cls, base: Tensor, tuned: Tensor, parts: Sequence[Part] = (...,)) -> TensorChange:
        """The change from a base.

        A model may be stored in a narrower type than its base, and have been trained from the base in that type. Where
        it is nearer to the rounded base, by more than a tenth, the base's rounding is no part of its change.
        """
        exact = cls(base, tuned, base.dtype, parts)
        if torch.promote_types(base.dtype, tuned.dtype) == tuned.dtype:
            return exact
        from_rounded = cls(base, tuned, tuned.dtype, parts)
        return from_rounded if from_rounded.length < NEARER * exact.length else exact

    def scaled(self, factor: float) -> TensorChange:
        return self if factor == 1.0 else replace(self, factor=factor)

    def rows(self, part: Part = ...) -> Tensor:
        """The change of some rows; not given: of all."""
        return self._whole if part is ... else self._computed(part)

    def matrix(self) -> SlicedMatrix:
        return SlicedMatrix(self.rows, self.parts)

    @cached_property
    def length(self) -> float:
        """Norm of the change."""
        return self.matrix().norm()

    @cached_property
    def _whole(self) -> Tensor:
        return self._computed(...)

    def _computed(self, part: Part) -> Tensor:
        change = (self.tuned[part].double() - self.base[part].to(self.start)).contiguous()  # no copy of all in float64
        return change if self.factor == 1.0 else change.mul_(self.factor)


def _rounding_shares(sources: Sequence[Source], lengths: Sequence[float]) -> list[float]:
    """`rounding_error` of each model's weights over the norm of its change."""
    return [
        rounding_error(source.weight) / max(length, 1e-300) for source, length in zip(sources, lengths, strict=True)
    ]


def rounding_error(weight: Tensor) -> float:
    """Bound on the largest singular value of the errors that rounding to float32 (or float64) left in a matrix.

    Errors of at most ``eps / 2`` of each entry, without correlation, have a norm of about a fifth of this.
    """
    outputs, inputs = weight.shape[-2:]
    share = outputs**-0.5 + inputs**-0.5
    norm = float(torch.linalg.vector_norm(weight, dtype=torch.float64))  # without a copy in float64
    return torch.finfo(torch.promote_types(weight.dtype, torch.float32)).eps * share * norm


def mean_of(changes: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The weighted mean."""
    total = sum(weights)
    return sum((weight / total * d for d, weight in zip(changes, weights, strict=True)), torch.zeros_like(changes[0]))


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


TASK_VECTORS: tuple[TaskVectorMethod, ...] = (Wudi(), Tsv(), Iso())
