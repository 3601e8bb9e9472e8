"""Adapters in memory, and how they are written: folders of peft's."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mergekit.common import ModelPath
from safetensors.torch import save_file
from torch import Tensor

from rotation_merge.errors import CheckpointError
from rotation_merge.files import FOLDER, Output, check_output
from rotation_merge.model.adapters import ADAPTER_FILES, PREFIX, WEIGHTS, Adapter
from rotation_merge.model.folder import fetched
from rotation_merge.model.headers import ADAPTER_CONFIG
from rotation_merge.model.hub import is_hub_name
from rotation_merge.model.low_rank import LowRank
from rotation_merge.model.staging import staged, write_files
from rotation_merge.record import MergeReport

BASE_LAYER = ".base_layer."
"""In the names of weights of the base that peft stores where an embedding or a head has factors."""


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
        self.save(out)

    def save(self, out: str) -> None:
        """Write the adapter atomically to a place that the caller has checked."""
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


def plain_adapter(path: str) -> Adapter:
    """A LoRA adapter of factors alone: a folder or hub name in peft's format.

    Weights of the base that peft stores beside the factors of an embedding or a head may stand in it.

    Raises:
        CheckpointError: it is none, is damaged, or is more than ``W + s B A`` for each map.
    """
    remote = is_hub_name(path) and not os.path.exists(path)
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
