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

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "*.tiktoken"),
)
VOCABULARY_FILES = tuple(name for name in TOKENIZER_FILES if not name.startswith(("tokenizer_", "special", "added")))
PROCESSOR_FILES = (
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "feature_extractor.json"),
    "image_processor.json",
)
SENTENCE_FILES = ("modules.json", "config_sentence_transformers.json", "sentence_*_config.json", "[0-9]_*/*")
REMEDY = "copy it ('--mend')"


def check_companions(contents: Contents, parents: Sequence[Contents]) -> Iterator[Defect]:
    """Compare the small files with those of the parents, the base's first."""
    yield from _code(contents, parents)
    yield from _tokenizer(contents, parents)
    yield from _processors(contents, parents)
    base = parents[0] if parents else None
    if base is not None and GENERATION in base.names and GENERATION not in contents.names:
        yield _lacking("no generation config", contents, base, [GENERATION], fatal=False)
    if base is not None and "modules.json" in base.names and "modules.json" not in contents.names:
        yield _lacking("no sentence-transformers modules", contents, base, _matching(base, SENTENCE_FILES))


def _matching(contents: Contents, patterns: Collection[str]) -> list[str]:
    return sorted(name for name in contents.names if any(fnmatch(name, pattern) for pattern in patterns))


def _lacking(kind: str, contents: Contents, parent: Contents, names: Sequence[str], fatal: bool = True) -> Defect:
    copies = tuple(file_copy(name, parent.path(name)) for name in names if name not in contents.names)
    problem = f"a parent has {named(copy.file for copy in copies)}"
    return Defect(kind, problem, copies[0].file if copies else names[0], REMEDY, fatal, copies)


def _tokenizer(contents: Contents, parents: Sequence[Contents]) -> Iterator[Defect]:
    """A tokenizer, its config, a chat template: of a parent with as many tokens as the model."""
    rows = embedding_rows(contents)
    alike = [parent for parent in parents if rows is None or embedding_rows(parent) == rows]
    parent = next((parent for parent in alike if _matching(parent, VOCABULARY_FILES)), None)
    if not _matching(contents, VOCABULARY_FILES):
        if parent is not None:
            yield _lacking("no tokenizer", contents, parent, _matching(parent, TOKENIZER_FILES))
        elif any(_matching(parent, VOCABULARY_FILES) for parent in parents):
            problem = "it is missing, and the parents' have another vocabulary size"
            yield Defect("no tokenizer", problem, "tokenizer.json", "copy the one that the merge was made with")
    elif parent is not None and TOKENIZER_CONFIG in parent.names and TOKENIZER_CONFIG not in contents.names:
        yield _lacking("no tokenizer config", contents, parent, [TOKENIZER_CONFIG])
    source = next((parent for parent in parents if templates_of(parent)), None)
    if source is not None and not templates_of(contents):
        files = [name for name in templates_of(source) if name.endswith(".jinja") or name == TEMPLATE_JSON]
        if files:
            yield _lacking("no chat template", contents, source, files, fatal=source is parents[0])
        elif TOKENIZER_CONFIG in contents.names:
            problem = f"a parent has one in its {TOKENIZER_CONFIG}"
            yield Defect("no chat template", problem, TOKENIZER_CONFIG, "copy it", fatal=source is parents[0])


def _processors(contents: Contents, parents: Sequence[Contents]) -> Iterator[Defect]:
    """Image and audio processors of a parent of the same kind."""
    kind = contents.config.get("model_type")
    for parent in (parent for parent in parents if parent.config.get("model_type") == kind):
        names = _matching(parent, PROCESSOR_FILES)
        if names and not _matching(contents, PROCESSOR_FILES):
            yield _lacking("no processor", contents, parent, names)
            return


def _code(contents: Contents, parents: Sequence[Contents]) -> Iterator[Defect]:
    """Python files that the config has transformers load."""
    mapped = contents.config.get("auto_map")
    places = mapped.values() if isinstance(mapped, dict) else ()
    modules = {str(place).rpartition("--")[2].partition(".")[0] for place in places if "--" not in str(place)}
    absent = sorted(f"{module}.py" for module in modules if f"{module}.py" not in contents.names)
    if not absent:
        return
    parent = next((parent for parent in parents if set(absent) <= parent.names), None)
    if parent is not None:
        code = [name for name in parent.names if re.fullmatch(r"[\w./-]+\.py", name)]
        yield _lacking("no custom code", contents, parent, sorted(code))
    else:
        yield Defect("no custom code", f"'auto_map' names {named(absent)}", CONFIG, "copy it from a parent")
