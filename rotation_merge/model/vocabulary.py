"""Vocabularies: rows of the tokens that models share, ids that differ, and tensors of vocabularies in slices.

An embedding or a head may be as large as several layers, so that it is computed in slices.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rotation_merge.architecture.model import Architecture, Block, TensorInfo
from rotation_merge.errors import CheckpointError
from rotation_merge.model.apply import read_tensor
from rotation_merge.model.contents import TOKENIZER, Contents
from rotation_merge.model.tensors import Tensors, TensorSource, as_tensors
from rotation_merge.model.view import View

LEAST_SHARED = 32
"""Least number of common tokens that tells the relation of two models."""

LONG = 1 << 25
"""Entries of a vocabulary's tensor that are looked at in one piece."""

TOGETHER = "tokenizer: {source: base}"
"""Recipe setting for models whose token ids differ."""


def shared_rows(models: Sequence[View]) -> tuple[Tensor, ...] | None:
    """Rows of the tokens that all models have, in one order.

    Returns:
        For each model int64, shape (tokens,); None where the vocabularies are the same, or none of them has one.

    Raises:
        CheckpointError: vocabularies of different sizes, and a tokenizer that would tell is missing; or next to nothing
            in common.
    """
    sizes = [size for model in models if (size := vocabulary_size(model)) is not None]
    same_size = len(set(sizes)) == 1
    if len(sizes) < len(models) or (same_size and _same_files(models)):
        return None
    known = [tokens_of(model) for model in models]
    tokens = [tokens for tokens in known if tokens is not None]
    if len(tokens) < len(models) and not same_size:
        lacking = str(models[known.index(None)].reference)
        problem = f"no tokenizer says which of its tokens are those of the others ({', '.join(map(str, sizes))} tokens)"
        raise CheckpointError(problem, where=lacking, remedy="put both models' tokenizers beside their weights")
    if len(tokens) < len(models) or (same_size and all(t == tokens[0] for t in tokens)):
        return None
    numbered = list(zip(tokens, sizes, strict=True))
    common = [token for token in tokens[0] if all(t.get(token, size) < size for t, size in numbered)]
    if len(common) < LEAST_SHARED:
        problem = f"shares {len(common)} tokens with {models[0].reference}"
        remedy = f"at least {LEAST_SHARED} are needed; use models with related tokenizers"
        raise CheckpointError(problem, where=str(models[-1].reference), remedy=remedy)
    common.sort(key=tokens[0].__getitem__)
    return tuple(torch.tensor([t[token] for token in common]) for t in tokens)


def matched_on(anchor: View, donor: View, count: int) -> str:
    """A note on models whose vocabularies differ."""
    names = f"`{donor.reference}` and `{anchor.reference}`"
    return f"{names} share {count} tokens: embeddings and heads were matched on them."


def check_token_ids(anchor: View, donor: View, tuned: bool = False) -> None:
    """Refuse rows that belong together by id, if ids stand for different tokens.

    Args:
        tuned: the donor is to be a fine-tune of the anchor, which may add tokens; else the two are to be averaged.

    Raises:
        CheckpointError: names the number of them.
    """
    if words := other_ids(anchor, donor, both=tuned):
        problem, remedy = f"{words}: rows of different words would be averaged", f"add '{TOGETHER}' to the recipe"
        if tuned:
            problem, remedy = f"{words}, so it is not a fine-tune of it", "name the model that it was tuned from"
        raise CheckpointError(problem, where=str(donor.reference), remedy=remedy)


def same_tokens(first: View, second: View) -> bool:
    """Whether token ids mean the same in two models.

    Raises:
        CheckpointError: as of `shared_rows`.
    """
    return shared_rows([first, second]) is None and not other_ids(first, second)


def other_ids(anchor: View, donor: View, both: bool = False) -> str:
    """The number of tokens that have other ids in the donor, as part of a sentence; empty if none has."""
    moved, whole = moved_tokens(anchor, donor, both)
    return f"{moved} of {whole} tokens have other ids than in {anchor.reference}" if moved else ""


def moved_tokens(anchor: View, donor: View, both: bool = False) -> tuple[int, int]:
    """Count the anchor's tokens that have other ids in the donor, or whose ids are other tokens there, and all tokens.

    0 of 0 if the vocabularies differ in size or a tokenizer is missing.

    Args:
        both: count only tokens that both know, whatever the sizes.
    """
    same_size = both or vocabulary_size(anchor) == vocabulary_size(donor)
    if not same_size or _same_files([anchor, donor]):
        return 0, 0
    known, ids = tokens_of(anchor), tokens_of(donor)
    if known is None or ids is None:
        return 0, 0
    at = {} if both else {number: token for token, number in ids.items()}
    moved = (ids.get(token, id_) != id_ or at.get(id_, token) != token for token, id_ in known.items())
    return sum(moved), len(known)


def vocabulary_size(model: View) -> int | None:
    """Rows of the vocabulary's tensors; None without a vocabulary."""
    for info in model.architecture.tensors():
        if info.vocabulary_axis is not None and info.name in model.shapes:
            return model.shapes[info.name][info.vocabulary_axis]
    return None


def tokens_of(model: View) -> Mapping[str, int] | None:
    """Tokens and their ids; None if no tokenizer can be loaded."""
    files = model.files
    tokenizer = None if files is None else tokenizer_in(files.folder, files.options.trust_remote_code)
    return None if tokenizer is None else tokenizer.get_vocab()


def tokenizer_in(folder: str, trust_remote_code: bool = False) -> Any | None:
    """The tokenizer in a folder, read-only; None if it has none."""
    return _loaded(folder, _contents(folder), trust_remote_code)


def _same_files(models: Sequence[View]) -> bool:
    """Whether all models have equal files of a tokenizer, so that none has to be loaded."""
    return all(model.files is not None for model in models) and len({_contents(m.folder) for m in models}) == 1


def _contents(folder: str) -> str:
    """A digest of a tokenizer's files."""
    digest = hashlib.blake2b(digest_size=20)
    for name in sorted(filter(TOKENIZER.fullmatch, os.listdir(folder))):
        digest.update(name.encode() + b"\0" + Path(folder, name).read_bytes())
    digest.update(str(Contents(folder).config.get("model_type")).encode())
    return digest.hexdigest()


@lru_cache(maxsize=4)
def _loaded(folder: str, contents: str, trust_remote_code: bool) -> Any | None:
    """The tokenizer in a folder, loaded again where its contents have changed."""
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError):
        return None
    words = set(loaded.get_vocab()) - set(loaded.all_special_tokens)
    return loaded if words - {"▁"} else None  # transformers makes up one where the files are missing


def with_rows(source: TensorSource, axes: Mapping[str, int], rows: Tensor | slice) -> Tensors:
    """Tensors with some of their rows, in the given order.

    Args:
        axes: whose rows are selected, by name; all other tensors stay as they are.
        rows: int64, shape (rows,); a slice gives views.
    """
    tensors, count = as_tensors(source), rows.stop - rows.start if isinstance(rows, slice) else len(rows)

    def select(name: str, tensor: Tensor) -> Tensor:
        if name not in axes:
            return tensor
        if isinstance(rows, slice):
            return tensor.narrow(axes[name], rows.start, count)
        return tensor.index_select(axes[name], rows.to(tensor.device))

    known = {name: tensors.shapes[name] for name in axes if name in tensors}
    changed = {name: (*shape[: axes[name]], count, *shape[axes[name] + 1 :]) for name, shape in known.items()}
    return tensors.map(select, {**tensors.shapes, **changed})


def vocabulary_axes(infos: Iterable[TensorInfo]) -> dict[str, int]:
    """The vocabulary axis of each tensor that has one, by name, including names of tied tensors."""
    return {
        name: info.vocabulary_axis
        for info in infos
        for name in (*info.names, *info.tied)
        if info.vocabulary_axis is not None and not info.stacked
    }


def on_shared_rows(known: Architecture, sources: Sequence[TensorSource], rows: Sequence[Tensor]) -> list[Tensors]:
    """Models under one's names, each with its rows of the tokens that all know."""
    axes = vocabulary_axes(known.tensors())
    return [with_rows(source, axes, row) for source, row in zip(sources, rows, strict=True)]


def padded_as(source: TensorSource, like: TensorSource, architecture: Architecture) -> Tensors:
    """A model's tensors with another one's number of vocabulary rows: cut, or extended by the other's rows."""
    tensors, padding, axes = as_tensors(source), as_tensors(like), vocabulary_axes(architecture.tensors())
    known = {name: padding.shapes[name] for name in axes if name in tensors and name in padding}

    def pad(name: str, tensor: Tensor) -> Tensor:
        unequal = name in known and tensor.shape != known[name]
        return with_rows_of(tensor, padding[name], axes[name]) if unequal else tensor

    return tensors.map(pad, {**tensors.shapes, **known})


def with_rows_of(tensor: Tensor, like: Tensor, axis: int) -> Tensor:
    """A tensor with another one's number of vocabulary rows: cut, or extended by the other's rows."""
    length = min(tensor.shape[axis], like.shape[axis])
    absent = like.narrow(axis, length, like.shape[axis] - length).to(tensor)
    return torch.cat([tensor.narrow(axis, 0, length), absent], axis)


def row_slices(shape: Sequence[int], axis: int, entries: int) -> list[slice]:
    """Slices of a tensor's shape along an axis, of so many entries at most where they have several rows."""
    count, size = shape[axis], max(1, math.prod(shape))
    step = max(1, entries * count // size)
    return [slice(start, min(count, start + step)) for start in range(0, count, step)]


def vocabulary_slices(info: TensorInfo, shapes: Sequence[Sequence[int]]) -> list[slice]:
    """The slices of a tensor's long vocabulary; none of a short one.

    Args:
        shapes: of the tensor in all models that are looked at; nothing is sliced where they differ.
    """
    axis, alike = info.vocabulary_axis, len(set(map(tuple, shapes))) == 1
    slices = [] if axis is None or info.stacked or not alike else row_slices(shapes[0], axis, LONG)
    return slices if len(slices) > 1 else []


def stored_tensors(block: Block, source: TensorSource) -> dict[str, Tensor]:
    """A block's tensors by their names, as they are stored."""
    names = (name for info in block.tensors for name in (*info.names, *info.tied))
    return {name: source[name] for name in dict.fromkeys(names) if name in source}


def in_slices(
    block: Block,
    info: TensorInfo,
    sources: Sequence[TensorSource],
    dtype: torch.dtype,
    make: Callable[[Sequence[Tensors] | None], Tensor],
) -> Tensor:
    """Computes a tensor of a block, in slices of a long vocabulary, each rounded at once to save memory.

    Args:
        sources: that it is computed from, which keep what is read of them; none: in one piece.
        dtype: of the result.
        make: gets the sources with a slice of the vocabulary; None: the whole tensor is wanted.
    """
    stored = [tensor for source in sources if (tensor := read_tensor(info, source)) is not None]
    slices = vocabulary_slices(info, [tensor.shape for tensor in stored])
    if not slices:
        return make(None).to(dtype).contiguous()
    axes, result = vocabulary_axes(block.tensors), torch.empty(stored[0].shape, dtype=dtype, device=stored[0].device)
    for rows in slices:
        place = result.narrow(info.vocabulary_axis or 0, rows.start, rows.stop - rows.start)
        place.copy_(make([with_rows(source, axes, rows) for source in sources]))
    return result
