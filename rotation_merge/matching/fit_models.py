"""`rotation_merge.fit`: learns alignments of models in any form."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from rotation_merge.errors import RecipeError
from rotation_merge.matching.engine import renamed, same_names
from rotation_merge.matching.fit import WIDEST, FitResult, Watch
from rotation_merge.matching.fit import fit as learn
from rotation_merge.matching.fit_records import FitConfig
from rotation_merge.matching.match_on import activation_matcher
from rotation_merge.matching.open_pair import open_pair
from rotation_merge.matching.options import AlignConfig
from rotation_merge.model.open import ModelLike, open_model
from rotation_merge.model.view import View
from rotation_merge.run.data import Samples, data_in_memory, listed, read_samples
from rotation_merge.run.functions import Batch, module_of
from rotation_merge.run.sample_kinds import SAMPLES, SOURCES


def fit(
    anchor: ModelLike,
    donors: ModelLike | Sequence[ModelLike],
    batches: Samples,
    match: AlignConfig | None = None,
    options: FitConfig | None = None,
    watch: Watch | None = None,
) -> FitResult:
    """Learn the transforms that lower the loss of models between an anchor and its donors.

    Args:
        anchor: as `rotation_merge.align` takes models. A module is put into evaluation mode, its weights are not
            modified; what is between the models is computed on its device.
        donors: one or more of the same class and sizes, modules on any devices. More than one are learned jointly.
        batches: inputs by the names the model's forward takes, with `labels` where there are any; or the name of a
            source (a file, `self`, `synthetic`, `demo:NAME`).
        match: groups to use and to start from; by default every local group and the largest residual one.
        options: how to learn.
        watch: told about every step.

    Returns:
        Alignments that are never worse on the held-out batches than where the fit started.

    Raises:
        RotationMergeError: models that do not fit together, groups that are not admitted, data without use.
    """
    match, options = AlignConfig.or_default(match or WIDEST), FitConfig.or_default(options)
    given = [anchor, *_as_list(donors)]
    if len(given) < 2:
        raise RecipeError("no donors are given", remedy="give one model or more to align to the anchor")
    shares = options.coefficients
    if shares is not None and len(shares) != len(given):
        problem = f"{len(shares)} 'coefficients' for {len(given)} models"
        raise RecipeError(problem, remedy="give one share for each model, the anchor first")
    opened = [open_model(model, f"donor {number}" if number else "anchor") for number, model in enumerate(given)]
    modules = [
        model if isinstance(model, nn.Module) else module_of(each) for model, each in zip(given, opened, strict=True)
    ]
    for module, model in zip(modules[1:], opened[1:], strict=True):
        same_names(modules[0], module, (opened[0].name, model.name))
    result = learn(
        *(modules[0], modules[1:], _samples(batches, opened[0], modules), match, options, watch),
        activation_matcher("samples"),
    )
    if all(module is model for module, model in zip(modules, given, strict=True)):
        return result
    return _of_checkpoints(result, opened)


def _as_list(donors: Any) -> list[ModelLike]:
    """The donors; a pair of a state dict and its config is one."""
    is_state = isinstance(donors, tuple) and len(donors) == 2 and isinstance(donors[0], Mapping)
    if isinstance(donors, list | tuple) and not (is_state and not isinstance(donors[0], View)):
        return list(donors)
    return [donors]


def _samples(batches: Samples, anchor: View, modules: Sequence[nn.Module]) -> list[Batch]:
    """Batches that all models can run on.

    Raises:
        DataError: they cannot.
    """
    if isinstance(batches, str | os.PathLike):
        limit = SAMPLES if str(batches) in SOURCES else None
        return read_samples(anchor, batches, limit, module=modules[0]).batches
    batches = listed(batches)
    for module in modules:
        data_in_memory(batches, module)
    return [dict(batch) for batch in batches]


def _of_checkpoints(result: FitResult, opened: Sequence[View]) -> FitResult:
    """A fit's alignments for the models as they are stored, instead of for the modules that were loaded."""
    alignments, architecture = [], result.architecture
    for donor, alignment in zip(opened[1:], result.alignments, strict=True):
        untie = alignment.basis is not None and alignment.basis.untie
        first, second = (open_model(model, untie=untie) for model in (opened[0], donor))
        pair = open_pair(first, second, result.match, untie)
        transforms = renamed(alignment.transforms, result.architecture, pair.architecture)
        basis = pair.basis(alignment.folded)
        alignments.append(replace(alignment, transforms=transforms, basis=basis))
        architecture = pair.architecture
    return replace(result, architecture=architecture, alignments=alignments)
