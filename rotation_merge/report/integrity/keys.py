"""Tensor names and shapes against the model that transformers makes of the config, on the meta device."""

from __future__ import annotations

import copy
import json
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from rotation_merge.errors import CheckpointError, named, short
from rotation_merge.model.contents import CONFIG, Contents, check_config
from rotation_merge.report.integrity.defect import Defect, json_entries, shard_header

IGNORED = (
    *("rotary_emb.inv_freq", "position_ids", "token_type_ids", ".attn.bias", ".attention.bias", ".masked_bias"),
    *("num_batches_tracked", "rotary_emb.cos_cached", "rotary_emb.sin_cached"),
)
"""Suffixes of unused buffers that older releases stored."""

LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
SIZES = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("num_local_experts", "num_experts", "moe_intermediate_size", "vocab_size", "num_labels", "id2label", "label2id"),
    *("max_position_embeddings", "attention_bias", "mlp_bias", *LAYERS),
)
"""Config entries that decide shapes."""


Shapes = dict[str, tuple[tuple[int, ...], tuple[int, ...]]]


@dataclass(frozen=True)
class Loading:
    """The messages of transformers on loading a checkpoint.

    Attributes:
        model_class: its class.
        missing, unexpected: names of the model that are not stored, and stored ones that it does not read.
        mismatched: by name, the shape that is stored and the model's.
        names: of all tensors of the model.
        embedding: name of its input embedding; None where it has none.
        tied: names of tensors that are others' once it is loaded.
        prefix: in front of the names of its base model.
    """

    model_class: str
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    names: frozenset[str]
    embedding: str | None
    tied: frozenset[str]
    prefix: str


def check_keys(contents: Contents, parents: Sequence[Contents]) -> Iterator[Defect]:
    """Compare names and shapes; corrections of the config are taken from the first parent that has the same shapes."""
    if not contents.whole_files or not contents.config:
        return
    loading = loading_of(contents)
    if isinstance(loading, Defect):
        yield loading
        return
    if loading is None:
        return
    missing, unexpected = set(loading.missing), set(loading.unexpected)
    yield from _prefix(contents, loading, missing, unexpected)
    yield from _differences(contents, parents, loading, missing, unexpected)
    yield from _stored_head(contents, loading)


def embedding_rows(contents: Contents) -> int | None:
    """Number of rows of the stored input embedding; None if unknown."""
    loading = loading_of(contents)
    if not isinstance(loading, Loading) or loading.embedding is None:
        return None
    name = _stored_name(contents, loading.embedding)
    return None if name is None else contents.whole.shapes[name][0]


@dataclass(frozen=True)
class _Headers:
    """Cache key of transformers' loading messages for a folder; a merge and its parents mostly share it."""

    config: str
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]
    folder: str = field(compare=False)


def loading_of(contents: Contents) -> Loading | Defect | None:
    """The messages of transformers; a defect if it cannot make the model, None if its code is custom."""
    whole = contents.whole
    tensors = tuple((name, whole.kinds[name], shape) for name, shape in sorted(whole.shapes.items()))
    text = contents.text(CONFIG) if contents.config else None
    return _loading(_Headers(text or "", tensors, contents.folder))


def settings_of(contents: Contents) -> Any:
    """The config as transformers reads it, or a defect; None for custom code."""
    return _settings(_Headers(contents.text(CONFIG) or "", (), contents.folder)) if contents.config else None


@lru_cache(maxsize=8)
def _settings(headers: _Headers) -> Any:
    import transformers

    config = json.loads(headers.config)
    classes = config.get("architectures") or [""]
    if config.get("auto_map") and not hasattr(transformers, str(classes[0])):
        return None
    try:
        check_config(headers.folder)
        return transformers.AutoConfig.from_pretrained(headers.folder, local_files_only=True)
    except CheckpointError as error:
        return Defect("config that cannot be loaded", error.what, CONFIG, error.remedy or "correct it")
    except Exception as error:  # of many classes
        return Defect("config that cannot be loaded", short(error), CONFIG, "correct it, or update transformers")


@lru_cache(maxsize=8)
def _loading(headers: _Headers) -> Loading | Defect | None:
    import torch
    import transformers

    settings = _settings(replace(headers, tensors=())) if headers.config else None
    config = json.loads(headers.config) if settings is not None else {}
    if settings is None or isinstance(settings, Defect) or config.get("quantization_config"):
        return settings if isinstance(settings, Defect) else None
    classes = config.get("architectures")
    model_class = getattr(transformers, classes[0], None) if classes else _base_class(settings)
    if model_class is None:
        problem = (
            f"transformers {transformers.__version__} has no {classes[0] if classes else config.get('model_type')}"
        )
        return Defect("unknown architecture", problem, CONFIG, "set 'architectures' to the model's class")
    if (loading := _exact(model_class, settings, headers)) is not None:
        return loading
    state = {name: torch.empty(shape, dtype=_dtype(dtype), device="meta") for name, dtype, shape in headers.tensors}
    try:
        with _quiet():
            model, info = model_class.from_pretrained(
                *(None,),
                config=copy.deepcopy(settings),
                state_dict=state,
                device_map="meta",
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except Exception as error:
        if "automatic conversion" in str(error):  # of tensors that transformers brings together
            problem = f"{model_class.__name__} cannot combine the tensors that are stored separately"
            return Defect("wrong shape", problem, CONFIG, "correct the config's sizes, or merge again")
        return Defect("config that makes no model", short(error), CONFIG, "correct it")
    return _loading_into(
        model,
        tuple(sorted(info["missing_keys"])),
        tuple(sorted(name for name in info["unexpected_keys"] if not name.endswith(IGNORED))),
        {name: (tuple(stored), tuple(expected)) for name, stored, expected in info["mismatched_keys"]},
    )


def _loading_into(model: Any, missing: tuple[str, ...], unexpected: tuple[str, ...], mismatched: Shapes) -> Loading:
    return Loading(
        type(model).__name__,
        missing,
        unexpected,
        mismatched,
        frozenset(model.state_dict()),
        _input_embedding(model),
        frozenset(getattr(model, "all_tied_weights_keys", None) or {}),
        f"{model.base_model_prefix}." if model.base_model_prefix else "",
    )


def _exact(model_class: Any, settings: Any, headers: _Headers) -> Loading | None:
    """Loading of a checkpoint with exactly the model's names and shapes, tied ones left out or not; None for others.

    Most checkpoints are, and making a model takes a quarter of the time of loading into one.
    """
    import torch

    try:
        with _quiet(), torch.device("meta"):
            model = model_class(copy.deepcopy(settings))
    except Exception:  # what stands in the way, loading says
        return None
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    stored = {name: shape for name, _, shape in headers.tensors}
    loading = _loading_into(model, (), (), {})
    return loading if shapes.keys() - loading.tied <= stored.keys() and stored.items() <= shapes.items() else None


def _base_class(settings: Any) -> Any:
    from transformers import AutoModel

    return AutoModel._model_mapping.get(type(settings), None)


def _dtype(code: str) -> Any:
    import torch

    return getattr(torch, code, torch.float32)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers while it loads."""
    from transformers.utils import logging as transformers_logging

    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


def _input_embedding(model: Any) -> str | None:
    try:
        weight = model.get_input_embeddings().weight
    except (AttributeError, NotImplementedError):
        return None
    return next((name for name, parameter in model.named_parameters() if parameter is weight), None)


def _stored_name(contents: Contents, name: str) -> str | None:
    """The stored name of a model's tensor, allowing for other prefixes."""
    if name in contents.files:
        return name
    steps = name.split(".")
    for start in range(1, len(steps) - 1):
        end = ".".join(steps[start:])
        names = [stored for stored in contents.files if stored == end or stored.endswith(f".{end}")]
        if len(names) == 1:
            return names[0]
    return None


def _prefix(contents: Contents, loading: Loading, missing: set[str], unexpected: set[str]) -> Iterator[Defect]:
    """Names that are the model's behind, or without, a prefix."""
    before, after = _prefixes(unexpected, missing)
    names = {
        name: after + name.removeprefix(before)
        for name in contents.files
        if (before and name.startswith(before)) or (after and not name.startswith(after))
    } or (_bare(contents, loading) if not before and not after else {})
    if not names:
        return
    unexpected -= {name for name in unexpected if name.startswith(before)}
    missing -= {name for name in missing if name.startswith(after)}
    files = sorted({contents.files[name] for name in names})
    fits = all(file.endswith(".safetensors") for file in files)
    corrections = tuple(
        shard_header(file, {old: new for old, new in names.items() if contents.files[old] == file}) for file in files
    )
    old, new = next(iter(names.items()))
    problem = f"{len(names)} tensors have names like '{old}', the model expects '{new}'"
    yield Defect("prefix", problem, named(files), "rename them ('--mend')", corrections=corrections if fits else ())


def _prefixes(unexpected: set[str], missing: set[str]) -> tuple[str, str]:
    """The prefixes by which most unexpected and most missing names differ; empty if there are none.

    transformers brings some tensors together before it compares, so that these names need not be those of the files.
    """
    pairs: Counter[tuple[str, str]] = Counter()
    ends = {name.partition(".")[2]: name for name in missing}
    for name in unexpected:
        steps = name.split(".")
        shorter = next((suffix for k in range(1, len(steps)) if (suffix := ".".join(steps[k:])) in missing), None)
        if shorter is not None:
            pairs[name.removesuffix(shorter), ""] += 1
        elif name in ends:
            pairs["", ends[name].removesuffix(name)] += 1
    (before, after), count = max(pairs.items(), key=lambda pair: pair[1], default=(("", ""), 0))
    return (before, after) if count * 2 > len(missing) else (_wrapper(unexpected, missing), "")


def _wrapper(unexpected: set[str], missing: set[str]) -> str:
    """The first step of all unexpected names, if they share one that no missing name has: the prefix of a wrapper."""
    steps = {name.partition(".")[0] for name in unexpected}
    shared = len(steps) == 1 and len(missing) > 1 and len(unexpected) > 1
    return f"{steps.pop()}." if shared and not steps & {name.partition(".")[0] for name in missing} else ""


def _bare(contents: Contents, loading: Loading) -> dict[str, str]:
    """Tensors without the prefix of the class with a head.

    transformers adds it; vLLM and llama.cpp's converter do not.
    """
    if not loading.model_class.endswith(("ForCausalLM", "LMHeadModel")) or not loading.prefix:
        return {}
    names = {n: f"{loading.prefix}{n}" for n in contents.files if f"{loading.prefix}{n}" in loading.names}
    behind = any(name.startswith(loading.prefix) for name in contents.files)
    return {} if behind or set(names) & loading.names else names


def _differences(
    contents: Contents, parents: Sequence[Contents], loading: Loading, missing: set[str], unexpected: set[str]
) -> Iterator[Defect]:
    """Other names than the model's, and other shapes; corrected where a parent with these tensors has other sizes."""
    corrections = tuple(json_entries(CONFIG, entries) for entries in (_sizes(contents, parents),) if entries)
    if missing:
        problem = f"{len(missing)} tensors of {loading.model_class} are not stored: {named(sorted(missing))}"
        remedy = "merge again, from parents that have them"
        yield Defect("missing tensors", problem, _place(contents), remedy, corrections=corrections)
    if unexpected:
        problem = f"{loading.model_class} does not read {len(unexpected)} tensors: {named(sorted(unexpected))}"
        remedy = "correct the config's number of layers or its class, or merge again without them"
        yield Defect("unexpected tensors", problem, _place(contents), remedy, corrections=corrections)
    if loading.mismatched:
        name, (stored, expected) = next(iter(sorted(loading.mismatched.items())))
        shapes = f"stored as {list(stored)}, {list(expected)} by config.json"
        problem = f"{len(loading.mismatched)} tensors, '{name}' first: {shapes}"
        yield Defect("wrong shape", problem, CONFIG, "correct the config's sizes", corrections=corrections)


def _place(contents: Contents) -> str:
    return contents.index or named(contents.weight_files)


def _sizes(contents: Contents, parents: Sequence[Contents]) -> dict[str, Any]:
    """Entries that decide shapes, as the first parent with tensors of the same shapes has them."""
    shapes = contents.whole.shapes
    parent = next((p for p in parents if p.whole.shapes == shapes), None)
    if parent is None:
        return {}
    return dict(_changes(contents.config, parent.config))


def _changes(config: Mapping[str, Any], expected: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key in {**config, **expected}:
        ours, value = config.get(key), expected.get(key)
        if isinstance(ours, dict) and isinstance(value, dict) and key not in SIZES:
            yield from _changes(ours, value, f"{before}{key}.")
        elif key in SIZES and ours != value:
            yield before + key, value


def _stored_head(contents: Contents, loading: Loading) -> Iterator[Defect]:
    """A head that is stored although the config ties it to the embeddings."""
    heads = [name for name in loading.tied if name in contents.files]
    embedding = None if loading.embedding is None else _stored_name(contents, loading.embedding)
    if heads and embedding is not None and embedding not in heads:
        problem = f"'{heads[0]}' is stored, and config.json ties it to '{embedding}': its weights count twice"
        remedy = "merge again without it; if it is a separate head, set 'tie_word_embeddings': false"
        file = os.path.basename(contents.files[heads[0]])
        yield Defect("tied head stored", problem, file, remedy, fatal=False)
