"""An adapter's tensors by the tensors of the base that they change, and an adapter written anew."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from rotation_merge.architecture.model import TensorInfo
from rotation_merge.architecture.registry import PossibleTensor, every_name
from rotation_merge.errors import CheckpointError
from rotation_merge.files import FOLDER, Output, check_output
from rotation_merge.model.adapters import WEIGHTS, Adapter, Change
from rotation_merge.model.factors import stacks, transposed
from rotation_merge.model.headers import ADAPTER_CONFIG
from rotation_merge.model.staging import staged, write_files
from rotation_merge.record import MergeReport

WHOLE = "merge the adapter into its base and carry the whole model"
WRONG_BASE = "name the base that it was trained on"


@dataclass(frozen=True)
class AdapterEntry:
    """An adapter's change of one weight of its base.

    Attributes:
        module: the module's path, as the adapter's names have it.
        change: names of the factors, of a magnitude.
        bias: name of the bias that peft's `lora_bias` changes.
        scale: factor of the product.
        spot: the tensor that is changed; expert: which one, where the base stores experts apart.
        transposed: it is [in, out] to the adapter, whose factors are A (rank, in) and B (out, rank).
    """

    module: str
    change: Change
    bias: str | None
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
    def bias_key(self) -> str:
        """peft's name for a bias of this module."""
        return self.b.removesuffix("weight") + "bias"


@dataclass(frozen=True)
class ParsedAdapter:
    """An adapter's low-rank changes, and its whole tensors by name (modules_to_save, biases)."""

    entries: list[AdapterEntry] = field(default_factory=list)
    saved: dict[str, PossibleTensor] = field(default_factory=dict)


@dataclass(frozen=True)
class AdapterWeights:
    """An adapter in memory: its config, tensors by peft's names, and other files by name.

    Attributes:
        notes: of the transfer that made it.
        report: of that transfer.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    beside: Mapping[str, bytes] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    report: MergeReport | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        facts = self.config
        rank, base = facts.get("r"), facts.get("base_model_name_or_path")
        return f"AdapterWeights({len(self.tensors)} tensors, rank {rank}, for {base})"

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the adapter atomically: the two files that peft reads, and the files beside them.

        Args:
            folder: new, or empty.

        Raises:
            RotationMergeError: the folder holds something, or is a file.
        """
        out = os.fspath(folder)
        check_output(Output(out, "folder", FOLDER, remedy="write to a new folder"))
        with staged(out) as staging:
            self.write(staging)

    def write(self, folder: str) -> None:
        """Write the files into a folder that the caller puts into its place."""
        os.makedirs(folder, exist_ok=True)
        tensors = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
        save_file(tensors, os.path.join(folder, WEIGHTS[0]), {"format": "pt"})
        with open(os.path.join(folder, ADAPTER_CONFIG), "w", encoding="utf-8") as file:
            json.dump(self.config, file, indent=2, sort_keys=True)
            file.write("\n")
        write_files(folder, self.beside)


def parse(adapter: Adapter, base: Mapping[str, Any]) -> ParsedAdapter:
    """The tensors of a base that an adapter's tensors change.

    Args:
        base: the base's config.

    Raises:
        CheckpointError: the adapter changes something that the base has not.
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
            result.entries.append(_carried(adapter, entry))
        elif change.shift is not None and adapter.changes.get(f"{name.removesuffix('bias')}weight") is None:
            raise _unknown(adapter, name)
    return result


def _carried(adapter: Adapter, entry: AdapterEntry) -> AdapterEntry:
    """An entry with factors along the axes of its base's tensor.

    Raises:
        CheckpointError: peft confuses inputs and outputs of a tensor.
    """
    if entry.transposed != transposed(entry.spot.info):
        problem = f"swaps inputs and outputs of '{entry.spot.info.name}', as peft does with this base's experts"
        raise CheckpointError(problem, where=adapter.path, remedy=WHOLE)
    return entry


def entry_of(adapter: Adapter, name: str, names: Mapping[str, PossibleTensor]) -> AdapterEntry | None:
    """An adapter's change of one weight; None if the base lacks the weight.

    Args:
        name: of the weight, as the adapter has it.
        names: all that the base's tensors may go by.
    """
    change = adapter.changes[name]
    module, plain = name.removesuffix(".weight"), name.replace(".base_layer", "")
    bias = adapter.changes.get(f"{module}.bias", Change()).shift
    parameter = plain if plain in names else _parameter(adapter, plain.removesuffix(".weight"), change, names)
    if parameter is None:
        return None
    spot = names[parameter]
    info = spot.info
    if info.stacked:
        return AdapterEntry(module, change, bias, change.scale, spot, info.names.index(plain), transposed(info))
    if not stacks(info) and parameter == plain:
        return AdapterEntry(module, change, bias, change.scale, spot, transposed=transposed(info))
    count = (info.axes[0].size or 1) if stacks(info) else 1  # ranks of all experts stand in one factor
    scale = adapter.scale(parameter, adapter.shapes[str(change.b)][1] // count)
    expected = bool(stacks(info)) and transposed(info)
    label = _own(info)[::-1] if expected else _own(info)
    flipped = expected if _alike(label, sizes(adapter, change)) else not expected
    return AdapterEntry(module, change, bias, scale, spot, transposed=flipped)


def _parameter(adapter: Adapter, module: str, change: Change, names: Mapping[str, PossibleTensor]) -> str | None:
    """The tensor of peft's `target_parameters` inside a module, identified by its sizes."""
    targets = [str(target).rpartition(".")[2] for target in adapter.config.get("target_parameters") or []]
    places = [place for name in dict.fromkeys(targets) if (place := f"{module}.{name}") in names]
    size = sizes(adapter, change)
    expected = {place: _own(i)[::-1] if transposed(i := names[place].info) else _own(i) for place in places}
    for turn in (1, -1):  # peft takes some for [out, in] that are [in, out]
        matching = [place for place in places if _alike(expected[place][::turn], size)]
        if len(matching) == 1:
            return matching[0]
    return None


def _alike(known: Sequence[int | None], sizes: Sequence[int]) -> bool:
    """Whether sizes agree where both are known."""
    return len(known) == len(sizes) and all(k in (None, s) for k, s in zip(known, sizes, strict=True))


def _own(info: TensorInfo) -> list[int | None]:
    """Sizes of one of the matrices that a tensor holds."""
    return [axis.size for axis in info.axes[stacks(info) :]]


def sizes(adapter: Adapter, change: Change) -> list[int]:
    """Output and input sizes of a change."""
    return [adapter.shapes[str(change.b)][0], adapter.shapes[str(change.a)][1]]


def _unknown(adapter: Adapter, name: str) -> CheckpointError:
    return CheckpointError(f"changes '{name}', which its base does not have", where=adapter.path, remedy=WRONG_BASE)
