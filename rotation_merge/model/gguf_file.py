"""A GGUF file, read by the `gguf` package, and written as a checkpoint in transformers' format."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
import torch
from mergekit.io.tensor_writer import TensorWriter
from torch import Tensor

from rotation_merge.errors import CheckpointError, short
from rotation_merge.files.durable import write_json
from rotation_merge.model.gguf import ORIGIN
from rotation_merge.model.gguf_config import AGAIN, ROPE_FACTORS, Family, family_of, in_order, read_config

SHARD = 2_000_000_000
"""Bytes of a shard at most, which are in memory at once."""

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
"""Types whose numbers keep their type; those of all others become float32."""

OTHER_TYPE = "update gguf, or quantise the model again to another type"
OWN_TOKENIZER = "put the model's tokenizer.json into the folder of the file"

TOKENIZER = ("tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "chat_template")
SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""transformers' words for special tokens, and those of metadata."""
UNUSED, PADDING = 5, re.compile(r"\[PAD\d+\]")
"""Type and name of rows of the embedding that have no token."""


class Reader(gguf.GGUFReader):
    """The `gguf` package's reader; where a file ends early, that one reads empty arrays, without end."""

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        if offset + np.dtype(dtype).itemsize * int(count) > len(self.data):
            raise EOFError
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
        """Metadata of the architecture, such as `block_count`."""
        return self.metadata(f"{self.architecture}.{key}", default)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor as torch has it, the dimension that is contiguous in memory last."""
        return tuple(int(size) for size in reversed(self.tensors[name].shape))

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor when read."""
        return DTYPES.get(self.tensors[name].tensor_type.name, torch.float32)

    def read(self, name: str, expert: int | None = None) -> Tensor:
        """The numbers of a tensor, or of one of the matrices that are stored one after the other in it.

        Raises:
            CheckpointError: the `gguf` package cannot read its type.
        """
        tensor = self.tensors[name]
        data = tensor.data if expert is None else tensor.data[expert]
        if tensor.tensor_type.name in DTYPES:
            return torch.from_numpy(np.array(data)).view(self.dtype(name))
        try:
            numbers = gguf.dequantize(data, tensor.tensor_type)
        except NotImplementedError:
            kind = tensor.tensor_type.name
            problem = f"tensor '{name}' is of type {kind}, which the gguf package cannot turn into numbers"
            raise CheckpointError(problem, where=self.paths[0], remedy=OTHER_TYPE) from None
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
    count = model.metadata("split.count", 1)
    if len(paths) == 1 and count > 1:
        problem = f"is one of {count} files, but its name does not say which"
        raise CheckpointError(problem, where=paths[0], remedy=f"name them NAME-00001-of-{count:05}.gguf, as they were")
    total = model.metadata("split.tensors.count", sum(len(reader.tensors) for reader in readers))
    if total != len(model.tensors):
        problem = f"has {len(model.tensors)} tensors in {len(paths)} files, but there should be {total}"
        raise CheckpointError(problem, where=paths[0], remedy="the files do not belong together; download them again")
    return model


def _opened(path: str) -> Reader:
    try:
        reader = Reader(path)
    except EOFError:
        problem = f"is truncated or damaged ({os.path.getsize(path)} bytes)"
        raise CheckpointError(problem, where=path, remedy=AGAIN) from None
    except (ValueError, KeyError, OverflowError, MemoryError) as error:
        problem = f"is no GGUF file that the gguf package can read ({short(error)})"
        raise CheckpointError(problem, where=path, remedy=f"{AGAIN}, or update gguf") from error
    if reader.byte_order == "S":
        raise CheckpointError("is big-endian", where=path, remedy="write it again with llama.cpp")
    return reader


def write_checkpoint(paths: Sequence[str], folder: str) -> None:
    """Decode a model in GGUF into a folder in transformers' format, a shard at a time.

    Raises:
        CheckpointError: it is no model that can be read; names what is wrong.
    """
    model = open_gguf(paths)
    family = family_of(model)
    config = read_config(model, family)
    places = _places(model, family, config)
    os.makedirs(folder)
    _write_tokenizer(model, folder)
    writer = TensorWriter(folder, max_shard_size=SHARD)
    for name, (stored, layout, expert) in places.items():
        writer.save_tensor(name, in_order(layout, model.read(stored, expert), config))
    writer.finalize()
    origin = {"files": [os.path.abspath(path) for path in paths], "note": _note(model)}
    write_json(os.path.join(folder, ORIGIN), origin)
    write_json(os.path.join(folder, "config.json"), config)


def _note(model: GgufFile) -> str:
    """A sentence on the types of a model's tensors, for reports."""
    kinds = Counter(tensor.tensor_type.name for tensor in model.tensors.values())
    words, file = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()), os.path.basename(model.paths[0])
    if {*kinds} <= {*DTYPES}:
        return f"was read from {file}, whose tensors are {words}"
    return f"was read from {file}, whose weights were quantised (tensors: {words}); they were read as float32"


def _places(model: GgufFile, family: Family, config: Mapping[str, Any]) -> dict[str, tuple[str, str, int | None]]:
    """Each tensor's name in the file, its layout there, and which expert of those in it."""
    names = {*model.tensors} - {*ROPE_FACTORS} - ({"output.weight"} if config["tie_word_embeddings"] else set())
    places = {
        stem + end: (stored + end, layout, expert)
        for stem, stored, layout, expert in family.places(model.value("block_count"), model.value("expert_count") or 0)
        for end in (".weight", ".bias")
        if stored + end in names
    }
    if unknown := sorted(names - {stored for stored, _, _ in places.values()}):
        problem = f"tensor '{unknown[0]}' has no place in a {family.class_name}"
        raise CheckpointError(problem, where=model.paths[0], remedy="take the model in safetensors")
    return places


def _write_tokenizer(model: GgufFile, folder: str) -> None:
    """The tokenizer beside the file, or the one in it as transformers reads it; none if there is no vocabulary."""
    source, file = os.path.split(os.path.abspath(model.paths[0]))
    kind, tokens = model.metadata("tokenizer.ggml.model"), model.metadata("tokenizer.ggml.tokens") or []
    rows = model.shape("token_embd.weight")[0]
    if tokens and len(tokens) != rows:
        problem = f"its vocabulary has {len(tokens)} tokens, its embedding {rows} rows"
        raise CheckpointError(problem, where=model.paths[0], remedy=AGAIN)
    types = model.metadata("tokenizer.ggml.token_type") or [1] * rows
    while tokens and types[len(tokens) - 1] == UNUSED and PADDING.fullmatch(tokens[-1]):
        tokens.pop()
    names = [name for name in os.listdir(source) if name.startswith(TOKENIZER)]
    if "tokenizer.json" in names:
        _check_vocabulary(os.path.join(source, "tokenizer.json"), tokens, file)
        for name in names:
            shutil.copyfile(os.path.join(source, name), os.path.join(folder, name))
    elif tokens and kind not in ("none", "no_vocab"):
        _convert_tokenizer(model, tokens, folder)


def _check_vocabulary(path: str, tokens: Sequence[str], file: str) -> None:
    """Check that a tokenizer.json beside a file has its tokens.

    Raises:
        CheckpointError: it has others at some ids, or is no tokenizer.
    """
    from tokenizers import Tokenizer

    try:
        beside = Tokenizer.from_file(path)
    except Exception as error:  # the class that tokenizers raises
        problem = f"cannot be read as a tokenizer ({short(error)})"
        raise CheckpointError(problem, where=path, remedy="move it away") from error
    wrong = [number for number, token in enumerate(tokens) if beside.id_to_token(number) not in (token, None)]
    if wrong:
        example = f"the first is {wrong[0]}: '{beside.id_to_token(wrong[0])}', there '{tokens[wrong[0]]}'"
        problem = f"has other tokens than {file} at {len(wrong)} ids, {example}"
        raise CheckpointError(problem, where=path, remedy="it is another model's; move it away")


def _convert_tokenizer(model: GgufFile, tokens: Sequence[str], folder: str) -> None:
    """The file's tokenizer as transformers reads it, without tokens that transformers adds or pads."""
    from transformers import PreTrainedTokenizerFast

    source, file = os.path.split(os.path.abspath(model.paths[0]))
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(
            source, gguf_file=file, model_max_length=model.value("context_length")
        )
        for word, key in SPECIAL.items():
            number = model.metadata(f"tokenizer.ggml.{key}_token_id")
            setattr(tokenizer, f"{word}_token", None if number is None else tokens[number])
        tokenizer.save_pretrained(folder)
    except Exception as error:  # transformers and tokenizers raise errors of many classes
        problem = f"its tokenizer cannot be read by transformers ({short(error)})"
        raise CheckpointError(problem, where=model.paths[0], remedy=OWN_TOKENIZER) from error
    path = os.path.join(folder, "tokenizer.json")
    with open(path, encoding="utf-8") as stream:
        content = json.load(stream)
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < len(tokens)]
    vocabulary = content["model"]["vocab"]
    if isinstance(vocabulary, dict):
        content["model"]["vocab"] = {token: number for token, number in vocabulary.items() if number < len(tokens)}
    write_json(path, content)
