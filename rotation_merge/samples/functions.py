"""Models as functions: loading them, inputs of the right kind, what comes out. transformers' own classes only."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from rotation_merge.architectures import Architecture, resolve
from rotation_merge.checkpoints.headers import read_json
from rotation_merge.checkpoints.hub import downloaded
from rotation_merge.checkpoints.models import adapted_state, parse_reference
from rotation_merge.errors import CheckpointError, DataError, short
from rotation_merge.matching.labels import Rows, in_order, label_rows, labels
from rotation_merge.matching.member import Member

Batch = dict[str, Tensor]

COMPARED = ("logits", "prediction_logits", "image_embeds", "text_embeds", "start_logits", "end_logits")
"""Outputs that are a model's answer, beside what is named logits."""

HIDDEN = ("last_hidden_state", "pooler_output")


def read_config(path: str) -> dict[str, Any]:
    """A checkpoint's config.json.

    Raises:
        CheckpointError: there is none, or it is no JSON object.
    """
    return read_json(os.path.join(path, "config.json"))


FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def local_path(path: str) -> str:
    """A directory as it is; a hub model downloaded to the cache. Of `model+adapter`, that of the model.

    Raises:
        CheckpointError: there is no such directory or model.
    """
    part = parse_reference(path).model
    return downloaded(part.path, part.revision, None, FILES)


def load(path: str, dtype: torch.dtype = torch.float32, like: str | None = None) -> Any:
    """The model at a path, in evaluation mode; every weight must be there.

    Args:
        like: a model in whose order its classes are to stand, where they have the same names.

    Raises:
        CheckpointError: no class of transformers fits, or weights are missing or of the wrong shape.
    """
    import transformers

    directory = local_path(path)
    kind = model_class(read_config(directory).get("architectures"), path)
    options = {"dtype": dtype, "output_loading_info": True, "attn_implementation": "eager"}
    state = adapted_state(path)
    try:
        if state is None:
            model, info = kind.from_pretrained(directory, local_files_only=True, **options)
        else:
            settings = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
            model, info = kind.from_pretrained(None, config=settings, state_dict=state, **options)
    except Exception as error:
        raise CheckpointError(f"cannot be loaded ({short(error)})", where=path, remedy="download it again") from error
    for what in ("missing_keys", "mismatched_keys"):
        if wrong := sorted(map(str, info.get(what) or [])):
            raise CheckpointError(
                f"{what.replace('_keys', '')} weights, the first is {wrong[0]}",
                where=path,
                remedy="the checkpoint is incomplete, or its config.json belongs to another model",
            )
    model.config._experts_implementation = "eager"  # grouped products know no double precision
    if like is not None:
        _relabel(model, read_config(local_path(like)), like)
    return model.eval()


def _relabel(model: nn.Module, config: dict[str, Any], where: str) -> None:
    """Put a loaded model's classes into the order that another's config gives them, where it names the same ones."""
    own = cast(Any, model).config.to_dict()
    ours, theirs = labels(config), labels(own)
    if ours != theirs and sorted(ours) == sorted(theirs):
        shapes = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
        member = Member(type(model).__name__, own, architecture_of(model), shapes)
        take_rows(model, label_rows(replace(member, name=where, config=config), member))


@torch.no_grad()
def take_rows(model: nn.Module, rows: Rows) -> None:
    """Put a loaded model's classes into another order, in place, its config with them (see `matching/labels.py`)."""
    for name, (dim, order) in rows.items():
        parameter = model.get_parameter(name)
        parameter.copy_(in_order(parameter, (dim, order)))
    if rows:
        config, (_, order) = cast(Any, model).config, next(iter(rows.values()))
        names = [config.id2label[i] for i in order]
        config.id2label, config.label2id = dict(enumerate(names)), {name: i for i, name in enumerate(names)}


def architecture_of(model: nn.Module, untie: bool = False) -> Architecture:
    """The architecture of a loaded model, under the names of its own state dict."""
    config = cast(Any, model).config.to_dict()
    config["architectures"] = [type(model).__name__]
    return resolve(config, list(model.state_dict()), type(model).__name__, untie=untie)


def model_class(names: Sequence[str] | None, where: str | None = None) -> Any:
    """transformers' class of a model, as its config names it.

    Raises:
        CheckpointError: there is none of that name.
    """
    import transformers

    kind = getattr(transformers, str(names[0]), None) if names else transformers.AutoModel
    if kind is None or not hasattr(kind, "from_pretrained"):
        what = f"transformers has no class {names[0] if names else ''}"
        raise CheckpointError(what, where=where, remedy="update transformers")
    return kind


def stored_dtype(path: str) -> torch.dtype:
    """What a checkpoint's weights were rounded to, as its config says."""
    config = read_config(local_path(path))
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    found = getattr(torch, str(name).removeprefix("torch."), None)
    return found if isinstance(found, torch.dtype) else torch.float32


def check_kind(model: Any, batch: Mapping[str, Tensor], source: str) -> None:
    """The data hold what the model takes.

    Raises:
        DataError: they are of another kind.
    """
    takes, given = set(inspect.signature(model.forward).parameters), set(batch) - {"labels"}
    wanted = getattr(model, "main_input_name", None)
    if not given <= takes or (wanted in takes and wanted not in given and "inputs_embeds" not in given):
        raise DataError(
            f"holds {', '.join(sorted(given)) or 'no inputs'}, {type(model).__name__} takes {wanted}",
            where=source,
            remedy="give data of the kind that the model was made for",
        )


SIZE, LENGTH = 2, 24
"""Examples in a random batch, and tokens in each."""


def random_batch(model: Any, generator: torch.Generator) -> Batch:
    """Random inputs of the kind the model takes: token ids, pixels or audio features."""
    config = model.config
    takes = set(inspect.signature(model.forward).parameters)
    batch: Batch = {}
    if "input_ids" in takes:
        batch["input_ids"] = _ids(config, generator)
    if "decoder_input_ids" in takes and getattr(config, "is_encoder_decoder", False):
        batch["decoder_input_ids"] = _ids(config, generator)
    if "pixel_values" in takes:
        vision = getattr(config, "vision_config", config)
        side = getattr(vision, "image_size", 224)
        height, width = side if isinstance(side, list | tuple) else (side, side)
        channels = getattr(vision, "num_channels", 3)
        batch["pixel_values"] = torch.randn(SIZE, channels, height, width, generator=generator)
    if "input_features" in takes:
        bins, frames = getattr(config, "num_mel_bins", 80), 2 * getattr(config, "max_source_positions", 1500)
        batch["input_features"] = torch.randn(SIZE, bins, frames, generator=generator)
    if "input_values" in takes:
        shape = (config.max_length, config.num_mel_bins) if hasattr(config, "num_mel_bins") else (8000,)
        batch["input_values"] = torch.randn(SIZE, *shape, generator=generator)
    if not batch:
        raise CheckpointError(
            f"{type(model).__name__} takes {', '.join(sorted(takes))}: no random input is known for that",
            remedy="give inputs with --data",
        )
    return batch


def _ids(config: Any, generator: torch.Generator) -> Tensor:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    longest = getattr(text, "max_position_embeddings", None) or LENGTH + 4
    length = max(2, min(LENGTH, longest - 4))
    ids = torch.randint(text.vocab_size, (SIZE, length), generator=generator)
    pad = getattr(text, "pad_token_id", None)
    if isinstance(pad, int) and text.vocab_size > 2:
        ids = torch.where(ids == pad, torch.full_like(ids, (pad + 1) % text.vocab_size), ids)
    return ids


@torch.no_grad()
def outputs(model: Any, batch: Mapping[str, Tensor]) -> Batch:
    """What a model answers to a batch: its logits or embeddings, else its last hidden state."""
    dtype = next(model.parameters()).dtype
    given = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items() if k != "labels"}
    result = model(**given)
    items = {k: v for k, v in result.items() if isinstance(v, Tensor) and v.is_floating_point()}
    chosen = {k: v for k, v in items.items() if k in COMPARED or k in HIDDEN or "logits" in k}
    if not chosen:
        raise CheckpointError(f"{type(model).__name__} gives no logits or hidden state to compare")
    return chosen
