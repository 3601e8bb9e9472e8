"""From the names that a module in memory has to those of its checkpoint, which may hold tensors apart or together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from rotation_merge.architecture.model import Architecture, Block, TensorInfo
from rotation_merge.run.maps import LinearMap, linear_map, same_map
from rotation_merge.run.measure import MeasuredStatistics
from rotation_merge.run.statistics_file import DeferredTensor


@dataclass
class Named:
    """Statistics under a checkpoint's names; see `file.Statistics`."""

    tensors: dict[str, DeferredTensor]
    inputs: dict[str, str]
    split: list[str]
    behind: list[str]
    uncalled: list[str]
    buffers: list[str]


def as_stored(measured: MeasuredStatistics, module: Architecture, stored: Architecture) -> Named:
    """Statistics of a module, `module`, under the names of its checkpoint, `stored`."""
    ours = {(b.module, b.place, b.index): b for b in module.blocks}
    named = Named({}, {}, [], [], [], [])
    leaders: dict[str, str] = {}
    for block in stored.blocks:
        same = ours.get((block.module, block.place, block.index))
        if same is None:
            continue
        candidates = [m for info in same.tensors if (m := linear_map(same, info)) is not None]
        for info in block.tensors:
            linear = linear_map(block, info)
            place = None if linear is None else same_map(linear, candidates)
            if linear is not None and place is not None:
                _name_map(named, measured, leaders, linear, *place)
            _name_fisher(named, measured, same, info, place)
    return named


def _name_map(
    named: Named, measured: MeasuredStatistics, leaders: dict[str, str], linear: LinearMap, ours: LinearMap, rows: slice
) -> None:
    name, tensors = linear.info.name, measured.tensors
    if ours.info.name in measured.uncalled:
        named.uncalled.append(name)
        return
    leader = measured.shared[ours.info.name]
    if leader not in leaders:
        leaders[leader] = name
        for statistic in ("gram", "diagonal", "factor", "count", "moments"):
            if f"{leader}.{statistic}" in tensors:
                named.tensors[f"{name}.{statistic}"] = tensors[f"{leader}.{statistic}"]
        if leader in measured.split:
            named.split.append(name)
    named.inputs[name] = leaders[leader]
    gradient = tensors.get(f"{ours.info.name}.gradient")
    if gradient is not None:
        named.behind += [name] if ours.info.name in measured.behind else []
        named.tensors[f"{name}.gradient"] = _cut(gradient, {-1: rows, -2: rows})


def _name_fisher(
    named: Named, measured: MeasuredStatistics, same: Block, info: TensorInfo, place: tuple[LinearMap, slice] | None
) -> None:
    ours = same.tensor(info.key) if place is None else place[0].info
    if ours is None:
        return
    for number, name in enumerate(info.names):
        whole = len(ours.names) != len(info.names)
        module_name = ours.names[0 if whole else number]
        stored = measured.tensors.get(f"{module_name}.fisher")
        if stored is None:
            named.buffers += [name] if module_name in measured.buffers else []
            continue
        if place is not None:
            dim = place[0].gives - (len(stored.shape) != len(ours.axes))
            stored = _cut(stored, {dim - len(stored.shape): place[1]})
        named.tensors[f"{name}.fisher"] = _row(stored, number) if whole and info.stacked else stored


def _cut(stored: DeferredTensor, parts: Mapping[int, slice]) -> DeferredTensor:
    """A piece of a tensor along some (negative) dimensions."""
    index: list[slice] = [slice(None)] * len(stored.shape)
    shape = list(stored.shape)
    for dim, part in parts.items():
        index[dim] = part
        shape[dim] = len(range(*part.indices(shape[dim])))
    return DeferredTensor(tuple(shape), stored.dtype, _then(stored.load, lambda tensor: tensor[tuple(index)]))


def _row(stored: DeferredTensor, number: int) -> DeferredTensor:
    return DeferredTensor(stored.shape[1:], stored.dtype, _then(stored.load, lambda tensor: tensor[number]))


def _then(load: Callable[[], Tensor], change: Callable[[Tensor], Tensor]) -> Callable[[], Tensor]:
    return lambda: change(load())
