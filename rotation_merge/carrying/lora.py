"""Writes the change of a whole model as a new LoRA in peft's format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rotation_merge.architecture.model import Block, TensorInfo
from rotation_merge.carrying.carrier import Changes, is_bias, weight_key
from rotation_merge.carrying.delta import Delta
from rotation_merge.errors import CheckpointError, short
from rotation_merge.model.adapter_files import AdapterWeights
from rotation_merge.model.blocks import read_tensor
from rotation_merge.model.low_rank import LowRank, dense, stacks, transposed
from rotation_merge.model.tensors import TensorSource
from rotation_merge.model.view import View
from rotation_merge.run.functions import architecture_of

PREFIX = "base_model.model."

Kept = dict[str, tuple[float, float]]
"""By tensor: the squared norm of its change, and of the change at that rank."""


def left_out(base: View) -> list[str]:
    """Lines on changes that an adapter of this base cannot express."""
    head = base.tied_head
    return [
        f"The embedding stays the new base's: `{head}` is tied to it, and an adapter would change only one of the two."
    ] * bool(head)


def adapter_of(delta: Delta, rank: int, base: View) -> tuple[AdapterWeights, Kept]:
    """A change as a new adapter of the base that it is for.

    Matrices are cut down to `rank`; biases go into peft's `lora_bias`, norms of streams that are not turned into
    `modules_to_save`. Beside a `lora_bias`, which peft has not for embeddings, these are left as they are; so are
    tensors without a module of their own in the model's class (experts in one tensor, position tables), and an
    embedding that is the head as well: peft would change one of the two.

    Args:
        rank: of every factor, at most.
        base: the new base.

    Returns:
        The adapter, and the share of each tensor's change that it keeps.
    """
    writing, norms, _ = _decomposed(delta, rank, base)
    return AdapterWeights(writing.config(rank, base.config, str(base.reference)), writing.tensors), norms


def adapter_changes(delta: Delta, rank: int, base: View) -> dict[str, Changes]:
    """The changes that `adapter_of` writes, by block and key, without what it leaves out."""
    _, norms, blocks = _decomposed(delta, rank, base)
    return {
        name: {key: change for key, change in changes.items() if norms[f"{name}: {key}"][1] > 0}
        for name, changes in blocks.items()
    }


def _decomposed(delta: Delta, rank: int, base: View) -> tuple[_Writing, Kept, dict[str, Changes]]:
    """The adapter in the making, the share of each change that it keeps, and all changes of that rank by block."""
    modules = _modules(base)
    writing = _Writing(base.tied_head is not None)
    norms, blocks = Kept(), dict[str, Changes]()
    for block in delta.carrier.architecture.blocks:
        changes, parts = delta.factors(block, rank)
        blocks[block.name] = changes
        norms.update({f"{block.name}: {key}": pair for key, pair in parts.items()})
        for key, change in changes.items():
            info = block.tensor(key)
            place = modules.get((block.module, block.place, block.index, key))
            if info is None or not writing.take(block, info, change, changes, place, delta.carrier.new):
                norms[f"{block.name}: {key}"] = parts[key][0], 0.0
    norms |= {key: (norms[key][0], 0.0) for key in writing.without_embeddings()}
    return writing, norms, blocks


@dataclass
class _Writing:
    """An adapter in the making."""

    tied: bool
    tensors: dict[str, Tensor] = field(default_factory=dict)
    targets: dict[str, int] = field(default_factory=dict)
    saved: set[str] = field(default_factory=set)
    embeddings: dict[str, str] = field(default_factory=dict)
    biases: bool = False
    stored_otherwise: bool = False

    def take(
        self,
        block: Block,
        info: TensorInfo,
        change: LowRank | Tensor,
        beside: Mapping[str, LowRank | Tensor],
        place: str | None,
        new: TensorSource,
    ) -> bool:
        """Put one change in; False where an adapter has no place for it."""
        words = self.tied and info.vocabulary_axis is not None
        if place is None or stacks(info) or words:
            return False
        module, _, leaf = place.rpartition(".")
        if isinstance(change, LowRank):
            if leaf != "weight":
                return False
            self._factors(block, info, change, module)
        elif is_bias(info.key) and isinstance(beside.get(weight_key(info.key)), LowRank):
            self.tensors[f"{PREFIX}{module}.lora_B.bias"] = change.float()
            self.biases = True
        elif len(info.axes) == 1 and not is_bias(info.key):
            stem = info.key.removesuffix("weight")
            for sibling in block.tensors:
                stored = read_tensor(sibling, new) if sibling.key.startswith(stem) else None
                if stored is not None:
                    added = beside.get(sibling.key, torch.zeros_like(stored))
                    name = f"{PREFIX}{module}.{sibling.key.removeprefix(stem)}"
                    self.tensors[name] = (stored.double() + dense(added, sibling)).to(stored.dtype)
            self.saved.add(module)
        else:
            return is_bias(info.key) and any(key.startswith(f"{PREFIX}{module}.") for key in self.tensors)
        return True

    def _factors(self, block: Block, info: TensorInfo, change: LowRank, module: str) -> None:
        embeds = transposed(info) and info.axes[0].label in ("vocabulary", "positions", "types")
        a, b = ("embedding_A", "embedding_B") if embeds else ("A.weight", "B.weight")
        self.tensors[f"{PREFIX}{module}.lora_{a}"] = change.a.float()
        self.tensors[f"{PREFIX}{module}.lora_{b}"] = change.b.float()
        self.targets[module] = change.a.shape[0]
        if embeds:
            self.embeddings[module] = f"{block.name}: {info.key}"
        else:
            self.stored_otherwise |= transposed(info)

    def without_embeddings(self) -> list[str]:
        """Drop embeddings that peft would refuse, and give every other module a bias; returns the dropped names."""
        if not self.biases:
            return []
        for module in self.embeddings:
            del self.targets[module]
            for factor in ("A", "B"):
                del self.tensors[f"{PREFIX}{module}.lora_embedding_{factor}"]
        for module in self.targets:
            b = self.tensors[f"{PREFIX}{module}.lora_B.weight"]
            self.tensors.setdefault(f"{PREFIX}{module}.lora_B.bias", b.new_zeros(b.shape[0]))
        return list(self.embeddings.values())

    def config(self, rank: int, base: Mapping[str, Any], name: str) -> dict[str, Any]:
        ranks = {module: module_rank for module, module_rank in self.targets.items() if module_rank != rank}
        classes = base.get("architectures") or [""]
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM" if classes[0].endswith("CausalLM") else None,
            "base_model_name_or_path": name,
            "r": rank,
            "lora_alpha": rank,
            "rank_pattern": ranks,
            "alpha_pattern": ranks,
            "target_modules": sorted(self.targets),
            "modules_to_save": sorted(self.saved) or None,
            "lora_bias": self.biases,
            "fan_in_fan_out": self.stored_otherwise,
            "lora_dropout": 0.0,
            "bias": "none",
            "inference_mode": True,
        }


def _modules(base: View) -> dict[tuple[str, str, int | None, str], str]:
    """Parameters as the model's class names them, by block and key of the architecture."""
    try:
        with torch.device("meta"):
            model = base.model_class(base.transformers_config)
    except Exception as error:  # models and configs raise errors of many classes
        problem, remedy = f"its class cannot be built ({short(error)})", "carry it as a whole model, not as an adapter"
        raise CheckpointError(problem, where=base.name, remedy=remedy) from error
    return {
        (block.module, block.place, block.index, info.key): info.name
        for block in architecture_of(model, untie=True).blocks
        for info in block.tensors
    }
