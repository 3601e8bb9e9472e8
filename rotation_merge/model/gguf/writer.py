"""A checkpoint written as a GGUF, in the names and the order of numbers that llama.cpp's converter gives them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rotation_merge.errors import CheckpointError
from rotation_merge.files.durable import replacing
from rotation_merge.model.checkpoint import Model
from rotation_merge.model.gguf.config import family_of, read_config, write_metadata
from rotation_merge.model.gguf.file import Entry, GgufFile
from rotation_merge.model.gguf.layout import CONVERTER, Family, Place, families, write_layout
from rotation_merge.model.gguf.vocabulary import write_vocabulary
from rotation_merge.model.stamps import unchanged
from rotation_merge.model.vocabulary import is_hollow
from rotation_merge.workers.progress import Progress

F16, Q8_0, F32 = "F16", "Q8_0", "F32"
FILE_TYPES = {F16: 1, Q8_0: 7}
"""What weights are written as, and what `general.file_type` says of it."""
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
"""Entries of a config that do not change what its model computes, or stand in it a second time."""


@dataclass(frozen=True)
class PlannedTensor(Entry):
    """A tensor of the file before it is written.

    Attributes:
        sources: the checkpoint's names of what is put into it, one after the other.
        numbers: of tensors that the config holds.
    """

    path: str = ""
    start: int = 0
    size: int = 0
    layout: str = ""
    sources: tuple[str, ...] = ()
    numbers: Tensor | None = None

    def bytes(self) -> np.ndarray:
        """Its name, as it is no other's copy."""
        return np.frombuffer(self.name.encode(), np.uint8)

    def read(self) -> Tensor:
        assert self.numbers is not None
        return self.numbers


@dataclass(frozen=True)
class GgufPlan:
    """What will be written: the metadata, and the tensors in their order.

    Attributes:
        notes: what the user should know of it.
    """

    model: Model
    config: Mapping[str, Any]
    metadata: Mapping[str, Any]
    tensors: tuple[PlannedTensor, ...]
    notes: tuple[str, ...] = ()

    def write(self, out: str, progress: Progress | None = None) -> None:
        """Write the file, whole or not at all; one tensor is in memory at a time.

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


def plan_gguf(model: Model, kind: str = "f16", name: str = "") -> GgufPlan:
    """How a checkpoint will be written; no weight is read.

    Args:
        kind: f16 or q8_0.
        name: what the file calls the model.

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
        "general.name": name or os.path.basename(model.folder.rstrip(os.sep)),
        **({"general.basename": family.named} if family.named else {}),
        "general.file_type": FILE_TYPES[kind.upper()],
        **({"general.quantization_version": 2} if kind == "q8_0" else {}),
    }
    values = {key: float(value) if key.endswith(FLOATING) else value for key, value in entries.items()}
    tokens, notes = _vocabulary(model, int(config["vocab_size"]), family, label)
    metadata = {**general, **values, **tokens}
    _check_config(family, GgufFile((label,), metadata, {tensor.name: tensor for tensor in tensors}), model)
    return GgufPlan(model, config, metadata, tuple(tensors), tuple(notes))


def _config(model: Model) -> dict[str, Any]:
    """The config of a checkpoint, also by names of entries that its class has for others."""
    known = model.transformers_config
    entries = {entry for family in families() for entry in family.config}
    return {**model.config, **{entry: getattr(known, entry) for entry in entries if hasattr(known, entry)}}


def _placed(config: Mapping[str, Any], names: list[str], label: str) -> tuple[Family, dict[str, Place]]:
    """The family of a model, and where each of its tensors lies in the file."""
    word = str((config.get("architectures") or ["a model of no class"])[0])
    known = [family for family in families() if family.class_name == word]
    if not known:
        classes = ", ".join(dict.fromkeys(family.class_name for family in families()))
        raise CheckpointError(f"{word} is not written to GGUF here, but {classes}", where=label, remedy=CONVERTER)
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
    """Metadata of the tokenizer beside a model, and what is to be said where there is none."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model.folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError):
        tokenizer = None
    if tokenizer is None or is_hollow(tokenizer):
        return {"tokenizer.ggml.model": "none"}, ["The model has no tokenizer, and nor has the file."]
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise CheckpointError("its tokenizer is not written to GGUF here", where=label, remedy=CONVERTER)
    metadata = write_vocabulary(tokenizer, rows, family.architecture, label)
    notes = ["The tokenizer joins no bytes; llama.cpp itself refuses files whose tokenizer has no merges."]
    return metadata, notes if metadata.get("tokenizer.ggml.merges") == [] else []


def _check_config(family: Family, gguf: GgufFile, model: Model) -> None:
    """What is read back computes the same: all entries of the config that say what a model computes are the same.

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
