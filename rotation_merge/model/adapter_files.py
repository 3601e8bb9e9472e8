"""LoRA adapters as pairs of factors, read from peft's folders and from single files, and written again in that form.

A map's change is ``s B A``: A (rank, inputs), B (outputs, rank), both flattened where the map is a convolution. Single
files are those of kohya's scripts (`lora_down`, `lora_up`, `alpha`) and of diffusers (`lora_A`, `lora_B`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from mergekit.common import ModelPath
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rotation_merge.errors import CheckpointError
from rotation_merge.files import FOLDER, Output, check_output, replacing
from rotation_merge.linalg.finite import all_finite
from rotation_merge.model.adapters import ADAPTER_FILES, WEIGHTS, Adapter, damaged, lora_scale
from rotation_merge.model.folder import fetched
from rotation_merge.model.headers import ADAPTER_CONFIG
from rotation_merge.model.hub import is_hub_name
from rotation_merge.model.low_rank import LowRank
from rotation_merge.model.staging import staged, write_files
from rotation_merge.record import MergeReport

DIFFUSERS = "diffusers"
FILE_FORMS = {"kohya": ("lora_down.weight", "lora_up.weight"), DIFFUSERS: ("lora_A.weight", "lora_B.weight")}
"""Endings of the names of A and B in single files, by who writes them so."""

HEADER_CONFIG = "lora_adapter_metadata"
"""Name under which diffusers stores peft's configs in a file's header."""

PEFT = "peft"
BASE_LAYER = ".base_layer."
"""In the names of weights of the base that peft stores where an embedding or a head has factors."""

SUFFIX = ".safetensors"
IN_BASE = "merge it into its base model first, then merge the models"

_OTHER_KINDS = re.compile(r"\.(hada_w\w+|lokr_w\w+|lora_mid\.weight|dora_scale|oft_\w+|diff|diff_b)$")


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
            CheckpointError: the folder holds something, or is a file.
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


@dataclass(frozen=True)
class AdapterFactors:
    """An adapter as factors by module.

    Attributes:
        form: `peft`, `kohya` or `diffusers`.
        config: peft's; empty for single files.
        base_weights: weights of the base that peft stores beside the factors of an embedding or a head, by its names.
    """

    path: str
    form: str
    maps: Mapping[str, LowRank]
    config: Mapping[str, Any] = field(default_factory=dict)
    base_weights: Mapping[str, Tensor] = field(default_factory=dict)

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
        return _read_folder(fetched(ModelPath(path=path), patterns=ADAPTER_FILES))
    return _read_file(path)


def _read_folder(path: str) -> AdapterFactors:
    adapter = Adapter(path)
    if adapter.config.get("target_parameters"):
        raise CheckpointError("changes stacked experts ('target_parameters')", where=path, remedy=IN_BASE)
    maps, base_weights = {}, {}
    for name, change in adapter.changes.items():
        if change.magnitude is not None or adapter.config.get("use_dora"):
            raise CheckpointError("is a DoRA: its changes are not of low rank", where=path, remedy=IN_BASE)
        of_base = change.value is not None and change.a is not None and BASE_LAYER in change.value
        if (change.value is not None and not of_base) or change.shift is not None:
            kind = "holds" if change.value is not None else "changes the bias"
            raise CheckpointError(f"{kind} '{name}', which has no factors", where=path, remedy=IN_BASE)
        if change.value is not None:
            base_weights[change.value] = adapter.tensor(change.value)
        factors = adapter.low_rank(name)
        assert factors is not None
        maps[name.removesuffix(".weight")] = factors
    return AdapterFactors(path, PEFT, maps, adapter.config, base_weights)


def _read_file(path: str) -> AdapterFactors:
    if not path.endswith(SUFFIX) or not os.path.isfile(path):
        raise CheckpointError("there is no LoRA adapter", where=path, remedy=f"name a folder or a {SUFFIX} file")
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            config = _stored_config(file.metadata() or {}, path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError("cannot be read", where=path, remedy="download it again") from error
    unsupported = next((name for name in tensors if _OTHER_KINDS.search(name)), None)
    if unsupported is not None:
        raise CheckpointError(f"'{unsupported}' is not a factor of a plain LoRA", where=path, remedy=IN_BASE)
    form = next((form for form, (down, _) in FILE_FORMS.items() if any(n.endswith(f".{down}") for n in tensors)), None)
    if form is None:
        raise CheckpointError("holds no factors of a LoRA", where=path, remedy="name an adapter, not a model")
    down, up = FILE_FORMS[form]
    maps: dict[str, LowRank] = {}
    for name in sorted(tensors):
        module = name.removesuffix(f".{down}")
        if module != name:
            maps[module] = _factors_of(module, tensors, (down, up), config, path)
        elif not name.endswith((f".{up}", ".alpha")):
            raise CheckpointError(f"'{name}' is not a factor of a plain LoRA", where=path, remedy=IN_BASE)
        elif (alone := name.removesuffix(f".{up}")) != name and f"{alone}.{down}" not in tensors:
            raise CheckpointError(f"'{alone}' lacks factors that fit", where=path, remedy="download it again")
    return AdapterFactors(path, form, maps)


def _stored_config(metadata: Mapping[str, str], path: str) -> dict[str, Any]:
    """What diffusers stores of peft's configs in the header of a file, by `PREFIX.ENTRY`; empty if it stores none."""
    try:
        config = json.loads(metadata.get(HEADER_CONFIG, "{}"))
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise damaged(f"'{HEADER_CONFIG}' in its header is no mapping", path)
    return config


def _factors_of(
    module: str, tensors: Mapping[str, Tensor], names: tuple[str, str], config: Mapping[str, Any], path: str
) -> LowRank:
    """The factors of one module in a single file.

    Args:
        names: endings of the names of A and B.
        config: see `_stored_config`.
    """
    a, b = tensors[f"{module}.{names[0]}"], tensors.get(f"{module}.{names[1]}")
    alpha = tensors.get(f"{module}.alpha", torch.ones(()))
    fits = b is not None and a.ndim >= 2 and b.ndim >= 2 and b.shape[1] == len(a) > 0 and alpha.numel() == 1
    if b is None or not fits or any(size != 1 for size in b.shape[2:]):
        raise CheckpointError(f"'{module}' lacks factors that fit", where=path, remedy="download it again")
    if not all_finite([a, b, alpha]):
        raise CheckpointError(f"'{module}' holds NaN or infinity", where=path, remedy="download it again")
    if f"{module}.alpha" in tensors:
        return LowRank(a, b, float(alpha) / len(a))
    prefix = module.partition(".")[0] + "."
    of_part = {key.removeprefix(prefix): value for key, value in config.items() if key.startswith(prefix)} or config
    return LowRank(a, b, lora_scale(of_part, module, len(a), path) if "lora_alpha" in of_part else 1.0)


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
            _in_peft(adapter).write(staging)
        return
    down, up = FILE_FORMS[adapter.form]
    tensors = {}
    most = max(factors.rank for factors in adapter.maps.values())
    for module, stored in adapter.maps.items():
        factors = stored.of_rank(most) if adapter.form == DIFFUSERS else stored  # whose loader assumes a single rank
        tensors[f"{module}.{down}"] = factors.a.contiguous()
        tensors[f"{module}.{up}"] = (factors.scale * factors.b).contiguous()
        if adapter.form == "kohya":
            tensors[f"{module}.alpha"] = torch.tensor(float(factors.rank))  # bfloat16 has no 257
    with replacing(out) as temporary:
        save_file(tensors, temporary, {"format": "pt"})


def _in_peft(adapter: AdapterFactors) -> AdapterWeights:
    """peft's config and tensors; every change is B A, its scale 1."""
    tensors = dict(adapter.base_weights)
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
