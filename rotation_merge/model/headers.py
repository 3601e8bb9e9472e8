"""Names and shapes of a checkpoint's tensors from the heads of its files; pickles only ever as plain tensors."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rotation_merge.errors import CheckpointError, short
from rotation_merge.model.tensors import Shapes

TOKENIZER = re.compile(r"(tokenizer|vocab|spiece|merges|added_tokens|special_tokens|chat_template).*")
"""Files of a tokenizer."""

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Floating types of safetensors headers."""

DTYPES = {
    **FLOATS,
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
    "BOOL": torch.bool,
}
"""Types of safetensors headers that torch calculates with."""

_CODES = re.compile(r"(torch\.)?(f(loat)?(?P<float>[468])(_\w+)?|(?P<sign>u|i|u?int)(?P<bits>8|16|32))", re.IGNORECASE)
"""Types that only quantised codes have, as safetensors headers and torch call them."""

_MATRICES = (2, 3)
"""Dimensions of linear maps and stacks of them; masks of bytes that some models store have four."""

_SCALES = ("scale", "scales", "weight_scale", "weight_scale_inv", "SCB", "absmax")
"""Last words in names of tensors that codes are to be multiplied by."""


def read_json(path: str) -> dict[str, Any]:
    """A JSON file that holds an object.

    Raises:
        CheckpointError: it is not there, or is something else.
    """
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except FileNotFoundError:
        name, folder = os.path.basename(path), os.path.dirname(path)
        if name == "config.json":
            _refuse_adapter(folder)
        raise CheckpointError(f"{name} is missing", where=folder, remedy="the model is incomplete") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot be read: {reason(error)}", where=path, remedy="download it again") from None
    if not isinstance(content, dict):
        raise CheckpointError("does not hold a JSON object", where=path, remedy="download it again")
    return content


def reason(error: Exception) -> str:
    """An error's message, without the path that an OSError repeats."""
    strerror = getattr(error, "strerror", None)
    return str(strerror).lower() if strerror else str(error) or type(error).__name__


ADAPTER_CONFIG = "adapter_config.json"


def _refuse_adapter(folder: str) -> None:
    """Refuse an adapter in the place of a model; says how its base is named with it."""
    if os.path.exists(adapter := os.path.join(folder, ADAPTER_CONFIG)):
        base = read_json(adapter).get("base_model_name_or_path") or "BASE"
        raise CheckpointError("is an adapter, not a model", where=folder, remedy=f"write {base}+{folder}")


WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
"""Weight files in the order in which mergekit looks for them."""

INDEX = ".index.json"
"""Ending of an index of their shards."""


def opened_file(folder: str) -> str | None:
    """The weight file, or index of shards, that mergekit opens in a directory; None if there is none.

    It takes safetensors before pickles, and an index before a single file.
    """
    places = (os.path.join(folder, stem + end) for stem in WEIGHT_FILES for end in (INDEX, ""))
    return next(filter(os.path.exists, places), None)


def holds_model(folder: str) -> bool:
    """Whether a directory holds weight files of a model, or an index of such."""
    return opened_file(folder) is not None


def tensor_files(folder: str) -> dict[str, str]:
    """Each tensor of a directory and the file that holds it, which mergekit and transformers would both open.

    Raises:
        CheckpointError: no weights, damaged ones, a missing shard, an index that names what its shards do not hold; or
            weights that mergekit and transformers would take from different files.
    """
    path = opened_file(folder)
    if path is None:
        _refuse_adapter(folder)
        remedy = "model.safetensors or pytorch_model.bin (or the index of shards of either) is needed"
        raise CheckpointError("there are no weights", where=folder, remedy=remedy)
    _check_others(folder, os.path.basename(path))
    if not path.endswith(INDEX):
        return dict.fromkeys(file_shapes(path), os.path.basename(path))
    places = weight_map(path)
    _check_shards(folder, os.path.basename(path).removesuffix(INDEX), places)
    return places


def _check_shards(folder: str, stem: str, places: Mapping[str, str]) -> None:
    """Check that all shards exist and are unambiguous.

    transformers takes a tensor that two shards hold from the last of them, mergekit from the one that the index names.
    """
    shards = sorted(set(places.values()))
    for shard in shards:
        if not os.path.isfile(os.path.join(folder, shard)):
            raise CheckpointError(f"shard {shard} is missing", where=folder, remedy="download it again")
    if shards != [stem] and os.path.exists(os.path.join(folder, stem)):
        raise _ambiguous(folder, f"{stem} and {stem}.index.json both exist")
    holders: dict[str, list[str]] = {}
    for shard in shards:
        for name in file_shapes(os.path.join(folder, shard)):
            holders.setdefault(name, []).append(shard)
    if absent := next((name for name in places if name not in holders), None):
        problem = f"the index names '{absent}', but its shard does not hold it"
        remedy = "the shards and their index do not belong together; download them again"
        raise CheckpointError(problem, where=folder, remedy=remedy)
    for name, several in holders.items():
        if len(several) > 1 and places.get(name) != several[-1]:
            raise _ambiguous(folder, f"tensor '{name}' is in {several[0]} and in {several[-1]}")


def _check_others(folder: str, opened: str) -> None:
    """Check that transformers would not open other weight files than mergekit."""
    if os.path.exists(os.path.join(folder, ADAPTER_CONFIG)):
        raise _ambiguous(folder, f"{opened} and {ADAPTER_CONFIG} both exist")
    if os.path.isfile(config := os.path.join(folder, "config.json")):
        named = read_json(config).get("transformers_weights")
        if named not in (None, opened):
            raise _ambiguous(
                folder, f"config.json names '{named}' (transformers_weights), but the folder also has {opened}"
            )


def _ambiguous(folder: str, problem: str) -> CheckpointError:
    remedy = "move away the files of the other set: transformers and mergekit would read different weights"
    return CheckpointError(f"the folder has more than one set of weights: {problem}", where=folder, remedy=remedy)


_COUNT = re.compile(r"(.*_)?(layers?|depth|experts)")
"""Entries of a config that count modules."""

_PLAUSIBLE = 4096
"""So many layers or experts are taken however few tensors there are: weights may not be here, experts may share one."""


def check_config(folder: str) -> None:
    """Check that a config does not claim more layers or experts than its files can hold.

    Raises:
        CheckpointError: names the entry; or config.json is missing or damaged.
    """
    config = read_json(os.path.join(folder, "config.json"))
    path = opened_file(folder)
    tensors = 0 if path is None else len(weight_map(path) if path.endswith(INDEX) else file_shapes(path))
    parts = [config]
    for part in parts:
        parts += [value for value in part.values() if isinstance(value, dict)]
        for name, value in part.items():
            if _COUNT.fullmatch(name) and isinstance(value, int | float) and value > max(tensors, _PLAUSIBLE):
                problem = f"'{name}' is {value:.15g} in config.json, but the weight files hold {tensors} tensors"
                raise CheckpointError(problem, where=folder, remedy="config.json is damaged, or that of another model")


def weight_map(index: str) -> dict[str, str]:
    """The weight map of an index: each tensor's shard.

    Raises:
        CheckpointError: it has none, or names a shard outside of its folder.
    """
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(isinstance(shard, str) for shard in shards.values()):
        raise CheckpointError("has no weight_map of names and files", where=index, remedy="download it again")
    for shard in shards.values():
        if os.path.isabs(shard) or ".." in shard.replace("\\", "/").split("/"):
            raise CheckpointError(
                f"names a shard outside of its directory, '{shard}'", where=index, remedy="do not use it"
            )
    return shards


@dataclass(frozen=True)
class Header:
    """What a weight file says of its tensors.

    Attributes:
        shapes: by name.
        kinds: numbers that they are stored as, by name: a code of safetensors, or a dtype of torch.
        metadata: of a safetensors file, `format` first of all.
    """

    shapes: Shapes
    kinds: Mapping[str, str]
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Dtypes by name, of the tensors that torch calculates with."""
        dtypes = {
            name: DTYPES.get(kind) or getattr(torch, kind.removeprefix("torch."), None)
            for name, kind in self.kinds.items()
        }
        return {name: dtype for name, dtype in dtypes.items() if isinstance(dtype, torch.dtype)}


def header(path: str) -> Header:
    """The header of a weight file; cached while the file is unchanged.

    Raises:
        CheckpointError: the file is damaged, or a pickle of something else than tensors.
    """
    try:
        facts = os.stat(path)
        return _header(path, facts.st_size, facts.st_mtime_ns, facts.st_ino)
    except SafetensorError as error:
        problem = f"cannot be read: it is truncated, damaged or no safetensors file ({short(error)})"
        raise CheckpointError(problem, where=path, remedy="download it again") from error
    except (OSError, ValueError, RuntimeError, EOFError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"cannot be read: {short(reason(error))}", where=path, remedy="download it again"
        ) from error


@lru_cache(maxsize=512)
def _header(path: str, size: int, changed: int, number: int) -> Header:
    """The header of a file of this size, time and inode."""
    return _read_header(path)


def _read_header(path: str) -> Header:
    with open(path, "rb"):
        pass  # which says better than the library that it is a directory, or must not be read
    if not path.endswith(".safetensors"):
        state = _unpickled(path)
        shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        return Header(shapes, {name: str(tensor.dtype) for name, tensor in state.items()})
    with safe_open(path, framework="pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
        return Header(shapes, {name: part.get_dtype() for name, part in slices.items()}, file.metadata() or {})


def file_shapes(path: str) -> Shapes:
    """Shapes of the tensors in one weight file; errors as of `header`."""
    return header(path).shapes


def codes(kinds: Mapping[str, str], shapes: Shapes) -> dict[str, str]:
    """Matrices stored in a type that only quantised codes have, and that type.

    Args:
        kinds: by name, the type as torch or safetensors call it.
    """
    matches = {name: _CODES.fullmatch(kind) for name, kind in kinds.items() if len(shapes[name]) in _MATRICES}
    return {name: _code(match) for name, match in matches.items() if match is not None}


def _code(match: re.Match[str]) -> str:
    unsigned = "u" if (match["sign"] or "").lower().startswith("u") else ""
    return f"fp{match['float']}" if match["float"] else f"{unsigned}int{match['bits']}"


def check_codes(kinds: Mapping[str, str], shapes: Shapes, label: str) -> None:
    """Refuse quantised weights whose config does not declare a quantisation.

    Args:
        kinds: as in `codes`.

    Raises:
        CheckpointError: names them and the way to dequantise.
    """
    name, kind = next(iter(codes(kinds, shapes).items()), ("", ""))
    if not name:
        return
    if kind.startswith("fp") and not any(tensor_name.rpartition(".")[2] in _SCALES for tensor_name in shapes):
        numbers = (
            "write one: CLASS.from_pretrained(PATH, dtype='bfloat16').save_pretrained(OUT), CLASS being the model's"
        )
    else:
        numbers = "put 'quantization_config' back into config.json; model.dequantize(), model.save_pretrained(OUT)"
    raise CheckpointError(
        f"its weights are quantised ({kind}, the first is '{name}') and cannot be aligned; config.json does not say so",
        where=label,
        remedy=f"name the model in full precision, or {numbers}",
    )


def _unpickled(path: str) -> dict[str, Tensor]:
    """The tensors of a pickle, without their data.

    Raises:
        ValueError: it is damaged, or holds something else.
    """
    try:
        state = torch.load(path, map_location="meta", weights_only=True)
    except Exception as error:  # pickle errors come in every class
        detail = short(error)
        if "weights_only" in detail or "Weights only" in detail:
            detail = "only plain tensors are read from pickles"
        raise ValueError(f"the pickle is damaged or holds more than tensors ({detail})") from error
    if isinstance(state, dict):
        state = state.get("state_dict", state)
    tensors = {n: v for n, v in state.items() if isinstance(v, Tensor)} if isinstance(state, dict) else {}
    if not tensors:
        raise ValueError("the pickle holds no tensors by name")
    return tensors
