"""What `rotation_merge` gives to Python: aligning, averaging and carrying models that people have at hand."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rotation_merge.architecture.model import Block, TensorInfo
from rotation_merge.carrying.carrier import Carrier
from rotation_merge.carrying.tuned import Tuned
from rotation_merge.errors import CheckpointError, RecipeError, not_written
from rotation_merge.matching.alignment import Alignment, Basis
from rotation_merge.matching.check_pair import check_pair
from rotation_merge.matching.match import Match, match_model
from rotation_merge.matching.options import MATCH_ON, NOTHING, WEIGHTS, AlignConfig
from rotation_merge.matching.run import Run
from rotation_merge.model.halves import NOTE
from rotation_merge.model.nearness import nearness
from rotation_merge.model.opened import ModelLike, OpenedModel, open_like, stored_dtype
from rotation_merge.model.source import TensorSource, read_tensor
from rotation_merge.model.sources import Average, Either, Relabelled
from rotation_merge.model.view import View, as_stored

LOG = logging.getLogger(__name__)

Batches = Sequence[Mapping[str, Tensor]]
"""Batches of inputs by the names that a model's forward takes."""


def align(
    anchor: ModelLike,
    donor: ModelLike,
    config: AlignConfig | None = None,
    *,
    match_on: str = WEIGHTS,
    samples: Batches | None = None,
    untie: bool = False,
    widths: bool = False,
    **options: Any,
) -> Alignment:
    """Find what moves a donor, its function unchanged, as near as possible to an anchor.

    Args:
        anchor, donor: folders, names on the hub, modules, or pairs of a state dict and its config; of one architecture
            and sizes; not modified. Beside an anchor that sees, too, a text-only donor will do, which is aligned to the
            anchor's language half.
        config: which groups to use; or name its fields as options.
        match_on: `weights`; or `activations` or `both`, of modules, on samples.
        samples: batches of inputs by the names that forward takes, without padding.
        untie: give a head that shares the embedding's tensor one of its own.
        widths: bring a smaller donor to the anchor's sizes first: zeros around its weights, its function unchanged.
        **options: fields of the config: attention, heads, ffn, rescale, residual, layers.

    Returns:
        The alignment, whose `apply(donor)` is the moved donor, and whose `report` says what was done.

    Raises:
        RotationMergeError: unknown options, an unsupported architecture, models that do not fit together.

    Example:
        >>> alignment = align(anchor, donor, heads="permutation")  # doctest: +SKIP
        >>> alignment.apply(donor).save_pretrained("aligned")  # doctest: +SKIP
    """
    chosen = _options(config, options)
    first, second = open_like(anchor, "anchor", untie=untie), open_like(donor, "donor", untie=untie)
    match = _matcher(match_on, samples, first, second)
    widening = ""
    if widths:
        second, widening = second.widened(first.member)
    half = second.within(first.member)
    matched = second if half is None else _with_rest(half, first)
    checked = check_pair(first.member, matched.member, chosen, untie=untie)
    _check_names(first, matched)
    source = Relabelled(matched.source, checked.rows)
    alignment = match(first.architecture, first.source, source, checked.options, None)
    basis = Basis.of(first, half or second, alignment.folded, checked.rows, bool(widening))
    run = Run()
    if widening:
        run.note(widening)
    if half is not None:
        run.note(f"The donor {NOTE.format(anchor='the anchor')}.")
    run.aligned(second.name, alignment)
    for note in (*checked.warnings, *checked.notes()):
        run.note(note)
    further = second.unread if alignment.moves_streams(first.architecture) else []
    if further:
        run.note(not_written(further))
        LOG.warning("%s", not_written(further))
    recipe = "\n".join(f"{name}: {value}" for name, value in asdict(checked.options).items())
    return replace(alignment, basis=basis, report=run.report(first.name, "none", recipe))


def average(models: Iterable[ModelLike], weights: Sequence[float] | None = None) -> View:
    """The weighted mean of models that lie in one set of coordinates.

    Args:
        models: views (`Alignment.apply`, `Alignment.apply_anchor`), or models as `align` takes them; at least one. The
            result has the first one's names, config and storage dtypes.
        weights: one for each model; divided by their sum. None: all equal.

    Returns:
        A lazy view: means are formed tensor by tensor in float32 at least, and rounded once.

    Raises:
        RecipeError: no models, other than one weight a model, or a sum of zero.
        CheckpointError: the models' tensors differ in names or shapes.
    """
    views = [model if isinstance(model, View) else as_stored(open_like(model)) for model in models]
    shares = [1.0] * len(views) if weights is None else [float(weight) for weight in weights]
    if not views or len(shares) != len(views):
        raise RecipeError(f"{len(shares)} weights for {len(views)} models", remedy="give one weight for each model")
    if abs(total := sum(shares)) < 1e-12:
        raise RecipeError("the weights' sum is zero", remedy="give weights whose sum is not zero")
    for view in views[1:]:
        if odd := sorted(set(views[0]) ^ set(view)):
            remedy = "average models of one class; where a stream is rotated, take apply_anchor(anchor), too"
            raise CheckpointError(
                f"tensor '{odd[0]}' is only in one of the models", where=view.opened.name, remedy=remedy
            )

    def compute(block: Block, info: TensorInfo, dtype: torch.dtype | None) -> Tensor | None:
        stored = read_tensor(info, views[0].opened.source)
        if stored is None:
            return None
        if not stored.is_floating_point():
            return stored
        wide = torch.promote_types(stored.dtype, torch.float32)
        sources = [{info.key: _of_shape(view.to(wide), block, info, stored.shape)} for view in views]
        mean = Average(sources, [share / total for share in shares])[info.key]
        return mean.to(stored_dtype(stored, dtype))

    return View(views[0].opened, compute, views[0].dtype, views[0].left_out)


def transfer(
    tuned: ModelLike,
    old: ModelLike,
    new: ModelLike,
    *,
    scale: float = 1.0,
    match_on: str = WEIGHTS,
    samples: Batches | None = None,
    untie: bool = False,
    **options: Any,
) -> View:
    """Carry what fine-tuning changed in an old base to a new one, by weights.

    The old base is aligned to the new one, and the change with it: W' = W_new + scale L (W_tuned - W_old) Rᵀ (Update
    your transformer to the latest release, 2025).

    Args:
        tuned: a fine-tune of `old`, as `align` takes models (also `base+adapter`); not modified.
        old, new: bases of one architecture and one shape; not modified.
        scale: what the change is multiplied by.
        match_on, samples, untie, **options: as of `align`; residual is the largest group that the models admit, if it
            is not said. Where no option is given, weights are matched and the bases share their coordinates, nothing
            is matched: the change is added as it is.

    Returns:
        The new base with the carried change, lazily (folded where the stream is rotated, and then without layers that
        predict tokens further ahead).

    Raises:
        RotationMergeError: unknown options, an unsupported architecture, tensors that do not fit.
    """
    bases = [open_like(model, name, untie=untie) for model, name in ((new, "new"), (old, "old"), (tuned, "tuned"))]
    first, second, third = bases
    for other in (second, third):
        _check_names(first, other)
    chosen = _options(None, {"residual": "largest", **options})
    check_pair(first.member, third.member, chosen, untie=untie)
    near = nearness(first.architecture, first.source, second.source)
    added = near.shared and not options and match_on == WEIGHTS
    chosen = NOTHING if added else chosen
    alignment = align(first, second, chosen, match_on=match_on, samples=samples, untie=untie)
    carrier = Carrier(first.architecture, second.source, first.source, alignment)
    change = Tuned(carrier, third.source, scale)

    def compute(block: Block, info: TensorInfo, dtype: torch.dtype | None) -> Tensor | None:
        return change.tensor(block, info, dtype)

    left_out = first.unread if alignment.folded else []
    if left_out:
        LOG.warning("%s", not_written(left_out))
    shared = f"The bases share their coordinates ({near.words}): nothing was matched, the change is added as it is."
    notes = [shared] if added else []
    notes += alignment.report.notes if alignment.report is not None else []
    notes += [not_written(left_out)] if left_out else []
    return View(first, compute, None, left_out, tuple(dict.fromkeys(notes)), alignment.report)


def _options(config: AlignConfig | None, options: Mapping[str, Any]) -> AlignConfig:
    """A config and options by name as one config."""
    if config is None:
        return AlignConfig.from_values(dict(options))
    if not isinstance(config, AlignConfig):
        what = f"the config is of type {type(config).__name__}"
        raise RecipeError(what, remedy="give an AlignConfig, or its fields as options")
    known = {field.name: getattr(config, field.name) for field in fields(AlignConfig)}
    return AlignConfig.from_values({**known, **options}) if options else config


def _matcher(how: str, samples: Batches | None, anchor: OpenedModel, donor: OpenedModel) -> Match:
    """What finds the donor's maps.

    Raises:
        RecipeError: there is no such way, or what it needs is missing.
    """
    if how not in MATCH_ON:
        raise RecipeError(f"option 'match_on' is {how!r}", remedy=f"it must be one of: {', '.join(MATCH_ON)}")
    if how == WEIGHTS:
        if samples is not None:
            raise RecipeError("weights are matched without samples", remedy="add match_on='both', or leave them out")
        return match_model
    if anchor.module is None or donor.module is None or not samples:
        what = f"match_on='{how}' runs the models on samples"
        raise RecipeError(what, remedy="give modules, and 'samples': batches of what their forward takes")
    from rotation_merge.matching.match_on import match_seen, seen_of

    batches = [dict(batch) for batch in samples]
    return partial(match_seen, seen=(seen_of(anchor.module, batches), seen_of(donor.module, batches)), how=how)


def _with_rest(half: OpenedModel, anchor: OpenedModel) -> OpenedModel:
    """A language half with the anchor's own tensors beside it, for matching."""
    own = set(half.names)
    source: TensorSource = Either(half.source, anchor.source, lambda name: name not in own)
    shapes = {**anchor.shapes, **half.shapes}
    return OpenedModel(half.name, half.config, source, tuple(shapes), shapes, half.untie)


def _check_names(first: OpenedModel, other: OpenedModel) -> None:
    """Both models have the same tensors, but for what they do not read and heads that may be tied."""
    spare = {*first.unread, *other.unread}
    if first.member.tied is not None and first.member.tied == other.member.tied:
        spare.add(first.member.tied[0])  # a second copy of the embedding
    if odd := sorted((set(first.names) ^ set(other.names)) - spare):
        what = f"tensor '{odd[0]}' is only in one of {first.name} and {other.name}"
        remedy = "give models of one class, both as folders or both as modules"
        raise CheckpointError(what, where=other.name, remedy=remedy)


def _of_shape(view: View, block: Block, info: TensorInfo, shape: torch.Size) -> Tensor:
    tensor = view.tensor(block, info)
    if tensor is None or tensor.shape != shape:
        own = "absent" if tensor is None else list(tensor.shape)
        what = f"tensor '{info.name}' is {own}, in the first model {list(shape)}"
        raise CheckpointError(what, where=view.opened.name, remedy="average models of equal shapes")
    return tensor
