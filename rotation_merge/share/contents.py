"""Files that a published folder may hold: those of a model, and those of its merge."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

from rotation_merge.errors import RotationMergeError, named

WEIGHTS = ("model*.safetensors", "model*.safetensors.index.json", "adapter_model.safetensors")

MODEL = (
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "spiece.model", "sentencepiece.model", "sentencepiece.bpe.model", "spm.model"),
    *("vocab.txt", "vocab.json", "merges.txt", "bpe.codes", "normalizer.json", "*.tiktoken", "tekken.json"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
    *("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"),
    *("[0-9]*_*/config.json", "[0-9]*_*/model.safetensors"),
)
"""Beside the weights: config, tokenizer, preprocessor, the modules of sentence-transformers."""

STATISTICS = ("statistics*.safetensors", "statistics/*.safetensors")

MERGE = (
    *("README.md", "LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "NOTICE.txt"),
    *("recipe.yml", "mergekit_config.yml", "rotation_merge.json", "barrier.json", "evaluation.json"),
    "distances.png",
    *("alignment*.safetensors", "alignment/*.safetensors"),
    *STATISTICS,
)
"""Files of a merge: card and its picture, recipe, report, alignment files, statistics."""

DATA = (".txt", ".json", ".jsonl", ".csv", ".tsv", ".npz", ".safetensors")
"""Endings of samples; any other text is published as `.txt`."""

PART = re.compile(r"\w[\w.@+ -]*")
"""A name in a path: not hidden, no option of a command, nothing that a shell or a terminal reads otherwise."""


def belongs(place: str) -> bool:
    """Whether a file of this place is one of a model (also of one under `heads/`), or of the merge that made it."""
    if place.startswith("data/"):
        return place.count("/") == 1 and place.endswith(DATA)
    return _matches(re.sub(r"^heads/[^/]+/", "", place), (*WEIGHTS, *MODEL, *MERGE))


def is_weights(place: str) -> bool:
    """Whether a file holds weights of the model or their index."""
    return not place.startswith(("alignment/", "statistics/", "data/")) and _matches(place.rpartition("/")[2], WEIGHTS)


def is_statistics(place: str) -> bool:
    """Whether a file is one of statistics, by its place."""
    return _matches(place, STATISTICS)


def included(place: str, patterns: Iterable[str]) -> bool:
    """Whether a user's patterns name a file; `*` stands for folders, too."""
    return any(fnmatchcase(place, pattern) for pattern in patterns)


def _matches(place: str, patterns: Iterable[str]) -> bool:
    return any(pattern.count("/") == place.count("/") and fnmatchcase(place, pattern) for pattern in patterns)


def published_name(kind: str, number: int, name: str) -> str:
    """The place of a file from elsewhere that the recipe reads, such as `alignment/0-maps.safetensors`."""
    stem = re.sub(r"[^\w.@+-]", "-", name)
    endings, usual = (DATA, ".txt") if kind == "data" else ((".safetensors",), ".safetensors")
    return f"{kind}/{number}-{stem}{'' if stem.endswith(endings) else usual}"


def chosen_files(folder: str, include: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Files of a folder to publish, by their places, and files that stay; hidden files are skipped.

    Args:
        include: patterns of files that are published although a merge has no such files.

    Raises:
        RotationMergeError: a link leads out of the folder, a pattern names no file, there are no weights.
    """
    files, root = dict(_walk(folder)), os.path.realpath(folder) + os.sep
    if outside := [place for place, path in files.items() if not f"{os.path.realpath(path)}{os.sep}".startswith(root)]:
        problem = f"links that lead out of the folder are not published: {named(outside)}"
        raise RotationMergeError(problem, where=folder, remedy="put the file itself there, or remove the link")
    usable = [place for place in files if all(map(PART.fullmatch, place.split("/"))) and os.path.isfile(files[place])]
    for pattern in include:
        if not any(included(place, [pattern]) for place in usable):
            problem = f"--include {pattern} names no file that can be published"
            raise RotationMergeError(problem, where=folder, remedy="write the path within the folder, as 'plots/*'")
    published = {place: files[place] for place in usable if belongs(place) or included(place, include)}
    if not any(map(is_weights, published)) and not include:
        remedy = "write them again as safetensors (a merge without --no-safe-serialization)"
        raise RotationMergeError("has no weights in safetensors", where=folder, remedy=remedy)
    return published, [place for place in files if place not in published]


def _walk(folder: str) -> Iterator[tuple[str, str]]:
    """Files of a folder, and links to folders, by their places in it; nothing that is hidden."""
    for place, folders, names in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(place, name))]
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in links)
        for name in sorted([*names, *links]):
            if not name.startswith("."):
                path = os.path.join(place, name)
                yield os.path.relpath(path, folder), path
