"""What a merge asks of carrying with samples: tensors of the new base, or scales, instead of something written."""

from __future__ import annotations

import os
from dataclasses import replace

import torch
from torch import Tensor

from rotation_merge.averaging.carrying import Carrying, Samples
from rotation_merge.checkpoints.bases import open_bases
from rotation_merge.checkpoints.carried import Settings, Work, aligned, by_weights
from rotation_merge.matching.model import Alignment, Progress
from rotation_merge.matching.tuned import Chosen, Scale
from rotation_merge.scratch import Scratch


def carried_tensors(
    name: str, old: str, new: str, settings: Settings, samples: Samples, progress: Progress | None = None
) -> tuple[dict[str, Tensor], list[str], Alignment]:
    """The new base's tensors that a fine-tune changes, as `carry_with_samples` solves them, in float32, notes, and
    what brought the old base to the new one."""
    one = _one(name, old, new, settings, samples, progress)
    with Scratch() as folder:
        solution, notes = one.solved(os.path.join(folder, "out"))
    return dict(replace(solution, dtype=torch.float32).tensors()), notes, one.work.carrier.alignment


def carried_scales(
    name: str, old: str, new: str, settings: Settings, samples: Samples, progress: Progress | None = None
) -> tuple[Chosen, list[str], None]:
    """The scales at which weights alone carry a fine-tune, with which maps of the streams, and notes."""
    return *_one(name, old, new, settings, samples, progress).scaled(), None


def carried_weights(
    name: str, old: str, new: str, settings: Settings, samples: Samples, progress: Progress | None = None
) -> tuple[dict[str, Tensor], list[str], Alignment]:
    """The new base's tensors as weights alone carry a fine-tune, at a scale or at those that samples say, notes, and
    what brought the old base to the new one."""
    one = _one(name, old, new, settings, samples, progress)
    work, alignment = one.work, one.work.carrier.alignment
    if samples.scale is None:
        chosen, notes = one.scaled()
        scale: Scale = chosen.scales
        one = one.with_layers(chosen.own)
        one = replace(one, work=replace(one.work, settings=replace(settings, scale=scale)))
    else:
        scale, notes = samples.scale, []
        one = replace(one, work=by_weights(work.bases, alignment, work.report, settings))
    changed, places = one.by_weights(scale)
    return changed, [*work.report.notes, *places, *notes, *one.work.layers()], alignment


def _one(name: str, old: str, new: str, settings: Settings, samples: Samples, progress: Progress | None) -> Carrying:
    bases = open_bases(new, old, settings.device, True, settings.unlike).settled(settings.match, progress)
    alignment, report = aligned(bases, settings, progress)
    work = Work(bases, bases.carrier(alignment), report, settings)
    return Carrying(work, name, bases.tuned(name), settings.lora, samples, progress)
