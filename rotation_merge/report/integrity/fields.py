"""Entries of config.json that contradict each other, the weights, or all parents."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rotation_merge.architecture.fields import differences
from rotation_merge.errors import named
from rotation_merge.model.contents import CONFIG, FLOATS, Contents, codes
from rotation_merge.report.integrity.defect import Defect, json_entries
from rotation_merge.report.integrity.keys import LAYERS, settings_of

DTYPE = ("dtype", "torch_dtype")
ROPE = ("rope_parameters", "rope_scaling")
HEADS = ("num_attention_heads", "num_key_value_heads")
COUNTS = (
    *HEADS,
    *("n_head", "n_heads", "num_heads", "num_kv_heads", "encoder_attention_heads", "decoder_attention_heads"),
)
"""Entries that define the split of rows into heads; shapes do not determine them."""
NEEDED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""Entries that a RoPE scaling cannot do without, as transformers' `modeling_rope_utils` checks them."""


def check_fields(contents: Contents, parents: Sequence[Contents]) -> Iterator[Defect]:
    """Look at the config by itself, beside the weights' dtypes, and beside those of the parents."""
    config = contents.config
    if not config:
        problem = contents.damaged.get(CONFIG, "there is none")
        yield Defect("no config", problem, CONFIG, "copy the base's, or merge again")
        return
    if not config.get("architectures"):
        known = next((parent.config["architectures"] for parent in parents if parent.config.get("architectures")), None)
        corrections = (json_entries(CONFIG, {"architectures": known}),) if known else ()
        problem = "'architectures' names no class, which vLLM and llama.cpp's converter need"
        yield Defect("no architecture", problem, CONFIG, "name the model's class", corrections=corrections)
    for path, part in _parts(config):
        yield from _layer_lists(path, part)
        yield from _heads(path, part)
        yield from _rope(path, part)
    yield from _dtype(contents)
    yield from _codes(contents)
    yield from _unlike_parents(contents, parents)


def _parts(config: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """A config and the configs inside of it, with their paths."""
    yield before, config
    for key, value in config.items():
        if isinstance(value, Mapping) and key.endswith("config"):
            yield from _parts(value, f"{before}{key}.")


def _layer_lists(path: str, part: Mapping[str, Any]) -> Iterator[Defect]:
    count, kinds = part.get("num_hidden_layers"), part.get("layer_types")
    if isinstance(kinds, list) and isinstance(count, int) and len(kinds) != count:
        corrections = (json_entries(CONFIG, {f"{path}layer_types": kinds[:count]}),) if len(kinds) > count else ()
        problem = f"{path}layer_types has {len(kinds)} entries, num_hidden_layers is {count}"
        yield Defect("layer types", problem, CONFIG, "give each layer its type", corrections=corrections)


def _heads(path: str, part: Mapping[str, Any]) -> Iterator[Defect]:
    heads, groups = (part.get(key) for key in HEADS)
    if isinstance(heads, int) and isinstance(groups, int) and (groups < 1 or heads % groups):
        problem = f"{path}num_attention_heads is {heads}, which {groups} num_key_value_heads do not divide"
        yield Defect("head count", problem, CONFIG, "take both from the base's config")


def _rope(path: str, part: Mapping[str, Any]) -> Iterator[Defect]:
    key = next((key for key in ROPE if isinstance(part.get(key), Mapping)), None)
    if key is None:
        return
    scalings = {"": part[key]} if not any(isinstance(v, Mapping) for v in part[key].values()) else part[key]
    for name, scaling in scalings.items():
        if isinstance(scaling, Mapping) and (problem := _wrong_scaling(scaling, part)):
            place = f"{path}{key}{f'.{name}' if name else ''}"
            yield Defect("RoPE", f"{place}: {problem}", CONFIG, "take it from the base's config")


def _wrong_scaling(scaling: Mapping[str, Any], part: Mapping[str, Any]) -> str | None:
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if absent := [name for name in NEEDED.get(kind, ()) if scaling.get(name) is None]:
        return f"'{kind}' lacks {named(absent)}"
    factor, theta = scaling.get("factor"), scaling.get("rope_theta", part.get("rope_theta"))
    if kind in NEEDED and factor is not None and not (isinstance(factor, int | float) and factor >= 1):
        return f"factor is {factor!r}, which is not a number of at least 1"
    if theta is not None and not (isinstance(theta, int | float) and theta > 0):
        return f"rope_theta is {theta!r}, which is not a positive number"
    original, longest = scaling.get("original_max_position_embeddings"), part.get("max_position_embeddings")
    if isinstance(original, int) and isinstance(longest, int) and original > longest:
        return f"original_max_position_embeddings is {original}, above max_position_embeddings {longest}"
    return None


def _dtype(contents: Contents) -> Iterator[Defect]:
    """Weights of another dtype than the config has transformers load them in, and roles of several dtypes."""
    kinds = contents.whole.kinds
    floats = Counter(kind for kind in kinds.values() if kind in FLOATS.values())
    key = next((key for key in DTYPE if isinstance(contents.config.get(key), str)), None)
    if key and floats and contents.config[key] not in floats and not contents.config.get("quantization_config"):
        most = floats.most_common(1)[0][0]
        problem = f"{key} is {contents.config[key]}, the weights are {named(floats)}"
        corrections = (json_entries(CONFIG, {key: most}),)
        yield Defect("dtype", problem, CONFIG, "set it ('--mend')", fatal=False, corrections=corrections)
    roles: dict[str, set[str]] = defaultdict(set)
    for name, kind in kinds.items():
        roles[re.sub(r"\.\d+\.", ".N.", name)].add(kind)
    if mixed := sorted(role for role, dtypes in roles.items() if len(dtypes) > 1):
        problem = f"{named(sorted(roles[mixed[0]]))} in the layers' '{mixed[0]}'"
        yield Defect("mixed dtypes", problem, CONFIG, "merge again with one 'dtype'", fatal=False)


def _codes(contents: Contents) -> Iterator[Defect]:
    """Codes of quantised numbers that the config does not speak of, and the other way round."""
    quantised = codes(contents.whole.kinds, contents.whole.shapes)
    stated = contents.config.get("quantization_config")
    if quantised and not stated:
        name, kind = next(iter(quantised.items()))
        problem = f"{len(quantised)} matrices are {kind} codes, '{name}' first, but there is no quantization_config"
        yield Defect("quantised weights", problem, CONFIG, "put it back, or dequantise the model")
    elif stated and contents.files and not quantised:
        corrections = (json_entries(CONFIG, {"quantization_config": None}),)
        problem = "there is a quantization_config, but the weights are not quantised"
        yield Defect("quantised weights", problem, CONFIG, "remove it ('--mend')", corrections=corrections)


def _unlike_parents(contents: Contents, parents: Sequence[Contents]) -> Iterator[Defect]:
    """Entries that change the meaning of weights, with a value that no parent has."""
    settings = [settings_of(each) for each in (contents, *parents)]
    if len(settings) < 2 or not all(hasattr(each, "to_dict") for each in settings):
        return
    ours, *parent_settings = (each.to_dict() for each in settings)
    unlike = [{entry.name: entry for entry in differences(parent, ours)} for parent in parent_settings]
    same_depth = any(all(ours.get(key) == parent.get(key) for key in LAYERS) for parent in parent_settings)
    for name, entry in unlike[0].items():
        last = name.rpartition(".")[2]
        decides = entry.field.forward or last.endswith("eps")
        if decides and all(name in each for each in unlike) and (last != "layer_types" or same_depth):
            yield _unlike(contents, name, entry.donor, entry.anchor, entry.field.why)
    parts = [dict(_parts(parent)) for parent in parent_settings]
    for path, part in _parts(ours):
        for key in (key for key in COUNTS if part.get(key) is not None):
            values = [parent_parts.get(path, {}).get(key) for parent_parts in parts]
            same_width = any(
                parent_parts.get(path, {}).get("hidden_size") == part.get("hidden_size") for parent_parts in parts
            )
            if part[key] not in values and same_width:
                yield _unlike(contents, path + key, part[key], values[0], "rows are cut into heads by it")


def _unlike(contents: Contents, name: str, value: Any, base: Any, why: str) -> Defect:
    corrections = (json_entries(CONFIG, {name: base}),) if _in(contents.config, name) else ()
    problem = f"'{name}' is {value!r}, in the base {base!r}: {why}"
    return Defect("config unlike parents", problem, CONFIG, "take the base's ('--mend')", corrections=corrections)


def _in(config: Any, path: str) -> bool:
    """Whether a config has an entry at this path."""
    key, _, below = path.partition(".")
    if not isinstance(config, Mapping) or key not in config:
        return False
    return not below or _in(config[key], below)
