"""An adapter's tensors by the tensors of the base that they change."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rotation_merge.architecture.model import TensorInfo
from rotation_merge.architecture.registry import PossibleTensor, every_name
from rotation_merge.errors import CheckpointError
from rotation_merge.model.adapters import Adapter, Change, lora_scale
from rotation_merge.model.low_rank import stacks, transposed

WHOLE = "merge the adapter into its base and carry the whole model"
WRONG_BASE = "name the base that it was trained on"

READS_STORED_ORDER, READS_BY_CLASS = (0, 19, 0), (0, 19, 1)
"""peft before the first takes fused experts [e, x, y] for [e, in, out], from the second on as the class has them."""


@dataclass(frozen=True)
class AdapterEntry:
    """An adapter's change of one weight of its base.

    Attributes:
        module: the module's path, as the adapter's names have it.
        change: names of the factors, of a magnitude.
        scale: factor of the product.
        spot: the tensor that is changed; expert: which one, where the base stores experts apart.
        transposed: it is [in, out] to the adapter, whose factors are A (rank, in) and B (out, rank).
    """

    module: str
    change: Change
    scale: float
    spot: PossibleTensor
    expert: int | None = None
    transposed: bool = False

    @property
    def a(self) -> str:
        return str(self.change.a)

    @property
    def b(self) -> str:
        return str(self.change.b)

    @property
    def bias(self) -> str:
        """peft's name for a bias of this module (`lora_bias`), which the adapter may have."""
        return self.b.removesuffix("weight") + "bias"

    @property
    def experts(self) -> int:
        """Number of experts whose factors stand in one; 0: they are of one map."""
        info = self.spot.info
        return (info.axes[0].size or 1) if stacks(info) and self.expert is None else 0


@dataclass(frozen=True)
class ParsedAdapter:
    """An adapter's low-rank changes, and its whole tensors by name (modules_to_save, biases)."""

    entries: list[AdapterEntry] = field(default_factory=list)
    saved: dict[str, PossibleTensor] = field(default_factory=dict)


def parse(adapter: Adapter, base: Mapping[str, Any]) -> ParsedAdapter:
    """The tensors of a base that an adapter's tensors change.

    Args:
        base: the base's config.

    Raises:
        CheckpointError: the adapter changes something that the base has not, or confuses inputs and outputs.
    """
    names, result = every_name(base), ParsedAdapter()
    for name, change in adapter.changes.items():
        if change.value is not None:
            plain = name.replace(".base_layer", "")
            if plain not in names:
                raise _unknown(adapter, plain)
            result.saved[change.value] = names[plain]
        if change.a is not None:
            entry = entry_of(adapter, name, names)
            if entry is None:
                raise _unknown(adapter, name.removesuffix(".weight"))
            if entry.transposed != transposed(entry.spot.info):
                problem = f"swaps inputs and outputs of '{entry.spot.info.name}', as peft does with this base's experts"
                raise CheckpointError(problem, where=adapter.path, remedy=WHOLE)
            result.entries.append(entry)
        elif change.shift is not None and adapter.changes.get(f"{name.removesuffix('bias')}weight") is None:
            raise _unknown(adapter, name)
    return result


def entry_of(adapter: Adapter, name: str, names: Mapping[str, PossibleTensor]) -> AdapterEntry | None:
    """An adapter's change of one weight; None if the base lacks the weight.

    Args:
        name: of the weight, as the adapter has it.
        names: all that the base's tensors may go by.

    Raises:
        CheckpointError: of fused experts it cannot be told what are inputs and what outputs.
    """
    change = adapter.changes[name]
    module, plain = name.removesuffix(".weight"), name.replace(".base_layer", "")
    parameter = plain if plain in names else _parameter(adapter, plain.removesuffix(".weight"), change, names)
    if parameter is None:
        return None
    spot = names[parameter]
    info = spot.info
    if info.stacked or (parameter == plain and not stacks(info)):
        expert = info.names.index(plain) if info.stacked else None
        return AdapterEntry(module, change, change.scale, spot, expert, transposed(info))
    entry = AdapterEntry(module, change, change.scale, spot, transposed=_reads_first(adapter, change, info))
    rank = adapter.shapes[entry.b][1] // max(entry.experts, 1)
    return replace(entry, scale=lora_scale(adapter.config, parameter, rank, adapter.path))


def _parameter(adapter: Adapter, module: str, change: Change, names: Mapping[str, PossibleTensor]) -> str | None:
    """The tensor of peft's `target_parameters` inside a module, identified by its sizes."""
    targets = [str(target).rpartition(".")[2] for target in adapter.config.get("target_parameters") or []]
    places = [place for name in dict.fromkeys(targets) if (place := f"{module}.{name}") in names]
    size = _sizes(adapter, change)
    for turn in (1, -1):  # peft takes some for [out, in] that are [in, out], or the other way round
        turned = {p: _matrix(i := names[p].info)[:: -turn if stacks(i) and transposed(i) else turn] for p in places}
        matching = [place for place in places if _alike(turned[place], size)]
        if len(matching) == 1:
            return matching[0]
    return None


def _reads_first(adapter: Adapter, change: Change, info: TensorInfo) -> bool:
    """Whether factors take a parameter for [in, out]: by its sizes; of square experts by the peft that wrote them."""
    size, stored = _sizes(adapter, change), _matrix(info)
    if not (_alike(stored, size) and _alike(stored[::-1], size)):
        return not _alike(stored, size)
    if not stacks(info) or transposed(info):
        return bool(stacks(info))
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", str(adapter.config.get("peft_version") or ""))
    version = tuple(map(int, numbers.groups())) if numbers else None
    if version is None or READS_STORED_ORDER <= version < READS_BY_CLASS:
        written = "does not say which peft wrote it" if version is None else "was written by peft 0.19.0"
        raise adapter.refusal(f"{written}, so inputs and outputs of '{info.name}', which is square, cannot be told")
    return version < READS_STORED_ORDER


def _alike(known: Sequence[int | None], sizes: Sequence[int]) -> bool:
    """Whether sizes agree where both are known."""
    return len(known) == len(sizes) and all(k in (None, s) for k, s in zip(known, sizes, strict=True))


def _matrix(info: TensorInfo) -> list[int | None]:
    """Sizes of one of the matrices that a tensor holds."""
    return [axis.size for axis in info.axes[stacks(info) :]]


def _sizes(adapter: Adapter, change: Change) -> list[int]:
    """Output and input sizes of a change."""
    return [adapter.shapes[str(change.b)][0], adapter.shapes[str(change.a)][1]]


def _unknown(adapter: Adapter, name: str) -> CheckpointError:
    return CheckpointError(f"changes '{name}', which its base does not have", where=adapter.path, remedy=WRONG_BASE)
