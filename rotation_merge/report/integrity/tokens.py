"""Ids and names of tokens against the vocabulary that the model has: config, tokenizer, special tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rotation_merge.errors import named
from rotation_merge.model.chat import (
    ADDED,
    VOCABULARY,
    Vocabulary,
    ids_in,
    more_special,
    same_vocabulary_files,
    special_tokens,
)
from rotation_merge.model.contents import CONFIG, GENERATION, TOKENIZER_CONFIG, TOKENIZER_JSON, Contents
from rotation_merge.report.integrity.defect import Corrections, Defect, json_entries
from rotation_merge.report.integrity.keys import embedding_rows, settings_of

ID = re.compile(r".*_token_(id|ids|index)|(begin_)?suppress_tokens")


def check_tokens(contents: Contents, parents: Sequence[Contents]) -> Iterator[Defect]:
    """Look at every id and every name of a token."""
    for name in (TOKENIZER_JSON, VOCABULARY, ADDED, TOKENIZER_CONFIG, GENERATION):
        contents.mapping(name)
        if name in contents.damaged:
            yield Defect("damaged file", contents.damaged[name], name, "copy a parent's")
    if contents.is_adapter:
        return
    vocabulary, rows = Vocabulary.of(contents), embedding_rows(contents)
    if rows is not None:
        yield from _tokens_beyond(vocabulary, rows)
        yield from _ids_beyond(contents, vocabulary, rows)
    twice = (
        (vocabulary.names[number], token)
        for token, number in vocabulary.ids.items()
        if vocabulary.names[number] != token
    )
    for pair in list(twice)[:1]:
        yield Defect("id twice", f"{pair} have one id", TOKENIZER_JSON, "copy a parent's tokenizer")
    if vocabulary.whole:
        yield from _unknown_names(contents, vocabulary)
        yield from check_ids(contents, parents)


def _tokens_beyond(vocabulary: Vocabulary, rows: int) -> Iterator[Defect]:
    if above := {number: token for token, number in vocabulary.ids.items() if number >= rows}:
        last = max(above)
        problem = f"{len(above)} tokens have ids up to {last} ('{above[last]}'), the embeddings have {rows} rows"
        remedy = "merge with a 'tokenizer' that gives them rows, or copy the tokenizer of the base"
        yield Defect("token beyond the vocabulary", problem, TOKENIZER_JSON, remedy)


def _ids_beyond(contents: Contents, vocabulary: Vocabulary, rows: int) -> Iterator[Defect]:
    """Ids of special tokens without rows, except defaults of the class; mended where the tokenizer says them."""
    usual = _defaults(contents)
    by_role = _ids_by_role(contents, vocabulary)
    for file in (CONFIG, GENERATION):
        stated = {path: ids for path, ids in _stated(contents.mapping(file), usual) if max(ids) >= rows}
        numbers = {
            path: dict.fromkeys((id_ for id_ in ids if id_ >= rows), by_role.get(_entry(path), rows))
            for path, ids in stated.items()
        }
        known = all(number < rows for ids in numbers.values() for number in ids.values())
        corrections = _renumbered(contents, file, numbers) if known else {}
        if numbers:
            above = (f"{path} {id_}" for path, ids in numbers.items() for id_ in ids)
            problem, remedy = f"{named(above)}: embeddings have {rows} rows", "set what the tokenizer says ('--mend')"
            yield Defect("special id beyond the vocabulary", problem, file, remedy, corrections=corrections)


def check_ids(contents: Contents, parents: Sequence[Contents]) -> Iterator[Defect]:
    """Ids of special tokens that come from a parent with another vocabulary, where they are ids of other tokens."""
    if all(same_vocabulary_files(contents, parent) for parent in parents):
        return
    vocabulary = Vocabulary.of(contents)
    by_role = _ids_by_role(contents, vocabulary)
    for file in (CONFIG, GENERATION):
        numbers: dict[str, dict[int, int]] = {}
        words: list[str] = []
        for path, ids in _stated(contents.mapping(file), {}):
            sources = [parent for parent in parents if dict(_stated(parent.mapping(file), {})).get(path) == ids]
            names = [Vocabulary.of(parent).names for parent in sources]
            for id_ in ids:
                name, tokens = vocabulary.names.get(id_), [known[id_] for known in names if id_ in known]
                if name is not None and tokens and name not in tokens:
                    words.append(f"{path} {id_} is '{name}', in {sources[0].folder} '{tokens[0]}'")
                    number = vocabulary.ids.get(tokens[0], by_role.get(_entry(path)))
                    numbers.setdefault(path, {})[id_] = id_ if number is None else number
        if words:
            corrections, remedy = _renumbered(contents, file, numbers), "set what the tokenizer says ('--mend')"
            yield Defect("id of another token", named(words), file, remedy, corrections=corrections)


def _ids_by_role(contents: Contents, vocabulary: Vocabulary) -> dict[str, int]:
    """Ids of the tokenizer's special tokens, by the entry that states them in a config."""
    names = special_tokens(contents).items()
    return {f"{role}_id": vocabulary.ids[name] for role, name in names if name in vocabulary.ids}


def _entry(path: str) -> str:
    return path.rpartition(".")[2]


def _renumbered(contents: Contents, file: str, numbers: Mapping[str, Mapping[int, int]]) -> Corrections:
    """Sets new ids in a file.

    Args:
        numbers: the new number by the present one, by the path of the entry; other ids of a list stay.
    """
    entries: dict[str, int | list[int]] = {}
    for path, value in _values(contents.mapping(file)):
        new = numbers.get(path, {})
        if isinstance(value, list):
            entries[path] = list(dict.fromkeys(new.get(id_, id_) for id_ in value))
        else:
            entries[path] = new.get(value, value)
    return json_entries(file, {path: value for path, value in entries.items() if numbers.get(path)})


def _values(content: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Entries of a file that state ids of tokens, by path."""
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _values(value, f"{before}{key}.")
        elif ID.fullmatch(key):
            yield before + key, value


def _stated(content: Mapping[str, Any], usual: Mapping[str, list[Any]]) -> Iterator[tuple[str, list[int]]]:
    """Ids of tokens in a file, by path, without the usual values of an entry."""
    for path, value in _values(content):
        if value not in usual.get(_entry(path), ()) and (ids := ids_in(value)):
            yield path, ids


def _defaults(contents: Contents) -> dict[str, list[Any]]:
    """Default values of the entries in the config of the model's class and its nested configs, by entry."""
    try:
        parts = [type(settings_of(contents))().to_dict()]
    except Exception:  # classes that cannot be made of nothing, of every kind
        return {}
    defaults: dict[str, list[Any]] = {}
    for part in parts:
        parts += [value for value in part.values() if isinstance(value, dict)]
        for key, value in part.items():
            defaults.setdefault(key, []).append(value)
    return defaults


def _unknown_names(contents: Contents, vocabulary: Vocabulary) -> Iterator[Defect]:
    names = {name: role for role, name in special_tokens(contents).items()} | more_special(contents)
    if unknown := [f"{role} '{name}'" for name, role in names.items() if name not in vocabulary.ids]:
        problem = f"{named(unknown)}: the tokenizer has no such token, and would add it behind the vocabulary"
        remedy = "copy this file and tokenizer.json from one model"
        yield Defect("unknown special token", problem, TOKENIZER_CONFIG, remedy)
