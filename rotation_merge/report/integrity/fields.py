"""Entries of config.json that contradict each other, the weights, or all parents."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rotation_merge.architecture.fields import differences
from rotation_merge.architecture.registry import DEQUANTISE, stores_codes
from rotation_merge.errors import named
from rotation_merge.model.contents import CONFIG, FLOATS, Contents
from rotation_merge.report.integrity.defect import Defect, json_entries
from rotation_merge.report.integrity.keys import settings_of

QUANTISED = "quantised weights"
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
DTYPE = ("dtype", "torch_dtype")
ROPE = ("rope_parameters", "rope_scaling")
HEADS = ("num_attention_heads", "num_key_value_heads")
COUNTS = (
    *HEADS,
    *("n_head", "n_heads", "num_heads", "num_kv_heads", "encoder_attention_heads", "decoder_attention_heads"),
)
"""Entries that define the split of rows into heads; shapes do not determine them."""


def check_fields(contents: Contents, parents: Sequence[Contents]) -> Iterator[Defect]:
    """Look at the config by itself, beside the weights' dtypes, and beside those of the parents."""
    config = contents.config
    if not config:
        problem = contents.damaged.get(CONFIG, "there is none")
        yield Defect("no config", problem, CONFIG, "copy the base's, or merge again")
        return
    if not config.get("architectures"):
        classes = next(filter(None, (parent.config.get("architectures") for parent in parents)), None)
        corrections = json_entries(CONFIG, {"architectures": classes} if classes else {})
        problem = "'architectures' names no class, which vLLM and llama.cpp's converter need"
        yield Defect("no architecture", problem, CONFIG, "name the model's class", corrections=corrections)
    for path, part in _parts(config):
        yield from _counts(path, part)
        yield from _rope(path, part)
    yield from _dtypes(contents)
    yield from _codes(contents, parents)
    yield from _unlike_parents(contents, parents)


def _parts(config: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """A config and the configs inside of it, with their paths."""
    yield before, config
    for key, value in config.items():
        if isinstance(value, Mapping) and key.endswith("config"):
            yield from _parts(value, f"{before}{key}.")


def _counts(path: str, part: Mapping[str, Any]) -> Iterator[Defect]:
    """Types of more or fewer layers than there are; query heads that are no multiple of the KV heads."""
    count, kinds = part.get("num_hidden_layers"), part.get("layer_types")
    if isinstance(kinds, list) and isinstance(count, int) and len(kinds) != count:
        corrections = json_entries(CONFIG, {f"{path}layer_types": kinds[:count]} if len(kinds) > count else {})
        problem = f"{path}layer_types has {len(kinds)} entries, num_hidden_layers is {count}"
        yield Defect("layer types", problem, CONFIG, "give each layer its type", corrections=corrections)
    heads, groups = (part.get(key) for key in HEADS)
    if isinstance(heads, int) and isinstance(groups, int) and (groups < 1 or heads % groups):
        problem = f"{path}num_attention_heads is {heads}, which {groups} num_key_value_heads do not divide"
        yield Defect("head count", problem, CONFIG, "take both from the base's config")


def _rope(path: str, part: Mapping[str, Any]) -> Iterator[Defect]:
    """Numbers of RoPE, of all layers or by type of layer; entries that a scaling lacks, transformers names itself."""
    tables = [part[key] for key in ROPE if isinstance(part.get(key), Mapping)]
    tables += [value for table in tables for value in table.values() if isinstance(value, Mapping)]
    longest = part.get("max_position_embeddings") or math.inf
    limits = {"factor": (1, math.inf), "rope_theta": (1e-9, math.inf), "original_max_position_embeddings": (1, longest)}
    for table in tables:
        for name, (least, most) in limits.items():
            value = table.get(name, part.get(name))
            if value is not None and not (isinstance(value, int | float) and least <= value <= most):
                problem = f"{path}{name} is {value!r}, which is no number from {least} to {most}"
                yield Defect("RoPE", problem, CONFIG, "take it from the base's config")


def _dtypes(contents: Contents) -> Iterator[Defect]:
    """Weights of another dtype than the config has transformers load them in, and roles of several dtypes."""
    kinds, config = contents.whole.kinds, contents.config
    floats = Counter(kind for kind in kinds.values() if kind in FLOATS.values())
    key = next((key for key in DTYPE if isinstance(config.get(key), str)), None)
    if key and floats and config[key] not in floats and not config.get("quantization_config"):
        problem = f"{key} is {config[key]}, the weights are {named(floats)}"
        corrections = json_entries(CONFIG, {key: floats.most_common(1)[0][0]})
        yield Defect("dtype", problem, CONFIG, "set it ('--mend')", fatal=False, corrections=corrections)
    roles: dict[str, set[str]] = defaultdict(set)
    for name, kind in kinds.items():
        roles[re.sub(r"\.\d+\.", ".N.", name)].add(kind)
    mixed = sorted(role for role, dtypes in roles.items() if len(dtypes) > 1)
    if mixed and not contents.quantisation:
        problem = f"{named(sorted(roles[mixed[0]]))} in the layers' '{mixed[0]}'"
        yield Defect("mixed dtypes", problem, CONFIG, "merge again with one 'dtype'", fatal=False)


def _codes(contents: Contents, parents: Sequence[Contents]) -> Iterator[Defect]:
    """Codes of quantised numbers without scales, or that the config does not speak of; and the other way round."""
    stated, unscaled = stores_codes(contents.config), contents.without_scales
    if unscaled:
        problem = f"{len(unscaled)} tensors, '{unscaled[0]}' first, are quantised codes without scales"
        yield Defect(QUANTISED, problem, contents.files[unscaled[0]], "download it again, or merge dequantised parents")
    elif contents.quantisation and not stated:
        problem = f"they are codes ({contents.quantisation}), but there is no quantization_config"
        yield Defect(QUANTISED, problem, CONFIG, "put it back, or dequantise the model")
    elif stated and contents.files and not contents.quantisation:
        plain = bool(parents) and not any(parent.quantisation for parent in parents)
        corrections = json_entries(CONFIG, {"quantization_config": None} if plain else {})
        problem = "there is a quantization_config, but the weights are not quantised"
        remedy = "remove it ('--mend')" if plain else "merge dequantised parents; remove it where these were"
        yield Defect(QUANTISED, problem, CONFIG, remedy, corrections=corrections)


def quantised_parents(parents: Mapping[str, Contents]) -> Iterator[Defect]:
    """Parents by name whose codes mergekit's methods average as if they were weights."""
    if methods := {name: parent.quantisation for name, parent in parents.items() if parent.quantisation}:
        kinds = named(dict.fromkeys(methods.values()))
        problem = f"parents hold codes of weights that are quantised ({kinds}), and mergekit averages the codes"
        yield Defect("quantised parents", problem, named(methods), f"dequantise them and merge again: {DEQUANTISE}")


def _unlike_parents(contents: Contents, parents: Sequence[Contents]) -> Iterator[Defect]:
    """Entries that change the meaning of weights, with a value that no parent has."""
    settings = [settings_of(each) for each in (contents, *parents)]
    if len(settings) < 2 or not all(hasattr(each, "to_dict") for each in settings):
        return
    config, *parent_configs = (each.to_dict() for each in settings)
    first, *unlike = ({entry.name: entry for entry in differences(parent, config)} for parent in parent_configs)
    same_depth = any(all(config.get(key) == parent.get(key) for key in LAYERS) for parent in parent_configs)
    for name, entry in first.items():
        last = name.rpartition(".")[2]
        decides = (entry.field.forward or last.endswith("eps")) and (last != "layer_types" or same_depth)
        if decides and all(name in each for each in unlike):
            yield _unlike(contents, name, entry.donor, entry.anchor, entry.field.why)
    for path, part in _parts(config):
        alike = [dict(_parts(parent)).get(path, {}) for parent in parent_configs]
        same_width = any(parent.get("hidden_size") == part.get("hidden_size") for parent in alike)
        for key in (key for key in COUNTS if part.get(key) is not None and same_width):
            if part[key] not in [parent.get(key) for parent in alike]:
                yield _unlike(contents, path + key, part[key], alike[0].get(key), "rows are cut into heads by it")


def _unlike(contents: Contents, name: str, value: Any, base: Any, why: str) -> Defect:
    path, _, key = name.rpartition(".")
    part: Any = contents.config
    for step in path.split(".") if path else ():
        part = part.get(step) if isinstance(part, Mapping) else None
    corrections = json_entries(CONFIG, {name: base} if isinstance(part, Mapping) and key in part else {})
    problem = f"'{name}' is {value!r}, in the base {base!r}: {why}"
    return Defect("config unlike parents", problem, CONFIG, "take the base's ('--mend')", corrections=corrections)
