"""The gate: every model becomes a `View` here, checked once, whatever form it is given in."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from mergekit.common import ModelPath, ModelReference
from mergekit.options import MergeOptions
from torch import Tensor, nn

from rotation_merge.architecture import Architecture, resolve
from rotation_merge.architecture.model import TensorInfo
from rotation_merge.architecture.registry import families, find, stores_codes, tied_head, unaligned
from rotation_merge.architecture.sentence import KEY as SENTENCE
from rotation_merge.errors import ArchitectureError, CheckpointError, RecipeError, short
from rotation_merge.model.adapter_base import OWN_BASE, check_base
from rotation_merge.model.adapter_parts import adapted
from rotation_merge.model.adapters import ADAPTER_FILES, Adapter
from rotation_merge.model.contents import DOWNLOAD, check_classes, check_codes, check_config
from rotation_merge.model.folder import SMALL, fetched, fetched_weights, stored_tensors
from rotation_merge.model.gguf import quantised
from rotation_merge.model.sentence import read_modules
from rotation_merge.model.tensors import Shapes, Tensors, as_tensors
from rotation_merge.model.view import Files, View

LOG = logging.getLogger(__name__)

ModelLike = Any
"""A folder, a name of the hub (also with a revision or an adapter, as in recipes), a GGUF, a module, a pair of a state
dict and its config (a transformers config, or the dictionary in config.json), or a view."""


def open_model(
    model: ModelLike,
    name: str = "",
    *,
    untie: bool = False,
    unsupported: str = "error",
    options: MergeOptions | None = None,
    any_base: bool = False,
) -> View:
    """Open a model and check it; of a stored model config and headers are read, no tensor.

    Args:
        model: see `ModelLike`; or a reference of mergekit.
        name: of a model in memory, for messages; of a stored one its path is taken.
        untie: give a head that shares the embedding's tensor one of its own.
        unsupported: `error` refuses an unknown architecture and unknown tensors, `merge` leaves them where they are.
        options: of mergekit, for caches and what it may run.
        any_base: take an adapter of another base: the caller checks it, or was told to.

    Raises:
        CheckpointError: it is no model, or cannot be read, or is damaged; names its type.
        ArchitectureError: no architecture file describes it.
    """
    if isinstance(model, View):
        if model.untie == untie:
            return model
        architecture = resolve(dict(model.config), list(model), model.name, untie=untie)
        return replace(model, architecture=architecture, untie=untie)
    model = as_reference(model)
    if isinstance(model, ModelReference):
        return _open_files(model, options or MergeOptions(), untie, unsupported, any_base)
    if isinstance(model, nn.Module):
        if hasattr(model, "merge_and_unload"):
            problem = "is a model of peft, with an adapter beside its weights"
            remedy = "give model.merge_and_unload(), or the folders as 'base+adapter'"
            raise CheckpointError(problem, where=name or None, remedy=remedy)
        values = {**_values(getattr(model, "config", None), name), "architectures": [type(model).__name__]}
        return _in_memory(name or type(model).__name__, model.state_dict(), values, untie, model)
    if isinstance(model, tuple) and len(model) == 2 and isinstance(model[0], Mapping):
        return _in_memory(name or "the state dict", model[0], _with_class(_values(model[1], name), model[0]), untie)
    is_state = isinstance(model, Mapping)
    problem = "is a state dict without its config" if is_state else f"is of type {type(model).__name__}"
    remedy = "give a folder, a name of the hub, a module, or a pair (state dict, config)"
    raise CheckpointError(f"{problem}, which is not a model", where=name or None, remedy=remedy)


def _in_memory(
    name: str, state: Mapping[str, Tensor], config: dict[str, Any], untie: bool, module: nn.Module | None = None
) -> View:
    if odd := [f"'{key}' is of type {type(x).__name__}" for key, x in state.items() if not isinstance(x, Tensor)]:
        remedy = "give a pair (state dict, config), with tensors of torch"
        raise CheckpointError(f"entry {odd[0]} in its state dict", where=name, remedy=remedy)
    tensors = as_tensors(dict(state), name)
    kinds = {key: str(dtype).removeprefix("torch.") for key, dtype in tensors.dtypes.items()}
    check_classes(config, name)
    check_codes(config, kinds, tensors.shapes, name)
    architecture = _architecture(name, config, tensors.shapes, untie, "error")
    return View(name, config, architecture, tensors, module=module, untie=untie)


def _values(config: Any, name: str) -> dict[str, Any]:
    """A config as the dictionary that config.json would hold."""
    if not isinstance(config, Mapping) and not hasattr(config, "to_dict"):
        remedy = "give a transformers config, or the dictionary in config.json"
        raise CheckpointError(f"its config is of type {type(config).__name__}", where=name or None, remedy=remedy)
    values = dict(config if isinstance(config, Mapping) else config.to_dict())
    if not stores_codes(values):
        values.pop("quantization_config", None)
    return values


def _with_class(config: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """A config with the class of transformers whose tensors are most like these, where it names none."""
    kinds = [k for spec in families().values() if config.get("model_type") in spec.model_types for k in spec.classes]
    if config.get("architectures") or not kinds:
        return config
    return {**config, "architectures": [min(kinds, key=lambda kind: len(_keys_of(kind, config) ^ set(names)))]}


def _keys_of(kind: str, config: dict[str, Any]) -> set[str]:
    """Names of the tensors of a new model of a class; none where transformers has no such class."""
    import transformers

    model_class = getattr(transformers, kind, None)
    if model_class is None or model_class.config_class.model_type != config["model_type"]:
        return set()
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # classes say how they are meant to be used
    try:
        with torch.device("meta"):
            return set(model_class(model_class.config_class.from_dict(config)).state_dict())
    finally:
        transformers.logging.set_verbosity(verbosity)


def _open_files(
    reference: ModelReference, options: MergeOptions, untie: bool, unsupported: str, any_base: bool
) -> View:
    """Open a stored model: a folder, one of the hub, a GGUF, with its adapter."""
    name, lora, remarks = str(reference), reference.lora, list[str]()
    adapter = None if lora is None else Adapter.open(fetched(lora, options.transformers_cache, ADAPTER_FILES))
    folder, config, tensors = read_stored(reference, options)
    architecture = _architecture(name, config, tensors.shapes, untie, unsupported)
    dtypes = tensors.dtypes
    if adapter is not None:
        tied = tied_head(config, list(tensors), name, None if untie else architecture)
        tensors = adapted(tensors, adapter, architecture, config, tied[0] if tied else None, name)
        remarks += [] if adapter.base else [f"`{name}`: the adapter does not say which base it was trained on."]
    remarks += [f"`{name}` {codes_read}." for codes_read in filter(None, [quantised(folder)])]
    files = Files(reference, folder, dtypes, options, adapter, tensors)
    view = View(name, config, architecture, tensors, files, untie=untie, remarks=tuple(remarks))
    if not any_base:
        check_own_base(view)
    return view


def check_present(reference: ModelReference, options: MergeOptions | None = None) -> None:
    """Refuse a model that is nowhere, before others are read; of the hub its config is fetched, a GGUF decoded.

    Raises:
        CheckpointError: names the directory, file or repository.
    """
    for part, patterns in ((reference.model, SMALL), (reference.lora, ADAPTER_FILES)):
        if part is not None:
            fetched(part, (options or MergeOptions()).transformers_cache, patterns)


def read_stored(reference: ModelReference, options: MergeOptions) -> tuple[str, dict[str, Any], Tensors]:
    """A stored model without its adapter: folder, config and tensors, whatever its architecture.

    The config has transformers' defaults; that of a model of sentence-transformers has the modules behind it, too.

    Raises:
        CheckpointError: config or weights are missing or damaged.
    """
    cache, path = options.transformers_cache, reference.model.path
    folder = fetched(reference.model, cache)
    check_config(folder)
    stored = reference.model_copy(update={"model": ModelPath(path=folder), "lora": None})
    try:
        config: dict[str, Any] = stored.config(trust_remote_code=options.trust_remote_code).to_dict()
    except Exception as error:  # transformers raises errors of many classes here
        remedy = "correct config.json" if folder == path else DOWNLOAD
        raise CheckpointError(f"its config cannot be loaded ({short(error)})", where=path, remedy=remedy) from error
    folder = fetched_weights(reference.model, cache)
    modules = read_modules(folder)
    tensors, kinds = stored_tensors(folder, modules, options.lazy_unpickle)
    check_codes(config, kinds, tensors.shapes, str(reference))
    return folder, {**config, SENTENCE: modules} if modules else config, tensors


def _architecture(name: str, config: dict[str, Any], shapes: Shapes, untie: bool, unsupported: str) -> Architecture:
    """The architecture of a model, its shapes compared with the config's."""
    merge_anyway = unsupported == "merge"
    if merge_anyway and find(config) is None:
        return unaligned(list(shapes), config)
    try:
        architecture = resolve(config, list(shapes), name, keep_unknown=merge_anyway, untie=untie)
    except ArchitectureError as error:
        if error.where == name:
            raise
        raise ArchitectureError(error.what, where=f"{name}, {error.where}", remedy=error.remedy) from error
    check_shapes(architecture, shapes, name)
    streams = ", ".join(f"{stream} up to {groups[-1]}" for stream, groups in architecture.stream_groups.items())
    LOG.info("%s: %s, %d blocks; %s", name, architecture.family, len(architecture.blocks), streams or "no stream")
    LOG.debug("%s: tensors are named with base %r and %s", name, architecture.base, architecture.spelling)
    return architecture


def check_own_base(view: View, further_bases: Iterable[View] = (), remedy: str = OWN_BASE) -> None:
    """Refuse a model with an adapter that was trained on another base.

    Args:
        further_bases: bases that it may have been trained on as well.

    Raises:
        CheckpointError: names its base and the model that it stands on.
    """
    if view.files is None or view.files.adapter is None or view.files.options.allow_crimes:
        return
    plain = view.files.reference.model_copy(update={"lora": None})
    base = open_model(plain, unsupported="merge", options=view.files.options)
    check_base(view.files.adapter, [*further_bases, base], view.name, open_model, remedy)


def several(models: Any, of: str = "models", single: tuple[type, ...] = ()) -> list[Any]:
    """Models (or what else `of` says) as a list; `single`: further types that are one of them.

    Raises:
        RecipeError: they are one of them, or none.
    """
    if isinstance(models, (str, os.PathLike, nn.Module, Mapping, *single)) or not isinstance(models, Iterable):
        raise RecipeError(f"one {type(models).__name__} stands where {of} belong", remedy=f"give a list of {of}")
    return list(models)


def paths_of(models: Any, of: str = "model") -> list[str]:
    """Files, folders or names of the hub as text.

    Raises:
        RecipeError: they are one, or none, or one of them is in memory.
    """
    values = several(models, f"{of}s")
    for value in values:
        if not isinstance(value, str | os.PathLike):
            problem = f"one {of} is of type {type(value).__name__}"
            raise RecipeError(problem, remedy="give names, of folders, of files, or on the hub")
    return [os.fspath(value) for value in values]


def parse_reference(path: str) -> ModelReference:
    """A model as a user names it: a directory, org/name, either with a revision or an adapter.

    Raises:
        CheckpointError: it names none.
    """
    try:
        return ModelReference(model=ModelPath(path=path)) if os.path.exists(path) else ModelReference.parse(path)
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(f"'{path}' names no model ({error})", remedy="write a directory, or org/name") from error


def as_reference(model: ModelLike) -> ModelLike:
    """The name of a stored model as mergekit has it; any other model unchanged."""
    return parse_reference(os.fspath(model)) if isinstance(model, str | os.PathLike) else model


def whole_path(name: str) -> str:
    """A model's name with absolute local paths, for a process in another folder."""
    parts = [name] if os.path.exists(name) else name.split("+")
    return "+".join(os.path.abspath(part) if os.path.exists(part) else part for part in parts)


def weights_of(path: str) -> int:
    """The number of weights in a model, from its files' headers.

    Raises:
        CheckpointError: it cannot be read.
    """
    return sum(map(math.prod, read_stored(parse_reference(path), MergeOptions())[2].shapes.values()))


def check_shape(info: TensorInfo, shape: tuple[int, ...], model: str | None = None) -> None:
    """Compare a (stacked) tensor's shape with its labelled axes; one without any claims nothing.

    Raises:
        CheckpointError: a dimension has another length than the architecture says; names tensor and lengths.
    """
    sizes = tuple(axis.size for axis in info.axes)
    if sizes and (len(sizes) != len(shape) or any(w not in (None, s) for w, s in zip(sizes, shape, strict=True))):
        words = " x ".join("any" if w is None else str(w) for w in sizes)
        problem = f"tensor '{info.name}' has shape {list(shape)}, its config says {words}"
        remedy = "config.json and weights do not belong together, or the architecture file is wrong"
        raise CheckpointError(problem, where=model, remedy=remedy)


def check_shapes(architecture: Architecture, shapes: Mapping[str, tuple[int, ...]], model: str) -> None:
    """Compare every stored tensor's shape with its labelled axes, as `check_shape` does."""
    for info in architecture.tensors():
        if (name := next((name for name in info.names if name in shapes), None)) is not None:
            check_shape(info, (len(info.names), *shapes[name]) if info.stacked else shapes[name], model)


def check_names(first: View, second: View) -> None:
    """Check that both models have the same tensors, except unread ones and tied heads."""
    spare = {*first.unread, *second.unread}
    if first.tied is not None and first.tied == second.tied:
        spare.add(first.tied[0])  # a second copy of the embedding
    if odd := sorted((set(first) ^ set(second)) - spare):
        problem = f"tensor '{odd[0]}' is only in one of {first.name} and {second.name}"
        remedy = "give models of one class, both as folders or both as modules"
        raise CheckpointError(problem, where=second.name, remedy=remedy)
