"""Vocabularies that differ: the rows of the tokens that all models share."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rotation_merge.errors import CheckpointError
from rotation_merge.model.contents import Contents
from rotation_merge.model.headers import TOKENIZER
from rotation_merge.model.view import View

LEAST_SHARED = 32
"""Least number of common tokens that tells the relation of two models."""

TOGETHER = "tokenizer: {source: base}"
"""Recipe setting for models whose token ids differ."""


def shared_rows(models: Sequence[View]) -> list[Tensor] | None:
    """Rows of the tokens that all models have, in one order.

    Returns:
        For each model int64, shape (tokens,); None where the vocabularies are the same, or none of them has one.

    Raises:
        CheckpointError: vocabularies of different sizes, and a tokenizer that would tell is missing; or next to nothing
            in common.
    """
    sizes = [size for model in models if (size := vocabulary_size(model)) is not None]
    if len(sizes) < len(models):
        return None
    if len(set(sizes)) == 1 and _same_files(models):
        return None
    known = [tokens_of(model) for model in models]
    tokens = [tokens for tokens in known if tokens is not None]
    if len(tokens) < len(models):
        lacking = known.index(None)
        other = next((number for number, size in enumerate(sizes) if size != sizes[lacking]), None)
        if other is None:
            return None
        problem = f"has {sizes[lacking]} tokens, {models[other].name} has {sizes[other]}, and no tokenizer says which"
        remedy = "put both models' tokenizers beside their weights"
        raise CheckpointError(f"{problem} tokens are the same", where=str(models[lacking].reference), remedy=remedy)
    if all(t == tokens[0] for t in tokens) and len(set(sizes)) == 1:
        return None
    numbered = list(zip(tokens, sizes, strict=True))
    common = [token for token in tokens[0] if all(t.get(token, size) < size for t, size in numbered)]
    if len(common) < LEAST_SHARED:
        problem = f"shares {len(common)} tokens with {models[0].reference}"
        remedy = f"at least {LEAST_SHARED} are needed; use models with related tokenizers"
        raise CheckpointError(problem, where=str(models[-1].reference), remedy=remedy)
    common.sort(key=tokens[0].__getitem__)
    return [torch.tensor([t[token] for token in common]) for t in tokens]


def row_pair(first: View, second: View) -> tuple[Tensor, Tensor] | None:
    """Rows of the tokens that both of two models have, of the first and of the second; as of `shared_rows`."""
    rows = shared_rows([first, second])
    return None if rows is None else (rows[0], rows[1])


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
    words = other_ids(anchor, donor, both=tuned)
    problem, remedy = f"{words}: rows of different words would be averaged", f"add '{TOGETHER}' to the recipe"
    if tuned:
        problem, remedy = f"{words}, so it is not a fine-tune of it", "name the model that it was tuned from"
    if words:
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
    other_sizes = not both and vocabulary_size(anchor) != vocabulary_size(donor)
    if anchor is donor or other_sizes or _same_files([anchor, donor]):
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
    tokenizer = None if model.files is None else tokenizer_in(model.folder, model.options.trust_remote_code)
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
    return None if has_only_special_tokens(loaded) else loaded


def has_only_special_tokens(tokenizer: Any) -> bool:
    """Whether a tokenizer knows special tokens only: where its files are missing, transformers makes up such a one."""
    return set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens) <= {"▁"}
