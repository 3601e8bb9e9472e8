"""Where an adapter has a place for the change of a tensor: the modules of the base's class, as peft takes them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from rotation_merge.architecture.model import TensorInfo
from rotation_merge.errors import short
from rotation_merge.model.adapters import Adapter
from rotation_merge.model.forms import names_in
from rotation_merge.model.low_rank import stacks
from rotation_merge.model.tensors import as_tensors
from rotation_merge.model.view import View
from rotation_merge.run.functions import architecture_of

FACTORED = (nn.Linear, Conv1D, nn.Embedding, nn.Conv2d, nn.Conv3d)
"""Modules that peft gives factors. Models read the stride of one-dimensional convolutions, which factors hide."""

READ_DIRECTLY = nn.modules.linear.NonDynamicallyQuantizableLinear
"""The map of an attention module of torch, which takes the weight without the factors."""

FACTORS, BIAS, WHOLE = "factors", "bias", "whole"
"""How an adapter holds a change: by two factors, as a bias, in `modules_to_save` with the rest of its module."""

IN_MAMBA = {"out_proj": "", "dt_proj": WHOLE}
MAMBA = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
"""In models of these types kernels take weights without their factors, and peft refuses factors of `out_proj`.

They are listed because nothing states them: peft accepts factors of `dt_proj`, which kernels ignore, and an error of
peft for a single target may also mean that it wants another target beside it, as of fused experts.
"""


@dataclass(frozen=True)
class AdapterPlaces:
    """The modules of a base, and the tensors whose changes an adapter has a place for.

    Attributes:
        model: of the base's class, without weights.
        parameters: their names in the class, by tensor; without those that several modules share, which peft would
            change in one of them.
    """

    model: Any
    parameters: Mapping[str, str]

    @classmethod
    def of(cls, base: View) -> AdapterPlaces:
        """The places of a base.

        Raises:
            CheckpointError: the class of the base cannot be built.
        """
        model = base.module_without_weights()
        owners: dict[int, int] = {}
        parameters = dict(model.named_parameters(remove_duplicate=False))
        for parameter in parameters.values():
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
        shared = {name for name, parameter in parameters.items() if owners[id(parameter)] > 1}
        infos = {name: info for name, (_, info, _) in base.architecture.places().items() if not stacks(info)}
        if base.tied_head is not None:
            infos = {name: info for name, info in infos.items() if info.vocabulary_axis is None}
        names = names_in(base.architecture, architecture_of(model, untie=True))
        known = {name: parameter for parameter, name in names.items() if name in infos and parameter not in shared}
        return cls(model, known)

    @cached_property
    def modules(self) -> dict[str, nn.Module]:
        """All modules of the model, by path."""
        return dict(self.model.named_modules())

    @cached_property
    def tensors(self) -> dict[str, dict[str, str]]:
        """By module, the tensors of its own, by their names in it."""
        tensors: dict[str, dict[str, str]] = {}
        for name, parameter in self.parameters.items():
            path, _, leaf = parameter.rpartition(".")
            tensors.setdefault(path, {})[leaf] = name
        return tensors

    def module(self, name: str) -> str:
        """Path of the module that a tensor belongs to; empty: an adapter has no place for it."""
        return self.parameters.get(name, "").rpartition(".")[0]

    def kind(self, info: TensorInfo) -> str:
        """How an adapter holds the change of a tensor: `FACTORS`, `BIAS`, `WHOLE`; empty: not at all.

        Routers, which do more than multiply, tables that are not of tokens, and norms are stored whole.
        """
        path, _, leaf = self.parameters.get(info.name, "").rpartition(".")
        module, in_mamba = self.modules[path], self.model.config.model_type in MAMBA
        routes = any(part.role == "index" for axis in info.axes[:1] for part in axis.parts)
        kind = IN_MAMBA.get(path.rpartition(".")[2], FACTORS) if in_mamba else FACTORS
        if routes or path not in self.candidates or (self.embeds(info) and info.vocabulary_axis is None):
            kind = WHOLE
        if kind == FACTORS or (leaf == "bias" and path in self.candidates):
            return BIAS if leaf == "bias" else FACTORS if path in self.factored else ""
        parts = next(module.children(), None) is not None
        complete = path and not parts and self.tensors[path].keys() == module.state_dict().keys()
        return kind if complete and self._named_by(path) == 1 else ""

    @cached_property
    def candidates(self) -> list[str]:
        """Modules that may have factors, but those whose path is the end of another's, which peft would take, too."""
        return [
            path
            for path, module in self.modules.items()
            if isinstance(module, FACTORED) and not isinstance(module, READ_DIRECTLY)
            if getattr(module, "groups", 1) == 1 and not self._named_by(f".{path}")
        ]

    @cached_property
    def factored(self) -> frozenset[str]:
        """Those that peft gives factors: it takes maps beside experts for experts, by their names, in some models."""
        leaves = {path: path.rpartition(".")[2] for path in self.candidates}
        in_mamba = self.model.config.model_type in MAMBA
        targets = [path for path, leaf in leaves.items() if not (in_mamba and leaf in IN_MAMBA)]
        model = self._in_peft({"peft_type": "LORA", "target_modules": targets}).get_base_model()
        return frozenset(path for path in targets if hasattr(model.get_submodule(path), "lora_A"))

    def embeds(self, info: TensorInfo) -> bool:
        """Whether a tensor is the table of an embedding, which peft factors as [in, out]."""
        return isinstance(self.modules.get(self.module(info.name)), nn.Embedding)

    def has_bias(self, path: str) -> bool:
        """Whether a module has a bias."""
        return getattr(self.modules[path], "bias", None) is not None

    def problem(self, adapter: Adapter) -> str:
        """Why peft does not load an adapter into the base and merge it; empty: it does."""
        from peft import set_peft_model_state_dict

        shapes = as_tensors(adapter.tensors).shapes
        described = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        try:
            model = self._in_peft({**adapter.config, "init_lora_weights": True})
            loaded = set_peft_model_state_dict(model, described)
            model.merge_and_unload()
        except Exception as error:  # peft and the classes of models raise errors of many classes
            return short(error)
        missing = [name for name in loaded.missing_keys if ".lora_" in name]
        return f"it takes no '{min(names)}'" if (names := [*loaded.unexpected_keys, *missing]) else ""

    def _in_peft(self, config: Mapping[str, Any]) -> Any:
        """A copy of the model as peft makes it ready for an adapter."""
        from peft import PeftConfig, get_peft_model

        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")  # peft's, on what transformers calls by another name now
            return get_peft_model(copy.deepcopy(self.model), PeftConfig.from_peft_type(**config))

    def _named_by(self, ending: str) -> int:
        """How many modules end so, all of which peft takes for one that a config names."""
        return sum(path.endswith(ending) for path in self.modules)
