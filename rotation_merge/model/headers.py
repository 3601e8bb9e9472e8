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
from safetensors import safe_open
from torch import Tensor

from rotation_merge.errors import CheckpointError, short
from rotation_merge.model.tensors import Shapes

VOCABULARIES = ("tokenizer", "vocab", "spiece", "sentencepiece", "merges")
"""Beginnings of names of files that a tokenizer cannot do without."""

TOKENIZER = re.compile(f"({'|'.join((*VOCABULARIES, 'added_tokens', 'special_tokens', 'chat_template'))}).*")
"""Files of a tokenizer."""

FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Floating types that weights are stored in, as safetensors and as torch call them."""

_TYPES = {
    **FLOATS,
    **{"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8"},
    "BOOL": "bool",
}
"""Types that torch calculates with."""

_CODES = re.compile(r"u?int(8|16|32)|U(16|32)|F[468](_.*)?|float[468]_.*")
"""Types that only quantised codes have."""

_MATRICES = (2, 3)
"""Dimensions of linear maps and stacks of them; masks of bytes that some models store have four."""

ADAPTER_CONFIG = "adapter_config.json"

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
"""Weight files in the order in which mergekit looks for them."""

INDEX = ".index.json"
"""Ending of an index of their shards."""

AGAIN = "download it again"


def read_json(path: str) -> dict[str, Any]:
    """A JSON file that holds an object.

    Raises:
        CheckpointError: it is not there, or is something else.
    """
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except FileNotFoundError:
        folder, name = os.path.split(path)
        if name == "config.json":
            refuse_adapter(folder)
        raise CheckpointError(f"{name} is missing", where=folder, remedy="the model is incomplete") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot be read: {reason(error)}", where=path, remedy=AGAIN) from None
    if not isinstance(content, dict):
        raise CheckpointError("does not hold a JSON object", where=path, remedy=AGAIN)
    return content


def reason(error: Exception) -> str:
    """An error's message, without the path that an OSError repeats."""
    strerror = getattr(error, "strerror", None)
    return str(strerror).lower() if strerror else str(error) or type(error).__name__


def refuse_adapter(folder: str) -> None:
    """Refuse an adapter in the place of a model; says how its base is named with it."""
    if os.path.exists(adapter := os.path.join(folder, ADAPTER_CONFIG)):
        base = read_json(adapter).get("base_model_name_or_path") or "BASE"
        raise CheckpointError("is an adapter, not a model", where=folder, remedy=f"write {base}+{folder}")


@dataclass(frozen=True)
class Header:
    """What a weight file says of its tensors.

    Attributes:
        shapes: by name.
        kinds: numbers that they are stored as, by name: as torch calls them, where it calculates with them.
        metadata: of a safetensors file, `format` first of all.
    """

    shapes: Shapes
    kinds: Mapping[str, str]
    metadata: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, file: Any) -> Header:
        """The header of an open safetensors file."""
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        kinds = {name: part.get_dtype() for name, part in slices.items()}
        shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
        return cls(shapes, {name: _TYPES.get(kind, kind) for name, kind in kinds.items()}, file.metadata() or {})

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Dtypes by name, of the tensors that torch calculates with."""
        dtypes = {name: getattr(torch, kind, None) for name, kind in self.kinds.items()}
        return {name: dtype for name, dtype in dtypes.items() if isinstance(dtype, torch.dtype)}


def header(path: str) -> Header:
    """The header of a weight file; cached while the file is unchanged.

    Raises:
        CheckpointError: the file is damaged, or a pickle of something else than tensors.
    """
    try:
        facts = os.stat(path)
        return _header(path, facts.st_size, facts.st_mtime_ns, facts.st_ino)
    except CheckpointError:
        raise
    except Exception as error:  # of safetensors and pickle, which come in every class
        problem = f"cannot be read: it is truncated, damaged or no weight file ({short(reason(error))})"
        raise CheckpointError(problem, where=path, remedy=AGAIN) from error


@lru_cache(maxsize=512)
def _header(path: str, size: int, changed: int, number: int) -> Header:
    """The header of a file of this size, time and inode."""
    with open(path, "rb"):
        pass  # which says better than the libraries that it is a directory, or must not be read
    if path.endswith(".safetensors"):
        with safe_open(path, framework="pt") as file:
            return Header.of(file)
    try:
        state = torch.load(path, map_location="meta", weights_only=True)
    except Exception as error:  # whose words advise to run the code in it
        problem = "the pickle is damaged or holds more than plain tensors"
        raise CheckpointError(problem, where=path, remedy=AGAIN) from error
    if isinstance(state, dict):
        state = state.get("state_dict", state)
    tensors = {n: v for n, v in state.items() if isinstance(v, Tensor)} if isinstance(state, dict) else {}
    if not tensors:
        raise CheckpointError("the pickle holds no tensors by name", where=path, remedy=AGAIN)
    kinds = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}
    return Header({name: tuple(tensor.shape) for name, tensor in tensors.items()}, kinds)


def codes(kinds: Mapping[str, str], shapes: Shapes) -> dict[str, str]:
    """Matrices stored in a type that only quantised codes have, and that type.

    Args:
        kinds: by name, as in `Header`.
    """
    return {name: kind for name, kind in kinds.items() if len(shapes[name]) in _MATRICES and _CODES.fullmatch(kind)}


def check_codes(kinds: Mapping[str, str], shapes: Shapes, label: str) -> None:
    """Refuse quantised weights whose config does not declare a quantisation.

    Args:
        kinds: as in `codes`.

    Raises:
        CheckpointError: names them and the ways to dequantise.
    """
    for name, kind in codes(kinds, shapes).items():
        raise CheckpointError(
            f"its weights are quantised ({kind}, the first is '{name}') and cannot be aligned; config.json does not "
            "say so",
            where=label,
            remedy="name the model in full precision, or write one: put 'quantization_config' back into config.json, "
            "then CLASS.from_pretrained(PATH, dtype='bfloat16'), .dequantize() for integers, .save_pretrained(OUT)",
        )
