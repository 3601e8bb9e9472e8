"""Chat templates: whether they can be rendered, and whether text ends where their turns end."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from rotation_merge.errors import named, short
from rotation_merge.model.contents import CONFIG, GENERATION, TOKENIZER_CONFIG, TOKENIZER_JSON, Contents
from rotation_merge.report.integrity.defect import Defect, json_entries
from rotation_merge.report.integrity.tokens import (
    LISTS,
    ROLES,
    SPECIAL_MAP,
    Vocabulary,
    dicts,
    ids_in,
    special_tokens,
    token_name,
)

TEMPLATE_JSON = "chat_template.json"
TEMPLATE_FILES = ("chat_template.jinja", TOKENIZER_CONFIG, TEMPLATE_JSON)
"""Files of the usual template, the one that transformers prefers first."""
ADDITIONAL = "additional_chat_templates/"
"""Folder of templates that may need tools or documents."""
SPECIAL = re.compile(r"<\|[\w-]{1,40}\|?>|<[\w-]{1,40}\|>|<(?:start|end)_of_\w+>|</s>")
"""Tokens as chat templates write them."""
ANSWER = "An answer in one sentence"
"""The assistant's turn in the conversation that templates are tried with."""


def check_turns(contents: Contents, parents: Sequence[Contents]) -> Iterator[Defect]:
    """Check chat templates, and that the ids which end text go with them: the template's, its model's, the tokenizer's.

    A turn ends with the last special token that the template writes after it.
    """
    vocabulary, ends, roles = Vocabulary.of(contents), ends_of_text(contents), special_tokens(contents)
    names = [roles["eos_token"]] if ends and vocabulary.whole and "eos_token" in roles else []
    for file, template in templates_of(contents).items():
        try:
            closing = [token for token in _closing(contents, template, roles) if token in vocabulary.ids]
        except Exception as error:  # of Jinja, and of every kind that an expression in a template raises
            yield from _broken(file, error)
            closing = []
        if not ends & {vocabulary.ids[token] for token in closing}:
            names += closing[-1:]
        sources = [parent for parent in parents if template.strip() in map(str.strip, templates_of(parent).values())]
        for parent in sources:
            names += [Vocabulary.of(parent).names.get(id_, "") for id_ in sorted(ends_of_text(parent))]
        yield from _other_roles(contents, template, sources)
        yield from _unknown_tokens(vocabulary, file, template)
    yield from _endless(contents, ends, {name: vocabulary.ids[name] for name in names if name in vocabulary.ids})


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


def _endless(contents: Contents, ends: set[int], names: dict[str, int]) -> Iterator[Defect]:
    """Tokens that should end text and do not."""
    endless = {name: number for name, number in names.items() if number not in ends}
    if not endless:
        return
    words = named(f"'{name}' ({number})" for name, number in endless.items())
    known = named(map(str, sorted(ends))) if ends else "not set"
    generation = bool(contents.mapping(GENERATION))  # a damaged one stays
    both = generation and contents.config.get("eos_token_id") is not None
    files = [CONFIG, GENERATION] if both else [GENERATION if generation else CONFIG]
    entries = {"eos_token_id": sorted(ends.union(endless.values()))}
    corrections = {file: change for name in files for file, change in json_entries(name, entries).items()}
    problem = f"text or turns end with {words}, eos_token_id is {known}"
    yield Defect("end of text", problem, files[-1], "add its id ('--mend')", fatal=False, corrections=corrections)


def _closing(contents: Contents, template: str, roles: dict[str, str]) -> list[str]:
    """Special tokens that a template writes after an assistant's turn, in their order.

    Raises:
        Exception: the template is no Jinja, or cannot be rendered.
    """
    text, settings = _after_a_turn(template, roles), contents.mapping(TOKENIZER_CONFIG)
    decoder, lists = settings.get("added_tokens_decoder"), [settings.get(key) for key in LISTS]
    numbered = dicts([*decoder.values()] if isinstance(decoder, dict) else [])
    added = [*dicts(contents.mapping(TOKENIZER_JSON).get("added_tokens")), *numbered]
    names = {token_name(token) for token in added if token.get("special")} | {*roles.values()}
    for tokens in lists:
        names.update(map(token_name, tokens.values() if isinstance(tokens, dict) else tokens or []))
    written = sorted((name for name in names if name and name in text), key=len, reverse=True)
    return re.findall("|".join([*map(re.escape, written), SPECIAL.pattern]), text)


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


def _broken(file: str, error: Exception) -> Iterator[Defect]:
    """A template that is no Jinja, or fails; it may refuse a conversation by itself, and may need more than one."""
    from jinja2 import TemplateError, TemplateSyntaxError

    if isinstance(error, TemplateSyntaxError):
        yield Defect("broken chat template", short(error), file, "copy a parent's")
    elif type(error) is not TemplateError and not file.startswith(ADDITIONAL):
        problem = f"fails on a question with its answer ({short(error)})"
        yield Defect("broken chat template", problem, file, "copy a parent's", fatal=False)


def _other_roles(contents: Contents, template: str, sources: Sequence[Contents]) -> Iterator[Defect]:
    """Special tokens that a template names, and the end of text, where no model that it comes from has the same.

    Args:
        sources: folders of these models.
    """
    roles, ids = special_tokens(contents), Vocabulary.of(contents).ids
    used = [role for role in ROLES if role == "eos_token" or re.search(rf"\b{role}\b", template)]
    others = [{role: special_tokens(source).get(role, "") for role in used} for source in sources]
    changes = [{r: name for r, name in other.items() if name in ids and name != roles.get(r)} for other in others]
    if not changes or not all(changes):
        return
    entries = changes[0]
    files = [name for name in (TOKENIZER_CONFIG, SPECIAL_MAP) if contents.mapping(name)]
    corrections = {file: change for name in files for file, change in json_entries(name, entries).items()}
    words = named(f"{role} '{roles.get(role)}', there '{name}'" for role, name in entries.items())
    problem = f"{words}: the chat template is that of {sources[0].folder}"
    remedy = "set what goes with the template ('--mend')"
    yield Defect("template of other tokens", problem, TOKENIZER_CONFIG, remedy, fatal=False, corrections=corrections)


def _unknown_tokens(vocabulary: Vocabulary, file: str, template: str) -> Iterator[Defect]:
    tokens = dict.fromkeys(SPECIAL.findall(template))
    if vocabulary.whole and (unknown := [token for token in tokens if token not in vocabulary.ids]):
        problem = f"writes {named(unknown)}, which the tokenizer cuts into pieces"
        remedy = "take template and tokenizer from one model"
        yield Defect("template of other tokens", problem, file, remedy, fatal=False)
