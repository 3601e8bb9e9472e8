"""Ids and names of tokens against the vocabulary that the model has: tokenizer, special tokens, chat template."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rotation_merge.errors import named, short
from rotation_merge.model.contents import CONFIG, GENERATION, TOKENIZER_CONFIG, TOKENIZER_JSON, Contents
from rotation_merge.report.integrity.defect import Defect, json_entries
from rotation_merge.report.integrity.keys import embedding_rows, settings_of

ADDED, VOCABULARY, WORDS = "added_tokens.json", "vocab.json", "vocab.txt"
TEMPLATE_JSON = "chat_template.json"
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
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
    """

    ids: Mapping[str, int]
    whole: bool

    @classmethod
    def of(cls, contents: Contents) -> Vocabulary:
        content = contents.mapping(TOKENIZER_JSON)
        model = content.get("model")
        files = [_entries(model.get("vocab") if isinstance(model, dict) else None)]
        files.append({_name(token): token.get("id") for token in _dicts(content.get("added_tokens"))})
        if TOKENIZER_JSON not in contents.names:
            files = [_entries(contents.mapping(VOCABULARY))]
            if VOCABULARY not in contents.names:
                files = [_entries((contents.text(WORDS) or "").splitlines())]
        whole = any(files)
        decoder = contents.mapping(TOKENIZER_CONFIG).get("added_tokens_decoder")
        numbered = decoder.items() if isinstance(decoder, dict) else ()
        files += [contents.mapping(ADDED), {_name(token): int(key) for key, token in numbered if key.isdigit()}]
        pairs = {token: number for file in files for token, number in file.items()}
        return cls({token: number for token, number in pairs.items() if token and type(number) is int}, whole)


def _dicts(content: Any) -> list[dict[str, Any]]:
    return [entry for entry in content if isinstance(entry, dict)] if isinstance(content, list) else []


def _name(token: Any) -> str:
    """A token's text, which may stand in an object; empty where it is none."""
    name = token.get("content") if isinstance(token, dict) else token
    return name if isinstance(name, str) else ""


def _entries(content: Any) -> dict[str, Any]:
    """Tokens and ids of a vocabulary: an object, or a list in their order (of Unigram, of tokens with scores)."""
    if isinstance(content, dict):
        return content
    listed = content if isinstance(content, list) else []
    return {_name(entry[0] if isinstance(entry, list) and entry else entry): at for at, entry in enumerate(listed)}


def check_tokens(contents: Contents) -> Iterator[Defect]:
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
    names: dict[int, str] = {}
    twice = (
        (names[number], token) for token, number in vocabulary.ids.items() if names.setdefault(number, token) != token
    )
    for pair in list(twice)[:1]:
        yield Defect("id twice", f"{pair} have one id", TOKENIZER_JSON, "copy a parent's tokenizer")
    if vocabulary.whole:
        yield from _unknown_names(contents, vocabulary)
    yield from _end_of_text(contents, vocabulary)
    for file, template in templates_of(contents).items():
        yield from _template(vocabulary, file, template)


def _tokens_beyond(vocabulary: Vocabulary, rows: int) -> Iterator[Defect]:
    if above := {number: token for token, number in vocabulary.ids.items() if number >= rows}:
        last = max(above)
        problem = f"{len(above)} tokens have ids up to {last} ('{above[last]}'), the embeddings have {rows} rows"
        remedy = "merge with a 'tokenizer' that gives them rows, or copy the tokenizer of the base"
        yield Defect("token beyond the vocabulary", problem, TOKENIZER_JSON, remedy)


def _ids_beyond(contents: Contents, vocabulary: Vocabulary, rows: int) -> Iterator[Defect]:
    """Ids of special tokens without rows, except defaults of the class; mended where the tokenizer says them."""
    usual = _defaults(contents)
    known = {f"{role}_id": vocabulary.ids.get(name, rows) for role, name in _special(contents).items()}
    for file in (CONFIG, GENERATION):
        above = {path: id_ for path, id_ in _stated(contents.mapping(file), usual) if id_ >= rows}
        entries = {path: known.get(path.rpartition(".")[2], rows) for path in above}
        corrections = json_entries(file, entries if max(entries.values(), default=rows) < rows else {})
        if above:
            problem = f"{named(f'{path} {id_}' for path, id_ in above.items())}: embeddings have {rows} rows"
            remedy = "set what the tokenizer says ('--mend')"
            yield Defect("special id beyond the vocabulary", problem, file, remedy, corrections=corrections)


def _stated(content: Mapping[str, Any], usual: Mapping[str, list[Any]], before: str = "") -> Iterator[tuple[str, int]]:
    """Ids of tokens in a file, by path, without the usual values of an entry."""
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _stated(value, usual, f"{before}{key}.")
        elif ID.fullmatch(key) and value not in usual.get(key, ()):
            numbers = value if isinstance(value, list) else [value]
            yield from ((before + key, number) for number in numbers if type(number) is int)


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


def _special(contents: Contents) -> dict[str, str]:
    """Special tokens by role, as the tokenizer's config names them."""
    names = {role: _name(contents.mapping(TOKENIZER_CONFIG).get(role)) for role in ROLES}
    return {role: name for role, name in names.items() if name}


def _unknown_names(contents: Contents, vocabulary: Vocabulary) -> Iterator[Defect]:
    names = {name: role for role, name in _special(contents).items()}
    for key in LISTS:
        tokens = contents.mapping(TOKENIZER_CONFIG).get(key)
        listed = tokens.values() if isinstance(tokens, dict) else tokens if isinstance(tokens, list) else ()
        names |= {name: key for name in map(_name, listed) if name}
    if unknown := [f"{role} '{name}'" for name, role in names.items() if name not in vocabulary.ids]:
        problem = f"{named(unknown)}: the tokenizer has no such token, and would add it behind the vocabulary"
        remedy = "copy this file and tokenizer.json from one model"
        yield Defect("unknown special token", problem, TOKENIZER_CONFIG, remedy)


def _end_of_text(contents: Contents, vocabulary: Vocabulary) -> Iterator[Defect]:
    """Tokens that should end writing and do not: the tokenizer's, and one with which a template ends turns."""
    ids, stated = vocabulary.ids, contents.mapping(GENERATION).get("eos_token_id", contents.config.get("eos_token_id"))
    ends = {number for number in (stated if isinstance(stated, list) else [stated]) if type(number) is int}
    names = [_special(contents).get("eos_token", "")] if vocabulary.whole else []
    for template in templates_of(contents).values():
        closing = [token for token in SPECIAL.findall(template) if token in ids and re.search("end|eot", token)]
        if closing and "eos_token" not in template and not ends & {ids[token] for token in closing}:
            names.append(closing[-1])
    endless = {name: ids[name] for name in names if name in ids and ids[name] not in ends}
    if ends and endless:
        file = GENERATION if contents.mapping(GENERATION) else CONFIG  # a damaged one stays
        words, known = named(f"'{name}' ({number})" for name, number in endless.items()), named(map(str, sorted(ends)))
        corrections = json_entries(file, {"eos_token_id": sorted(ends.union(endless.values()))})
        problem = f"text or turns end with {words}, eos_token_id is {known}"
        yield Defect("end of text", problem, file, "add its id ('--mend')", fatal=False, corrections=corrections)


def templates_of(contents: Contents) -> dict[str, str]:
    """Chat templates by file."""
    templates: dict[str, Any] = {name: contents.text(name) for name in contents.names if name.endswith(".jinja")}
    for file in (TOKENIZER_CONFIG, TEMPLATE_JSON):
        template = contents.mapping(file).get("chat_template")
        templates[file] = next((entry.get("template") for entry in _dicts(template)), template)
    return {name: text for name, text in sorted(templates.items()) if text and isinstance(text, str)}


def _template(vocabulary: Vocabulary, file: str, template: str) -> Iterator[Defect]:
    """A template that is no Jinja, or writes unknown tokens."""
    from jinja2 import Environment, TemplateSyntaxError

    try:
        environment = Environment(extensions=["jinja2.ext.loopcontrols"])  # parses, never renders
        environment.parse(GENERATION_BLOCK.sub("", template))
    except TemplateSyntaxError as error:
        yield Defect("broken chat template", short(error), file, "copy a parent's")
        return
    tokens = dict.fromkeys(SPECIAL.findall(template))
    if vocabulary.whole and (unknown := [token for token in tokens if token not in vocabulary.ids]):
        problem = f"writes {named(unknown)}, which the tokenizer cuts into pieces"
        remedy = "take template and tokenizer from one model"
        yield Defect("template of other tokens", problem, file, remedy, fatal=False)
