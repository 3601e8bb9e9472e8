"""Tensor names and shapes against the model that transformers makes of the config, on the meta device."""

from __future__ import annotations

import copy
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from rotation_merge.architecture.registry import find
from rotation_merge.errors import named, short
from rotation_merge.model.contents import CONFIG, Contents, check_config
from rotation_merge.model.folder import ShardReader
from rotation_merge.report.integrity.defect import Correction, Defect, file_copy, json_entries, shard_header

IGNORED = (
    *("rotary_emb.inv_freq", "position_ids", "token_type_ids", ".attn.bias", ".attention.bias", ".masked_bias"),
    *("num_batches_tracked", "rotary_emb.cos_cached", "rotary_emb.sin_cached"),
)
"""Suffixes of unused buffers that older releases stored."""


# --- what transformers expects ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loading:
    """What transformers says on loading a checkpoint.

    Attributes:
        model: on the meta device.
        missing, unexpected: names of the model that are not stored, and stored ones that it does not read.
        mismatched: name, stored shape and the model's.
    """

    model: Any
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[tuple[str, Sequence[int], Sequence[int]], ...] = ()


@dataclass(frozen=True)
class _Headers:
    """Cache key of `_loading`: a merge and its parents mostly share it, and a model takes long to make."""

    config: str
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]
    settings: Any = field(compare=False)


def settings_of(contents: Contents) -> Any:
    """The config as transformers reads it, or a defect; None for custom code."""
    import transformers

    if not (config := contents.config):
        return None
    try:
        check_config(contents.folder)
        if config.get("auto_map") and not hasattr(transformers, (config.get("architectures") or [""])[0]):
            return None
        with _quiet():
            return transformers.AutoConfig.from_pretrained(contents.folder, local_files_only=True)
    except Exception as error:  # of many classes
        kind = "RoPE" if "`rope_parameters`" in str(error) else "config that cannot be loaded"
        remedy = getattr(error, "remedy", None) or "correct it, or update transformers"
        return Defect(kind, getattr(error, "what", short(error)), CONFIG, remedy)


def loading_of(contents: Contents) -> Loading | Defect | None:
    """The messages of transformers; a defect if it cannot make the model, None if its code is custom."""
    settings, whole = settings_of(contents), contents.whole
    if settings is None or isinstance(settings, Defect):
        return settings
    tensors = tuple((name, whole.kinds[name], shape) for name, shape in sorted(whole.shapes.items()))
    return _loading(_Headers(contents.text(CONFIG) or "", tensors, settings))


@lru_cache(maxsize=8)
def _loading(headers: _Headers) -> Loading | Defect | None:
    import transformers
    from transformers import AutoModel

    config = json.loads(headers.config)
    if config.get("quantization_config"):
        return None
    name = next(iter(config.get("architectures") or ()), None)
    mapped = AutoModel._model_mapping.get(type(headers.settings), None)
    model_class = mapped if name is None else getattr(transformers, name, None)
    if model_class is None:
        problem = f"transformers {transformers.__version__} has no {name or config.get('model_type')}"
        return Defect("unknown architecture", problem, CONFIG, "set 'architectures' to the model's class")
    try:
        with _quiet():
            return _compared(model_class, headers)
    except Exception as error:
        if "automatic conversion" in str(error):  # of tensors that transformers brings together
            problem = f"{model_class.__name__} cannot combine the tensors that are stored separately"
            return Defect("wrong shape", problem, CONFIG, "correct the config's sizes, or merge again")
        return Defect("config that makes no model", short(error), CONFIG, "correct it")


def _compared(model_class: Any, headers: _Headers) -> Loading:
    """Loading by transformers itself, which renames and combines tensors of older layouts."""
    dtypes = {kind: getattr(torch, kind, torch.float32) for _, kind, _ in headers.tensors}
    state = {name: torch.empty(shape, dtype=dtypes[kind], device="meta") for name, kind, shape in headers.tensors}
    model, info = model_class.from_pretrained(
        None,
        config=copy.deepcopy(headers.settings),
        state_dict=state,
        device_map="meta",
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    unexpected = sorted(name for name in info["unexpected_keys"] if not name.endswith(IGNORED))
    mismatched = sorted(info["mismatched_keys"])
    return Loading(model, tuple(sorted(info["missing_keys"])), tuple(unexpected), tuple(mismatched))


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


def embedding_rows(contents: Contents) -> int | None:
    """Number of rows of the stored input embedding; None if unknown."""
    loading = loading_of(contents)
    name = _stored_embedding(contents, loading) if isinstance(loading, Loading) else None
    return None if name is None else contents.whole.shapes[name][0]


def _stored_embedding(contents: Contents, loading: Loading) -> str | None:
    """The stored name of the input embedding, allowing for other prefixes; None where there is none."""
    try:
        weight = loading.model.get_input_embeddings().weight
    except (AttributeError, NotImplementedError):
        return None
    steps = next((name for name, x in loading.model.named_parameters() if x is weight), "").split(".")
    for start in range(max(1, len(steps) - 1)):
        end = ".".join(steps[start:])
        names = [name for name in contents.files if f".{name}".endswith(f".{end}")]
        if end in names or len(names) == 1:
            return end if end in names else names[0]
    return None


# --- what is stored --------------------------------------------------------------------------------------------------


def check_keys(contents: Contents, parents: Sequence[Contents]) -> Iterator[Defect]:
    """Compare names and shapes; the config is corrected by that of the first parent with these shapes."""
    loading = loading_of(contents) if contents.whole_files else None
    if isinstance(loading, Defect):
        yield loading
    elif loading is not None:
        names = _new_names(contents, loading)
        yield from _prefix(contents, names) if names else _differences(contents, parents, loading)
        yield from _stored_head(contents, loading)
    if contents.whole_files:
        yield from _lost(contents, parents)


def _lost(contents: Contents, parents: Sequence[Contents]) -> Iterator[Defect]:
    """Weights of a parent that the model's class does not need: layers that predict further tokens."""
    for parent in parents:
        spec = find(parent.config)
        begins = () if spec is None else tuple(begin.format(**parent.config) for begin in spec.dropped)
        absent = [name for name in parent.files if name.startswith(begins) and name not in contents.files]
        if absent and parent.config.get("architectures") == contents.config.get("architectures"):
            problem = f"{parent.folder} has {named(sorted(absent))}, which predict further tokens (MTP)"
            remedy = "copy them from the base if no residual stream was moved, or decode without speculation"
            yield Defect("lost tensors", problem, contents.index or named(contents.weight_files), remedy, fatal=False)
            return


def _new_names(contents: Contents, loading: Loading) -> dict[str, str]:
    """Names by the stored ones, where they stand behind a wrapper's prefix, or lack that of the class with a head.

    transformers adds the latter itself; vLLM and llama.cpp's converter do not.
    """
    names, stored = loading.model.state_dict().keys(), contents.files
    steps = loading.unexpected[0].split(".") if loading.missing and loading.unexpected else []
    for wrapper in (".".join([*steps[:count], ""]) for count in range(1, len(steps))):
        unwrapped = {name: name.removeprefix(wrapper) for name in stored if name.startswith(wrapper)}
        if names & set(unwrapped.values()) and not stored.keys() & set(unwrapped.values()):
            return unwrapped
    prefix = f"{loading.model.base_model_prefix}."
    causal = type(loading.model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
    if not causal or any(name.startswith(prefix) for name in stored):
        return {}
    return {name: prefix + name for name in stored if prefix + name in names and name not in names}


def _prefix(contents: Contents, names: Mapping[str, str]) -> Iterator[Defect]:
    """Tensors under other names than the model's; renamed in every file that holds them, and in the index."""
    files = sorted(file for file, head in contents.by_file.items() if names.keys() & head.shapes)
    corrections: dict[str, Correction] = {file: shard_header(names) for file in files if file.endswith(".safetensors")}
    if contents.index is not None and corrections:
        weight_map = {names.get(name, name): file for name, file in contents.weight_map.items()}
        corrections |= json_entries(contents.index, {"weight_map": weight_map})
    old, new = next(iter(names.items()))
    problem = f"{len(names)} tensors have names like '{old}', the model expects '{new}'"
    yield Defect("prefix", problem, named(files), "rename them ('--mend')", corrections=corrections)


def _differences(contents: Contents, parents: Sequence[Contents], loading: Loading) -> Iterator[Defect]:
    """Other names than the model's, and other shapes; corrected by the config of a parent with these tensors."""
    alike = (parent for parent in parents if parent.whole.shapes == contents.whole.shapes)
    parent = next(filter(_is_whole, alike), None)
    corrections = {CONFIG: file_copy(parent.path(CONFIG))} if parent is not None else {}
    place, name = contents.index or named(contents.weight_files), type(loading.model).__name__
    if loading.missing:
        problem = f"{len(loading.missing)} tensors of {name} are not stored: {named(loading.missing)}"
        remedy = "merge again, from parents that have them"
        yield Defect("missing tensors", problem, place, remedy, corrections=corrections)
    if loading.unexpected:
        problem = f"{name} does not read {len(loading.unexpected)} tensors: {named(loading.unexpected)}"
        remedy = "correct the config's number of layers or its class, or merge again without them"
        yield Defect("unexpected tensors", problem, place, remedy, corrections=corrections)
    for tensor, stored, expected in loading.mismatched[:1]:
        shapes = f"stored as {list(stored)}, {list(expected)} by config.json"
        problem = f"{len(loading.mismatched)} tensors, '{tensor}' first: {shapes}"
        yield Defect("wrong shape", problem, CONFIG, "correct the config's sizes", corrections=corrections)


def _is_whole(contents: Contents) -> bool:
    """Whether a folder's tensors are those of its config."""
    loading = loading_of(contents)
    return isinstance(loading, Loading) and not (loading.missing or loading.unexpected or loading.mismatched)


def _stored_head(contents: Contents, loading: Loading) -> Iterator[Defect]:
    """A head that is stored although the config ties it to the embeddings; one that differs is a head of its own."""
    tied = getattr(loading.model, "all_tied_weights_keys", None) or {}
    embedding, shapes = _stored_embedding(contents, loading), contents.whole.shapes
    if embedding is None:
        return
    alike = (name for name in sorted(tied) if name != embedding and shapes.get(name) == shapes[embedding])
    if (head := next(alike, None)) is None:
        return
    read = ShardReader(contents.folder, {name: (contents.files[name], name) for name in (head, embedding)}, False)
    if torch.equal(read(head), read(embedding)):
        problem = f"'{head}' is stored, and config.json ties it to '{embedding}': its weights count twice"
        file, remedy = os.path.basename(contents.files[head]), "merge again without it"
        yield Defect("tied head stored", problem, file, remedy, fatal=False)
    elif not getattr(loading.model.config, "scale_decoder_outputs", False):  # which goes with the entry
        problem = f"'{head}' differs from '{embedding}', and config.json ties them: most programs drop the head"
        corrections = json_entries(CONFIG, _untied(contents.config)) if tied.keys() <= contents.files.keys() else {}
        yield Defect("tied head", problem, CONFIG, "set 'tie_word_embeddings': false ('--mend')", True, corrections)


def _untied(config: Mapping[str, Any]) -> dict[str, bool]:
    """Entries of a config that says that its head is a tensor of its own, by path."""
    tie = "tie_word_embeddings"
    parts = [name for name, part in config.items() if isinstance(part, Mapping) and tie in part]
    return {tie: False, **{f"{name}.{tie}": False for name in parts}}
