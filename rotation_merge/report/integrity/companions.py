"""Files that belong beside the weights, which the parents have and the folder lacks."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatch

from rotation_merge.errors import named
from rotation_merge.model.chat import (
    SPECIAL_MAP,
    TEMPLATE_FILES,
    TEMPLATE_JSON,
    Vocabulary,
    main_template,
    same_vocabulary_files,
    special_tokens,
    templates_of,
)
from rotation_merge.model.contents import CONFIG, GENERATION, TOKENIZER_CONFIG, Contents
from rotation_merge.model.vocabulary import tokenizer_in
from rotation_merge.report.integrity.defect import Corrections, Defect, file_copy, json_entries
from rotation_merge.report.integrity.keys import embedding_rows

VOCABULARY_FILES = (
    *("tokenizer.json", "tokenizer.model*", "vocab.json", "vocab.txt", "merges.txt", "spiece.model"),
    *("sentencepiece.bpe.model", "*.tiktoken", "tekken.json", "*.spm", "*.bpe"),
)
TOKENIZER_FILES = (*VOCABULARY_FILES, TOKENIZER_CONFIG, SPECIAL_MAP, "added_tokens.json", "normalizer.json")
PROCESSOR_FILES = (
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "feature_extractor.json"),
    "image_processor.json",
)
SENTENCE_FILES = ("modules.json", "config_sentence_transformers.json", "sentence_*_config.json", "[0-9]_*/*")
TEMPLATES = ("*.jinja", TEMPLATE_JSON)
COPY = "copy it ('--mend')"


def check_companions(contents: Contents, parents: Sequence[Contents]) -> Iterator[Defect]:
    """Compare the small files with those of the parents, the base's first."""
    yield from _code(contents, parents)
    rows, kind_of_model = embedding_rows(contents), contents.config.get("model_type")
    fitting = [parent for parent in parents if rows is None or embedding_rows(parent) == rows]
    of_kind = [parent for parent in parents if parent.config.get("model_type") == kind_of_model]
    tokenizer = _matching(contents, VOCABULARY_FILES)
    tokenizers = [parent for parent in parents if _matching(parent, VOCABULARY_FILES)]
    for kind, sources, needed, copied, fatal in (
        ("tokenizer", fitting, VOCABULARY_FILES, TOKENIZER_FILES, True),
        ("tokenizer config", fitting if tokenizer else [], (TOKENIZER_CONFIG,), (TOKENIZER_CONFIG,), True),
        ("processor", of_kind, PROCESSOR_FILES, PROCESSOR_FILES, True),
        ("generation config", parents[:1], (GENERATION,), (GENERATION,), False),
        ("sentence-transformers modules", parents[:1], ("modules.json",), SENTENCE_FILES, True),
    ):
        source = next((parent for parent in sources if _matching(parent, needed)), None)
        names = [] if source is None else _absent(contents, source, copied)
        if source is not None and not _matching(contents, needed):
            yield _lacking(f"no {kind}", source, names, fatal)
        elif source is not None and names and kind == "processor" and not _in_one_file(contents):
            yield _lacking("incomplete processor", source, names, fatal=False)
    if tokenizers and not tokenizer and not any(parent in fitting for parent in tokenizers):
        problem = "it is missing, and the parents' have another vocabulary size"
        yield Defect("no tokenizer", problem, "tokenizer.json", "copy the one that the merge was made with")
    yield from _tokenizer_files(contents, tokenizers)
    yield from _no_template(contents, parents)


def _no_template(contents: Contents, parents: Sequence[Contents]) -> Iterator[Defect]:
    """No chat template, where a parent has one."""
    source = next((parent for parent in parents if templates_of(parent)), None)
    if source is None or templates_of(contents):
        return
    if files := [name for name in _matching(source, TEMPLATES) if name in templates_of(source)]:
        yield _lacking("no chat template", source, files, fatal=source is parents[0])
    elif contents.has(TOKENIZER_CONFIG):
        problem, template = f"a parent has one in its {TOKENIZER_CONFIG}", source.mapping(TOKENIZER_CONFIG)
        corrections = json_entries(TOKENIZER_CONFIG, {"chat_template": template["chat_template"]})
        yield Defect("no chat template", problem, TOKENIZER_CONFIG, COPY, corrections=corrections)


def _tokenizer_files(contents: Contents, parents: Sequence[Contents]) -> Iterator[Defect]:
    """Files that are missing of a tokenizer which is that of a parent."""
    for parent in parents if _matching(contents, VOCABULARY_FILES) else ():
        names = _absent(contents, parent, (*TOKENIZER_FILES, *TEMPLATES))
        if not names:
            continue
        copies = tokenizer_copies(contents, parent)
        if names := [name for name in names if name in copies and name not in TEMPLATE_FILES]:
            yield _lacking("incomplete tokenizer", parent, names, fatal=False)
            return


def tokenizer_copies(contents: Contents, parent: Contents) -> Corrections:
    """Copies the files of a parent's tokenizer, if its tokens and special tokens are the folder's; else nothing.

    A chat template of another model stays, with the tokenizer's config, which may hold it.
    """
    roles, known = special_tokens(contents), special_tokens(parent)
    if any(roles.get(role, token) != token for role, token in known.items()) or not _same_tokens(contents, parent):
        return {}
    same_template = main_template(contents) == main_template(parent)
    names = set(_matching(parent, (*TOKENIZER_FILES, *TEMPLATES)))
    if not same_template:
        names -= {*_matching(parent, TEMPLATES), TOKENIZER_CONFIG}
    return {name: file_copy(parent.path(name)) for name in sorted(names)}


def _same_tokens(contents: Contents, parent: Contents) -> bool:
    """Whether two tokenizers have the same tokens at the same ids; of sentencepiece models that they are loaded for."""
    if same_vocabulary_files(contents, parent):
        return True
    vocabularies = []
    for folder in (contents, parent):
        vocabulary = Vocabulary.of(folder)
        tokenizer = None if vocabulary.whole else tokenizer_in(folder.folder)
        vocabularies.append(vocabulary.ids if tokenizer is None else tokenizer.get_vocab())
    return bool(vocabularies[0]) and vocabularies[0] == vocabularies[1]


def _in_one_file(contents: Contents) -> bool:
    """Whether the processor's config holds those of its parts, as transformers 5 writes it."""
    return not {"image_processor", "feature_extractor"}.isdisjoint(contents.mapping("processor_config.json"))


def _matching(contents: Contents, patterns: Collection[str]) -> list[str]:
    return sorted(name for name in contents.names if any(fnmatch(name, pattern) for pattern in patterns))


def _absent(contents: Contents, parent: Contents, patterns: Collection[str]) -> list[str]:
    """Files of a parent that the folder lacks."""
    return [name for name in _matching(parent, patterns) if name not in contents.names]


def _lacking(kind: str, parent: Contents, names: Sequence[str], fatal: bool = True) -> Defect:
    copies = {name: file_copy(parent.path(name)) for name in names}
    return Defect(kind, f"a parent has {named(copies)}", next(iter(copies)), COPY, fatal, copies)


def _code(contents: Contents, parents: Sequence[Contents]) -> Iterator[Defect]:
    """Python files that the config has transformers load."""
    mapped = (contents.mapping(file).get("auto_map") for file in (CONFIG, TOKENIZER_CONFIG))
    classes = [name for entry in mapped if isinstance(entry, dict) for name in entry.values()]
    places = [str(place) for name in classes for place in (name if isinstance(name, list) else [name]) if place]
    absent = sorted({f"{place.partition('.')[0]}.py" for place in places if "--" not in place} - contents.names)
    if not absent:
        return
    parent = next((parent for parent in parents if set(absent) <= parent.names), None)
    if parent is not None:
        code = sorted(name for name in parent.names if re.fullmatch(r"[\w./-]+\.py", name))
        yield _lacking("no custom code", parent, [name for name in code if name not in contents.names])
    else:
        yield Defect("no custom code", f"'auto_map' names {named(absent)}", CONFIG, "copy it from a parent")
