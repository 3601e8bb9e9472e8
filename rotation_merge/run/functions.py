"""Models as functions: in memory, without weights, their inputs and outputs. Only transformers' own classes."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from rotation_merge.architecture import Architecture, resolve
from rotation_merge.architecture.registry import stores_codes
from rotation_merge.architecture.sentence import KEY
from rotation_merge.errors import CheckpointError, short
from rotation_merge.model.contents import read_json
from rotation_merge.model.folder import fetched_weights
from rotation_merge.model.forms import restructured
from rotation_merge.model.labels import with_classes_of
from rotation_merge.model.open import open_model, parse_reference
from rotation_merge.model.view import View, as_stored, stored_dtype
from rotation_merge.run.batches import Batch, inputs_for
from rotation_merge.run.sentence import with_modules

BESIDE = ("output_hidden_states", "output_attentions", "output_router_logits")
"""Switches of a config for additional outputs: coordinates of inner spaces."""

SAME = 1e-4
"""Outputs apart by less than this share of their largest are the same in float32."""


def local_path(path: str) -> str:
    """The folder of a model: a local directory, or the hub's cache. Of `model+adapter` the model's.

    Raises:
        CheckpointError: there is no such directory or model.
    """
    return fetched_weights(parse_reference(path).model)


def read_config(path: str) -> dict[str, Any]:
    """The config.json of the model at a path.

    Raises:
        CheckpointError: there is none, or it is no JSON object.
    """
    return read_json(os.path.join(local_path(path), "config.json"))


def predicts_next(model: nn.Module) -> bool:
    """Whether a model's labels are the next tokens."""
    name = type(model).__name__
    sees = "ForConditionalGeneration" in name and not getattr(model.config, "is_encoder_decoder", False)
    return sees or name.endswith(("ForCausalLM", "LMHeadModel"))


def load(path: str, dtype: torch.dtype = torch.float32, like: str | View | None = None) -> Any:
    """The model at a path in memory, in evaluation mode; every weight must be there.

    Args:
        like: a model in whose order its classes are to stand, where they have the same names.

    Raises:
        CheckpointError: no class of transformers fits, weights are missing or of the wrong shape, or an adapter was
            trained on another base.
    """
    import transformers

    config = read_config(path)
    unseen = stores_codes(config) or not config.get("architectures")  # transformers alone knows what it is
    if unseen and parse_reference(path).lora is None:
        name = str((config.get("architectures") or ["AutoModel"])[0])
        if not hasattr(kind := getattr(transformers, name, None), "from_pretrained"):
            raise CheckpointError(f"transformers has no class {name}", where=path, remedy="update transformers")
        return _from_pretrained(kind, path, dtype, local_path(path), local_files_only=True)
    view = open_model(path, unsupported="merge")
    if like is not None:
        named = like if isinstance(like, View) else replace(view, name=like, config=read_config(like))
        view = with_classes_of(view, named)
    return in_memory(view, dtype)


def in_memory(view: View, dtype: torch.dtype | None = torch.float32, trained: bool = False) -> Any:
    """A model in memory, in evaluation mode: of a module a copy, of sentence-transformers with its modules.

    Args:
        dtype: of the module; None: the widest of the model's tensors.
        trained: its parameters are its own; else those of files may stay mapped to them.

    Raises:
        CheckpointError: no class of transformers fits, or weights are missing or of the wrong shape.
    """
    stored, mapped = as_stored(view), not trained and view.files is not None and view.files.adapter is None
    if view.module is not None:
        return stored.to_module() if dtype is None else stored.to_module().to(dtype)
    state = {name: tensor.to("cpu", stored_dtype(tensor, dtype), copy=not mapped) for name, tensor in stored.blocks()}
    kinds = [tensor.dtype for tensor in state.values() if tensor.is_floating_point()]
    values = {"config": stored.transformers_config, "state_dict": state}
    model = _from_pretrained(stored.model_class, view.name, max(kinds, key=lambda kind: kind.itemsize), **values)
    return with_modules(model, modules, state, view.name) if (modules := view.config.get(KEY)) else model


def _from_pretrained(kind: Any, label: str, dtype: torch.dtype, directory: str | None = None, **values: Any) -> Any:
    """A model of a class of transformers, all of whose weights are there; it computes in any precision."""
    options = {"dtype": dtype, "attn_implementation": "eager", "output_loading_info": True}
    try:
        model, info = kind.from_pretrained(directory, **options, **values)
    except Exception as error:
        raise CheckpointError(f"cannot be loaded ({short(error)})", where=label, remedy="download it again") from error
    for failure in ("missing", "mismatched"):
        if wrong := sorted(map(str, info.get(f"{failure}_keys") or [])):
            remedy = "the checkpoint is incomplete, or its config.json belongs to another model"
            raise CheckpointError(f"{failure} weights, the first is {wrong[0]}", where=label, remedy=remedy)
    model.config._experts_implementation = "eager"  # grouped products know no double precision
    disable_extra_outputs(model.config)
    return model.eval()


def empty_model(view: View) -> Any:
    """A model of transformers' own class without weights, its buffers as they should be; in evaluation mode.

    No weight is drawn: where tensors hold nothing that takes longer than all the rest.

    Raises:
        CheckpointError: transformers has no class for it.
    """
    from accelerate import init_empty_weights
    from transformers.initialization import no_init_weights

    config = copy.deepcopy(view.transformers_config)  # whose mappings may be those of the view
    disable_extra_outputs(config)
    for part in (config, config.get_text_config()):
        part.use_cache = False
        part._attn_implementation = part._experts_implementation = "eager"
        if view.untie:
            part.tie_word_embeddings = False
    with init_empty_weights(include_buffers=False), no_init_weights():
        model = view.model_class(config)
        if modules := view.config.get(KEY):
            model = with_modules(model, modules)
    model.tie_weights()
    return model.eval()


def streamed_model(view: View, device: str) -> Any:
    """transformers' model in evaluation mode and float32, whose modules read their weights on each run.

    Raises:
        CheckpointError: weights are missing, or the files have them in another form.
    """
    from accelerate import cpu_offload

    model = empty_model(view)
    tensors = restructured(view.tensors, view.architecture, architecture_of(model, view.untie))
    if missing := sorted({name for name, _ in model.named_parameters(remove_duplicate=False)} - tensors.keys()):
        problem = f"has no weight {missing[0]} in the form of {type(model).__name__}"
        raise CheckpointError(problem, where=view.name, remedy="download it again, or run it as a whole")
    model.hf_device_map = {"": device}
    return cpu_offload(model, device, state_dict=tensors)


def disable_extra_outputs(config: Any) -> None:
    """Turn off a config's additional model outputs."""
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        for key in BESIDE:
            if getattr(part, key, False):
                setattr(part, key, False)


def architecture_of(model: nn.Module, untie: bool = False) -> Architecture:
    """The architecture of a loaded model, under its state dict's names."""
    config = {**cast(Any, model).config.to_dict(), "architectures": [type(model).__name__]}
    return resolve(config, list(model.state_dict()), type(model).__name__, untie=untie)


def configured_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """The dtype of a checkpoint's weights, as its config names it; float32 where it names none."""
    name = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    dtype = getattr(torch, name, None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


@torch.no_grad()
def outputs(model: Any, batch: Mapping[str, Tensor]) -> Batch:
    """Default outputs of a model: every floating tensor except caches.

    Tensors of its parts are included (`text_model_output.NAME`).
    """
    return floating_outputs(model, model(**inputs_for(model, batch)))


def floating_outputs(model: Any, answer: Any) -> Batch:
    """The floating tensors among a model's outputs; see `outputs`.

    Raises:
        CheckpointError: there are none.
    """
    tensors = dict(_floating("", answer))
    if not tensors:
        raise CheckpointError(f"{type(model).__name__} has no output to compare")
    return tensors


def _floating(name: str, output: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield name, output
    elif name != "past_key_values" and isinstance(output, Mapping | list | tuple):
        for key, value in output.items() if isinstance(output, Mapping) else enumerate(output):
            yield from _floating(f"{name}.{key}" if name else str(key), value)


def check_answers(model: Any, tensors: Iterable[Tensor], label: str | None = None) -> None:
    """Check that a model's outputs are not NaN.

    Raises:
        CheckpointError: it is NaN.
    """
    if any(bool(tensor.isnan().any()) for tensor in tensors):
        problem, remedy = f"{type(model).__name__} answers with NaN", "repair or replace the checkpoint"
        raise CheckpointError(problem, where=label, remedy=remedy)


@contextmanager
def fused_attention(model: Any, batch: Batch) -> Iterator[None]:
    """Use torch's fused attention within the block, if it computes the same on a batch.

    It is much faster, but lacks some families' changes of attention (soft caps).
    """
    supported = [part._supports_sdpa for part in model.modules() if hasattr(part, "_supports_sdpa")]
    can_change = hasattr(model, "set_attn_implementation") and all(supported)
    if not can_change or getattr(model.config, "_attn_implementation", None) != "eager":
        yield
        return
    plain = outputs(model, batch)
    model.set_attn_implementation("sdpa")
    try:
        fused = outputs(model, batch)
        same = fused.keys() == plain.keys() and all(
            float((fused[name] - x).abs().max()) <= SAME * float(x.abs().max()) for name, x in plain.items()
        )  # NaN is not the same
        if not same:
            model.set_attn_implementation("eager")
        yield
    finally:
        model.set_attn_implementation("eager")
