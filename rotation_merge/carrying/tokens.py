"""Tokens of models between which a change is carried: one set, at whatever ids; and the fine-tune's chat template."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from rotation_merge.errors import CheckpointError
from rotation_merge.model.chat import Vocabulary, closing_tokens, ids_in, main_template
from rotation_merge.model.contents import GENERATION, TOKENIZER, Contents
from rotation_merge.model.view import View
from rotation_merge.model.vocabulary import check_token_ids, tokenizer_in, tokens_of, vocabulary_size
from rotation_merge.model.writing import small_files

NAMED = 2
"""Tokens that a line names, at most."""

ONE_VOCABULARY = "carry between bases of one vocabulary; 'tokenizer' in a recipe is for donors that are not carried"
AS_BASE = "remove the tokens that it added, or train on the new base"

Tokens = Mapping[str, int] | None
"""Tokens and their ids, if there is a tokenizer."""


def check_same_set(new: View, old: View) -> None:
    """Check that two bases know the same tokens.

    Raises:
        CheckpointError: one has tokens that the other lacks, or another size and no tokenizer that explains it.
    """
    _check(new, str(old.reference), tokens_of(old), vocabulary_size(old), ONE_VOCABULARY)


def check_tuned_tokens(base: View, tuned: View) -> None:
    """Check that a fine-tune, or a base with an adapter, has the tokens of its base, none added, at the same ids."""
    lora = tuned.reference.lora
    tokens = tokens_of(tuned) if lora is None else _tokens_in(lora.path)
    _check(base, str(tuned.reference), tokens, vocabulary_size(tuned), AS_BASE)
    check_token_ids(base, tuned, tuned=True)


def check_adapter_tokens(base: View, adapter: str, size: int | None) -> None:
    """Check that an adapter, by the tokenizer in its folder, has its base's tokens; errors as of `check_same_set`.

    Args:
        size: rows of the embedding or head that it holds whole; None: it holds none.
    """
    _check(base, adapter, _tokens_in(adapter), vocabulary_size(base) if size is None else size, AS_BASE)


def _tokens_in(folder: str) -> Tokens:
    tokenizer = tokenizer_in(folder) if os.path.isdir(folder) else None
    return None if tokenizer is None else tokenizer.get_vocab()


def _check(base: View, name: str, tokens: Tokens, size: int | None, remedy: str) -> None:
    known, length = tokens_of(base), vocabulary_size(base)
    if size is None or length is None:
        return
    if known is None or tokens is None:
        if size != length:
            problem = (
                f"has {size} rows of tokens, {base.reference} has {length}, and no tokenizer says which are the same"
            )
            raise CheckpointError(problem, where=name, remedy="put the tokenizers of both beside their weights")
        return
    before = {token for token, number in known.items() if number < length}
    after = {token for token, number in tokens.items() if number < size}
    for word, different in (("has", after - before), ("lacks", before - after)):
        if different:
            names = ", ".join(f"`{token}`" for token in sorted(different)[:NAMED])
            problem = f"{word} {len(different)} tokens that differ from {base.reference} ({names})"
            raise CheckpointError(problem, where=name, remedy=remedy)


SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Entries of a config that name tokens."""


def chat_folder(old: View, tuned: View | str) -> str:
    """The folder of a fine-tune or adapter with a chat template that the old base lacks; empty if it has none."""
    if old.files is None or vocabulary_size(old) is None:
        return ""
    if isinstance(tuned, View):
        lora = tuned.reference.lora
        tuned = lora.path if lora is not None else "" if tuned.files is None else tuned.folder
    template = main_template(Contents(tuned)) if os.path.isdir(tuned) else ""
    return tuned if template and template != main_template(Contents(old.folder)) else ""


def with_chat(base: View, chat: str, old: View, tuned: View) -> View:
    """The new base with the fine-tune's tokenizer, and the ids with which that begins, ends and pads.

    Args:
        chat: the folder of the tokenizer.
    """
    before, after = old.config, tuned.config
    ids = {key: after[key] for key in SPECIAL if after.get(key) is not None and after[key] != before.get(key)}
    files = {} if base.files is None else small_files(base.folder)
    files = {name: content for name, content in files.items() if not TOKENIZER.fullmatch(name)} | tokenizer_files(chat)
    config = {**base.config, **ids}
    folders = [chat] if base.files is None else [chat, base.folder]
    generation = next(filter(None, (Contents(folder).mapping(GENERATION) for folder in folders)), {})
    if ends := _lacking_ends(chat, set(ids_in((generation or config).get("eos_token_id")))):
        ids["eos_token_id"] = config["eos_token_id"] = ends
        if generation:
            files[GENERATION] = json.dumps({**generation, "eos_token_id": ends}, indent=2).encode()
    return replace(base, config=config, changed={**base.changed, **ids}, beside=files)


def _lacking_ends(chat: str, ends: set[int]) -> list[int]:
    """The ids that end text, with one that ends a template's turns; none if they end them already."""
    contents, closing = Contents(chat), list[str]()
    with suppress(Exception):  # of Jinja, and of every kind that an expression in a template raises
        closing = closing_tokens(contents, main_template(contents))
    numbers = [Vocabulary.of(contents).ids[token] for token in closing]
    return [] if not numbers or ends & {*numbers} else sorted({*ends, numbers[-1]})


def tokenizer_files(folder: str) -> dict[str, bytes]:
    """The files of the tokenizer in a folder, and that of the tokens with which text begins and ends, by name."""
    names = (name for name in sorted(os.listdir(folder)) if TOKENIZER.fullmatch(name) or name == GENERATION)
    return {name: Path(folder, name).read_bytes() for name in names}
