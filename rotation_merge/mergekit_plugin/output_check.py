"""What a merge has written, looked at before anybody loads it: headers and small files, no weights."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable

import click
from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from mergekit.options import MergeOptions

from rotation_merge.errors import printable, short
from rotation_merge.mergekit_plugin.recipe.settings import tokenizer_source
from rotation_merge.model.gguf.place import in_cache, is_folder
from rotation_merge.report.integrity import Defect, check_folder
from rotation_merge.report.integrity.mending import copy_companions

log = logging.getLogger(__name__)

OF_TOKENIZER = ("no tokenizer", "no tokenizer config", "no chat template")
"""Defects of a folder that is to hold no tokenizer."""


def complete(config: MergeConfiguration, folder: str, options: MergeOptions) -> tuple[list[str], list[Defect]]:
    """Copy the small files of the base that mergekit leaves behind, and look at what has been written.

    Returns:
        What was copied, by file; and what is wrong with the folder still. A check that fails itself is such a line, as
        nobody's merge is to be lost by it.
    """
    parents = parent_folders(config, options)
    without = (
        () if options.copy_tokenizer or tokenizer_source(config.model_dump(exclude_none=True))[1] else OF_TOKENIZER
    )
    try:
        copied = copy_companions(folder, parents, without)
        return copied, [defect for defect in check_folder(folder, parents) if defect.kind not in without]
    except Exception as error:  # of readers and of transformers, of every kind
        what = f"could not be looked at ({short(error)})"
        return [], [Defect("not checked", what, os.path.basename(folder), "run 'rotation-merge doctor'", fatal=False)]


def parent_folders(config: MergeConfiguration, options: MergeOptions) -> list[str]:
    """Where the files of the merged models lie, the base's first."""
    base = [config.base_model] if config.base_model is not None else []
    models: Iterable[ModelReference] = dict.fromkeys([*base, *config.referenced_models()])
    places = (_folder(model, options.transformers_cache) for model in models)
    return [place for place in places if place is not None]


def _folder(model: ModelReference, cache: str | None) -> str | None:
    path, revision = model.model.path, model.model.revision
    return path if is_folder(path) else in_cache(path, revision, cache)


def say_defects(config: MergeConfiguration, folder: str, options: MergeOptions) -> None:
    """Look at the output of another method of mergekit's; nothing is changed."""
    defects = check_folder(folder, parent_folders(config, options))
    lines = [f"rotation_merge: {folder}: {defect.line}" for defect in defects]
    say(lines or [f"rotation_merge: {folder} is whole"])


def say(lines: Iterable[str]) -> None:
    """In a command on stderr, from Python as log."""
    for line in lines:
        if click.get_current_context(silent=True) is not None:
            click.echo(printable(line), err=True)
        else:
            log.info(line)
