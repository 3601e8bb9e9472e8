"""Files that a published folder may hold: those of a model, and those of its merge."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from rotation_merge.errors import RotationMergeError, named
from rotation_merge.model.contents import Contents
from rotation_merge.report.integrity.companions import PROCESSOR_FILES, TOKENIZER_FILES

WEIGHTS = (
    *("model*.safetensors", "model*.safetensors.index.json", "adapter_model.safetensors"),
    "[0-9]*_*/model.safetensors",
)
MODEL = (
    *("config.json", "generation_config.json", "adapter_config.json", *TOKENIZER_FILES, *PROCESSOR_FILES),
    *("sentencepiece.model", "spm.model", "bpe.codes", "normalizer.json", "tekken.json"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
    *("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json", "[0-9]*_*/config.json"),
)
"""Beside the weights: config, tokenizer, preprocessor, the modules of sentence-transformers."""

STATISTICS = ("statistics*.safetensors", "statistics/*.safetensors")
DATA = (".txt", ".json", ".jsonl", ".csv", ".tsv", ".npz", ".safetensors")
"""Endings of samples; any other text is published as `.txt`."""

MERGE = (
    *("README.md", "LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "NOTICE.txt", "distances.png"),
    *("recipe.yml", "mergekit_config.yml", "rotation_merge.json", "barrier.json", "evaluation.json"),
    *("alignment*.safetensors", "alignment/*.safetensors", *STATISTICS, *(f"data/*{ending}" for ending in DATA)),
)
"""Files of a merge: card and its picture, recipe, report, alignment files, statistics, samples."""

NAME = re.compile(r"\w[\w.@+ -]*")
"""A name in a path: not hidden, no option of a command, nothing that a shell or a terminal reads otherwise."""


def belongs(place: str) -> bool:
    """Whether a file of this place is one of a model (also of one under `heads/`), or of the merge that made it."""
    return _matches(place, (*WEIGHTS, *MODEL, *MERGE))


def is_weights(place: str) -> bool:
    """Whether a file holds weights of the model or their index."""
    return _matches(place, WEIGHTS)


def _matches(place: str, patterns: Iterable[str]) -> bool:
    place = re.sub(r"^heads/[^/]+/", "", place)
    return any(pattern.count("/") == place.count("/") and fnmatchcase(place, pattern) for pattern in patterns)


def published_name(kind: str, number: int, path: str) -> str:
    """The place of a file from elsewhere that the recipe reads, such as `alignment/0-maps.safetensors`."""
    stem = re.sub(r"[^\w.@+-]", "-", Path(path).name)
    endings = DATA if kind == "data" else (".safetensors",)
    return f"{kind}/{number}-{stem}{'' if stem.endswith(endings) else endings[0]}"


def chosen_files(folder: str, include: Sequence[str], statistics: bool) -> tuple[dict[str, str], list[str]]:
    """Files of a folder to publish, by their places, and files that stay; hidden files are skipped.

    Args:
        include: patterns of files that are published although a merge has no such files; `*` stands for folders, too.
        statistics: publish those that lie in the folder.

    Raises:
        RotationMergeError: a link leads out of the folder, a pattern names no file, there are no weights.
    """
    paths = [path for path in sorted(Path(folder).rglob("*")) if path.is_symlink() or not path.is_dir()]
    places, root = {path.relative_to(folder).as_posix(): path for path in paths}, Path(folder).resolve()
    files = {place: path for place, path in places.items() if "/." not in f"/{place}"}
    if outside := [place for place, path in files.items() if not path.resolve().is_relative_to(root)]:
        problem = f"links that lead out of the folder are not published: {named(outside)}"
        raise RotationMergeError(problem, where=folder, remedy="put the file itself there, or remove the link")
    usable = [place for place, path in files.items() if path.is_file() and all(map(NAME.fullmatch, place.split("/")))]
    for pattern in include:
        if not any(fnmatchcase(place, pattern) for place in usable):
            problem = f"--include {pattern} names no file that can be published"
            raise RotationMergeError(problem, where=folder, remedy="write the path within the folder, as 'plots/*'")
    weights = {name for name in Contents(folder).weight_files if name.endswith(".safetensors")}  # whatever their names
    chosen = [
        place
        for place in usable
        if place in weights or (belongs(place) and (statistics or not _matches(place, STATISTICS)))
    ]
    chosen += [place for place in usable if any(fnmatchcase(place, pattern) for pattern in include)]
    if not include and not any(map(is_weights, chosen)):
        remedy = "write them again as safetensors (a merge without --no-safe-serialization)"
        raise RotationMergeError("has no weights in safetensors", where=folder, remedy=remedy)
    return {place: str(files[place]) for place in chosen}, [place for place in files if place not in chosen]
