"""An adapter's tensors by the tensors of the base that they change, and an adapter written anew."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from rotation_merge.architectures.registry import Spot, every_name
from rotation_merge.checkpoints.adapters import WEIGHTS, Adapter, Change
from rotation_merge.checkpoints.headers import ADAPTER_CONFIG
from rotation_merge.errors import CheckpointError
from rotation_merge.matching.factors import stacks, transposed

WHOLE = "merge the adapter into its base and carry the whole model"
WRONG_BASE = "name the base that it was trained on by --from"


@dataclass(frozen=True)
class Entry:
    """What an adapter does to one weight of its base.

    Attributes:
        module: the module's path, as the adapter's names have it.
        change: names of the factors, of a magnitude.
        bias: name of what peft's `lora_bias` adds.
        scale: what the product is multiplied by.
        spot: the tensor that is changed; expert: which one, where the base stores experts apart.
    """

    module: str
    change: Change
    bias: str | None
    scale: float
    spot: Spot
    expert: int | None = None

    @property
    def a(self) -> str:
        return str(self.change.a)

    @property
    def b(self) -> str:
        return str(self.change.b)

    @property
    def bias_key(self) -> str:
        """Where peft keeps a bias of this module."""
        return self.b.removesuffix("weight") + "bias"


@dataclass(frozen=True)
class Parsed:
    """An adapter's low-rank changes, and by their names the tensors that it holds whole (modules_to_save, biases)."""

    entries: list[Entry] = field(default_factory=list)
    saved: dict[str, Spot] = field(default_factory=dict)


@dataclass(frozen=True)
class Written:
    """An adapter to be written: adapter_config.json, and the tensors by peft's names."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]

    def write(self, folder: str) -> None:
        """The two files that peft reads."""
        os.makedirs(folder, exist_ok=True)
        tensors = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
        save_file(tensors, os.path.join(folder, WEIGHTS[0]), {"format": "pt"})
        with open(os.path.join(folder, ADAPTER_CONFIG), "w", encoding="utf-8") as file:
            json.dump(self.config, file, indent=2, sort_keys=True)
            file.write("\n")


def parse(adapter: Adapter, base: Mapping[str, Any]) -> Parsed:
    """Which tensor of a base each of an adapter's tensors changes.

    Args:
        base: the base's config.

    Raises:
        CheckpointError: the adapter changes something that the base has not.
    """
    names, result = every_name(base), Parsed()
    for name, change in adapter.changes.items():
        if change.value is not None:
            plain = name.replace(".base_layer", "")
            if plain not in names:
                raise _unknown(adapter, plain)
            result.saved[change.value] = names[plain]
        if change.a is not None:
            result.entries.append(_entry(adapter, name, change, names))
        elif change.shift is not None and adapter.changes.get(f"{name.removesuffix('bias')}weight") is None:
            raise _unknown(adapter, name)
    return result


def _entry(adapter: Adapter, name: str, change: Change, names: Mapping[str, Spot]) -> Entry:
    module = name.removesuffix(".weight")
    bias = adapter.changes.get(f"{module}.bias", Change()).shift
    plain = name.replace(".base_layer", "")
    spot = names.get(plain) or _parameter(adapter, plain.removesuffix(".weight"), change, names)
    if spot.info.stacked:
        return Entry(module, change, bias, change.scale, spot, spot.info.names.index(plain))
    count = (spot.info.axes[0].size or 1) if stacks(spot.info) else 1  # ranks of all experts stand in one factor
    scale = change.scale * (count**0.5 if adapter.config.get("use_rslora") else count)
    return Entry(module, change, bias, scale, spot)


def _parameter(adapter: Adapter, module: str, change: Change, names: Mapping[str, Spot]) -> Spot:
    """The stacked tensor that peft's `target_parameters` name inside a module, told by its sizes."""
    sizes = [adapter.shapes[str(change.b)][0], adapter.shapes[str(change.a)][1]]
    wanted = [str(target).rpartition(".")[2] for target in adapter.config.get("target_parameters") or []]
    known = [spot for parameter in dict.fromkeys(wanted) if (spot := names.get(f"{module}.{parameter}")) is not None]
    found = []
    for spot in known:
        own = [axis.size for axis in spot.info.axes[1:]]
        if (own[::-1] if transposed(spot.info) else own) == sizes:
            found.append(spot)
    if len(found) != 1:
        raise _unknown(adapter, module)
    return found[0]


def _unknown(adapter: Adapter, name: str) -> CheckpointError:
    return CheckpointError(f"changes '{name}', which its base has not", where=adapter.path, remedy=WRONG_BASE)
