"""transformers' models, created without weights or with all of them."""

from __future__ import annotations

import copy
from typing import Any

import torch

from rotation_merge.architecture import Architecture
from rotation_merge.architecture.sentence import KEY as MODULES
from rotation_merge.errors import CheckpointError
from rotation_merge.model.blocks import read_tensor, unstack
from rotation_merge.model.tensors import TensorSource
from rotation_merge.run.functions import disable_extra_outputs, model_class
from rotation_merge.run.sentence import with_empty_modules, with_modules


def empty_model(config: Any, untie: bool = False) -> Any:
    """A model of transformers' own class without weights, its buffers as they should be; in evaluation mode.

    No weight is drawn: where tensors hold nothing that takes longer than all the rest.
    """
    from accelerate import init_empty_weights
    from transformers.initialization import no_init_weights

    config_copy = copy.deepcopy(config)
    disable_extra_outputs(config_copy)
    for part in (config_copy, config_copy.get_text_config()):
        part.use_cache = False
        part._attn_implementation = part._experts_implementation = "eager"
        if untie:
            part.tie_word_embeddings = False
    kind = model_class(config_copy.architectures)
    with init_empty_weights(include_buffers=False), no_init_weights():
        model = kind(config_copy)
        if modules := getattr(config_copy, MODULES, None):
            model = with_empty_modules(model, modules)
    model.tie_weights()
    return model.eval()


def whole_model(empty: Any, source: TensorSource, architecture: Architecture, dtype: torch.dtype) -> Any:
    """A model with all of its weights, which transformers brings into its own form."""
    state = {}
    for info in architecture.tensors():
        tensor = read_tensor(info, source)
        if tensor is not None and all(name in source for name in info.names):
            state.update(unstack(info, tensor.to(dtype)))
    kind = model_class([type(empty).__name__])
    model, info = kind.from_pretrained(
        None, config=empty.config, state_dict=state, dtype=dtype, output_loading_info=True
    )
    if modules := getattr(empty.config, MODULES, None):
        model = with_modules(model, modules, state, type(empty).__name__)
    if missing := sorted(info["missing_keys"]):
        raise CheckpointError(f"missing weights, the first is {missing[0]}", remedy="the checkpoint is incomplete")
    return model.requires_grad_(False).eval()
