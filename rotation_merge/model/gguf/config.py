"""transformers' config out of a GGUF's metadata, and metadata out of a config."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rotation_merge.errors import CheckpointError, nearest
from rotation_merge.model.gguf.file import AGAIN, GgufFile
from rotation_merge.model.gguf.layout import CONVERTER, FREQUENCIES, LONG, SHORT, Family, families

THETA, LOCAL_THETA = 10_000.0, 10_000.0
"""Bases of rotary frequencies where nothing is said."""

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
ORIGINAL_LENGTHS = [1 << power for power in (13, *range(9, 13), *range(14, 21))]
"""Candidate parameters of Llama 3's rule for frequencies; a GGUF stores only its results."""

TOKENS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}


def family_of(gguf: GgufFile) -> Family:
    """The family of a GGUF.

    Raises:
        CheckpointError: it is no model, or of an architecture that is not read.
    """
    kind, path = gguf.metadata.get("general.type", "model"), gguf.paths[0]
    if kind == "imatrix" or "imatrix.datasets" in gguf.metadata:
        problem = "holds an importance matrix for quantisation, not a model"
        raise CheckpointError(problem, where=path, remedy="name the model's own file")
    if kind == "adapter":
        remedy = "name the LoRA in peft's format (BASE+ADAPTER): the folder that it was converted from"
        raise CheckpointError("holds a LoRA adapter, not a model", where=path, remedy=remedy)
    if kind != "model" or gguf.architecture == "clip":
        problem = f"holds a '{kind}' of architecture '{gguf.architecture}', not a language model"
        raise CheckpointError(problem, where=path, remedy="name the language model's file")
    fitting = [family for family in families() if family.fits(gguf)]
    if not fitting:
        known = sorted({family.architecture for family in families()})
        problem = f"its architecture '{gguf.architecture}' cannot be read from GGUF"
        remedy = f"{nearest(gguf.architecture, known)}; take the model in safetensors"
        raise CheckpointError(problem, where=path, remedy=remedy)
    return fitting[-1]


def read_config(gguf: GgufFile, family: Family) -> dict[str, Any]:
    """The content of config.json, from a GGUF's metadata.

    Raises:
        CheckpointError: the metadata lack an entry, or transformers' config cannot express one.
    """
    config: dict[str, Any] = {"architectures": [family.class_name], "model_type": family.model_type, **family.fixed}
    for entry, key in family.config.items():
        value = _single(gguf, key)
        if value is not None:
            config[entry] = value
    _check_sizes(gguf)
    config["vocab_size"] = gguf.entries["token_embd.weight"].shape[0]
    config["tie_word_embeddings"] = tied(gguf)
    config.update({entry: tensor in gguf.entries for entry, tensor in family.present.items()})
    config.update({entry: gguf.metadata.get(f"tokenizer.ggml.{key}") for entry, key in TOKENS.items()})
    config.update(_heads(gguf, family))
    matrices = {entry.dtype for entry in gguf.entries.values() if len(entry.shape) > 1}
    config["dtype"] = str(max(matrices, key=lambda dtype: dtype.itemsize)).removeprefix("torch.")
    return {
        key: None if key in family.fixed and value == 0 and value is not False else value
        for key, value in config.items()
    }


def _check_sizes(gguf: GgufFile) -> None:
    """Check that the sizes from which all others follow are there, and fit the tensors.

    Raises:
        CheckpointError: names the first that does not.
    """
    sizes = {key: _single(gguf, key) for key in ("embedding_length", "block_count", "attention.head_count")}
    for key, size in sizes.items():
        if size is None:
            problem = f"its metadata lack '{gguf.architecture}.{key}'"
            raise CheckpointError(problem, where=gguf.paths[0], remedy=AGAIN)
        if not isinstance(size, int) or size < 1:
            problem = f"'{gguf.architecture}.{key}' is {size!r}, which is no size"
            raise CheckpointError(problem, where=gguf.paths[0], remedy=AGAIN)
    if "token_embd.weight" not in gguf.entries:
        raise CheckpointError("has no tensor 'token_embd.weight'", where=gguf.paths[0], remedy=AGAIN)
    last = f"blk.{sizes['block_count'] - 1}"
    if not any(name.startswith(f"{last}.") for name in gguf.entries):
        problem = f"its metadata say {sizes['block_count']} layers, but no tensor is named '{last}...'"
        raise CheckpointError(problem, where=gguf.paths[0], remedy=AGAIN)
    experts = gguf.value("expert_count") or 0
    stored = sorted({entry.shape[0] for name, entry in gguf.entries.items() if name.endswith("_exps.weight")})
    if experts and stored != [experts]:
        problem = f"its metadata say {experts} experts, its tensors hold {' or '.join(map(str, stored)) or 'none'}"
        raise CheckpointError(problem, where=gguf.paths[0], remedy=AGAIN)


def _single(gguf: GgufFile, key: str) -> Any:
    """A value that is the same for all layers."""
    value = gguf.value(key)
    if not isinstance(value, list):
        return value
    if len(set(value)) != 1:
        problem = f"'{gguf.architecture}.{key}' is not the same in all layers, which transformers has no class for"
        raise CheckpointError(problem, where=gguf.paths[0], remedy="take the model in safetensors")
    return value[0]


def tied(gguf: GgufFile) -> bool:
    """Whether the head is the embedding: it has no tensor, or one of the same bytes, as some converters write it."""
    head, embedding = gguf.entries.get("output.weight"), gguf.entries.get("token_embd.weight")
    if head is None or embedding is None:
        return head is None
    if (head.kind, head.size) != (embedding.kind, embedding.size):
        return False
    return bool(np.array_equal(head.bytes(), embedding.bytes()))


def _heads(gguf: GgufFile, family: Family) -> dict[str, Any]:
    """Entries on heads and rotary positions."""
    heads, width = _single(gguf, "attention.head_count"), gguf.value("embedding_length")
    rotated = gguf.value("rope.dimension_count")
    size = gguf.value("attention.key_length") or (rotated if family.architecture == "llama" else None) or width // heads
    config = dict[str, Any]()
    if family.config.get("num_key_value_heads") and gguf.value("attention.head_count_kv") is None:
        config["num_key_value_heads"] = heads
    if family.head_dim or size != width // heads:
        config["head_dim"] = size
    if family.scalar:
        config["query_pre_attn_scalar"] = width // heads if gguf.value("block_count") == family.scalar else size
    if family.rope:
        config["rope_parameters"] = _rope(gguf, family, (rotated or size) / size, rotated or size)
    return config


def _rope(gguf: GgufFile, family: Family, share: float, rotated: int) -> dict[str, Any]:
    split = family.rope == "global and local"
    rope = {
        "rope_type": "default",
        "rope_theta": gguf.value("rope.freq_base", 1e6 if split else THETA),
        **_scaling(gguf, rotated),
    }
    if share != 1:
        rope["partial_rotary_factor"] = share
    if not split:
        return rope
    local = {"rope_type": "default", "rope_theta": gguf.value("rope.freq_base_swa", LOCAL_THETA)}
    return {"full_attention": rope, "sliding_attention": local}


def _scaling(gguf: GgufFile, rotated: int) -> dict[str, Any]:
    """The scaling of rotary positions."""
    kind, original = gguf.value("rope.scaling.type", "none"), gguf.value("rope.scaling.original_context_length")
    if LONG in gguf.entries:
        factors = {
            f"{word}_factor": gguf.entries[name].read().tolist() for word, name in (("long", LONG), ("short", SHORT))
        }
        return {"rope_type": "longrope", **factors, "original_max_position_embeddings": original}
    if FREQUENCIES in gguf.entries:
        return _llama3(gguf, gguf.entries[FREQUENCIES].read(), rotated)
    if kind == "linear":
        return {"rope_type": "linear", "factor": gguf.value("rope.scaling.factor")}
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": gguf.value("rope.scaling.factor"),
            "original_max_position_embeddings": original,
        }
    if kind in ("none", "longrope"):  # which Phi-3 says of its short models, too
        return {}
    problem = f"its rotary positions are scaled by '{kind}', which is not supported"
    raise CheckpointError(problem, where=gguf.paths[0], remedy="take the model in safetensors")


def _llama3(gguf: GgufFile, divisors: Tensor, rotated: int) -> dict[str, Any]:
    """The settings of Llama 3's rule that give these divisors of frequencies."""
    factor = float(divisors.max())
    if float((divisors - 1).abs().max()) < 1e-6:
        return {}
    for original in ORIGINAL_LENGTHS:
        rope = {"rope_type": "llama3", "factor": factor, **LLAMA3, "original_max_position_embeddings": original}
        theta = gguf.value("rope.freq_base", THETA)
        if torch.allclose(llama3_divisors({**rope, "rope_theta": theta}, rotated), divisors, rtol=1e-4):
            return rope
    problem = f"'{FREQUENCIES}' scales rotary frequencies in a way that transformers cannot describe"
    raise CheckpointError(problem, where=gguf.paths[0], remedy="take the model in safetensors")


def llama3_divisors(rope: Mapping[str, Any], rotated: int) -> Tensor:
    """Divisors of rotary frequencies by Llama 3's rule, as in llama.cpp's converter.

    Args:
        rope: `rope_parameters` of a config.
        rotated: dimensions of a head that are turned.

    Returns:
        float32, shape (rotated / 2,).
    """
    waves = 2 * math.pi * float(rope["rope_theta"]) ** (torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)
    low, high = (rope["original_max_position_embeddings"] / rope[f"{end}_freq_factor"] for end in ("low", "high"))
    smooth = (rope["original_max_position_embeddings"] / waves - rope["low_freq_factor"]) / (
        rope["high_freq_factor"] - rope["low_freq_factor"]
    )
    between = 1 / ((1 - smooth) / rope["factor"] + smooth)
    divisors = torch.where(waves > low, torch.full_like(waves, rope["factor"]), between)
    return torch.where(waves < high, torch.ones_like(waves), divisors).float()


def write_metadata(config: Mapping[str, Any], family: Family) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The metadata of an architecture, and the tensors that belong to its config.

    Raises:
        CheckpointError: GGUF has no words for something in the config.
    """
    values = {key: config[entry] for entry, key in family.config.items() if config.get(entry) is not None}
    values = {**values, **family.written}
    heads, width = values["attention.head_count"], values["embedding_length"]
    values.setdefault("feed_forward_length", 4 * width)
    size = config.get("head_dim") or width // heads
    values["vocab_size"] = config["vocab_size"]
    tensors = dict[str, Tensor]()
    if family.rope:
        values.update({"attention.key_length": size, "attention.value_length": size})
        rope = config["rope_parameters"]
        if family.rope == "global and local":
            values["rope.freq_base_swa"] = rope["sliding_attention"]["rope_theta"]
            rope = rope["full_attention"]
        rotated = int(size * (rope.get("partial_rotary_factor") or 1))
        values.update({"rope.freq_base": rope["rope_theta"], "rope.dimension_count": rotated})
        scaling, tensors = _written_scaling(rope, rotated)
        values.update(scaling)
    return {f"{family.architecture}.{key}": value for key, value in values.items()}, tensors


def _written_scaling(rope: Mapping[str, Any], rotated: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return {}, {}
    if kind == "llama3":
        return {}, {FREQUENCIES: llama3_divisors(rope, rotated)}
    original = {"rope.scaling.original_context_length": rope.get("original_max_position_embeddings")}
    if kind == "longrope":
        factors = {name: torch.tensor(rope[f"{word}_factor"]) for word, name in (("long", LONG), ("short", SHORT))}
        return original, factors
    if kind in ("linear", "yarn"):
        return {
            "rope.scaling.type": kind,
            "rope.scaling.factor": rope["factor"],
            **(original if kind == "yarn" else {}),
        }, {}
    raise CheckpointError(
        f"its rotary positions are scaled by '{kind}', which cannot be written to GGUF", remedy=CONVERTER
    )
