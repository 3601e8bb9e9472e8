"""A checkpoint in transformers' format out of a GGUF; names, layouts and config are in the table `gguf_families.json`.

The order of numbers is that of llama.cpp's converter: queries and keys of Llama have the two numbers of a RoPE pair
side by side, gains of Gemma are stored with the one that its norms add, GPT-2's linear maps as (out, in), experts of
a layer in one tensor.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from mergekit.io.tensor_writer import TensorWriter
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rotation_merge.architecture.registry import overlay
from rotation_merge.errors import CheckpointError, nearest, short
from rotation_merge.files import write_json
from rotation_merge.model.contents import DOWNLOAD, FLOATS, TOKENIZER, read_json, reason

SAFETENSORS = "take the model in safetensors"

SHARD = 1_000_000_000
"""Bytes of a shard at most, which are in memory at once."""

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
ROPE_FACTORS = FREQUENCIES, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
"""Tensors of a GGUF that are part of transformers' config: divisors of rotary frequencies."""

THETA = 10_000.0
"""Base of rotary frequencies where nothing is said."""

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
ORIGINAL_LENGTHS = [1 << power for power in (13, *range(9, 13), *range(14, 21))]
"""Candidate parameters of Llama 3's rule for frequencies; a GGUF stores only its results."""

SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""transformers' words for special tokens, and those of metadata."""
OWN_TOKENIZER = "put the model's tokenizer.json beside the file"
LIKE_GPT2 = "gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "gigachat", "roberta-bpe"
SINGLE_DIGITS = "smollm", "starcoder", "refact", "command-r", "codeshell", "minerva-7b"
"""Rules for splitting text that transformers' reader does not tell from GPT-2's, by llama.cpp's names."""
UNNAMED_SPLITS = {"gpt2": "gpt-2", "falcon": "falcon", "starcoder2": "starcoder"}
"""Those of architectures whose older files name none."""
UNUSED, PADDING = 5, re.compile(r"\[PAD\d+\]")
"""Type and name of rows of the embedding that have no token."""


class CheckedReader(gguf.GGUFReader):
    """The `gguf` package's reader; where a file ends early, that one reads empty arrays, without end."""

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        self.data = np.asarray(self.data)  # type: ignore[assignment]  # still mapped, but quicker to slice
        if offset + np.dtype(dtype).itemsize * int(count) > len(self.data):
            raise EOFError(f"it ends after {len(self.data)} bytes")
        return super()._get(offset, dtype, count, override_order)


@dataclass(frozen=True)
class GgufFile:
    """A model in GGUF: one file, or the files that it was split into.

    Attributes:
        paths: of all files, in their order.
        fields: metadata of the first file.
        tensors: by the name in the file, as the `gguf` package reads them.
    """

    paths: Sequence[str]
    fields: Mapping[str, gguf.ReaderField]
    tensors: Mapping[str, gguf.ReaderTensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata("general.architecture", ""))

    def metadata(self, key: str, default: Any = None) -> Any:
        field = self.fields.get(key)
        if field is None:
            return default
        if field.types[0] == gguf.GGUFValueType.FLOAT32:
            return float(str(field.parts[-1][0]))  # 1e-05, not 9.999999747378752e-06
        return field.contents()

    def value(self, key: str, default: Any = None) -> Any:
        """Metadata of the architecture, such as `block_count`; one value that is the same for all layers.

        Raises:
            CheckpointError: the layers have several.
        """
        value = self.metadata(f"{self.architecture}.{key}", default)
        if isinstance(value, list) and len(set(value)) != 1:
            problem = f"'{self.architecture}.{key}' is not the same in all layers, which transformers has no class for"
            raise self.refusal(problem, SAFETENSORS)
        return value[0] if isinstance(value, list) else value

    def rows(self, name: str) -> int:
        """Outer dimension of a tensor as torch has it: rows of a matrix, or experts."""
        return int(self.tensors[name].shape[-1])

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor when read: floating-point numbers keep theirs, codes become float32."""
        return getattr(torch, FLOATS.get(self.tensors[name].tensor_type.name, "float32"))

    def refusal(self, problem: str, remedy: str = DOWNLOAD) -> CheckpointError:
        return CheckpointError(problem, where=self.paths[0], remedy=remedy)

    def read(self, name: str, expert: int | None = None) -> Tensor:
        """The numbers of a tensor, or of one of the matrices that are stored one after the other in it.

        Raises:
            CheckpointError: the `gguf` package cannot read its type.
        """
        tensor = self.tensors[name]
        data = tensor.data if expert is None else tensor.data[expert]
        if tensor.tensor_type.name in FLOATS:
            return torch.from_numpy(np.array(data)).view(self.dtype(name))
        try:
            numbers = gguf.dequantize(data, tensor.tensor_type)
        except NotImplementedError:
            problem = f"tensor '{name}' is of type {tensor.tensor_type.name}, which the gguf package does not decode"
            raise self.refusal(problem, "update gguf, or quantise the model again to another type") from None
        return torch.from_numpy(np.ascontiguousarray(numbers, np.float32))


def open_gguf(paths: Sequence[str]) -> GgufFile:
    """The header of a model in GGUF.

    Args:
        paths: all files of the model.

    Raises:
        CheckpointError: a file is truncated, damaged or no GGUF, or the files do not belong together.
    """
    readers = [_opened(path) for path in paths]
    model = GgufFile(paths, readers[0].fields, {tensor.name: tensor for reader in readers for tensor in reader.tensors})
    count = max(1, model.metadata("split.count", len(paths)))
    total = model.metadata("split.tensors.count", sum(len(reader.tensors) for reader in readers))
    if (count, total) != (len(paths), len(model.tensors)):
        problem = f"is one of {count} files with {total} tensors, but here are {len(paths)} with {len(model.tensors)}"
        raise model.refusal(problem, f"name them NAME-00001-of-{count:05}.gguf, as they were, or download them again")
    return model


def _opened(path: str) -> CheckedReader:
    try:
        reader = CheckedReader(path)
        if reader.byte_order == "S":
            raise ValueError("it is big-endian")
    except (OSError, EOFError, ValueError, KeyError, OverflowError, MemoryError) as error:
        problem = f"is no GGUF file that the gguf package can read, or truncated ({short(reason(error))})"
        raise CheckpointError(problem, where=path, remedy=f"{DOWNLOAD}, or update gguf") from error
    return reader


# --- families


@dataclass(frozen=True)
class Family:
    """A class of transformers' as llama.cpp names and lays out its tensors.

    Attributes:
        architecture: as `general.architecture` says it.
        class_name, model_type: transformers' words.
        config: entries of transformers' config, and the metadata that hold them.
        tensors: stems of names, and where they lie in the file: the stem there, or this and a layout.
        named: a word in the file's own names that tells it from others of the architecture.
        when: what tells it from others: tensors that it has, or metadata and their least values.
        fixed: entries of the config that hold if no metadata say otherwise; 0 stands for none.
        present: entries of the config that are true where the file has a tensor.
        head_dim: whether the config has the size of a head.
        rope: `every` layer has the same rotary positions, or they are `global and local`; empty: there are none.
        scalar: layers of the one size whose attention is scaled by hidden_size / heads, not by a head's size.
    """

    architecture: str
    class_name: str
    model_type: str
    config: Mapping[str, str]
    tensors: Mapping[str, str | Sequence[str]]
    named: str = ""
    when: Mapping[str, float] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    present: Mapping[str, str] = field(default_factory=dict)
    head_dim: bool = False
    rope: str = ""
    scalar: int = 0

    def fits(self, model: GgufFile) -> bool:
        """Whether a file belongs to this family, by its header."""
        names = " ".join(str(model.metadata(f"general.{key}", "")) for key in ("name", "basename")).lower()
        return (
            model.architecture == self.architecture
            and self.named in names
            and all(key in model.tensors or (model.value(key) or 0) >= least for key, least in self.when.items())
        )


@cache
def families() -> tuple[Family, ...]:
    """All families; of several that fit a file, the last one counts."""
    content = json.loads(Path(__file__).with_name("gguf_families.json").read_text(encoding="utf-8"))

    def extended(name: str) -> dict[str, Any]:  # laid over the entry that it extends; null takes out
        below = content[name].get("extends")
        own = {key: value for key, value in content[name].items() if key != "extends"}
        return overlay(extended(below) if below else {}, own)

    return tuple(Family(**extended(name)) for name in content)


def family_of(model: GgufFile) -> Family:
    """The family of a GGUF.

    Raises:
        CheckpointError: it is no model, or of an architecture that is not read.
    """
    architecture = model.architecture
    kind = "imatrix" if model.metadata("imatrix.datasets") else model.metadata("general.type", "model")
    if kind != "model" or architecture == "clip":
        problem = f"is of type '{kind}', architecture '{architecture}': not a language model"
        raise model.refusal(problem, "name the model's own file; an adapter in peft's format, as BASE+ADAPTER")
    fitting = [family for family in families() if family.fits(model)]
    if not fitting:
        known = sorted({family.architecture for family in families()})
        problem = f"its architecture '{architecture}' cannot be read from GGUF"
        raise model.refusal(problem, f"{nearest(architecture, known)}; {SAFETENSORS}")
    return fitting[-1]


# --- config


def read_config(model: GgufFile, family: Family) -> dict[str, Any]:
    """The content of config.json, from a GGUF's metadata.

    Raises:
        CheckpointError: the metadata lack a size, or transformers' config cannot express one.
    """
    for key in ("embedding_length", "block_count", "attention.head_count"):  # from which all other sizes follow
        size = model.value(key)
        if not isinstance(size, int) or size < 1:
            raise model.refusal(f"'{model.architecture}.{key}' is {size!r}, which is no size")
    stored = {entry: model.value(key) for entry, key in family.config.items()}
    config = {**family.fixed, **{entry: value for entry, value in stored.items() if value is not None}}
    special = {word: model.metadata(f"tokenizer.ggml.{key}_token_id") for word, key in SPECIAL.items() if word != "unk"}
    matrices = [model.dtype(name) for name, tensor in model.tensors.items() if len(tensor.shape) > 1]
    config |= {
        "architectures": [family.class_name],
        "model_type": family.model_type,
        "vocab_size": model.rows(EMBEDDING),
        "tie_word_embeddings": _tied(model),
        **{entry: tensor in model.tensors for entry, tensor in family.present.items()},
        **{f"{word}_token_id": number for word, number in special.items()},
        **_heads(model, family),
        "dtype": str(max(matrices, key=lambda dtype: dtype.itemsize)).removeprefix("torch."),
    }
    none = {key for key in family.fixed if config[key] == 0 and config[key] is not False}
    return {**config, **dict.fromkeys(none)}


def _tied(model: GgufFile) -> bool:
    """Whether the head is the embedding: it has no tensor, or one of the same bytes, as some converters write it."""
    head, embedding = model.tensors.get(HEAD), model.tensors[EMBEDDING]
    if head is None or head.tensor_type != embedding.tensor_type:
        return head is None
    return bool(np.array_equal(head.data.view(np.uint8), embedding.data.view(np.uint8)))


def _heads(model: GgufFile, family: Family) -> dict[str, Any]:
    """Entries on heads and rotary positions."""
    heads, width = model.value("attention.head_count"), model.value("embedding_length")
    rotated = model.value("rope.dimension_count")
    size = model.value("attention.key_length") or (rotated if family.architecture == "llama" else None)
    size = size or width // heads
    config = dict[str, Any]()
    if family.config.get("num_key_value_heads") and model.value("attention.head_count_kv") is None:
        config["num_key_value_heads"] = heads
    if family.head_dim or size != width // heads:
        config["head_dim"] = size
    if family.scalar:
        config["query_pre_attn_scalar"] = width // heads if model.value("block_count") == family.scalar else size
    if family.rope:
        config["rope_parameters"] = _rope(model, family.rope != "every", (rotated or size) / size, rotated or size)
    return config


def _rope(model: GgufFile, split: bool, share: float, rotated: int) -> dict[str, Any]:
    """Rotary positions of a share of a head's dimensions; split: those of global and of local layers."""
    theta = model.value("rope.freq_base", 1e6 if split else THETA)
    rope = {"rope_type": "default", "rope_theta": theta, **_scaling(model, rotated)}
    if share != 1:
        rope["partial_rotary_factor"] = share
    local = {"rope_type": "default", "rope_theta": model.value("rope.freq_base_swa", THETA)}
    return {"full_attention": rope, "sliding_attention": local} if split else rope


def _scaling(model: GgufFile, rotated: int) -> dict[str, Any]:
    """The scaling of rotary positions."""
    kind, factor = model.value("rope.scaling.type", "none"), model.value("rope.scaling.factor")
    original = {"original_max_position_embeddings": model.value("rope.scaling.original_context_length")}
    if LONG in model.tensors:
        factors = {"long_factor": model.read(LONG).tolist(), "short_factor": model.read(SHORT).tolist()}
        return {"rope_type": "longrope", **factors, **original}
    if FREQUENCIES in model.tensors:
        return _llama3(model, model.read(FREQUENCIES), rotated)
    if kind in ("none", "longrope"):  # which Phi-3 says of its short models, too
        return {}
    if kind in ("linear", "yarn"):
        return {"rope_type": kind, "factor": factor, **(original if kind == "yarn" else {})}
    raise model.refusal(f"its rotary positions are scaled by '{kind}', which is not supported", SAFETENSORS)


def _llama3(model: GgufFile, divisors: Tensor, rotated: int) -> dict[str, Any]:
    """The settings of Llama 3's rule that give these divisors of frequencies."""
    if float((divisors - 1).abs().max()) < 1e-6:
        return {}
    theta, factor = model.value("rope.freq_base", THETA), float(divisors.max())
    plain = theta ** -(torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)
    for original in ORIGINAL_LENGTHS:
        rope = {"rope_type": "llama3", "factor": factor, **LLAMA3, "original_max_position_embeddings": original}
        config = LlamaConfig(head_dim=rotated, rope_parameters={**rope, "rope_theta": theta})
        frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        if torch.allclose((plain / frequencies).float(), divisors, rtol=1e-4):
            return rope
    problem = f"'{FREQUENCIES}' scales rotary frequencies in a way that transformers cannot describe"
    raise model.refusal(problem, SAFETENSORS)


# --- tensors


def _halves(tensor: Tensor, heads: int) -> Tensor:
    """Heads whose RoPE pairs lie side by side in the file, as transformers has them: (i, i + d/2)."""
    return tensor.reshape(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _groups(tensor: Tensor, config: Mapping[str, Any]) -> Tensor:
    """All queries, all keys, all values as rows of KV groups (queries, a key, a value)."""
    groups, heads = config["num_kv_heads"], config["num_attention_heads"]
    size = config["hidden_size"] // heads
    parts = tensor.split([heads * size, groups * size, groups * size])
    return torch.cat([x.reshape(groups, -1, size, *tensor.shape[1:]) for x in parts], 1).reshape(tensor.shape)


LAYOUTS: dict[str, Callable[[Tensor, Mapping[str, Any]], Tensor]] = {
    "": lambda tensor, _: tensor,
    "rope q": lambda tensor, config: _halves(tensor, config["num_attention_heads"]),
    "rope k": lambda tensor, config: _halves(tensor, config["num_key_value_heads"]),
    "plus one": lambda tensor, _: tensor - 1,
    "transposed": lambda tensor, _: tensor.t() if tensor.ndim > 1 else tensor,
    "row": lambda tensor, _: tensor.reshape(1, -1),
    "groups": _groups,
}
"""Functions that bring a tensor of a GGUF into transformers' order."""


def write_checkpoint(paths: Sequence[str], folder: str) -> str:
    """Decode a model in GGUF into a folder in transformers' format, a shard at a time.

    Returns:
        A sentence on the types of its tensors, for reports.

    Raises:
        CheckpointError: it is no model that can be read; names what is wrong.
    """
    model = open_gguf(paths)
    family = family_of(model)
    config = read_config(model, family)
    places = _places(model, family, config)
    os.makedirs(folder, exist_ok=True)
    _write_tokenizer(model, folder)
    writer = TensorWriter(folder, max_shard_size=SHARD)
    for name, (stored, layout, expert) in places.items():
        writer.save_tensor(name, LAYOUTS[layout](model.read(stored, expert), config))
    writer.finalize()
    write_json(os.path.join(folder, "config.json"), config)
    kinds, file = Counter(tensor.tensor_type.name for tensor in model.tensors.values()), os.path.basename(paths[0])
    words = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    decoded = "; those that are quantised were read as float32" if kinds.keys() - FLOATS else ""
    return f"was read from {file}, whose tensors are {words}{decoded}"


def _places(model: GgufFile, family: Family, config: Mapping[str, Any]) -> dict[str, tuple[str, str, int | None]]:
    """Each tensor's name in the file, its layout there, and which expert of those in it."""
    layouts = {stem: (place, "") if isinstance(place, str) else place for stem, place in family.tensors.items()}
    stems = {template: (stem, layout) for stem, (template, layout) in layouts.items()}
    places: dict[str, tuple[str, str, int | None]] = {}
    for stored in sorted(model.tensors.keys() - {*ROPE_FACTORS, HEAD if config["tie_word_embeddings"] else ""}):
        template, _, end = stored.rpartition(".")
        layer = re.match(r"blk\.(\d+)\.", stored)
        stem, layout = stems.get(template if layer is None else template.replace(layer[1], "{i}", 1), ("", ""))
        if not stem or end not in ("weight", "bias"):
            raise model.refusal(f"tensor '{stored}' has no place in a {family.class_name}", SAFETENSORS)
        for expert in range(model.rows(stored)) if "{e}" in stem else [None]:
            places[f"{stem.format(i=layer and layer[1], e=expert)}.{end}"] = stored, layout, expert
    return dict(sorted(places.items()))


# --- tokenizer


def _write_tokenizer(model: GgufFile, folder: str) -> None:
    """The tokenizer beside the file, or the one in it as transformers reads it; none if there is no vocabulary."""
    source, file = os.path.split(os.path.abspath(model.paths[0]))
    kind, tokens = model.metadata("tokenizer.ggml.model"), model.metadata("tokenizer.ggml.tokens") or []
    rows = model.rows(EMBEDDING)
    if tokens and len(tokens) != rows:
        raise model.refusal(f"its vocabulary has {len(tokens)} tokens, its embedding {rows} rows")
    types = model.metadata("tokenizer.ggml.token_type") or [1] * rows
    while tokens and types[len(tokens) - 1] == UNUSED and PADDING.fullmatch(tokens[-1]):
        tokens.pop()
    names = list(filter(TOKENIZER.fullmatch, os.listdir(source)))
    if "tokenizer.json" in names:
        _check_vocabulary(os.path.join(source, "tokenizer.json"), tokens, file)
        for name in names:
            shutil.copyfile(os.path.join(source, name), os.path.join(folder, name))
    elif tokens and kind not in ("none", "no_vocab"):
        _convert_tokenizer(model, tokens, folder)


def _check_vocabulary(path: str, tokens: Sequence[str], file: str) -> None:
    """Refuse a tokenizer.json beside a file that has other tokens at some ids, or is none."""
    from tokenizers import Tokenizer

    try:
        beside = Tokenizer.from_file(path)
        wrong = [number for number, token in enumerate(tokens) if beside.id_to_token(number) not in (token, None)]
        problem = f"has other tokens than {file} at {len(wrong)} ids, {wrong[0]} first" if wrong else ""
    except Exception as error:  # the class that tokenizers raises
        problem = f"cannot be read as a tokenizer ({short(error)})"
    if problem:
        raise CheckpointError(problem, where=path, remedy="move it away, if it is another model's or damaged")


def _convert_tokenizer(model: GgufFile, tokens: Sequence[str], folder: str) -> None:
    """The file's tokenizer as transformers reads it, without tokens that transformers adds or pads."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import PreTrainedTokenizerFast

    source, file = os.path.split(os.path.abspath(model.paths[0]))
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(
            source, gguf_file=file, model_max_length=model.value("context_length")
        )
        for word, key in SPECIAL.items():
            if (number := model.metadata(f"tokenizer.ggml.{key}_token_id")) is not None:
                setattr(tokenizer, f"{word}_token", tokens[number])
        backend = tokenizer.backend_tokenizer
    except Exception as error:  # transformers and tokenizers raise errors of many classes
        raise model.refusal(f"its tokenizer cannot be read by transformers ({short(error)})", OWN_TOKENIZER) from error
    if model.metadata("tokenizer.ggml.model") == "gpt2" and isinstance(backend.pre_tokenizer, ByteLevel):
        backend.pre_tokenizer = _splitting(model)
    tokenizer.save_pretrained(folder)
    path = os.path.join(folder, "tokenizer.json")
    content = read_json(path)
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < len(tokens)]
    vocabulary = content["model"]["vocab"]
    if isinstance(vocabulary, dict):
        content["model"]["vocab"] = {token: number for token, number in vocabulary.items() if number < len(tokens)}
    write_json(path, content)


def _splitting(model: GgufFile) -> Any:
    """The rule for splitting text that a file names, where transformers' reader took GPT-2's."""
    from tokenizers import Regex, pre_tokenizers

    name = model.metadata("tokenizer.ggml.pre") or UNNAMED_SPLITS.get(model.architecture)
    like_gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name in LIKE_GPT2:
        return like_gpt2
    if name in SINGLE_DIGITS:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), like_gpt2])
    if name == "falcon":
        threes = pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated")
        words = pre_tokenizers.Punctuation("contiguous"), like_gpt2, pre_tokenizers.Digits(individual_digits=False)
        return pre_tokenizers.Sequence([*words, threes])
    problem = f"by '{name}', which is not known" if name else "in a way that it does not name"
    raise model.refusal(f"its tokenizer splits text {problem}", OWN_TOKENIZER)
