"""Chat templates: whether they can be rendered, and whether text ends where their turns end."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from rotation_merge.errors import named, short
from rotation_merge.model.chat import (
    ROLES,
    SPECIAL,
    SPECIAL_MAP,
    Vocabulary,
    closing_tokens,
    ends_of_text,
    same_vocabulary_files,
    special_tokens,
    templates_of,
)
from rotation_merge.model.contents import CONFIG, GENERATION, TOKENIZER_CONFIG, Contents
from rotation_merge.report.integrity.defect import Defect, json_entries

ADDITIONAL = "additional_chat_templates/"
"""Folder of templates that may need tools or documents."""


def check_turns(contents: Contents, parents: Sequence[Contents]) -> Iterator[Defect]:
    """Check chat templates, and that the ids which end text go with them: the template's, its model's, the tokenizer's.

    A turn ends with the last special token that the template writes after it.
    """
    vocabulary, ends, roles = Vocabulary.of(contents), ends_of_text(contents), special_tokens(contents)
    names = [roles["eos_token"]] if ends and vocabulary.whole and "eos_token" in roles else []
    for file, template in templates_of(contents).items():
        try:
            closing = closing_tokens(contents, template)
        except Exception as error:  # of Jinja, and of every kind that an expression in a template raises
            yield from _broken(file, error)
            closing = []
        if not ends & {vocabulary.ids[token] for token in closing}:
            names += closing[-1:]
        sources = [parent for parent in parents if template.strip() in map(str.strip, templates_of(parent).values())]
        for parent in sources:
            known = vocabulary if same_vocabulary_files(contents, parent) else Vocabulary.of(parent)
            names += [known.names.get(id_, "") for id_ in sorted(ends_of_text(parent))]
        yield from _other_roles(contents, template, sources)
        yield from _unknown_tokens(vocabulary, file, template)
    yield from _endless(contents, ends, {name: vocabulary.ids[name] for name in names if name in vocabulary.ids})


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
