"""Files that belong beside the weights, which the parents have and the folder lacks."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatch

from rotation_merge.errors import named
from rotation_merge.model.contents import CONFIG, GENERATION, TOKENIZER_CONFIG, Contents
from rotation_merge.report.integrity.defect import Defect, file_copy
from rotation_merge.report.integrity.keys import embedding_rows
from rotation_merge.report.integrity.tokens import TEMPLATE_JSON, templates_of

VOCABULARY_FILES = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "spiece.model"),
    *("sentencepiece.bpe.model", "*.tiktoken"),
)
TOKENIZER_FILES = (*VOCABULARY_FILES, TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json")
PROCESSOR_FILES = (
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "feature_extractor.json"),
    "image_processor.json",
)
SENTENCE_FILES = ("modules.json", "config_sentence_transformers.json", "sentence_*_config.json", "[0-9]_*/*")
TEMPLATES = ("*.jinja", TEMPLATE_JSON)


def check_companions(contents: Contents, parents: Sequence[Contents]) -> Iterator[Defect]:
    """Compare the small files with those of the parents, the base's first."""
    yield from _code(contents, parents)
    rows, kind_of_model = embedding_rows(contents), contents.config.get("model_type")
    fitting = [parent for parent in parents if rows is None or embedding_rows(parent) == rows]
    of_kind = [parent for parent in parents if parent.config.get("model_type") == kind_of_model]
    tokenizer = _matching(contents, VOCABULARY_FILES)
    tokenizers = [parent for parent in parents if _matching(parent, VOCABULARY_FILES)]
    with_template = [parent for parent in parents if templates_of(parent) and not templates_of(contents)]
    for kind, sources, needed, copied, fatal in (
        ("no tokenizer", fitting, VOCABULARY_FILES, TOKENIZER_FILES, True),
        ("no tokenizer config", fitting if tokenizer else [], (TOKENIZER_CONFIG,), (TOKENIZER_CONFIG,), True),
        ("no chat template", with_template[:1], TEMPLATES, TEMPLATES, with_template[:1] == [*parents[:1]]),
        ("no processor", of_kind, PROCESSOR_FILES, PROCESSOR_FILES, True),
        ("no generation config", parents[:1], (GENERATION,), (GENERATION,), False),
        ("no sentence-transformers modules", parents[:1], ("modules.json",), SENTENCE_FILES, True),
    ):
        source = next((parent for parent in sources if _matching(parent, needed)), None)
        if source is not None and not _matching(contents, needed):
            yield _lacking(kind, contents, source, _matching(source, copied), fatal)
    if tokenizers and not tokenizer and not any(parent in fitting for parent in tokenizers):
        problem = "it is missing, and the parents' have another vocabulary size"
        yield Defect("no tokenizer", problem, "tokenizer.json", "copy the one that the merge was made with")
    if with_template and not _matching(with_template[0], TEMPLATES) and TOKENIZER_CONFIG in contents.names:
        problem = f"a parent has one in its {TOKENIZER_CONFIG}"
        yield Defect("no chat template", problem, TOKENIZER_CONFIG, "copy it")


def _matching(contents: Contents, patterns: Collection[str]) -> list[str]:
    return sorted(name for name in contents.names if any(fnmatch(name, pattern) for pattern in patterns))


def _lacking(kind: str, contents: Contents, parent: Contents, names: Sequence[str], fatal: bool = True) -> Defect:
    copies = {name: file_copy(parent.path(name)) for name in names if name not in contents.names}
    return Defect(kind, f"a parent has {named(copies)}", next(iter(copies)), "copy it ('--mend')", fatal, copies)


def _code(contents: Contents, parents: Sequence[Contents]) -> Iterator[Defect]:
    """Python files that the config has transformers load."""
    mapped = contents.config.get("auto_map")
    places = map(str, mapped.values() if isinstance(mapped, dict) else ())
    absent = sorted({f"{place.partition('.')[0]}.py" for place in places if "--" not in place} - contents.names)
    if not absent:
        return
    parent = next((parent for parent in parents if set(absent) <= parent.names), None)
    if parent is not None:
        code = sorted(name for name in parent.names if re.fullmatch(r"[\w./-]+\.py", name))
        yield _lacking("no custom code", contents, parent, code)
    else:
        yield Defect("no custom code", f"'auto_map' names {named(absent)}", CONFIG, "copy it from a parent")
