"""The tokens of models between which a change is carried: they have to be the same set, at whatever ids."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

from rotation_merge.errors import CheckpointError
from rotation_merge.model.view import View
from rotation_merge.model.vocabulary import tokenizer_in, tokens_of, vocabulary_size

NAMED = 2
"""Tokens that a line names, at most."""

ONE_VOCABULARY = "carry between bases of one vocabulary; 'tokenizer' in a recipe is for donors that are not carried"
AS_BASE = "remove the tokens that it added, or train on the new base"


def check_same_set(new: View, old: View) -> None:
    """Check that two bases know the same tokens.

    Raises:
        CheckpointError: one has tokens that the other lacks, or another size and no tokenizer that explains it.
    """
    _check(new, str(old.reference), tokens_of(old), vocabulary_size(old), ONE_VOCABULARY)


def check_no_added_tokens(base: View, tuned: View) -> None:
    """Check that a fine-tune, or a base with an adapter, has its base's tokens; errors as of `check_same_set`."""
    lora = tuned.reference.lora
    tokens = tokens_of(tuned) if lora is None else _tokens_in(lora.path)
    _check(base, str(tuned.reference), tokens, vocabulary_size(tuned), AS_BASE)


def check_adapter_tokens(base: View, adapter: str, size: int | None) -> None:
    """Check that an adapter, by the tokenizer in its folder, has its base's tokens; errors as of `check_same_set`.

    Args:
        size: rows of the embedding or head that it holds whole; None: it holds none.
    """
    _check(base, adapter, _tokens_in(adapter), vocabulary_size(base) if size is None else size, AS_BASE)


def _tokens_in(folder: str) -> Mapping[str, int] | None:
    tokenizer = tokenizer_in(folder) if os.path.isdir(folder) else None
    return None if tokenizer is None else tokenizer.get_vocab()


def _check(base: View, name: str, tokens: Mapping[str, int] | None, size: int | None, remedy: str) -> None:
    known, length = tokens_of(base), vocabulary_size(base)
    if size is None or length is None:
        return
    if known is not None and tokens is not None:
        before, after = (
            {token for token, number in numbered.items() if number < count}
            for numbered, count in ((known, length), (tokens, size))
        )
        words = [f"has {_counted(after - before)} that {base.reference} lacks"] if after - before else []
        words += [f"lacks {_counted(before - after)} of {base.reference}"] if before - after else []
        if words:
            raise CheckpointError(" and ".join(words), where=name, remedy=remedy)
    elif size != length:
        raise CheckpointError(
            f"has {size} rows of tokens, {base.reference} has {length}, and no tokenizer says which are the same",
            where=name,
            remedy="put the tokenizers of both beside their weights",
        )


def _counted(tokens: Collection[str]) -> str:
    """A number of tokens and the names of the first."""
    names = ", ".join(f"`{token}`" for token in sorted(tokens)[:NAMED])
    more = ", ..." if len(tokens) > NAMED else ""
    return f"{len(tokens)} token{'s' if len(tokens) > 1 else ''} ({names}{more})"
