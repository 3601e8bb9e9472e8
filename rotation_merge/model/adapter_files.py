"""LoRA adapters as pairs of factors, read from peft's folders and from single files, and written again in that form.

A map's change is ``s B A``: A (rank, inputs), B (outputs, rank), both flattened where the map is a convolution. Single
files are those of kohya's scripts (`lora_down`, `lora_up`, `alpha`) and of diffusers (`lora_A`, `lora_B`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rotation_merge.errors import CheckpointError
from rotation_merge.files.durable import replacing
from rotation_merge.linalg.finite import all_finite
from rotation_merge.model.adapters import ADAPTER_FILES, Adapter
from rotation_merge.model.hub import downloaded, is_hub_name
from rotation_merge.model.lora import AdapterWeights
from rotation_merge.model.output import staged

FILE_FORMS = {"kohya": ("lora_down.weight", "lora_up.weight"), "diffusers": ("lora_A.weight", "lora_B.weight")}
"""Endings of the names of A and B in single files, by who writes them so."""

PEFT = "peft"
SUFFIX = ".safetensors"
IN_BASE = "merge it into its base model first, then merge the models"

_OTHER_KINDS = re.compile(r"\.(hada_w\w+|lokr_w\w+|lora_mid\.weight|dora_scale|oft_\w+|diff|diff_b)$")


@dataclass(frozen=True)
class LowRankFactors:
    """The low-rank change of one map, ``s B A``.

    Attributes:
        a: (rank, inputs), or a convolution's (rank, channels, ...).
        b: (outputs, rank), with ones behind for a convolution.
        embedding: whether the map is an embedding, whose weight is the transpose.
    """

    a: Tensor
    b: Tensor
    scale: float = 1.0
    embedding: bool = False

    @property
    def rank(self) -> int:
        return len(self.a)

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs) of the change."""
        return len(self.b), self.a[0].numel()

    def flat(self) -> tuple[Tensor, Tensor]:
        """A (rank, inputs) and s B (outputs, rank), float64."""
        return self.a.double().flatten(1), self.scale * self.b.double().flatten(1)

    def with_flat(self, a: Tensor, b: Tensor) -> LowRankFactors:
        """Other factors of the same map, in this one's shapes and types, with the scale 1."""
        a_shape, b_shape = (len(a), *self.a.shape[1:]), (len(b), len(a), *self.b.shape[2:])
        return replace(self, a=a.reshape(a_shape).to(self.a.dtype), b=b.reshape(b_shape).to(self.b.dtype), scale=1.0)


@dataclass(frozen=True)
class AdapterFactors:
    """An adapter as factors by module.

    Attributes:
        form: `peft`, `kohya` or `diffusers`.
        config: peft's; empty for single files.
    """

    path: str
    form: str
    maps: Mapping[str, LowRankFactors]
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def base(self) -> str | None:
        """The name of the base that it was trained on, if it is stored."""
        return self.config.get("base_model_name_or_path")


def read_adapter(path: str) -> AdapterFactors:
    """A LoRA adapter: a folder or hub name in peft's format, or a `.safetensors` file in kohya's or diffusers'.

    Raises:
        CheckpointError: it is none, is damaged, or is more than ``W + s B A`` for each map.
    """
    if os.path.isdir(path) or (is_hub_name(path) and not path.endswith(SUFFIX)):
        return _read_folder(downloaded(path, None, None, ADAPTER_FILES))
    return _read_file(path)


def _read_folder(path: str) -> AdapterFactors:
    adapter = Adapter(path)
    if adapter.config.get("target_parameters"):
        raise CheckpointError("changes stacked experts ('target_parameters')", where=path, remedy=IN_BASE)
    maps = {}
    for name, change in adapter.changes.items():
        if change.magnitude is not None:
            raise CheckpointError("is a DoRA: its changes are not of low rank", where=path, remedy=IN_BASE)
        if change.value is not None or change.shift is not None:
            kind = "holds" if change.value is not None else "changes the bias"
            raise CheckpointError(f"{kind} '{name}', which has no factors", where=path, remedy=IN_BASE)
        factors = adapter.factors(name)
        assert factors is not None
        maps[name.removesuffix(".weight")] = LowRankFactors(*factors, embedding=change.embedding)
    return AdapterFactors(path, PEFT, maps, adapter.config)


def _read_file(path: str) -> AdapterFactors:
    if not path.endswith(SUFFIX) or not os.path.isfile(path):
        raise CheckpointError("there is no LoRA adapter", where=path, remedy=f"name a folder or a {SUFFIX} file")
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError("cannot be read", where=path, remedy="download it again") from error
    unsupported = next((name for name in tensors if _OTHER_KINDS.search(name)), None)
    if unsupported is not None:
        raise CheckpointError(f"'{unsupported}' is not a factor of a plain LoRA", where=path, remedy=IN_BASE)
    form = next((form for form, (down, _) in FILE_FORMS.items() if any(n.endswith(f".{down}") for n in tensors)), None)
    if form is None:
        raise CheckpointError("holds no factors of a LoRA", where=path, remedy="name an adapter, not a model")
    down, up = FILE_FORMS[form]
    maps: dict[str, LowRankFactors] = {}
    for name in sorted(tensors):
        module, leaf = name.removesuffix(f".{down}"), tensors[name]
        if module == name:
            if not name.endswith((f".{up}", ".alpha")):
                raise CheckpointError(f"'{name}' is not a factor of a plain LoRA", where=path, remedy=IN_BASE)
            continue
        b = tensors.get(f"{module}.{up}")
        if b is None or leaf.ndim < 2 or b.ndim < 2 or b.shape[1] != len(leaf):
            raise CheckpointError(f"'{module}' lacks factors that fit", where=path, remedy="download it again")
        alpha = tensors.get(f"{module}.alpha")
        maps[module] = LowRankFactors(leaf, b, 1.0 if alpha is None else float(alpha) / len(leaf))
        if not all_finite([leaf, b]):
            raise CheckpointError(f"'{module}' holds NaN or infinity", where=path, remedy="download it again")
    return AdapterFactors(path, form, maps)


def write_adapter(adapter: AdapterFactors, out: str) -> None:
    """Write an adapter in its format, atomically: a folder for peft, else a `.safetensors` file.

    Raises:
        CheckpointError: the name is that of a file, and the form a folder, or the other way round.
    """
    if out.endswith(SUFFIX) != (adapter.form != PEFT):
        kind = f"a {SUFFIX} file" if adapter.form != PEFT else "a folder"
        raise CheckpointError(f"adapters of {adapter.form} are {kind}", where=out, remedy=f"name {kind} to write")
    if adapter.form == PEFT:
        with staged(out) as staging:
            _in_peft(adapter).save_pretrained(staging)
        return
    down, up = FILE_FORMS[adapter.form]
    tensors = {}
    for module, factors in adapter.maps.items():
        tensors[f"{module}.{down}"] = factors.a.contiguous()
        tensors[f"{module}.{up}"] = (factors.scale * factors.b).contiguous()
        if adapter.form == "kohya":
            tensors[f"{module}.alpha"] = torch.tensor(float(factors.rank), dtype=factors.a.dtype)
    with replacing(out) as temporary:
        save_file(tensors, temporary, {"format": "pt"})


def _in_peft(adapter: AdapterFactors) -> AdapterWeights:
    """peft's config and tensors; every change is B A, its scale 1."""
    tensors = {}
    for module, factors in adapter.maps.items():
        part = "lora_embedding_" if factors.embedding else "lora_"
        leaf = "" if factors.embedding else ".weight"
        tensors[f"base_model.model.{module}.{part}A{leaf}"] = factors.a
        tensors[f"base_model.model.{module}.{part}B{leaf}"] = factors.scale * factors.b
    most = max(factors.rank for factors in adapter.maps.values())
    ranks = {re.escape(module): f.rank for module, f in adapter.maps.items() if f.rank != most}
    settings = {
        "r": most,
        "lora_alpha": most,
        "rank_pattern": ranks,
        "alpha_pattern": dict(ranks),
        "use_rslora": False,
        "target_modules": sorted(adapter.maps),
        "layers_to_transform": None,
        "layers_pattern": None,
        "exclude_modules": None,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    return AdapterWeights({**adapter.config, **settings}, tensors)
