"""Writes a checkpoint as a GGUF, with the names and element order of llama.cpp's converter."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rotation_merge.errors import CheckpointError
from rotation_merge.files.durable import replacing
from rotation_merge.model.checkpoint import Model
from rotation_merge.model.gguf.config import family_of, read_config, write_metadata
from rotation_merge.model.gguf.file import Entry, GgufFile, open_gguf
from rotation_merge.model.gguf.layout import CONVERTER, Family, Place, families, write_layout
from rotation_merge.model.gguf.place import gguf_files
from rotation_merge.model.gguf.tokenizer import (
    BYTE,
    BYTE_PAIRS,
    CONTROL,
    NORMAL,
    SENTENCE_PIECES,
    SPACE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    splittings,
    tokenizer_of,
    written_templates,
)
from rotation_merge.model.run_keys import unchanged
from rotation_merge.model.vocabulary import has_only_special_tokens
from rotation_merge.workers import Progress

F16, Q8_0, F32 = "F16", "Q8_0", "F32"
FILE_TYPES = {F16: 1, Q8_0: 7}
"""Types of weights, with their `general.file_type`."""
BLOCK = 32
"""Numbers that Q8_0 stores together; rows of other lengths stay F16."""
EXACT = ("_norm", "ffn_gate_inp", "ffn_gate_inp_shexp", "position_embd")
"""Ends of names of tensors that stay F32, as all vectors do."""

FLOATING = ("epsilon", "freq_base", "freq_base_swa", "factor", "softcapping")
"""Ends of keys of metadata that are no whole numbers."""

NOISE = (
    *("_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype", "use_cache", "model_type"),
    *(
        "initializer_range",
        "pretraining_tp",
        "id2label",
        "label2id",
        "task_specific_params",
        "max_window_layers",
        "n_ctx",
    ),
    *("bos_token_id", "eos_token_id", "pad_token_id", "output_router_logits", "router_aux_loss_coef", "embd_pdrop"),
    *("attention_dropout", "hidden_dropout", "residual_dropout", "embedding_dropout", "attn_pdrop", "resid_pdrop"),
    *("router_jitter_noise", "use_sliding_window", "summary_activation", "summary_first_dropout", "summary_use_proj"),
    *(
        "summary_proj_to_labels",
        "summary_type",
        "reorder_and_upcast_attn",
        "sliding_window_pattern",
        "cache_implementation",
    ),
    *(
        "_sliding_window_pattern",
        "rope_theta",
        "rope_scaling",
        "rope_local_base_freq",
        "return_dict",
        "quantization_config",
    ),
)
"""Entries of a config that do not change the model's outputs, or duplicate others."""


@dataclass(frozen=True)
class PlannedTensor(Entry):
    """A tensor of the file before it is written.

    Attributes:
        sources: checkpoint names of the tensors that are concatenated in it.
        numbers: of tensors that the config holds.
    """

    path: str = ""
    start: int = 0
    size: int = 0
    layout: str = ""
    sources: tuple[str, ...] = ()
    numbers: Tensor | None = None

    def bytes(self) -> np.ndarray:
        """Bytes that identify its content: its name, as it copies no other tensor."""
        return np.frombuffer(self.name.encode(), np.uint8)

    def read(self) -> Tensor:
        assert self.numbers is not None
        return self.numbers


@dataclass(frozen=True)
class GgufPlan:
    """The plan of a GGUF: metadata, and the tensors in order.

    Attributes:
        notes: notes for the user.
    """

    model: Model
    config: Mapping[str, Any]
    metadata: Mapping[str, Any]
    tensors: tuple[PlannedTensor, ...]
    notes: tuple[str, ...] = ()

    def write(self, out: str, progress: Progress | None = None) -> None:
        """Write the file atomically, with one tensor in memory at a time.

        Raises:
            CheckpointError: a weight does not fit into float16.
        """
        import gguf

        values = gguf.GGUFValueType
        with replacing(out) as temporary, unchanged([self.model.reference]):
            writer = gguf.GGUFWriter(temporary, str(self.metadata["general.architecture"]))
            try:
                for key, value in list(self.metadata.items())[1:]:  # the architecture stands there
                    if value == []:  # such as merges where nothing is joined
                        continue
                    whole = isinstance(value, int) and not isinstance(value, bool)
                    writer.add_key_value(key, value, values.UINT32 if whole else values.get_type(value))
                for tensor in self.tensors:
                    kind = gguf.GGMLQuantizationType[tensor.kind]
                    block, of_block = gguf.GGML_QUANT_SIZES[kind]
                    size = math.prod(tensor.shape) // block * of_block
                    writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), size, kind)
                writer.write_header_to_file()
                writer.write_kv_data_to_file()
                writer.write_ti_data_to_file()
                for number, tensor in enumerate(self.tensors):
                    if progress is not None:
                        progress("writing", number, len(self.tensors))
                    kind = gguf.GGMLQuantizationType[tensor.kind]
                    writer.write_tensor_data(gguf.quantize(self._numbers(tensor).numpy(), kind))
            finally:
                writer.close()

    def _numbers(self, tensor: PlannedTensor) -> Tensor:
        """A tensor in the file's order, float32."""
        if tensor.numbers is not None:
            return tensor.numbers.float()
        parts = [write_layout(tensor.layout, self.model[name], self.config) for name in tensor.sources]
        whole = (parts[0] if len(parts) == 1 else torch.stack(parts)).float().contiguous()
        whole = whole.reshape(tensor.shape)
        if tensor.kind == F16 and float(whole.abs().max()) > torch.finfo(torch.float16).max:
            problem = f"'{tensor.sources[0]}' holds numbers that are too large for float16"
            raise CheckpointError(problem, where=str(self.model.reference), remedy="write q8_0")
        return whole


def plan_gguf(model: Model, kind: str = "f16") -> GgufPlan:
    """Plan a checkpoint's GGUF; reads no weights.

    Args:
        kind: f16 or q8_0.

    Raises:
        CheckpointError: its class, its config or its tokenizer has no place in GGUF, as far as is known here.
    """
    config, label = _config(model), str(model.reference)
    head = model.tied_head if model.tied is not None else None
    names = [stored for stored in model.names if stored not in {*model.ignored, head}]
    family, placed = _placed(config, names, label)
    tensors = list(_planned(placed, model.shapes, config, kind.upper()))
    entries, beside = write_metadata(config, family)
    tensors += [PlannedTensor(key, tuple(x.shape), F32, numbers=x.float()) for key, x in beside.items()]
    general = {
        "general.architecture": family.architecture,
        "general.type": "model",
        "general.name": _name(model.folder),
        **({"general.basename": family.named} if family.named else {}),
        "general.file_type": FILE_TYPES[kind.upper()],
        **({"general.quantization_version": 2} if kind == "q8_0" else {}),
    }
    values = {key: float(value) if key.endswith(FLOATING) else value for key, value in entries.items()}
    tokens, notes = _vocabulary(model, int(config["vocab_size"]), family, label)
    metadata = {**general, **values, **tokens}
    _check_config(family, GgufFile((label,), metadata, {tensor.name: tensor for tensor in tensors}), model)
    return GgufPlan(model, config, metadata, tuple(tensors), tuple(notes))


def _name(folder: str) -> str:
    """The name of a model: of one that was read from a GGUF, that in the file."""
    if paths := gguf_files(folder):
        return str(open_gguf(paths[0]).metadata.get("general.name") or Path(paths[0]).stem)
    return os.path.basename(folder.rstrip(os.sep))


def _config(model: Model) -> dict[str, Any]:
    """The config of a checkpoint, also by names of entries that its class has for others."""
    known = model.transformers_config
    entries = {entry for family in families() for entry in family.config}
    return {**model.config, **{entry: getattr(known, entry) for entry in entries if hasattr(known, entry)}}


def _placed(config: Mapping[str, Any], names: list[str], label: str) -> tuple[Family, dict[str, Place]]:
    """The family of a model, and the places of its tensors in the file."""
    word = str((config.get("architectures") or ["a model of no class"])[0])
    known = [family for family in families() if family.class_name == word]
    if not known:
        classes = ", ".join(dict.fromkeys(family.class_name for family in families()))
        raise CheckpointError(
            f"{word} cannot be written to GGUF; supported are {classes}", where=label, remedy=CONVERTER
        )
    unknown = ""
    for family in sorted(known, key=lambda f: sum(config.get(key) != value for key, value in f.fixed.items())):
        layers = int(_first(config, family, "block_count"))
        experts = int(_first(config, family, "expert_count") or 0)
        places = dict(family.places(layers, experts))
        unknown = next((name for name in names if name.rpartition(".")[0] not in places), "")
        if not unknown:
            return family, {name: places[name.rpartition(".")[0]] for name in names}
    raise CheckpointError(f"tensor '{unknown}' has no place in a GGUF", where=label, remedy=CONVERTER)


def _first(config: Mapping[str, Any], family: Family, key: str) -> Any:
    """The entry of a config that some metadata hold."""
    return next((config.get(entry) for entry, metadata_key in family.config.items() if metadata_key == key), None)


def _planned(
    placed: Mapping[str, Place], shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], kind: str
) -> Iterator[PlannedTensor]:
    """The tensors of the file, those of experts put together, in the order of the file."""
    sources: dict[str, list[str]] = {}
    for name, place in sorted(placed.items(), key=lambda item: item[1].expert or 0):
        sources.setdefault(f"{place.stem}.{name.rpartition('.')[2]}", []).append(name)
    for gguf_name, names in sorted(sources.items(), key=lambda item: _order(item[0])):
        place = placed[names[0]]
        shape = tuple(write_layout(place.layout, torch.empty(shapes[names[0]], device="meta"), config).shape)
        shape = shape if place.expert is None else (len(names), *shape)
        exact = len(shape) < 2 or place.stem.endswith(EXACT)
        stored = F32 if exact else F16 if shape[-1] % BLOCK else kind
        yield PlannedTensor(gguf_name, shape, stored, layout=place.layout, sources=tuple(names))


def _order(name: str) -> tuple[int, int, str]:
    """Embeddings, blocks by number, the end."""
    words = name.split(".")
    return (1, int(words[1]), name) if words[0] == "blk" else (2 if words[0].startswith("output") else 0, 0, name)


def _vocabulary(model: Model, rows: int, family: Family, label: str) -> tuple[dict[str, Any], list[str]]:
    """Metadata of the tokenizer beside a model, and a note if there is none."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model.folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError):
        tokenizer = None
    if tokenizer is None or has_only_special_tokens(tokenizer):
        return {"tokenizer.ggml.model": "none"}, ["The model has no tokenizer, so the file has none either."]
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise CheckpointError("its tokenizer cannot be written to GGUF", where=label, remedy=CONVERTER)
    metadata = write_vocabulary(tokenizer, rows, family.architecture, label)
    notes = ["The tokenizer joins no bytes; llama.cpp itself refuses files whose tokenizer has no merges."]
    return metadata, notes if metadata.get("tokenizer.ggml.merges") == [] else []


def _check_config(family: Family, gguf: GgufFile, model: Model) -> None:
    """Check that a config read back from the GGUF describes the same computation.

    Raises:
        CheckpointError: names the first that GGUF does not hold.
    """
    read = read_config(gguf, family_of(gguf))
    kind = type(model.transformers_config)
    ours, read_back = model.config, kind.from_dict(read).to_dict()
    declared = {entry: gguf.value(key) for entry, key in family.config.items() if entry in ours}
    declared["head_dim"] = ours.get("hidden_size", 0) // ours.get("num_attention_heads", 1)
    ours = {key: declared.get(key) if value is None else value for key, value in ours.items()}
    for entry in sorted({*kind().to_dict()} - {*NOISE}):
        if not _same(ours.get(entry), read_back.get(entry)):
            words = f"{_short(ours.get(entry))} would be read as {_short(read_back.get(entry))}"
            problem = f"GGUF would lose '{entry}' of its config: {words}"
            raise CheckpointError(problem, where=str(model.reference), remedy=CONVERTER)


def _short(value: Any) -> str:
    words = str(value)
    return words if len(words) < 60 else f"{words[:57]}..."


def _same(ours: Any, read_back: Any) -> bool:
    """Whether two values of configs are the same up to float32."""
    if isinstance(ours, Mapping) and isinstance(read_back, Mapping):
        keys = {key for key in (*ours, *read_back) if key != "type"}
        return all(_same(ours.get(key), read_back.get(key)) for key in keys)
    if isinstance(ours, list) and isinstance(read_back, list):
        return len(ours) == len(read_back) and all(map(_same, ours, read_back))
    if isinstance(ours, int | float) and isinstance(read_back, int | float):
        return math.isclose(ours, read_back, rel_tol=1e-6)
    return bool(ours == read_back)


SAMPLE = (
    "The 12345 quick foxes aren't here,  they're THERE!\n\n\tüber naïve 東京 и привет (x == 3.14) — ok?",
    " leading",
    "a",
    "",
)
"""Texts that a tokenizer must split in the same way once it has been read back."""


def write_vocabulary(tokenizer: Any, rows: int, architecture: str, label: str) -> dict[str, Any]:
    """The metadata of a tokenizer.

    Args:
        tokenizer: transformers', a fast one.
        rows: of the embedding; those that have no token are padded, as llama.cpp does.
        architecture: as `general.architecture` says it.
        label: name of the model for errors.

    Raises:
        CheckpointError: llama.cpp has no name for its pre-tokenizer.
    """
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    tokens, types = _tokens(content, rows, label)
    kind, special = _kind(content, tokens, types, label)
    ids = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    numbers = {name: getattr(tokenizer, f"{short}_token_id") for name, short in ids.items()}
    marked, plain = (tokenizer("a", add_special_tokens=added).input_ids for added in (True, False))
    metadata = {
        **kind,
        "tokenizer.ggml.tokens": tokens,
        **special,
        "tokenizer.ggml.token_type": types,
        **{f"tokenizer.ggml.{name}_token_id": number for name, number in numbers.items() if number is not None},
        "tokenizer.ggml.add_bos_token": len(marked) > len(plain) and marked[0] == numbers["bos"],
        "tokenizer.ggml.add_eos_token": len(marked) > len(plain) and marked[-1] == numbers["eos"],
    }
    if kind["tokenizer.ggml.model"] == SENTENCE_PIECES:
        metadata["tokenizer.ggml.add_space_prefix"] = tokenizer.tokenize("a")[:1] == [f"{SPACE}a"]
    metadata |= written_templates(tokenizer.chat_template)
    _check(tokenizer, metadata, tokens, architecture, label)
    return metadata


def _tokens(content: Mapping[str, Any], rows: int, label: str) -> tuple[list[str], list[int]]:
    """Tokens by their ids, and their types."""
    vocab = content["model"].get("vocab")
    if content["model"].get("type") != "BPE" or not isinstance(vocab, dict):
        problem = f"its tokenizer is a {content['model'].get('type')}, which cannot be written to GGUF"
        raise CheckpointError(problem, where=label, remedy=CONVERTER)
    names = {number: token for token, number in vocab.items()}
    added = {token["id"]: token for token in content.get("added_tokens", [])}
    names.update({number: token["content"] for number, token in added.items()})
    if names and max(names) >= rows:
        problem = f"its tokenizer has {max(names) + 1} tokens, its embedding {rows} rows"
        raise CheckpointError(problem, where=label, remedy="they do not belong together; check tokenizer.json")
    unknown, bytewise = content["model"].get("unk_token"), content["model"].get("byte_fallback")
    types = []
    for number in range(rows):
        token = names.get(number)
        if token is None:
            types.append(UNUSED)
        elif token == unknown and bytewise:
            types.append(UNKNOWN)
        elif number in added:
            types.append(CONTROL if added[number]["special"] else USER_DEFINED)
        else:
            types.append(BYTE if bytewise and len(token) == 6 and token.startswith("<0x") else NORMAL)
    return [names.get(number, f"[PAD{number}]") for number in range(rows)], types


def _kind(
    content: Mapping[str, Any], tokens: list[str], types: list[int], label: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pre-tokenizer's name in a GGUF."""
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in content["model"]["merges"]]
    if content["model"].get("byte_fallback"):
        ranks: dict[str, int] = {}
        for rank, (a, b) in enumerate(merges, 1):
            ranks.setdefault(a + b, rank)
        last = len(merges) + 1
        scores = [
            -float(ranks.get(token, last)) if kind == NORMAL else 0.0 for token, kind in zip(tokens, types, strict=True)
        ]
        return {"tokenizer.ggml.model": SENTENCE_PIECES, "tokenizer.ggml.pre": "default"}, {
            "tokenizer.ggml.scores": scores
        }
    whole = bool(content["model"].get("ignore_merges"))
    parts = content.get("pre_tokenizer") or {}
    parts = parts.get("pretokenizers", [parts])
    name = next(
        (n for n, rule in splittings().items() if rule["parts"] == parts and bool(rule.get("whole")) == whole), None
    )
    if name is None and not merges:  # where nothing is joined, it does not matter where text is cut
        name = "gpt-2"
    if name is None or content.get("normalizer") not in (None, {"type": "NFC"}):
        problem = "its tokenizer splits text in a way that llama.cpp is not known to support"
        raise CheckpointError(problem, where=label, remedy=CONVERTER)
    joined = [" ".join(merge) for merge in merges]
    return {"tokenizer.ggml.model": BYTE_PAIRS, "tokenizer.ggml.pre": name}, {"tokenizer.ggml.merges": joined}


def _check(tokenizer: Any, metadata: Mapping[str, Any], tokens: list[str], architecture: str, label: str) -> None:
    """Read back, it splits text as it did."""
    again = tokenizer_of(metadata, tokens, architecture, label)
    if any(again(text).input_ids != tokenizer(text).input_ids for text in SAMPLE):
        problem = "its tokenizer would split text differently after reading it from GGUF"
        raise CheckpointError(problem, where=label, remedy=CONVERTER)
