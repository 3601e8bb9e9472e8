"""The Python API: align state dicts or modules without mergekit's files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rotation_merge.architectures import resolve
from rotation_merge.errors import CheckpointError
from rotation_merge.matching.model import aligned_tensors, match_model
from rotation_merge.matching.options import MatchOptions
from rotation_merge.report.record import MergeReport
from rotation_merge.report.run import Run

State = Mapping[str, Tensor] | torch.nn.Module


def align(donor: State, anchor: State, config: Any, **options: Any) -> tuple[dict[str, Tensor], MergeReport]:
    """Move a donor, its function unchanged, as near as possible to an anchor.

    Args:
        donor: state dict or module; not modified.
        anchor: state dict or module of the same architecture and sizes; not modified.
        config: the models' config: a transformers config, or the dictionary in config.json.
        **options: as in a recipe: attention, heads, ffn, rescale, residual, layers.

    Returns:
        The aligned donor's state dict (names and dtypes as the donor's), and the report.

    Raises:
        RotationMergeError: unknown options, an unsupported architecture, tensors that do not fit.

    Example:
        >>> aligned, report = align(donor, anchor, anchor.config, heads="permutation")  # doctest: +SKIP
    """
    chosen = MatchOptions.from_values(options)
    values = dict(config) if isinstance(config, Mapping) else config.to_dict()
    if not isinstance(config, Mapping) and isinstance(anchor, torch.nn.Module):
        values["architectures"] = [type(anchor).__name__]
    mine, theirs = _state(donor), _state(anchor)
    if set(mine) != set(theirs):
        odd = sorted(set(mine) ^ set(theirs))[0]
        raise CheckpointError(f"tensor '{odd}' is only in one of the two models", remedy="align models of one class")
    architecture = resolve(values, list(theirs), "anchor")
    alignment = match_model(architecture, theirs, mine, chosen)
    run = Run()
    run.aligned("donor", alignment)
    aligned = {**mine, **dict(aligned_tensors(architecture, mine, alignment))}
    return aligned, MergeReport.of(run, "anchor", "none", "")


def _state(model: State) -> dict[str, Tensor]:
    return dict(model.state_dict() if isinstance(model, torch.nn.Module) else model)
