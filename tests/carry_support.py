"""Adapters made by hand: on every linear map, convolution and embedding of a tiny model, and merged by hand."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import rotation_merge as rm
from rotation_merge.architecture import Architecture
from rotation_merge.architecture.model import TensorInfo
from rotation_merge.model.low_rank import stacks, transposed

RANK, ALPHA = 2, 3.0
PREFIX = "base_model.model."


@dataclass(frozen=True)
class Made:
    """An adapter's config and tensors."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]

    def save_pretrained(self, where: Path | str) -> None:
        """Also into a folder that holds another one, or its base."""
        Path(where).mkdir(exist_ok=True)
        (Path(where) / "adapter_config.json").write_text(json.dumps(self.config))
        save_file({n: x.contiguous() for n, x in self.tensors.items()}, Path(where) / "adapter_model.safetensors")


def targets(architecture: Architecture, state: dict[str, Tensor]) -> list[TensorInfo]:
    """Tensors that peft can put a LoRA on; not tied ones, which by hand would be changed twice."""
    tied = {name for info in architecture.tensors() for name in info.tied if info.name not in state}
    return [
        info
        for info in architecture.tensors()
        if info.name in state
        and len(info.axes) >= 2
        and "norm" not in info.name.lower()
        and not (len(info.axes) == 3 and state[info.name].ndim == 3 and state[info.name].shape[1] == 1)  # depthwise
        and info.name not in tied
        and (info.name.endswith(".weight") or stacks(info))
    ]


def embeds(info: TensorInfo) -> bool:
    return transposed(info) and info.axes[0].label in ("vocabulary", "positions", "types")


def make_adapter(
    architecture: Architecture, state: dict[str, Tensor], seed: int = 0, embeddings: bool = True, **config: Any
) -> Made:
    """Random factors for every target."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    parameters = []

    def random(*shape: int) -> Tensor:
        return 0.5 * torch.randn(*shape, generator=generator, dtype=torch.float64)

    for info in targets(architecture, state):
        for name in info.names:
            shape, module = state[name].shape, PREFIX + name.removesuffix(".weight")
            if embeds(info) and not embeddings:
                continue
            if stacks(info) and not info.stacked:
                parameters.append(name)
                parent, depth = PREFIX + name.rpartition(".")[0], 0
                while f"{parent}{'.base_layer' * depth}.lora_A.weight" in tensors:
                    depth += 1
                module = parent + ".base_layer" * depth
                gives, reads = (shape[2], shape[1]) if transposed(info) else (shape[1], shape[2])
                tensors[f"{module}.lora_A.weight"] = random(RANK * shape[0], reads)
                tensors[f"{module}.lora_B.weight"] = random(gives, RANK * shape[0])
            elif embeds(info):
                tensors[f"{module}.lora_embedding_A"] = random(RANK, shape[0])
                tensors[f"{module}.lora_embedding_B"] = random(shape[1], RANK)
            elif transposed(info):
                tensors[f"{module}.lora_A.weight"] = random(RANK, shape[0])
                tensors[f"{module}.lora_B.weight"] = random(shape[1], RANK)
            else:
                kernel = shape[2:]
                tensors[f"{module}.lora_A.weight"] = random(RANK, *shape[1:])
                tensors[f"{module}.lora_B.weight"] = random(shape[0], RANK, *[1] * len(kernel))
    content = {
        "peft_type": "LORA",
        "peft_version": "0.21.2",
        "r": RANK,
        "lora_alpha": ALPHA,
        "base_model_name_or_path": "old",
    }
    return Made({**content, "target_parameters": parameters, **config}, tensors)


def merged(
    adapter: Any, architecture: Architecture, state: dict[str, Tensor], scale: float = ALPHA / RANK
) -> dict[str, Tensor]:
    """The base with the adapter's changes added, as peft's merge_and_unload adds them; every tensor must be used."""
    result, used = dict(state), set()

    def take(key: str) -> Tensor | None:
        if key in adapter.tensors:
            used.add(key)
        return adapter.tensors.get(key)

    for info in targets(architecture, state):
        for name in info.names:
            module = PREFIX + name.removesuffix(".weight")
            if stacks(info) and not info.stacked:
                count, *sizes = state[name].shape
                gives, reads = sizes[::-1] if transposed(info) else sizes
                parent = PREFIX + name.rpartition(".")[0]
                for depth in range(3):
                    a = adapter.tensors.get(f"{parent}{'.base_layer' * depth}.lora_A.weight")
                    b = adapter.tensors.get(f"{parent}{'.base_layer' * depth}.lora_B.weight")
                    if a is not None and b is not None and (b.shape[0], a.shape[1]) == (gives, reads):
                        used |= {f"{parent}{'.base_layer' * depth}.lora_{x}.weight" for x in "AB"}
                        a, b = a.reshape(count, -1, reads), b.reshape(gives, -1, count)
                        change = scale * torch.einsum("ore,eri->eoi", b, a)
                        result[name] = result[name] + (change.mT if transposed(info) else change)
                continue
            bias = take(f"{module}.lora_B.bias")
            if bias is not None:
                own = name.removesuffix("weight") + "bias"
                result[own] = result[own] + scale * bias if own in result else None
                assert result[own] is not None or not bias.any()
            a, b = (take(f"{module}.lora_embedding_{x}") for x in "AB")
            if a is None or b is None:
                a, b = (take(f"{module}.lora_{x}.weight") for x in "AB")
            if a is None or b is None:
                continue
            change = scale * (b.flatten(1) @ a.flatten(1))
            change = change.T if transposed(info) else change
            result[name] = result[name] + change.reshape(state[name].shape)
    for key, tensor in adapter.tensors.items():
        if "lora_" not in key:
            result[key.removeprefix(PREFIX)] = tensor
            used.add(key)
    assert used == adapter.tensors.keys()
    return {name: tensor for name, tensor in result.items() if tensor is not None}


def other_coordinates(model: Any, options: rm.AlignConfig, seed: int = 5) -> tuple[dict[str, Tensor], rm.Alignment]:
    """A base that computes the same in other coordinates, and what brings the first one there.

    Where the stream is turned, the norms of the new base get gains and shifts of their own.
    """
    alignment = rm.Alignment.random(model, options, seed=seed)
    view = alignment.apply(model)
    drawn = torch.Generator().manual_seed(seed)
    return unfolded(view.architecture, view.state_dict(), alignment.folded, drawn), alignment


def unfolded(
    architecture: Architecture, state: dict[str, Tensor], streams: Iterable[str], generator: torch.Generator
) -> dict[str, Tensor]:
    """Gains and shifts of the folded norms made random, and taken back out of what reads them."""
    result = dict(state)
    for block in architecture.blocks:
        for norm in [n for n in block.norms if n.stream in streams]:
            gain_info = block.tensor(norm.gain)
            if gain_info is None or gain_info.name not in state:
                continue
            size = state[gain_info.name].shape[0]
            gain = 0.5 + torch.rand(size, generator=generator, dtype=torch.float64)
            result[gain_info.name] = gain - norm.offset
            shift_info = block.tensor(norm.shift) if norm.shift else None
            readers = [i for i in block.tensors if _weight_of(i.key, norm.reads) and i.names[0] in state]
            biased = all(i.name.removesuffix("weight") + "bias" in state for i in readers)
            shift = None
            if shift_info is not None and shift_info.name in state:
                if biased:
                    shift = torch.randn(size, generator=generator, dtype=torch.float64)
                    result[shift_info.name] = shift
                else:
                    result[shift_info.name] = state[shift_info.name] * gain
            for info in readers:
                dims = [d for d, a in enumerate(info.axes) if any(p.role == "read" for p in a.parts)]
                for name in info.names:
                    dim = dims[0] - info.stacked
                    copies = state[name].shape[dim] // size
                    shape = [-1 if d == dim else 1 for d in range(state[name].ndim)]
                    result[name] = state[name] / gain.repeat(copies).reshape(shape)
                    if shift is not None:
                        bias = name.removesuffix("weight") + "bias"
                        result[bias] = state[bias] - (result[name] * shift.repeat(copies).reshape(shape)).sum(dim)
        for scale in [s for s in block.scales if s.stream in streams]:
            info = block.tensor(scale.gain)
            assert info is not None
            factor = 0.5 + torch.rand(state[info.name].shape, generator=generator, dtype=torch.float64)
            result[info.name] = factor
            for key in scale.writes:
                if (own := block.tensor(key)) is not None and own.name in state:
                    result[own.name] = state[own.name] / factor.reshape(-1, *[1] * (state[own.name].ndim - 1))
    return result


def _weight_of(key: str, reads: Iterable[str]) -> bool:
    return not key.endswith(".bias") and (key in reads or key.removesuffix(".weight") in reads)
