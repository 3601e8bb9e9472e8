"""Adapters in memory, and how they are written: folders of peft's, and single files of kohya's and diffusers' forms."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from mergekit.common import ModelPath
from safetensors.torch import save_file
from torch import Tensor

from rotation_merge.errors import CheckpointError
from rotation_merge.files import FOLDER, Output, check_output, replacing
from rotation_merge.model.adapters import ADAPTER_FILES, DIFFUSERS, KOHYA, PEFT, PREFIX, SUFFIX, WEIGHTS, Adapter
from rotation_merge.model.contents import ADAPTER_CONFIG
from rotation_merge.model.folder import fetched
from rotation_merge.model.hub import is_hub_name
from rotation_merge.model.low_rank import LowRank
from rotation_merge.model.writing import staged, write_files
from rotation_merge.record import MergeReport

BASE_LAYER = ".base_layer."
"""In the names of weights of the base that peft stores where an embedding or a head has factors."""


@dataclass(frozen=True)
class AdapterWeights:
    """An adapter in memory: its config, tensors by the names of its form, and other files by name.

    Attributes:
        notes: of the transfer that made it.
        report: of that transfer.
        form: `peft`, a folder; `kohya` or `diffusers`, a single file without a config.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    beside: Mapping[str, bytes] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    report: MergeReport | None = field(default=None, repr=False)
    form: str = PEFT

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
        self.save(out)

    def save(self, out: str) -> None:
        """Write the adapter atomically to a place that the caller has checked: a folder, or one `.safetensors` file.

        Raises:
            CheckpointError: the name is that of a file, and the form a folder, or the other way round.
        """
        if out.endswith(SUFFIX) != (self.form != PEFT):
            kind = f"a {SUFFIX} file" if self.form != PEFT else "a folder"
            raise CheckpointError(f"adapters of {self.form} are {kind}", where=out, remedy=f"name {kind} to write")
        if self.form == PEFT:
            with staged(out) as staging:
                self.write(staging)
        else:
            with replacing(out) as temporary:
                self._write_tensors(temporary)

    def write(self, folder: str) -> None:
        """Write the files into a folder that the caller puts into its place."""
        os.makedirs(folder, exist_ok=True)
        self._write_tensors(os.path.join(folder, WEIGHTS[0]))
        with open(os.path.join(folder, ADAPTER_CONFIG), "w", encoding="utf-8") as file:
            json.dump(self.config, file, indent=2, sort_keys=True)
            file.write("\n")
        write_files(folder, self.beside)

    def _write_tensors(self, path: str) -> None:
        save_file({name: tensor.contiguous() for name, tensor in self.tensors.items()}, path, {"format": "pt"})


def plain_adapter(path: str) -> Adapter:
    """A LoRA adapter of factors alone: a folder or hub name in peft's format, or a file in kohya's or diffusers'.

    Weights of the base that peft stores beside the factors of an embedding or a head may stand in it.

    Raises:
        CheckpointError: it is none, is damaged, or is more than ``W + s B A`` for each map.
    """
    remote = is_hub_name(path) and not os.path.exists(path) and not path.endswith(SUFFIX)
    adapter = Adapter(fetched(ModelPath(path=path), patterns=ADAPTER_FILES) if remote else path)
    reasons = {
        "target_parameters": "changes stacked experts ('target_parameters')",
        "use_dora": "is a DoRA: its changes are not of low rank",
    }
    problems = [words for entry, words in reasons.items() if adapter.config.get(entry)]
    for change in adapter.changes.values():
        if change.magnitude or change.shift or not change.a or (change.value and BASE_LAYER not in change.value):
            problems.append(f"changes '{change.name}' otherwise than by two factors")
    if problems:
        remedy = "merge it into its base model first, then merge the models"
        raise CheckpointError(problems[0], where=path, remedy=remedy)
    return adapter


def with_factors(like: Adapter, maps: Mapping[str, LowRank], base_weights: Mapping[str, Tensor]) -> AdapterWeights:
    """An adapter in the form of another one, with other factors.

    Args:
        maps: by module.
        base_weights: weights of the base that peft stores beside factors, by its names.
    """
    most = max(factors.rank for factors in maps.values())
    if like.form == PEFT:
        return AdapterWeights(factor_config(like.config, maps, most), {**base_weights, **peft_tensors(maps)})
    down, up = ("lora_down", "lora_up") if like.form == KOHYA else ("lora_A", "lora_B")
    tensors = {}
    for module, stored in maps.items():
        factors = stored.of_rank(most) if like.form == DIFFUSERS else stored  # whose loader assumes a single rank
        tensors[f"{module}.{down}.weight"] = factors.a
        tensors[f"{module}.{up}.weight"] = factors.scale * factors.b
        if like.form == KOHYA:
            tensors[f"{module}.alpha"] = torch.tensor(float(factors.rank))  # bfloat16 has no 257
    return AdapterWeights({}, tensors, form=like.form)


def peft_tensors(maps: Mapping[str, LowRank]) -> dict[str, Tensor]:
    """Factors by peft's names; every change is B A, its scale 1."""
    tensors = {}
    for module, factors in maps.items():
        part = "lora_embedding_" if factors.embedding else "lora_"
        leaf = "" if factors.embedding else ".weight"
        tensors[f"{PREFIX}{module}.{part}A{leaf}"] = factors.a
        tensors[f"{PREFIX}{module}.{part}B{leaf}"] = factors.scale * factors.b
    return tensors


def factor_config(config: Mapping[str, Any], maps: Mapping[str, LowRank], most: int) -> dict[str, Any]:
    """peft's config of factors whose largest rank is `most`, each of the scale 1."""
    ranks = {re.escape(module): factors.rank for module, factors in maps.items() if factors.rank != most}
    return {
        **config,
        "r": most,
        "lora_alpha": most,
        "rank_pattern": ranks,
        "alpha_pattern": dict(ranks),
        "use_rslora": False,
        "target_modules": sorted(maps),
        "layers_to_transform": None,
        "layers_pattern": None,
        "exclude_modules": None,
        "init_lora_weights": True,
        "inference_mode": True,
    }
