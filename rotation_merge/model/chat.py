"""What a tokenizer's files say, without loading it: tokens, special tokens, chat templates, ends of turns."""

from __future__ import annotations

import filecmp
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from rotation_merge.model.contents import GENERATION, TOKENIZER_CONFIG, TOKENIZER_JSON, Contents

ADDED, VOCABULARY, WORDS = "added_tokens.json", "vocab.json", "vocab.txt"
SPECIAL_MAP = "special_tokens_map.json"
VOCABULARIES = (TOKENIZER_JSON, "tokenizer.model", VOCABULARY, WORDS, ADDED, "spiece.model")
"""Files that hold tokens."""
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
LISTS = ("additional_special_tokens", "extra_special_tokens")
TEMPLATE_JSON = "chat_template.json"
TEMPLATE_FILES = ("chat_template.jinja", TOKENIZER_CONFIG, TEMPLATE_JSON)
"""Files of the usual template, the one that transformers prefers first."""
SPECIAL = re.compile(r"<\|[\w-]{1,40}\|?>|<[\w-]{1,40}\|>|<(?:start|end)_of_\w+>|</s>")
"""Tokens as chat templates write them."""
ANSWER = "An answer in one sentence"
"""The assistant's turn in the conversation that templates are tried with."""


@dataclass(frozen=True)
class Vocabulary:
    """Tokens by name.

    Attributes:
        ids: of the tokens that the files name.
        whole: whether these are all (a sentencepiece model beside them is not read).
    """

    ids: Mapping[str, int]
    whole: bool

    @cached_property
    def names(self) -> dict[int, str]:
        """Tokens by id."""
        return {number: token for token, number in self.ids.items()}

    @classmethod
    def of(cls, contents: Contents) -> Vocabulary:
        """The vocabulary of a folder, read once."""
        if contents not in _vocabularies:
            _vocabularies[contents] = cls._read(contents)
        return _vocabularies[contents]

    @classmethod
    def _read(cls, contents: Contents) -> Vocabulary:
        content = contents.mapping(TOKENIZER_JSON)
        model = content.get("model")
        files = [_entries(model.get("vocab") if isinstance(model, dict) else None)]
        files.append({token_name(token): token.get("id") for token in dicts(content.get("added_tokens"))})
        if TOKENIZER_JSON not in contents.names:
            files = [_entries(contents.mapping(VOCABULARY))]
            if VOCABULARY not in contents.names:
                files = [_entries((contents.text(WORDS) or "").splitlines())]
        whole = any(files)
        decoder = contents.mapping(TOKENIZER_CONFIG).get("added_tokens_decoder")
        numbered = decoder.items() if isinstance(decoder, dict) else ()
        files += [contents.mapping(ADDED), {token_name(token): int(key) for key, token in numbered if key.isdigit()}]
        pairs = {token: number for file in files for token, number in file.items()}
        return cls({token: number for token, number in pairs.items() if token and type(number) is int}, whole)


_vocabularies: WeakKeyDictionary[Contents, Vocabulary] = WeakKeyDictionary()


def dicts(content: Any) -> list[dict[str, Any]]:
    """The objects of a JSON list; none of something else."""
    return [entry for entry in content if isinstance(entry, dict)] if isinstance(content, list) else []


def token_name(token: Any) -> str:
    """A token's text, which may stand in an object; empty where it is none."""
    name = token.get("content") if isinstance(token, dict) else token
    return name if isinstance(name, str) else ""


def _entries(content: Any) -> dict[str, Any]:
    """Tokens and ids of a vocabulary: an object, or a list in their order (of Unigram, of tokens with scores)."""
    if isinstance(content, dict):
        return content
    listed = content if isinstance(content, list) else []
    tokens = (entry[0] if isinstance(entry, list) and entry else entry for entry in listed)
    return {token_name(token): number for number, token in enumerate(tokens)}


def same_vocabulary_files(contents: Contents, parent: Contents) -> bool:
    """Whether the files of a vocabulary are equal, so that they need not be read; `tokenizer.json` decides alone."""
    folders = (contents, parent)
    names = [name for name in VOCABULARIES if any(folder.has(name) for folder in folders)]
    if all(folder.has(TOKENIZER_JSON) for folder in folders):
        names = [TOKENIZER_JSON]
    same = (
        all(folder.has(name) for folder in folders)
        and filecmp.cmp(contents.path(name), parent.path(name), shallow=False)
        for name in names
    )
    return bool(names) and all(same)


def special_tokens(contents: Contents) -> dict[str, str]:
    """Special tokens by role, as transformers takes them from the tokenizer's files."""
    settings = contents.mapping(TOKENIZER_CONFIG)
    if "added_tokens_decoder" not in settings:
        settings = {**settings, **contents.mapping(SPECIAL_MAP)}
    names = {role: token_name(settings.get(role)) for role in ROLES}
    return {role: name for role, name in names.items() if name}


def more_special(contents: Contents) -> dict[str, str]:
    """Special tokens without a role, each with the entry of the tokenizer's config that lists it."""
    entries: dict[str, str] = {}
    for key in LISTS:
        tokens = contents.mapping(TOKENIZER_CONFIG).get(key)
        listed = tokens.values() if isinstance(tokens, dict) else tokens if isinstance(tokens, list) else ()
        entries |= {name: key for name in map(token_name, listed) if name}
    return entries


def ids_in(value: Any) -> list[int]:
    """The ids that an entry of a config states: one, a list, or none."""
    return [number for number in (value if isinstance(value, list) else [value]) if type(number) is int]


def templates_of(contents: Contents) -> dict[str, str]:
    """Chat templates by file; of several in a tokenizer's config the default one."""
    templates = {name: contents.text(name) for name in contents.names if name.endswith(".jinja")}
    for file in (TOKENIZER_CONFIG, TEMPLATE_JSON):
        stated = contents.mapping(file).get("chat_template")
        by_name = {entry.get("name"): entry.get("template") for entry in dicts(stated)}
        templates[file] = by_name.get("default", next(iter(by_name.values()), stated))
    return {name: text for name, text in sorted(templates.items()) if text and isinstance(text, str)}


def main_template(contents: Contents) -> str:
    """The usual chat template, without space around it; empty if there is none."""
    templates = templates_of(contents)
    return next((templates[file].strip() for file in TEMPLATE_FILES if file in templates), "")


def ends_of_text(contents: Contents) -> set[int]:
    """The ids at which transformers ends text: the generation config's, without that file the model's."""
    config = contents.config
    parts = [config, *(config.get(key) for key in ("decoder", "generator", "text_config"))]
    if contents.mapping(GENERATION):
        parts = [contents.mapping(GENERATION)]
    stated = (part.get("eos_token_id") for part in parts if isinstance(part, dict))
    return set(ids_in(next((value for value in stated if value is not None), None)))


def closing_tokens(contents: Contents, template: str) -> list[str]:
    """Special tokens of the vocabulary that a template writes after an assistant's turn, in their order.

    Raises:
        Exception: the template is no Jinja, or cannot be rendered.
    """
    roles, settings = special_tokens(contents), contents.mapping(TOKENIZER_CONFIG)
    text = _after_a_turn(template, roles)
    decoder = settings.get("added_tokens_decoder")
    numbered = dicts([*decoder.values()] if isinstance(decoder, dict) else [])
    added = [*dicts(contents.mapping(TOKENIZER_JSON).get("added_tokens")), *numbered]
    names = {token_name(token) for token in added if token.get("special")}.union(roles.values(), more_special(contents))
    written = sorted((name for name in names if name and name in text), key=len, reverse=True)
    tokens = re.findall("|".join([*map(re.escape, written), SPECIAL.pattern]), text)
    return [token for token in tokens if token in Vocabulary.of(contents).ids]


def _after_a_turn(template: str, roles: dict[str, str]) -> str:
    """What a template writes after an assistant's turn, whose content is text or a list of parts; may be nothing."""
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    errors: list[Exception] = []
    for in_parts in (False, True):
        turns = (("user", "A question"), ("assistant", ANSWER))
        chat = [{"role": r, "content": [{"type": "text", "text": t}] if in_parts else t} for r, t in turns]
        try:
            texts, _ = render_jinja_template([chat], chat_template=template, **roles)
        except TemplateSyntaxError:
            raise
        except Exception as error:  # of every kind
            errors.append(error)
        else:
            if ANSWER in texts[0]:
                return texts[0].rpartition(ANSWER)[2]
    if len(errors) > 1:
        raise errors[0]
    return ""
