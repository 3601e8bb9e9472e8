r"""Several LoRA adapters merged into one, map by map, without their base.

The changes ``D_t = B_t A_t`` of one map lie in the span of all B_t and of all A_t. With orthonormal bases Q_B (outputs)
and Q_A (inputs) of the two, ``D_t = Q_B C_t Q_A^T`` with small cores C_t. Methods that commute with orthogonal maps
merge the cores, with exactly the result of merging the full changes; methods that look at single entries (TIES, DARE)
merge the full changes of one map at a time. A head is known by its name, an embedding that is the head, too, is not.
The singular vectors of the result are the factors of the new adapter. A smaller rank cuts these: compressing the bases
first, and then merging (arXiv 2606.03723), was measured. At half the joint rank it was worse by `tsv` and `linear`, and
on average by `wudi`.

Source: Stoica and others 2025 (KnOTS, arXiv 2410.19735) for the common bases.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from mergekit.merge_methods import registry
from mergekit.merge_methods.base import TensorGroup
from mergekit.merge_methods.generalized_task_arithmetic import GeneralizedTaskArithmeticMerge
from torch import Tensor

from rotation_merge.architecture.model import Axis, TensorInfo
from rotation_merge.averaging.config import (
    ADAPTER_METHODS,
    ADAPTER_PARAMETERS,
    AdapterMergeConfig,
    CalibrationConfig,
    check_adapter_parameters,
    numbers_for,
)
from rotation_merge.averaging.methods import Source
from rotation_merge.averaging.parameters import checked, parameter
from rotation_merge.averaging.registry import TASK_VECTORS
from rotation_merge.averaging.svc import calibrate
from rotation_merge.averaging.task_vectors import TaskVectorMethod
from rotation_merge.errors import CheckpointError, RecipeError, nearest
from rotation_merge.files import FILE, FOLDER, Output, check_output
from rotation_merge.linalg.finite import all_finite
from rotation_merge.linalg.seeding import seeded
from rotation_merge.model.adapter_names import by_module, is_vocabulary_head
from rotation_merge.model.adapters import PEFT, SUFFIX, Adapter, Change, adapter_of, plain_adapter
from rotation_merge.model.low_rank import LowRank
from rotation_merge.model.open import paths_of

LINEAR = "linear"
SPARE = 16
"""Directions that a randomised decomposition looks at beyond the rank that is asked for."""

_ENTRYWISE = {
    method.spec.name: method
    for method in registry.registered_methods()
    if isinstance(method, GeneralizedTaskArithmeticMerge)
}


@dataclass(frozen=True)
class MergedMap:
    """The merged change of one map.

    Attributes:
        shares: by adapter, the merged change's component along the adapter's own, over that change; None where the
            adapter leaves the map as it is.
        energy: share of the merged change's squared norm that the rank keeps.
    """

    rank: int
    shares: tuple[float | None, ...]
    energy: float


@dataclass(frozen=True)
class MergedAdapter:
    """One adapter out of several.

    Attributes:
        adapter: the result; its form is that of the inputs.
        sources: paths of the inputs.
        maps: rank and energy of each map, by module.
        notes: on names of modules, as lines.
    """

    adapter: Adapter
    sources: tuple[str, ...]
    maps: Mapping[str, MergedMap]
    notes: Sequence[str] = ()

    def __repr__(self) -> str:
        rank = max(merged.rank for merged in self.maps.values())
        return f"MergedAdapter({', '.join(self.sources)}, {len(self.maps)} maps of rank {rank} at most)"

    def shares(self) -> list[float]:
        """Mean share of each input's change in the merged maps."""
        by_source = zip(*(merged.shares for merged in self.maps.values()), strict=True)
        present = [[share for share in column if share is not None] for column in by_source]
        return [sum(column) / len(column) for column in present]

    @property
    def energy(self) -> float:
        """The least share of a map's squared norm that the rank keeps."""
        return min(merged.energy for merged in self.maps.values())

    def save(self, out: str | os.PathLike[str], force: bool = False) -> None:
        """Write the adapter: a folder in peft's format, or the one file that the inputs were.

        Args:
            out: a new file, or a folder that is new or empty.
            force: replace what lies there, if it is no input.

        Raises:
            RotationMergeError: something lies there, or the name does not fit the format.
        """
        path = os.fspath(out)
        output = Output(path, FILE if path.endswith(SUFFIX) else FOLDER)
        check_output(output, self.sources, force)
        self.adapter.save(path)


def merge_adapters(
    adapters: Iterable[str | os.PathLike[str]],
    method: str = LINEAR,
    weights: Sequence[float] | None = None,
    config: AdapterMergeConfig | None = None,
    *,
    parameters: Mapping[str, Any] | None = None,
    same_base: bool = True,
    **options: Any,
) -> MergedAdapter:
    """Merge LoRA adapters of one base into one adapter.

    Args:
        adapters: folders or hub names in peft's format, or `.safetensors` files in kohya's or diffusers'; two at least.
        method: one of `ADAPTER_METHODS`; `linear` is the weighted mean of the changes.
        weights: one for each adapter; 1 if not given.
        config: rank of the result; or name its fields as options.
        parameters: of the method, such as `lambda`, `density`, `ridge`.
        same_base: whether adapters that name different bases are refused.
        **options: fields of the config: rank, energy, seed.

    Raises:
        CheckpointError: an adapter cannot be read, or they do not belong together.
        RecipeError: a parameter, an option or a weight means nothing.
    """
    chosen = AdapterMergeConfig.of(config, options)
    paths = paths_of(adapters, "adapter")
    if len(paths) < 2:
        remedy = "name two or more adapters, then the output folder"
        raise CheckpointError("a merge needs two adapters or more", remedy=remedy)
    chosen.check_energy()
    read = [plain_adapter(path) for path in paths]
    named, notes = by_module(read)
    base_weights = _check_alike(read, named, same_base)
    rule, entrywise = _rule(method, dict(parameters or {}))
    shares = [1.0] * len(read) if weights is None else numbers_for(weights, len(read), "adapter")
    if not all(math.isfinite(share) and share > 0 for share in shares):
        raise RecipeError(f"'weights' are {shares}", remedy="all must be positive numbers")
    most = sum(adapter.rank for adapter in read)
    if isinstance(chosen.rank, int) and chosen.rank > most:
        problem, remedy = f"option 'rank' is {chosen.rank}", f"it must be from 1 to {most}, the ranks together"
        raise RecipeError(problem, remedy=remedy)
    maps, maps_by_module = dict[str, LowRank](), dict[str, MergedMap]()
    with seeded(chosen.seed):
        for module in sorted({module for changes in named for module in changes}):
            pairs = zip(read, named, strict=True)
            parts = [a.low_rank(changes[module]) if module in changes else None for a, changes in pairs]
            maps[module], maps_by_module[module] = _merged(module, parts, shares, rule, entrywise, chosen)
    merged = adapter_of(maps, read[0].config, base_weights, read[0].form)
    return MergedAdapter(merged, tuple(a.path for a in read), maps_by_module, notes)


Rule = Callable[[Sequence[Tensor], Sequence[float], LowRank, bool], Tensor]
"""Merges changes of a map (or cores) by weights; takes factors of the map, too, and whether it is a head."""


def _rule(name: str, parameters: Mapping[str, Any]) -> tuple[Rule, bool]:
    """The rule of a method, and whether it looks at single entries, so that cores do not do.

    Raises:
        RecipeError: there is no such method or parameter, or a value means nothing.
    """
    if name not in ADAPTER_METHODS:
        remedy = f"{nearest(str(name), ADAPTER_METHODS)}; there are {', '.join(ADAPTER_METHODS)}"
        raise RecipeError(f"adapters are not merged by '{name}'", remedy=remedy)
    method = TASK_VECTORS.get(name) or _ENTRYWISE["task_arithmetic" if name == LINEAR else name]
    check_adapter_parameters(name, parameters)
    options = [parameter(o.key, o.default, o.text, o.type) for o in CalibrationConfig.options().values()]
    specs = {spec.name: spec for spec in (*method.spec.parameters, *options) if spec.name in ADAPTER_PARAMETERS[name]}
    values = {key: checked(spec, parameters.get(key, spec.default)) for key, spec in specs.items()}
    calibrates, alpha = values.pop("calibrate", None), values.pop("alpha", 1.0)
    if "alpha" in parameters and not calibrates:
        raise RecipeError("'alpha' has no effect without 'calibrate'", remedy="add 'calibrate: svc', or leave it out")
    values |= {"normalize": True} if name == LINEAR else {}

    def in_mergekit(changes: Sequence[Tensor], weights: Sequence[float], *_: Any) -> Tensor:
        group = TensorGroup.from_tensors([torch.zeros_like(changes[0]), *changes], base_index=0)
        (merged,) = method((group,), parameters={**values, "weight": list(weights)})
        return merged

    def by_own_rule(changes: Sequence[Tensor], weights: Sequence[float], like: LowRank, head: bool) -> Tensor:
        assert isinstance(method, TaskVectorMethod)
        sources = [Source(change, weight) for change, weight in zip(changes, weights, strict=True)]
        base, size = Source(torch.zeros_like(changes[0]), 0.0), {"size": min(like.shape)}
        info = TensorInfo("", ("",), (Axis(label="vocabulary"), Axis()) if head else ())
        return method.merge([base, *sources], info, {**values, **size}, _is_linear(like))

    own = isinstance(method, TaskVectorMethod)
    rule: Rule = by_own_rule if own else in_mergekit
    entrywise = not own and bool(method.sparsification_method or method.consensus_method)

    def then_calibrated(changes: Sequence[Tensor], weights: Sequence[float], like: LowRank, head: bool) -> Tensor:
        merged = rule(changes, weights, like, head)
        if _is_linear(like):
            calibrate(merged, torch.zeros_like(merged), changes, values, alpha)
        return merged

    return then_calibrated if calibrates else rule, entrywise


def _is_linear(like: LowRank) -> bool:
    """Whether factors are of a linear map; as in recipes, others get the mean."""
    return not like.embedding and like.a.ndim == 2


def _merged(
    module: str,
    parts: Sequence[LowRank | None],
    weights: Sequence[float],
    rule: Rule,
    entrywise: bool,
    config: AdapterMergeConfig,
) -> tuple[LowRank, MergedMap]:
    """One map of the new adapter; None if the adapter leaves the map unchanged."""
    like, most = next(part for part in parts if part is not None), sum(part.rank for part in parts if part is not None)
    flats = [None if part is None else part.flat() for part in parts]
    outputs = torch.linalg.qr(torch.cat([flat[1] for flat in flats if flat is not None], 1))[0]
    inputs = torch.linalg.qr(torch.cat([flat[0] for flat in flats if flat is not None], 0).mT)[0]
    unchanged = outputs.new_zeros(outputs.shape[1], inputs.shape[1])
    head = _is_linear(like) and like.shape[0] > like.shape[1] and is_vocabulary_head(module)
    cores = [unchanged if flat is None else (outputs.mT @ flat[1]) @ (flat[0] @ inputs) for flat in flats]
    if entrywise:
        merged = rule([outputs @ core @ inputs.mT for core in cores], weights, like, head)
        u, s, v = _decomposed(merged, most)
    else:
        merged = rule(cores, weights, like, head)
        u, s, v = torch.linalg.svd(merged, full_matrices=False)
        u, v = outputs @ u, v @ inputs.mT
    total = float(merged.square().sum())
    count = _count(s[:most], total, config)
    root = s[:count].sqrt()
    a, b = root[:, None] * v[:count], u[:, :count] * root
    stored_a, stored_b = a.reshape(-1, *like.a.shape[1:]), b.reshape(*b.shape, *like.b.shape[2:])
    factors = LowRank(stored_a.to(like.a.dtype), stored_b.to(like.b.dtype), embedding=like.embedding)
    if not all_finite([factors.a, factors.b]):
        problem = f"the merged change exceeds the range of {str(factors.a.dtype).removeprefix('torch.')}"
        raise RecipeError(problem, remedy="a smaller 'lambda' or smaller weights keep it in range")
    shares = tuple(None if flat is None else _share(a, b, *flat) for flat in flats)
    return factors, MergedMap(count, shares, float(s[:count].square().sum()) / total if total else 1.0)


def _share(a: Tensor, b: Tensor, a_before: Tensor, b_before: Tensor) -> float:
    """The component of ``b a`` along ``b_before a_before``, over the latter."""
    squared = float(((b_before.mT @ b_before) * (a_before @ a_before.mT)).sum())
    return float(((b.mT @ b_before) * (a @ a_before.mT)).sum()) / squared if squared else 1.0


def _count(values: Tensor, total: float, config: AdapterMergeConfig) -> int:
    """The number of singular values to keep: at least one, as an adapter has no rank 0."""
    if isinstance(config.rank, int):
        return min(config.rank, len(values))
    nonzero = int((values > 1e-9 * values[0]).sum()) if total else 1
    if config.rank is None:
        return max(1, nonzero)
    reached = values.square().cumsum(0) >= config.energy * total * (1 - 1e-12)
    return max(1, min(nonzero, int((~reached).sum()) + 1))


def _decomposed(matrix: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """The largest singular triples of a matrix: exact for small ones, else by randomised subspace iteration.

    The reported energy includes the error of the iteration.
    """
    size = most + SPARE
    if size * 4 > min(matrix.shape):
        return tuple(torch.linalg.svd(matrix, full_matrices=False))
    u, s, right = torch.svd_lowrank(matrix, q=size, niter=6)
    return u, s, right.mT


def _check_alike(read: Sequence[Adapter], named: Sequence[Mapping[str, Change]], same_base: bool) -> dict[str, Tensor]:
    """Refuse adapters of different forms, bases, or shapes of one map; returns weights of the base beside factors."""
    first, weights, shapes = read[0], dict[str, Tensor](), dict[str, list[int]]()
    remedy = "merge adapters of one base and one format; carry or convert one of them first"
    for adapter, changes in zip(read, named, strict=True):
        problem = ""
        if adapter.form != first.form:
            problem = f"is in the format of {adapter.form}, {first.path} in that of {first.form}"
        elif same_base and _place(adapter.base) != _place(first.base):
            bases = [base or "an unnamed base" for base in (adapter.base, first.base)]
            problem = f"is an adapter of {bases[0]}, {first.path} one of {bases[1]}"
            remedy += "; if the two are the same model, use --force (in Python: same_base=False)"
        for module, change in changes.items():
            shape = [adapter.shapes[change.b][0], math.prod(adapter.shapes[change.a][1:])]
            if shape != shapes.setdefault(module, shape):
                problem = f"changes '{change.module}' of shape {shape}, an adapter before it of {shapes[module]}"
            weight = adapter.tensors[change.value] if change.value else None
            key = change.value.replace(change.module, module, 1)
            if weight is not None and not torch.equal(weights.setdefault(key, weight), weight):
                problem = f"holds another '{change.value}' of the base than the adapters before it"
        if problem:
            raise CheckpointError(problem, where=adapter.path, remedy=remedy)
    if first.form != PEFT and not any(set(named[0]) & set(changes) for changes in named[1:]):
        raise CheckpointError(f"has no map in common with {first.path}", where=read[1].path, remedy=remedy)
    return weights


def _place(base: str | None) -> str | None:
    """A base's folder without links and relative parts; another name unchanged."""
    return os.path.realpath(base) if base and os.path.isdir(base) else base
