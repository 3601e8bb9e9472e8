"""Ids and names of tokens against the vocabulary that the model has: tokenizer, special tokens, chat template."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rotation_merge.errors import named, short
from rotation_merge.model.contents import (
    CONFIG,
    GENERATION,
    TOKENIZER_CONFIG,
    TOKENIZER_JSON,
    Contents,
)
from rotation_merge.report.integrity.defect import Correction, Defect, json_entries
from rotation_merge.report.integrity.keys import embedding_rows, settings_of

ADDED = "added_tokens.json"
TEMPLATE_JSON = "chat_template.json"
VOCABULARIES = (TOKENIZER_JSON, "vocab.json", "vocab.txt")
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
LISTS = ("additional_special_tokens", "extra_special_tokens")
ID = re.compile(r".*_token_(id|ids|index)|(begin_)?suppress_tokens")
SPECIAL = re.compile(r"<\|[\w-]{1,40}\|>|<(?:start|end)_of_\w+>|</s>")
"""Tokens as chat templates write them."""
GENERATION_BLOCK = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
"""A tag of transformers' own, which plain Jinja does not know."""


@dataclass(frozen=True)
class Vocabulary:
    """Tokens by name.

    Attributes:
        ids: of the tokens that the files name.
        whole: whether these are all (a sentencepiece model beside them is not read).
        twice: two tokens of one id.
    """

    ids: Mapping[str, int]
    whole: bool
    twice: tuple[str, str] | None

    @classmethod
    def of(cls, contents: Contents) -> Vocabulary:
        ids: dict[str, int] = {}
        whole = True
        if TOKENIZER_JSON in contents.names:
            content = contents.mapping(TOKENIZER_JSON)
            model = content.get("model") if isinstance(content.get("model"), dict) else {}
            ids |= _entries((model or {}).get("vocab"))
            ids |= _entries([[token, token["id"]] for token in _dicts(content.get("added_tokens")) if "id" in token])
        elif "vocab.json" in contents.names:
            ids |= _entries(contents.mapping("vocab.json"))
        elif "vocab.txt" in contents.names:
            text = contents.text("vocab.txt") or ""
            ids |= {token: number for number, token in enumerate(text.splitlines())}
        else:
            whole = False
        ids |= _entries(contents.mapping(ADDED))
        added = contents.mapping(TOKENIZER_CONFIG).get("added_tokens_decoder")
        decoder = added if isinstance(added, dict) else {}
        ids |= _entries([[token, int(number)] for number, token in decoder.items() if str(number).isdigit()])
        names: dict[int, str] = {}
        twice = next(((names[i], t) for t, i in ids.items() if names.setdefault(i, t) != t), None)
        return cls(ids, whole and bool(ids), twice)


def _dicts(content: Any) -> list[dict[str, Any]]:
    return [entry for entry in content if isinstance(entry, dict)] if isinstance(content, list) else []


def _entries(content: Any) -> dict[str, int]:
    """Tokens and ids of a vocabulary: an object, pairs of token and id, or (of Unigram) pairs of token and score."""
    if isinstance(content, dict):
        return {token: number for token, number in content.items() if type(number) is int}
    pairs = [pair for pair in content if isinstance(pair, list) and len(pair) == 2] if isinstance(content, list) else []
    ids = {}
    for place, (token, number) in enumerate(pairs):
        name = token.get("content") if isinstance(token, dict) else token
        if isinstance(name, str):
            ids[name] = number if type(number) is int else place
    return ids


def check_tokens(contents: Contents, parents: Sequence[Contents]) -> Iterator[Defect]:
    """Look at every id and every name of a token; `parents` are of no use here."""
    vocabulary = Vocabulary.of(contents)
    for name in (TOKENIZER_JSON, "vocab.json", ADDED, TOKENIZER_CONFIG, GENERATION):
        contents.mapping(name)
        if name in contents.damaged:
            yield Defect("damaged file", contents.damaged[name], name, "copy a parent's")
    if contents.is_adapter:
        return
    rows = embedding_rows(contents)
    if rows is not None:
        yield from _beyond(vocabulary, rows)
        yield from _ids_beyond(contents, rows)
    if vocabulary.twice is not None:
        first, second = vocabulary.twice
        problem = f"'{first}' and '{second}' have the id {vocabulary.ids[first]}"
        yield Defect("id twice", problem, _file(contents), "copy a parent's tokenizer")
    if vocabulary.whole:
        yield from _unknown_names(contents, vocabulary)
        yield from _end_of_text(contents, vocabulary)
    yield from _templates(contents, vocabulary)


def _file(contents: Contents) -> str:
    return next((name for name in VOCABULARIES if name in contents.names), TOKENIZER_CONFIG)


def _beyond(vocabulary: Vocabulary, rows: int) -> Iterator[Defect]:
    if above := {token: number for token, number in vocabulary.ids.items() if number >= rows}:
        token, number = max(above.items(), key=lambda pair: pair[1])
        problem = f"{len(above)} tokens have ids up to {number} ('{token}'), the embeddings have {rows} rows"
        remedy = "merge with a 'tokenizer' that gives them rows, or copy the tokenizer of the base"
        yield Defect("token beyond the vocabulary", problem, TOKENIZER_JSON, remedy)


def _stated(content: Any, usual: Mapping[str, list[Any]], before: str = "") -> Iterator[tuple[str, int]]:
    """Ids of tokens in a file, by path, without the defaults of the model's class."""
    for key, value in content.items() if isinstance(content, Mapping) else ():
        if isinstance(value, Mapping):
            yield from _stated(value, usual, f"{before}{key}.")
        elif ID.fullmatch(key) and value not in usual.get(key, ()):
            numbers = value if isinstance(value, list) else [value]
            yield from ((before + key, number) for number in numbers if type(number) is int)


def _usual(contents: Contents) -> dict[str, list[Any]]:
    """Default values of the entries in the config of the model's class and its nested configs, by entry."""
    try:
        content = type(settings_of(contents))().to_dict()
    except Exception:  # classes that cannot be made of nothing, of every kind
        return {}
    usual: dict[str, list[Any]] = {}
    parts = [content]
    for part in parts:
        parts += [value for value in part.values() if isinstance(value, dict)]
        for key, value in part.items():
            usual.setdefault(key, []).append(value)
    return usual


def _ids_beyond(contents: Contents, rows: int) -> Iterator[Defect]:
    usual = _usual(contents)
    for file in (CONFIG, GENERATION):
        above = {key: number for key, number in _stated(contents.mapping(file), usual) if number >= rows}
        if above:
            words = named(f"{key} {number}" for key, number in above.items())
            corrections = _corrected(contents, file, above)
            problem = f"{words}: embeddings have {rows} rows"
            yield Defect("special id beyond the vocabulary", problem, file, "set what the tokenizer says ('--mend')",
                         corrections=corrections)  # fmt: skip


def _corrected(contents: Contents, file: str, above: Mapping[str, int]) -> tuple[Correction, ...]:
    """Ids of the tokens that the tokenizer names, for entries with one of that name."""
    ids, entries = Vocabulary.of(contents).ids, {}
    for path in above:
        name = _special(contents).get(path.rpartition(".")[2].removesuffix("_id"))
        if name is None or name not in ids or ids[name] in above.values():
            return ()
        entries[path] = ids[name]
    return (json_entries(file, entries),)


def _special(contents: Contents) -> dict[str, str]:
    """Special tokens by role, as the tokenizer's config names them."""
    names = {}
    for role in NAMES:
        token = contents.mapping(TOKENIZER_CONFIG).get(role)
        name = token.get("content") if isinstance(token, dict) else token
        if isinstance(name, str) and name:
            names[role] = name
    return names


def _unknown_names(contents: Contents, vocabulary: Vocabulary) -> Iterator[Defect]:
    listed: dict[str, str] = {}
    for key in LISTS:
        tokens = contents.mapping(TOKENIZER_CONFIG).get(key)
        tokens = tokens.values() if isinstance(tokens, dict) else tokens if isinstance(tokens, list) else ()
        names = [token.get("content") if isinstance(token, dict) else token for token in tokens]
        listed |= {name: key for name in names if isinstance(name, str)}
    roles = {name: role for role, name in _special(contents).items()} | listed
    if unknown := [f"{role} '{name}'" for name, role in roles.items() if name not in vocabulary.ids]:
        problem = f"{named(unknown)}: the tokenizer has no such token, and would add it behind the vocabulary"
        yield Defect(
            "unknown special token", problem, TOKENIZER_CONFIG, "copy this file and tokenizer.json from one model"
        )


def _ends(contents: Contents) -> set[int]:
    """Ids at which writing ends."""
    ends = contents.mapping(GENERATION).get("eos_token_id", contents.config.get("eos_token_id"))
    return {number for number in (ends if isinstance(ends, list) else [ends]) if type(number) is int}


def _end_of_text(contents: Contents, vocabulary: Vocabulary) -> Iterator[Defect]:
    name = _special(contents).get("eos_token")
    ends = _ends(contents)
    if name is None or name not in vocabulary.ids or not ends or vocabulary.ids[name] in ends:
        return
    number, file = vocabulary.ids[name], GENERATION if GENERATION in contents.names else CONFIG
    problem = f"eos_token_id is {named(map(str, sorted(ends)))}, the tokenizer's '{name}' is {number}: text may not end"
    corrections = (json_entries(file, {"eos_token_id": sorted({number, *ends})}),)
    yield Defect("end of text", problem, file, "add it ('--mend')", fatal=False, corrections=corrections)


def templates_of(contents: Contents) -> dict[str, str]:
    """Chat templates by file."""
    templates = {name: contents.text(name) for name in contents.names if name.endswith(".jinja")}
    for file in (TOKENIZER_CONFIG, TEMPLATE_JSON):
        template = contents.mapping(file).get("chat_template")
        if isinstance(template, list):
            template = next((entry.get("template") for entry in template if isinstance(entry, dict)), None)
        templates[file] = template if isinstance(template, str) else None
    return {name: template for name, template in sorted(templates.items()) if template}


def _templates(contents: Contents, vocabulary: Vocabulary) -> Iterator[Defect]:
    from jinja2 import Environment, TemplateSyntaxError

    for file, template in templates_of(contents).items():
        try:
            environment = Environment(extensions=["jinja2.ext.loopcontrols"])  # parses, never renders
            environment.parse(GENERATION_BLOCK.sub("", template))
        except TemplateSyntaxError as error:
            yield Defect("broken chat template", short(error), file, "copy a parent's")
            continue
        tokens = list(dict.fromkeys(SPECIAL.findall(template)))
        if vocabulary.whole and (unknown := [token for token in tokens if token not in vocabulary.ids]):
            problem = f"writes {named(unknown)}, which the tokenizer cuts into pieces"
            yield Defect("template of other tokens", problem, file, "take template and tokenizer from one model",
                         fatal=False)  # fmt: skip
        yield from _turns(contents, vocabulary, file, template, tokens)


def _turns(
    contents: Contents, vocabulary: Vocabulary, file: str, template: str, tokens: Sequence[str]
) -> Iterator[Defect]:
    """Check that a token with which a template ends a turn also ends generation."""
    closing = [token for token in tokens if token in vocabulary.ids and ("end" in token or "eot" in token)]
    ends = _ends(contents)
    if not closing or not ends or "eos_token" in template or ends & {vocabulary.ids[token] for token in closing}:
        return
    ids = [vocabulary.ids[token] for token in closing]
    place = GENERATION if GENERATION in contents.names else CONFIG
    corrections = (json_entries(place, {"eos_token_id": sorted({*ends, *ids[-1:]})}),)
    problem = f"ends turns with {named(closing)} (id {ids[-1]}), eos_token_id is {named(map(str, sorted(ends)))}"
    yield Defect("turns do not end", problem, file, "add its id ('--mend')", fatal=False, corrections=corrections)
