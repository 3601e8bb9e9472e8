"""What a merge asks of carrying with samples: tensors of the new base, or scales, instead of something written."""

from __future__ import annotations

import os
from dataclasses import replace

import torch
from torch import Tensor

from rotation_merge.carrying.bases import open_bases
from rotation_merge.carrying.by_samples import Carrying, Samples
from rotation_merge.carrying.by_weights import Settings, Work, aligned
from rotation_merge.carrying.tuned import Scale
from rotation_merge.files.scratch import Scratch
from rotation_merge.matching.alignment import Alignment
from rotation_merge.model.source import Progress


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
) -> tuple[dict[str, float], list[str], None]:
    """The scales at which weights alone carry a fine-tune, and notes."""
    return *_one(name, old, new, settings, samples, progress).scaled(), None


def carried_weights(
    name: str, old: str, new: str, settings: Settings, samples: Samples, progress: Progress | None = None
) -> tuple[dict[str, Tensor], list[str], Alignment]:
    """The new base's tensors as weights alone carry a fine-tune, at a scale or at those that samples say, notes, and
    what brought the old base to the new one."""
    one = _one(name, old, new, settings, samples, progress)
    scale: Scale
    if samples.scale is None:
        scale, notes = one.scaled()
    else:
        scale, notes = samples.scale, []
    changed, places = one.by_weights(scale)
    return changed, [*one.work.report.notes, *places, *notes], one.work.carrier.alignment


def _one(name: str, old: str, new: str, settings: Settings, samples: Samples, progress: Progress | None) -> Carrying:
    bases = open_bases(new, old, settings.device, True, settings.unlike).settled(settings.match, progress)
    alignment, report = aligned(bases, settings, progress)
    work = Work(bases, bases.carrier(alignment), report, settings)
    return Carrying(work, name, bases.tuned(name), settings.lora, samples, progress)
