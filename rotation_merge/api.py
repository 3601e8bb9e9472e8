"""The Python API: align state dicts or modules, and carry changes, without mergekit's files."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rotation_merge.architectures import resolve
from rotation_merge.architectures.registry import tied_head, unread
from rotation_merge.checkpoints.halves import NOTE, language_half
from rotation_merge.checkpoints.headers import check_codes, codes
from rotation_merge.checkpoints.widened import widening, words
from rotation_merge.errors import CheckpointError, RecipeError, not_written
from rotation_merge.matching.carry import Carrier
from rotation_merge.matching.labels import in_order
from rotation_merge.matching.member import Member
from rotation_merge.matching.model import Match, aligned_tensors, match_model
from rotation_merge.matching.options import MATCH_ON, WEIGHTS, MatchOptions
from rotation_merge.matching.pair import check_pair
from rotation_merge.matching.tuned import Tuned
from rotation_merge.matching.widen import Widened
from rotation_merge.report.record import MergeReport
from rotation_merge.report.run import Run

LOG = logging.getLogger(__name__)

State = Mapping[str, Tensor] | torch.nn.Module


def align(donor: State, anchor: State, config: Any, **options: Any) -> tuple[dict[str, Tensor], MergeReport]:
    """Move a donor, its function unchanged, as near as possible to an anchor.

    Args:
        donor: state dict or module; not modified. Beside an anchor that sees, too, a text-only module will do, which
            is aligned to the anchor's language half.
        anchor: state dict or module of the same architecture and sizes; not modified.
        config: the models' config: a transformers config, or the dictionary in config.json.
        **options: as in a recipe: attention, heads, ffn, rescale, residual, layers, untie; widths: bring a smaller
            donor (a module, whose config is known) to the anchor's sizes first; match_on: `activations` or `both`, of
            modules, on `samples`: batches of inputs by the names that forward takes, without padding.

    Returns:
        The aligned donor's state dict (names and dtypes as the donor's; a classifier's classes in the anchor's order,
        where the configs give them the same names), and the report. Where a stream moves, layers that predict tokens
        further ahead (MTP), which the model does not read, are left out; report and log name them.

    Raises:
        RotationMergeError: unknown options, an unsupported architecture, tensors that do not fit.

    Example:
        >>> aligned, report = align(donor, anchor, anchor.config, heads="permutation")  # doctest: +SKIP
    """
    untie, widths = bool(options.pop("untie", False)), bool(options.pop("widths", False))
    match = _matcher(options.pop("match_on", WEIGHTS), options.pop("samples", None), donor, anchor)
    chosen = MatchOptions.from_values(options)
    mine, theirs = _state(donor), _state(anchor)
    given = _config(config, anchor)
    first = _member("anchor", given, theirs, untie)
    second = _member("donor", _config(getattr(donor, "config", None) or given, donor), mine, untie)
    if (half := language_half(first, second)) is not None:
        mine = half.all_of(mine, theirs)
        second = _member("donor", half.config(first.config, second.config), mine, untie)
        second = replace(second, note=f"The donor {NOTE.format(anchor='the anchor')}.")
    if widths and (grown := widening(second, first, untie)) is not None:
        config, wide = grown
        source = Widened(mine, wide)
        noted = words(second, first, config)
        mine = {name: source[name] for name in mine}
        second = replace(_member("donor", config, mine, untie), note=noted)
    checked = check_pair(first, second, chosen, untie=untie)
    further = unread(second.config, list(mine))
    if odd := sorted((set(mine) ^ set(theirs)).difference(further, unread(given, list(theirs)))):
        raise CheckpointError(f"tensor '{odd[0]}' is only in one of the two models", remedy="align models of one class")
    mine = {name: in_order(tensor, checked.rows.get(name)) for name, tensor in mine.items()}
    alignment = match(first.architecture, theirs, mine, checked.options, None)
    run = Run()
    run.aligned("donor", alignment)
    for note in (*checked.warnings, *checked.notes()):
        run.note(note)
    stays = _without(further if alignment.moves_streams(first.architecture) else [], mine, run)
    aligned = {**stays, **dict(aligned_tensors(first.architecture, mine, alignment, theirs))}
    if half is not None:
        aligned = {own: aligned[name] for name, own in half.names.items() if name in aligned}
    return aligned, MergeReport.of(run, "anchor", "none", "")


def carry(
    tuned: State, old: State, new: State, config: Any, scale: float = 1.0, **options: Any
) -> tuple[dict[str, Tensor], MergeReport]:
    """Carry what fine-tuning changed in an old base to a new one: the old base is aligned to the new one, and the
    change with it, W' = W_new + scale L (W_tuned - W_old) Rᵀ (Update your transformer to the latest release, 2025).

    Args:
        tuned: state dict or module, a fine-tune of `old`; not modified.
        old, new: state dicts or modules of one architecture and one shape; not modified.
        config: the models' config: a transformers config, or the dictionary in config.json.
        scale: what the change is multiplied by.
        **options: as of `align`; residual is the largest group that the models admit, if it is not said.

    Returns:
        The new base's state dict with the carried change (its names and dtypes; folded where the stream is rotated,
        and then without layers that predict tokens further ahead), and the report on the two bases.

    Raises:
        RotationMergeError: unknown options, an unsupported architecture, tensors that do not fit.
    """
    untie = bool(options.pop("untie", False))
    match = _matcher(options.pop("match_on", WEIGHTS), options.pop("samples", None), old, new)
    chosen = MatchOptions.from_values({"residual": "largest", **options})
    states = {"new": _state(new), "old": _state(old), "tuned": _state(tuned)}
    given = _config(config, new)
    members = {name: _member(name, given, state, untie) for name, state in states.items()}
    further = {name: unread(given, list(state)) for name, state in states.items()}
    for name in ("old", "tuned"):
        if odd := sorted((set(states[name]) ^ set(states["new"])).difference(further[name], further["new"])):
            what = f"tensor '{odd[0]}' is only in one of the new base and the {name} model"
            raise CheckpointError(what, remedy="carry between models of one class; the command knows others")
    check_pair(members["new"], members["tuned"], chosen, untie=untie)
    checked = check_pair(members["new"], members["old"], chosen, untie=untie)
    alignment = match(members["new"].architecture, states["new"], states["old"], checked.options, None)
    run = Run()
    run.aligned("old", alignment)
    for note in (*checked.warnings, *checked.notes()):
        run.note(note)
    carrier = Carrier(members["new"].architecture, states["old"], states["new"], alignment)
    pieces = (found for _, found, *_ in Tuned(carrier, states["tuned"], scale).tensors())
    stays = _without(further["new"] if alignment.folded else [], states["new"], run)
    carried = {**stays, **{name: tensor for found in pieces for name, tensor in found.items()}}
    return carried, MergeReport.of(run, "new", "none", "")


def _without(names: Sequence[str], state: Mapping[str, Tensor], run: Run) -> dict[str, Tensor]:
    """A state dict without what would be wrong in it."""
    if names:
        run.note(not_written(names))
        LOG.warning("%s", not_written(names))
    return {name: tensor for name, tensor in state.items() if name not in names}


def _matcher(how: str, samples: Sequence[Mapping[str, Tensor]] | None, donor: State, anchor: State) -> Match:
    """What finds the donor's maps.

    Raises:
        RotationMergeError: there is no such way, or what it needs is missing.
    """
    if how not in MATCH_ON:
        raise RecipeError(f"option 'match_on' is {how!r}", remedy=f"it must be one of: {', '.join(MATCH_ON)}")
    if how == WEIGHTS:
        if samples is not None:
            raise RecipeError("weights are matched without samples", remedy="add match_on='both', or leave them out")
        return match_model
    if not (isinstance(donor, torch.nn.Module) and isinstance(anchor, torch.nn.Module) and samples):
        what = f"match_on='{how}' runs the models on samples"
        raise RecipeError(what, remedy="give modules, and 'samples': batches of what their forward takes")
    from rotation_merge.averaging.match_on import match_seen, seen_of

    batches = [dict(batch) for batch in samples]
    return partial(match_seen, seen=(seen_of(anchor, batches), seen_of(donor, batches)), how=how)


def _config(config: Any, model: State) -> dict[str, Any]:
    values = dict(config) if isinstance(config, Mapping) else config.to_dict()
    if not isinstance(config, Mapping) and isinstance(model, torch.nn.Module):
        values["architectures"] = [type(model).__name__]
    return values


def _member(name: str, config: dict[str, Any], state: Mapping[str, Tensor], untie: bool) -> Member:
    shapes = {key: tuple(tensor.shape) for key, tensor in state.items()}
    if not config.get("quantization_config"):
        check_codes(codes({key: (str(tensor.dtype), shapes[key]) for key, tensor in state.items()}), state, name)
    return Member(name, config, resolve(config, list(state), name, untie=untie), shapes, tied_head(config, state, name))


def _state(model: State) -> dict[str, Tensor]:
    return dict(model.state_dict() if isinstance(model, torch.nn.Module) else model)
