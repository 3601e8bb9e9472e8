"""Vocabularies that differ: the rows of the tokens that all models share."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import torch
from mergekit.common import ModelReference
from torch import Tensor

from rotation_merge.errors import CheckpointError, RotationMergeError
from rotation_merge.model.folder import folder_of
from rotation_merge.model.headers import TOKENIZER, read_json
from rotation_merge.model.view import View

LEAST_SHARED = 32
"""Least number of common tokens that tells the relation of two models."""


def shared_rows(models: Sequence[View]) -> list[Tensor] | None:
    """Rows of the tokens that all models have, in one order.

    Returns:
        For each model int64, shape (tokens,); None where the vocabularies are the same, or none of them has one.

    Raises:
        CheckpointError: vocabularies of different sizes, and a tokenizer that would tell is missing; or next to nothing
            in common.
    """
    sizes = [vocabulary_size(model) for model in models]
    if any(size is None for size in sizes):
        return None
    tokens = [_tokens(model.reference, model.options.trust_remote_code) if model.files else None for model in models]
    lacking = next((m for m, t in zip(models, tokens, strict=True) if t is None), None)
    if lacking is not None:
        if len(set(sizes)) == 1:
            return None
        size = sizes[models.index(lacking)]
        unequal, unequal_size = next((m, s) for m, s in zip(models, sizes, strict=True) if s != size)
        raise CheckpointError(
            f"has {size} tokens, {unequal.name} has {unequal_size}, and no tokenizer says which tokens are the same",
            where=str(lacking.reference),
            remedy="put both models' tokenizers beside their weights",
        )
    if all(t == tokens[0] for t in tokens) and len(set(sizes)) == 1:
        return None
    known = [t or {} for t in tokens]
    common = [token for token in known[0] if all(_held(t, token, s) for t, s in zip(known, sizes, strict=True))]
    if len(common) < LEAST_SHARED:
        raise CheckpointError(
            f"shares {len(common)} tokens with {models[0].reference}",
            where=str(models[-1].reference),
            remedy=f"at least {LEAST_SHARED} are needed; use models with related tokenizers",
        )
    common.sort(key=known[0].__getitem__)
    return [torch.tensor([t[token] for token in common]) for t in known]


def matched_on(anchor: View, donor: View, count: int) -> str:
    """A note on models whose vocabularies differ."""
    names = f"`{donor.reference}` and `{anchor.reference}`"
    return f"{names} share {count} tokens: embeddings and heads were matched on them."


def other_order(anchor: View, donor: View) -> list[str]:
    """A note if tokens of two local models have different ids; for vocabularies of one size."""
    moved, whole = moved_tokens(anchor, donor)
    return [f"{donor.reference}: {_other_ids(anchor, moved, whole)}; a merge needs '{TOGETHER}'."] if moved else []


TOGETHER = "tokenizer: {source: base}"
"""Recipe setting for models whose token ids differ."""


def token_ids_differ(anchor: View, donor: View) -> bool:
    """Whether a merge of two models has to match their vocabularies by token.

    Their sizes differ, or an id stands for different tokens. False if a model has no tokenizer.
    """
    return vocabulary_size(anchor) != vocabulary_size(donor) or moved_tokens(anchor, donor)[0] > 0


def check_token_ids(anchor: View, donor: View) -> None:
    """Refuse to average rows of the vocabularies by id if ids stand for different tokens.

    Raises:
        CheckpointError: names the number of them.
    """
    moved, whole = moved_tokens(anchor, donor)
    if moved:
        problem = f"{_other_ids(anchor, moved, whole)}: rows of different words would be averaged"
        raise CheckpointError(problem, where=str(donor.reference), remedy=f"add '{TOGETHER}' to the recipe")


def check_same_tokens(merged: View, *teachers: View) -> None:
    """Check that teachers' outputs mean the same for the merge that learns from them.

    Raises:
        RotationMergeError: one is not there, or has another vocabulary.
    """
    for teacher in teachers:
        if shared_rows([merged, teacher]) is not None or moved_tokens(merged, teacher)[0]:
            problem, remedy = (
                f"its tokens are not those of {merged.reference}",
                "give teachers with the merge's tokenizer",
            )
            raise RotationMergeError(problem, where=str(teacher.reference), remedy=remedy)


def check_tuned_ids(origin: View, tuned: View) -> None:
    """Refuse the difference of two models whose common tokens have different ids.

    Raises:
        CheckpointError: names the number of them.
    """
    moved, whole = moved_tokens(origin, tuned, both=True)
    if moved:
        problem = f"{_other_ids(origin, moved, whole)}, so it is not a fine-tune of it"
        raise CheckpointError(problem, where=str(tuned.reference), remedy="name the model that it was tuned from")


def _other_ids(anchor: View, moved: int, whole: int) -> str:
    return f"{moved} of {whole} tokens have other ids than in {anchor.reference}"


def moved_tokens(anchor: View, donor: View, both: bool = False) -> tuple[int, int]:
    """Count the anchor's tokens that have other ids in the donor, or whose ids are other tokens there, and all tokens.

    0 of 0 if the vocabularies differ in size or a tokenizer is missing.

    Args:
        both: count only tokens that both know.
    """
    models = (anchor, donor)
    if (
        anchor is donor
        or (not both and vocabulary_size(anchor) != vocabulary_size(donor))
        or not all(m.files and _has_tokenizer(m.reference) for m in models)
    ):
        return 0, 0
    if len({_tokenizer(m.reference, m.options.trust_remote_code) for m in models}) == 1:
        return 0, 0
    ours, donor_tokens = (_tokens(m.reference, m.options.trust_remote_code) or {} for m in models)
    at = {} if both else {number: token for token, number in donor_tokens.items()}
    moved = (
        donor_tokens.get(token, number) != number or at.get(number, token) != token for token, number in ours.items()
    )
    return sum(moved), len(ours)


def _has_tokenizer(reference: ModelReference) -> bool:
    path = _folder(reference)
    return os.path.isdir(path) and any(name.startswith(("tokenizer", "vocab", "spiece")) for name in os.listdir(path))


def _folder(reference: ModelReference) -> str:
    """The folder of a model's files; its name on the hub if they are not here."""
    return folder_of(reference.model) or reference.model.path


def _held(tokens: Mapping[str, int], token: str, size: int | None) -> bool:
    """Whether a token has a row."""
    return token in tokens and tokens[token] < (size or 0)


def vocabulary_size(model: View) -> int | None:
    """Rows of the vocabulary's tensors; None without a vocabulary."""
    for info in model.architecture.tensors():
        if info.vocabulary_axis is not None and info.name in model.shapes:
            return model.shapes[info.name][info.vocabulary_axis]
    return None


def _tokens(reference: ModelReference, trust_remote_code: bool) -> Mapping[str, int] | None:
    """Tokens and their ids; None if no tokenizer can be loaded."""
    tokenizer = tokenizer_of(reference, trust_remote_code)
    return None if tokenizer is None else MappingProxyType(tokenizer.get_vocab())


def tokenizer_of(reference: ModelReference, trust_remote_code: bool = False) -> Any | None:
    """A model's tokenizer, read-only; None if it has none."""
    return _loaded(_tokenizer(reference, trust_remote_code))


def _tokenizer(reference: ModelReference, trust_remote_code: bool) -> _Tokenizer:
    path = _folder(reference)
    return _Tokenizer(path, reference.model.revision, trust_remote_code, _contents(path))


@dataclass(frozen=True)
class _Tokenizer:
    """A tokenizer; local tokenizers are equal where their files are equal.

    Attributes:
        contents: a digest of its files; the path again where it does not lie here.
    """

    path: str = field(compare=False)
    revision: str | None
    trust_remote_code: bool
    contents: str


def _contents(path: str) -> str:
    if not os.path.isdir(path):
        return path
    digest = hashlib.blake2b(digest_size=20)
    for name in sorted(filter(TOKENIZER.fullmatch, os.listdir(path))):
        with open(os.path.join(path, name), "rb") as file:
            digest.update(name.encode() + b"\0" + file.read())
    with suppress(RotationMergeError):
        digest.update(str(read_json(os.path.join(path, "config.json")).get("model_type")).encode())
    return digest.hexdigest()


@lru_cache(maxsize=4)
def _loaded(tokenizer: _Tokenizer) -> Any | None:
    from transformers import AutoTokenizer

    options = {"revision": tokenizer.revision, "trust_remote_code": tokenizer.trust_remote_code}
    try:
        tokenizer_of_model = AutoTokenizer.from_pretrained(tokenizer.path, **options)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError):
        return None
    return None if has_only_special_tokens(tokenizer_of_model) else tokenizer_of_model


def has_only_special_tokens(tokenizer: Any) -> bool:
    """Whether a tokenizer knows special tokens only: where its files are missing, transformers makes up such a one."""
    return set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens) <= {"▁"}
