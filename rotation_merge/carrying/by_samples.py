"""Work carried to a new base with samples: refitted, its scale chosen and its effect measured on samples held out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rotation_merge.averaging.polish import PolishOptions
from rotation_merge.carrying.bases import open_bases
from rotation_merge.carrying.by_weights import (
    Done,
    Settings,
    Work,
    aligned,
    card,
    check_head,
    left_as_they_are,
    verdict,
)
from rotation_merge.carrying.carry_change import ChangeOptions, refit_change
from rotation_merge.carrying.carry_distil import Distilled, Lessons, adapter_in_training, distil
from rotation_merge.carrying.carry_losses import SCALES, Both, Losses, both
from rotation_merge.carrying.carry_samples import AT_ONCE, HELD_OUT, Samples, read_parts
from rotation_merge.carrying.carry_scale import Scaled, search
from rotation_merge.carrying.carry_scale import words as scale_words
from rotation_merge.carrying.carry_sites import site_maps
from rotation_merge.carrying.carry_solution import Solution
from rotation_merge.carrying.lora_of_tuned import left_out, lora_of_tuned
from rotation_merge.carrying.tuned import Scale, Tuned
from rotation_merge.errors import DataError
from rotation_merge.files.unfinished import Unfinished
from rotation_merge.matching.match_on import seen_of
from rotation_merge.model.adapters import Adapter, is_adapter
from rotation_merge.model.factors import dense
from rotation_merge.model.source import Progress, TensorSource, read_tensor, unstack
from rotation_merge.model.sources import Renamed, Replaced
from rotation_merge.model.writing import write_checkpoint
from rotation_merge.run.data import Data, read_batches, unpadded
from rotation_merge.run.evaluate import evaluate
from rotation_merge.run.functions import Batch, architecture_of, load, local_path
from rotation_merge.run.runner import Runner
from rotation_merge.run.written import SELF

REFITTED = "The new base's maps were solved, one layer after the other, to make the change on samples."
ALONE = "leave --carry and --scale auto out: weights alone are carried by the tokens that both have"
HOW = {
    "activations": "What the weights' alignment moved was moved on at every map's inputs, by maps from activations.",
    "refit": REFITTED,
    "distil": f"{REFITTED} From there on it was **trained** for a few steps.",
}
"""What was done, for a card."""


def carry_with_samples(
    works: Mapping[str, str],
    old: str,
    new: str,
    settings: Settings,
    samples: Samples,
    progress: Progress | None = None,
) -> list[Done]:
    """Carry adapters and fine-tunes of one base to another by solving for their change, or by scaling it, on samples.

    Args:
        works: directories of adapters and of whole models, by the directory that each is to be written to.

    Raises:
        RotationMergeError: a model, an adapter or the samples cannot be read, or they do not fit together.
    """
    bases = open_bases(new, old, settings.device, True, settings.unlike)
    if (unmoved := left_as_they_are(works, bases, settings)) is not None:
        return unmoved
    bases = bases.settled(settings.match, progress)
    if bases.rows is not None:
        raise DataError(
            f"its vocabulary is not that of {new}: samples mean other things to the two", where=old, remedy=ALONE
        )
    names = {out: f"{old}+{path}" if is_adapter(path) else path for out, path in works.items()}
    sources = {out: bases.tuned(name) for out, name in names.items()}
    alignment, report = aligned(bases, settings, progress)
    used = [{"of": f"carrying {work}", "source": samples.data, "samples": samples.count} for work in works.values()]
    report = replace(report, data=[*report.data, *used])
    work = Work(bases, bases.carrier(alignment, settings.storage.dtype), report, settings)
    done = []
    for out, source in sources.items():
        rank = settings.lora or (Adapter(works[out]).rank if is_adapter(works[out]) else 0)
        one = Carrying(work, names[out], source, rank, samples, progress)
        if samples.way == "weights":
            done.append(_moved(one, works[out], out))
            continue
        solution, notes = one.solved(out)
        how = f"{one.how} {notes[0]}"
        if rank:
            written, _ = lora_of_tuned(solution, rank, bases.new)
            notes += left_out(bases.new)
            done.append(work.write(works[out], out, written, notes, how))
            continue
        full = replace(work.report_on(works[out]), notes=[*report.notes, *notes])
        text = card(bases, works[out], full, out, "finetune", how)
        write_checkpoint(bases.new, solution.tensors(), full, text, out, settings.storage, progress)
        done.append(Done(works[out], out, [verdict(bases, full), *full.notes]))
    return done


def _moved(one: Carrying, path: str, out: str) -> Done:
    """Carried by weights, each block at the scale that samples say."""
    work, settings = one.work, one.work.settings
    if not (is_adapter(path) or settings.lora):
        check_head(work.bases, work.carrier.alignment, settings)
    scales, notes = one.scaled()
    report = replace(work.report, notes=[*work.report.notes, *notes])
    work = replace(work, report=report, settings=replace(settings, scale=scales))
    if not one.rank:
        return work.write_tuned(path, out, one.source, one.progress)
    if is_adapter(path) and work.carrier.frame is None:
        return work.write(path, out, *work.adapter(Adapter(path)))
    return work.write(path, out, *work.as_lora(one.source, one.rank))


@dataclass
class Carrying:
    """One thing that is carried with samples.

    Attributes:
        name: of the fine-tune, as it is loaded: a path, or `base+adapter`.
        source: its tensors. rank: of the adapter that is to be written; 0: a model is.
    """

    work: Work
    name: str
    source: TensorSource
    rank: int
    samples: Samples
    progress: Progress | None

    @property
    def how(self) -> str:
        return HOW[self.samples.way]

    def scaled(self) -> tuple[dict[str, float], list[str]]:
        """The scale of each block at which weights alone carry it, and what the user should know."""
        _, held_out, own = read_parts(self.name, self._new, self.samples)
        moved = Scaled(self.work.carrier, self.source, self._config, self.work.settings.device)

        def losses_at(scales: Mapping[str, float]) -> Both:
            return both(moved.model(scales), held_out, own)

        scales, zero, best = search(moved.blocks, losses_at, self.progress or (lambda *_: None))
        losses = Losses(*self._home(held_out), *zero, {0.0: zero, 1.0: best}, own is not held_out)
        return scales, [*losses.words(float(any(scales.values())), "at the scales below"), scale_words(scales)]

    def _home(self, held_out: Data) -> tuple[float, float]:
        """Losses of the old pair."""
        old, tuned = (evaluate(load(n), held_out)[0] for n in (str(self.work.bases.old.reference), self.name))
        return old, tuned

    def solved(self, out: str) -> tuple[Solution, list[str]]:
        """What is carried, at its scale, and what the user should know."""
        data, held_out, own = read_parts(self.name, self._new, self.samples)
        on = f"{data.examples} samples ({self.samples.data})"
        if self.samples.way == "activations":
            changed, count = self._at_sites(data)
            notes = [f"What {count} maps read was moved by maps of its own, from activations on {on}."]
        else:
            changed = self._refitted(data)
            notes = [f"Refitted on {on}."]
        if self.samples.way == "distil":
            with Unfinished(out) as place:
                changed, distilled = self._distilled(place, changed, data, held_out, own)
            notes += distilled.words(self.samples.steps)
        losses = self._losses(changed, held_out, own)
        scale = losses.best if self.samples.scale is None else self.samples.scale
        return Solution(self.work.carrier, changed, scale), [
            *notes,
            self._in_weights(changed, scale),
            *losses.words(scale),
        ]

    def _in_weights(self, changed: Mapping[str, Tensor], scale: float) -> str:
        """What became of the change in weights: how large it is, and how much of it alignment alone would carry."""
        moved, new = self._changes()[0], self.work.carrier.new
        whole = sum(float(one.double().square().sum()) for one in moved.values())
        made = {name: scale * (tensor.double() - new[name].double()) for name, tensor in changed.items()}
        size = sum(float(one.square().sum()) for one in made.values())
        along = sum(float((one * moved[name].double()).sum()) for name, one in made.items() if name in moved)
        size, along = size / (whole or 1.0), max(along, 0.0) / (whole or 1.0)
        return (
            f"In weights, what is carried has {size:.2g} of the squared norm of what fine-tuning changed, and holds "
            f"{along:.0%} of that change as alignment moves it."
        )

    @property
    def _new(self) -> str:
        return str(self.work.bases.new.reference)

    @property
    def _config(self) -> Any:
        return self.work.bases.new.transformers_config

    def _refitted(self, data: Data) -> dict[str, Tensor]:
        settings = self.work.settings
        options = ChangeOptions(rank=self.rank, untie=self._untie, device=settings.device)
        batches = unpadded(data.batches, self.samples.data)
        names = (str(self.work.bases.old.reference), self.name) if self.work.carrier.frame is not None else ()
        pair = [_on(name, settings.device) for name in names]
        return refit_change(self.work.carrier, self._config, self.source, batches, options, pair=pair)[0]

    def _at_sites(self, data: Data) -> tuple[dict[str, Tensor], int]:
        """The new base's tensors with the change moved at every map's inputs by itself, and how many such maps."""
        batches, bases = unpadded(data.batches, self.samples.data), (self._new, str(self.work.bases.old.reference))
        new, old = (seen_of(_on(name, self.work.settings.device), batches) for name in bases)
        carrier = replace(self.work.carrier, sites=site_maps(self.work.carrier, new, old))
        moved = replace(self, work=replace(self.work, carrier=carrier))
        return moved.by_weights()[0], len(carrier.sites)

    def _added(self, change: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self.work.carrier.new[name].to(one.dtype) + one for name, one in change.items()}

    def _changes(self, scale: Scale = 1.0) -> tuple[dict[str, Tensor], list[str]]:
        """What weights carry, as changes of the new base's tensors, and what of it has a place there."""
        tuned, change = Tuned(self.work.carrier, self.source, scale), dict[str, Tensor]()
        for block in self.work.carrier.architecture.blocks:
            for key, found in tuned.factors(block, None)[0].items():
                if (info := block.tensor(key)) is not None and info.name != self._tied:
                    change |= unstack(info, dense(found, info))
        return change, tuned.share()

    def by_weights(self, scale: Scale = 1.0) -> tuple[dict[str, Tensor], list[str]]:
        """The new base's tensors as weights carry them, and what of the change has a place there."""
        change, notes = self._changes(scale)
        return self._added(change), notes

    @property
    def _untie(self) -> bool:
        return self.work.settings.storage.untie

    @property
    def _tied(self) -> str | None:
        """A head that stays the embedding's tensor."""
        return None if self._untie else self.work.bases.new.tied_head

    def _model(self, changed: Mapping[str, Tensor]) -> Any:
        """The new base with some tensors changed, by the names of the carrier's architecture."""
        carrier, settings = self.work.carrier, self.work.settings
        source = Replaced(carrier.new, changed)
        device = settings.device
        model = Runner(self._config, source, carrier.architecture, [], untie=self._untie, device=device).fill_all()
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()  # what is trained is not the source
        return model

    def _student(self, changed: Mapping[str, Tensor]) -> Any:
        """What is trained: a model, or the factors of an adapter beside it."""
        if not self.rank:
            return self._model(changed).requires_grad_(True)
        solution = Solution(self.work.carrier, changed, 1.0)
        written, _ = lora_of_tuned(solution, self.rank, self.work.bases.new)
        return adapter_in_training(self._model({}), written)

    def _distilled(
        self, place: Unfinished, changed: dict[str, Tensor], data: Data, held_out: Data, own: Data
    ) -> tuple[dict[str, Tensor], Distilled]:
        settings, samples = self.work.settings, self.samples
        matcher = getattr(settings.matcher, "__name__", settings.matcher)  # whose repr would hold an address
        models = f"{self.name} {self.work.bases.old.reference} {self._new}"
        place.of(f"{models} {samples} {settings} {matcher} {self.rank}")
        parts = [unpadded(part.batches, samples.data) for part in (data, held_out)]
        kept = own is not held_out and samples.scale is None
        extra = self._own_text() if kept else []
        lessons = Lessons([*parts[0], *parts[1]], extra, (len(parts[1]), max(1, round(HELD_OUT * len(extra)))))
        names = {"new": self._new, "old": str(self.work.bases.old.reference), "tuned": self.name}
        trained, report = distil(
            {what: partial(_on, name, settings.device) for what, name in names.items()},
            lambda: self._student(changed),
            lessons,
            PolishOptions(samples.steps, self.rank, seed=samples.seed),
            lambda model: sum(both(model, held_out, own)) if kept else both(model, held_out, held_out)[0],
            place,
            self.progress,
        )
        return self._taken(self._student(changed), trained), report

    def _own_text(self) -> list[Batch]:
        """More text of the new base's own, in batches of half the size."""
        few = replace(self.samples, data=SELF, seed=self.samples.seed + 2)
        return read_batches(SELF, local_path(self._new), load(self._new), **few.read(AT_ONCE // 2)).batches

    def _taken(self, student: Any, trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What training changed, by the names of the carrier's architecture."""
        carrier = self.work.carrier
        with torch.no_grad():
            for name, parameter in student.named_parameters():
                if name in trained:
                    parameter.copy_(trained[name])
        model = student.merge_and_unload() if self.rank else student
        named = Renamed(model.state_dict(), architecture_of(model, self._untie), carrier.architecture)
        found: dict[str, Tensor] = {}
        for info in carrier.architecture.tensors():
            before, after = read_tensor(info, carrier.new), read_tensor(info, named)
            if info.name == self._tied or before is None or after is None:
                continue
            if not torch.equal(before.to(after), after):
                found |= unstack(info, after.detach())
        return found

    def _losses(self, changed: Mapping[str, Tensor], held_out: Data, own: Data) -> Losses:
        """Losses of all models, and of the new base with the change at every scale."""
        scales = sorted({0.0, *(SCALES if self.samples.scale is None else (self.samples.scale,))})
        carried = {}
        for scale in scales:
            model = self._model(dict(Solution(self.work.carrier, changed, scale, torch.float32).tensors()))
            carried[scale] = both(model, held_out, own)
        return Losses(*self._home(held_out), *carried[0.0], carried, own is not held_out)


def _on(name: str, device: str) -> Any:
    return load(name).to(device)
