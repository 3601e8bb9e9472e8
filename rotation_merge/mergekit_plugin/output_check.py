"""Check of a merge's output folder: headers and small files, no weights."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable

import click
from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from mergekit.options import MergeOptions

from rotation_merge.errors import named, printable, short
from rotation_merge.mergekit_plugin.rules import tokenizer_source
from rotation_merge.model.folder import folder_of
from rotation_merge.report.integrity import Contents, Defect, check_folder
from rotation_merge.report.integrity.mending import copy_companions
from rotation_merge.report.integrity.tokens import Vocabulary

log = logging.getLogger(__name__)

OF_TOKENIZER = ("no tokenizer", "no tokenizer config", "no chat template")
"""Defects of a folder that is to hold no tokenizer."""


def complete(config: MergeConfiguration, folder: str, options: MergeOptions) -> tuple[list[str], list[Defect]]:
    """Copy the base's small files that mergekit does not copy, and check the written folder.

    Returns:
        Notes for the report, and the remaining defects of the folder. An error of the check itself becomes such a line,
        so that no merge is lost.
    """
    parents, copied = parent_folders(config, options), list[str]()
    with_tokenizer = options.copy_tokenizer or tokenizer_source(config)
    without = () if with_tokenizer else OF_TOKENIZER
    try:
        copied = copy_companions(folder, parents, without)
        defects = [defect for defect in check_folder(folder, parents) if defect.kind not in without]
    except Exception as error:  # of readers and of transformers, of every kind
        problem, remedy = f"could not be checked ({short(error)})", "run 'rotation-merge doctor'"
        defects = [Defect("not checked", problem, os.path.basename(folder), remedy, fatal=False)]
    notes = vocabulary_notes(config, folder, options)
    notes += [f"Copied from a parent: {', '.join(copied)}."] if copied else []
    return [*notes, *(f"Check of the output: {defect.line}." for defect in defects)], defects


def vocabulary_notes(config: MergeConfiguration, folder: str, options: MergeOptions) -> list[str]:
    """A note on which model's rows the tokens have, if a recipe combines vocabularies.

    Empty if it does not, or if a tokenizer cannot be read without its library.

    mergekit's `PermutedEmbeddings` decides: a token of one model has that model's row; for a token of several, those
    that lack it count with the base's row, or with the mean of the rows where the base lacks it, too.
    """
    if config.tokenizer is None and config.tokenizer_source is None:
        return []
    places = {str(model): folder_of(model.model, options.transformers_cache) for model in _models(config)}
    known = {name: Vocabulary.of(Contents(place)) for name, place in places.items() if place is not None}
    result = Vocabulary.of(Contents(folder))
    if len(known) < 2 or not all(vocabulary.whole for vocabulary in (result, *known.values())):
        return []
    holders = {token: [name for name in known if token in known[name].ids] for token in result.ids}
    shared = sum(len(names) == len(known) for names in holders.values())
    partial = sum(1 < len(names) < len(known) for names in holders.values())
    parts = [f"Vocabulary of {len(result.ids)} tokens: the rows of {shared} tokens that all models have are averaged"]
    for name in known:
        if tokens := [f"'{token}'" for token, names in holders.items() if names == [name]]:
            parts.append(f"{len(tokens)} tokens that only `{name}` has keep its rows ({named(tokens)})")
    if partial:
        parts.append(f"for {partial} tokens that some models lack, those models contribute the base's row, or the mean")
    return [f"{'; '.join(parts)}."]


def _models(config: MergeConfiguration) -> list[ModelReference]:
    """The merged models, the base first."""
    base = [config.base_model] if config.base_model is not None else []
    return list(dict.fromkeys([*base, *sorted(config.referenced_models(), key=str)]))


def parent_folders(config: MergeConfiguration, options: MergeOptions) -> list[str]:
    """Folders of the merged models, the base's first."""
    places = (folder_of(model.model, options.transformers_cache) for model in _models(config))
    return [place for place in places if place is not None]


def say_defects(config: MergeConfiguration, folder: str, options: MergeOptions) -> None:
    """Look at the output of another method of mergekit's; nothing is changed."""
    defects = check_folder(folder, parent_folders(config, options))
    lines = [f"rotation_merge: {folder}: {defect.line}" for defect in defects]
    say(lines or [f"rotation_merge: {folder} is complete"])


def say(lines: Iterable[str]) -> None:
    """Print lines on stderr in a command, log them from Python."""
    for line in lines:
        if click.get_current_context(silent=True) is not None:
            click.echo(printable(line), err=True)
        else:
            log.info(line)
