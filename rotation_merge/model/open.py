"""The gate: every model becomes a `View` here, checked once, whatever form it is given in; an adapter on its base."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from mergekit.common import ModelPath, ModelReference
from mergekit.options import MergeOptions
from torch import Tensor, nn

from rotation_merge.architecture import Architecture, resolve
from rotation_merge.architecture.model import TensorInfo
from rotation_merge.architecture.registry import families, find, says_tied, stores_codes, unaligned
from rotation_merge.architecture.sentence import KEY as SENTENCE
from rotation_merge.errors import ArchitectureError, CheckpointError, RecipeError, RotationMergeError, short
from rotation_merge.model.adapter_parts import adapted
from rotation_merge.model.adapters import ADAPTER_FILES, Adapter
from rotation_merge.model.apply import with_tied
from rotation_merge.model.checkpoint import stamps_of
from rotation_merge.model.codes import dequantised
from rotation_merge.model.contents import (
    ADAPTER_CONFIG,
    CONFIG,
    DOWNLOAD,
    check_classes,
    check_codes,
    check_config,
    read_json,
)
from rotation_merge.model.folder import SMALL, fetched, fetched_weights, place_of, stored_tensors
from rotation_merge.model.gguf import is_gguf, quantised
from rotation_merge.model.nearness import Nearness, nearness
from rotation_merge.model.sentence import read_modules
from rotation_merge.model.tensors import Shapes, Tensors, are_equal, as_tensors
from rotation_merge.model.view import Files, View
from rotation_merge.model.writing import untied
from rotation_merge.record import REPORT_FILE

LOG = logging.getLogger(__name__)

_equal: dict[tuple[Any, ...], bool] = {}
"""Whether two tensors of files have the same values, by the files' stamps and the tensors' names."""

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
    dequantise: bool = False,
) -> View:
    """Open a model and check it; of a stored model config and headers are read, no tensor.

    Args:
        model: see `ModelLike`; or a reference of mergekit.
        name: of a model in memory, for messages; of a stored one its path is taken.
        untie: give a head that shares the embedding's tensor one of its own.
        unsupported: `error` refuses an unknown architecture and unknown tensors, `merge` leaves them where they are.
        options: of mergekit, for caches and what it may run.
        any_base: take an adapter of another base: the caller checks it, or was told to.
        dequantise: read FP8 codes of a stored model as numbers, which are refused otherwise.

    Raises:
        CheckpointError: it is no model, or cannot be read, or is damaged; names its type.
        ArchitectureError: no architecture file describes it.
    """
    if isinstance(model, View):
        untie = untie or model.head_differs
        if model.untie == untie:
            return model
        architecture = resolve(dict(model.config), list(model), model.name, untie=untie)
        return replace(model, architecture=architecture, untie=untie)
    model = as_reference(model)
    if isinstance(model, ModelReference):
        return _open_files(model, options or MergeOptions(), untie, unsupported, any_base, dequantise)
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
    for key, value in state.items():
        layout = value.layout if isinstance(value, Tensor) else f"of type {type(value).__name__}"
        if layout is not torch.strided or not isinstance(key, str):
            remedy = "give a pair (state dict, config), with dense tensors of torch by their names"
            raise CheckpointError(f"entry '{key}' is {layout} in its state dict", where=name, remedy=remedy)
    tensors = as_tensors(dict(state), name)
    kinds = {key: str(dtype).removeprefix("torch.") for key, dtype in tensors.dtypes.items()}
    check_classes(config, name)
    check_codes(config, kinds, tensors.shapes, name)
    architecture = _architecture(name, config, tensors.shapes, untie, "error")
    view = View(name, config, architecture, tensors, module=module, untie=untie)
    return view if any(tensor.is_meta for tensor in state.values()) else _with_own_head(view, "error")


def _with_own_head(view: View, unsupported: str) -> View:
    """A model whose config says what its weights say: a stored head that differs from the embedding is not tied to it.

    transformers decides in the same way when it loads such a model.

    Raises:
        CheckpointError: the head would compute something else if the config did not tie it.
    """
    head = differing_head(view) if says_tied(view.config) else None
    if head is None:
        return view
    config = untied(view.config)
    architecture = _architecture(view.name, config, view.shapes, True, unsupported)
    if architecture.named()[head.name].common != head.common:
        problem = f"'{head.name}' differs from '{head.tied[0]}', which the config ties it to, and reads scaled outputs"
        remedy = "remove it, or divide it by the scale and set 'tie_word_embeddings': false"
        raise CheckpointError(problem, where=view.name, remedy=remedy)
    return replace(view, config=config, architecture=architecture, untie=True, head_differs=True)


def differing_head(view: View) -> TensorInfo | None:
    """A stored head whose values are not those of the embedding that is stored beside it."""
    for info in view.architecture.heads():
        embedding = next((name for name in info.tied if name in view), None)
        if info.name in view and embedding is not None and not _equal_stored(view, info.name, embedding):
            return replace(info, tied=(embedding,))
    return None


def _equal_stored(view: View, first: str, second: str) -> bool:
    """Whether two tensors have the same values; those of files are read once, while the files are unchanged."""
    if view.files is None:
        return are_equal(view[first], view[second])
    key = *stamps_of(view).items(), first, second
    if key not in _equal:
        _equal[key] = are_equal(view[first], view[second])
    return _equal[key]


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
    reference: ModelReference, options: MergeOptions, untie: bool, unsupported: str, any_base: bool, dequantise: bool
) -> View:
    """Open a stored model: a folder, one of the hub, a GGUF, with its adapter."""
    name, lora, cache = str(reference), reference.lora, options.transformers_cache
    adapter = None if lora is None else Adapter.open(fetched(lora, cache, ADAPTER_FILES))
    folder, config, tensors = read_stored(reference, options)
    if dequantise:
        config, tensors = dequantised(config, tensors, name)
    architecture = _architecture(name, config, tensors.shapes, untie, unsupported)
    remarks = tuple(f"`{name}` {codes_read}." for codes_read in filter(None, [quantised(folder)]))
    files = Files(reference.model_copy(update={"lora": None}), folder, tensors.dtypes, options, tensors)
    stored = View(str(files.reference), config, architecture, tensors, files, untie=untie, remarks=remarks)
    base = _with_own_head(stored, unsupported)
    if adapter is None:
        return base
    view = with_adapter(base, adapter, reference, unsupported)
    if not any_base:
        check_own_base(view)
    return view


def with_adapter(base: View, adapter: Adapter, reference: ModelReference, unsupported: str = "merge") -> View:
    """A stored model with an adapter merged into its weights, each when it is asked for.

    Args:
        reference: names both.
        unsupported: as of `open_model`.

    Raises:
        CheckpointError: the adapter changes something that the model does not have, or that has another shape.
    """
    name, remarks, files = str(reference), base.remarks, base.files
    if files is None:
        raise CheckpointError("is in memory", where=base.name, remedy="give its folder")
    if not adapter.base:
        remarks = (f"`{name}`: the adapter does not say which base it was trained on.", *remarks)
    apart = _with_head_apart(base, adapter)
    tensors = adapted(apart, adapter, name)
    dtypes = dict(apart.dtypes) if apart is not base else files.dtypes
    files = replace(files, reference=reference, dtypes=dtypes, tensors=tensors, adapter=adapter, base=base)
    view = replace(apart, name=name, tensors=tensors, files=files, remarks=remarks)
    if apart is base:
        return view
    view = view if adapter.config.get("ensure_weight_tying") else _with_own_head(view, unsupported)
    if view.head_differs:
        return view
    tensors = tensors.only(base)
    return replace(view, architecture=base.architecture, tensors=tensors, files=replace(files, tensors=tensors))


def _with_head_apart(base: View, adapter: Adapter) -> View:
    """A base whose tied head is a second tensor, where an adapter changes it or the embedding: they may differ then."""
    if not says_tied(base.config) or find(base.config) is None:
        return base
    architecture = resolve(dict(base.config), list(base), base.name, keep_unknown=True, untie=True)
    names = {name.replace(".base_layer", "") for name in adapter.changes}
    heads = [info for info in architecture.heads() if names & {info.name, *info.tied}]
    if not heads:
        return base
    return replace(base, architecture=architecture, tensors=with_tied(architecture, base.tensors))


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


SAME = 0.9999
"""Least cosine of two copies of one model, in whatever types they are stored."""

OWN_BASE = "put it on its own base; if this is a copy of it, correct 'base_model_name_or_path' in adapter_config.json"


def check_own_base(view: View, further_bases: Iterable[View] = (), remedy: str = OWN_BASE) -> None:
    """Refuse a model with an adapter that was trained on another base.

    Args:
        further_bases: bases that it may have been trained on as well.

    Raises:
        CheckpointError: names its base and the model that it stands on.
    """
    files = view.files
    if files is not None and files.adapter is not None and files.base is not None and not files.options.allow_crimes:
        check_base(files.adapter, [*further_bases, files.base], view.name, remedy)


def check_base(adapter: Adapter, bases: Iterable[View], label: str, remedy: str = OWN_BASE) -> None:
    """Refuse an adapter that was trained on none of some bases.

    The criterion is the report beside it (if it was carried), else the weights of the base in its config, else that
    base's name.

    Args:
        label: the adapter's name in errors.

    Raises:
        CheckpointError: names its base and the others.
    """
    name, bases = adapter.base, list(bases)
    if not name:
        return
    beside = os.path.join(adapter.path, REPORT_FILE)
    marks = read_json(beside).get("fingerprints") if os.path.isfile(beside) else None
    mark = marks.get(name) if isinstance(marks, dict) else None
    base_names = " or ".join(base.name for base in bases)
    if mark is not None and mark not in (base.fingerprint for base in bases):
        problem = f"was carried to {name}, whose weights were not those of {base_names}"
        raise CheckpointError(problem, where=label, remedy=remedy)
    if mark is None and not any(_is_called(base, str(name)) for base in bases):
        raise CheckpointError(f"is an adapter of {name}, not of {base_names}", where=label, remedy=remedy)


def _is_called(base: View, name: str) -> bool:
    """Whether a base is the model of this name: the same folder, the same weights, or a folder of the same name."""
    path = str(base.reference.model.path)
    if os.path.realpath(name) == os.path.realpath(path) or name == path:
        return True
    near = Nearness()
    with suppress(RotationMergeError):  # such as a folder without weights
        place = place_of(ModelPath(path=name))
        near = near if place is None else nearness(base.architecture, base.tensors, open_model(place).tensors)
    return near.least >= SAME if near.cosines else os.path.basename(name) == os.path.basename(path)


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


def on_base(name: str, base: str | None = None) -> str:
    """An adapter's folder without a base as `BASE+ADAPTER`; any other name unchanged.

    Args:
        base: it stands on this one; None: on the one that its config names, a folder or GGUF, a model in the hub's
            cache, or a folder or GGUF of that name beside the adapter.

    Raises:
        CheckpointError: that base is not here.
    """
    config = os.path.join(name, ADAPTER_CONFIG)
    if not os.path.isfile(config) or os.path.isfile(os.path.join(name, CONFIG)):
        return name
    if base is not None:
        return f"{base}+{name}"
    stated = str(read_json(config).get("base_model_name_or_path") or "")
    beside = os.path.join(os.path.dirname(os.path.abspath(name)), os.path.basename(stated))
    for place in (stated, beside) if stated else ():
        if os.path.isfile(os.path.join(place, CONFIG)) or (os.path.exists(place) and is_gguf(place)):
            return f"{os.path.abspath(place)}+{name}"
    if not os.path.exists(stated) and place_of(ModelPath(path=stated)) is not None:
        return f"{stated}+{name}"
    problem = f"is an adapter of {stated or 'a base that it does not name'}, which is not on this machine"
    remedy = "name its folder as 'base', or merge adapters without a base ('rotation-merge lora')"
    raise CheckpointError(problem, where=name, remedy=remedy)


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
