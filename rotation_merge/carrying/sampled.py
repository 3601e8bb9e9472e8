"""Changes carried with samples: solved for, trained on from there, or scaled, and judged on samples held out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rotation_merge.averaging.polish import PolishOptions
from rotation_merge.carrying.carrier import site_maps
from rotation_merge.carrying.config import TransferConfig
from rotation_merge.carrying.delta import Delta, Scale
from rotation_merge.carrying.distil import Distilled, Lessons, adapter_in_training, distil
from rotation_merge.carrying.judge import (
    AT_ONCE,
    HELD_OUT,
    SCALES,
    Both,
    Losses,
    Scaled,
    both,
    read_parts,
    scale_words,
    search,
)
from rotation_merge.carrying.lora import adapter_of
from rotation_merge.carrying.refit import ChangeOptions, refit_change
from rotation_merge.carrying.session import Session
from rotation_merge.files.unfinished import Unfinished
from rotation_merge.matching.match_on import seen_of
from rotation_merge.model.source import Progress, TensorSource, read_tensor, unstack
from rotation_merge.model.sources import Renamed, Replaced
from rotation_merge.run.data import Data, read_batches, unpadded
from rotation_merge.run.evaluate import evaluate
from rotation_merge.run.functions import Batch, architecture_of, load, local_path
from rotation_merge.run.runner import Runner
from rotation_merge.run.written import SELF

REFITTED = "The new base's maps were solved, one layer after the other, to make the change on samples."
HOW = {
    "activations": "What the weights' alignment moved was moved on at every map's inputs, by maps from activations.",
    "refit": REFITTED,
    "distil": f"{REFITTED} From there on it was **trained** for a few steps.",
}
"""What was done, for a card."""


@dataclass
class SampledTransfer:
    """One fine-tune that is carried with samples.

    Attributes:
        name: of the fine-tune, as it is loaded: a path, or `base+adapter`.
        tuned: its tensors.
        rank: of the adapter that is to be written; 0: a model is.
    """

    session: Session
    name: str
    tuned: TensorSource
    rank: int
    progress: Progress | None = None

    @property
    def config(self) -> TransferConfig:
        return self.session.config

    @property
    def how(self) -> str:
        """What is done, for a card."""
        return HOW[self.config.method]

    def scaled(self) -> tuple[dict[str, float], list[str]]:
        """The scale of each block at which weights alone carry it, and what the user should know."""
        _, held_out, own = read_parts(self.name, self._new, self.config)
        moved = Scaled(self.session.carrier, self.tuned, self._model_config, self.session.execution.device)

        def losses_at(scales: Mapping[str, float]) -> Both:
            return both(moved.model(scales), held_out, own)

        scales, zero, best = search(moved.blocks, losses_at, self.progress or (lambda *_: None))
        losses = Losses(*self._home(held_out), *zero, {0.0: zero, 1.0: best}, own is not held_out)
        return scales, [*losses.words(float(any(scales.values())), "at the scales below"), scale_words(scales)]

    def _home(self, held_out: Data) -> tuple[float, float]:
        """Losses of the old pair."""
        old, tuned = (evaluate(load(name), held_out)[0] for name in (self._old, self.name))
        return old, tuned

    def solved(self, out: str) -> tuple[Delta, list[str]]:
        """What is carried, at its scale, and what the user should know."""
        data, held_out, own = read_parts(self.name, self._new, self.config)
        samples = f"{data.examples} samples ({self.config.data})"
        if self.config.method == "activations":
            tensors, count = self._at_sites(data)
            lines = [f"What {count} maps read was moved by maps of its own, from activations on {samples}."]
        else:
            tensors = self._refitted(data)
            lines = [f"Refitted on {samples}."]
        if self.config.method == "distil":
            with Unfinished(out) as work:
                tensors, distilled = self._distilled(work, tensors, data, held_out, own)
            lines += distilled.words(self.config.steps)
        delta = Delta.of_solved(self.session.carrier, tensors)
        losses = self._losses(delta, held_out, own)
        scale = losses.best if self.config.factor is None else self.config.factor
        delta = delta.scaled(scale)
        return delta, [*lines, self._in_weights(delta), *losses.words(scale)]

    def _in_weights(self, delta: Delta) -> str:
        """What became of the change in weights: how large it is, and how much of it alignment alone would carry."""
        moved, made = self._moved().changes(self._tied), delta.changes()
        whole = sum(float(change.double().square().sum()) for change in moved.values())
        size = sum(float(change.square().sum()) for change in made.values())
        along = sum(float((change * moved[name].double()).sum()) for name, change in made.items() if name in moved)
        size, along = size / (whole or 1.0), max(along, 0.0) / (whole or 1.0)
        return (
            f"In weights, what is carried has {size:.2g} of the squared norm of what fine-tuning changed, and holds "
            f"{along:.0%} of that change as alignment moves it."
        )

    @property
    def _new(self) -> str:
        return str(self.session.bases.new.reference)

    @property
    def _old(self) -> str:
        return str(self.session.bases.old.reference)

    @property
    def _model_config(self) -> Any:
        return self.session.bases.new.transformers_config

    def _refitted(self, data: Data) -> dict[str, Tensor]:
        device = self.session.execution.device
        options = ChangeOptions(rank=self.rank, untie=self._untie, device=device)
        batches = unpadded(data.batches, self.config.data)
        names = (self._old, self.name) if self.session.carrier.frame is not None else ()
        pair = [_on(name, device) for name in names]
        return refit_change(self.session.carrier, self._model_config, self.tuned, batches, options, pair=pair)[0]

    def _at_sites(self, data: Data) -> tuple[dict[str, Tensor], int]:
        """The new base's tensors with the change moved at every map's inputs by itself, and how many such maps."""
        batches = unpadded(data.batches, self.config.data)
        new, old = (seen_of(_on(name, self.session.execution.device), batches) for name in (self._new, self._old))
        carrier = replace(self.session.carrier, sites=site_maps(self.session.carrier, new, old))
        return self._with(Delta(carrier, self.tuned)), len(carrier.sites)

    def _moved(self, scale: Scale = 1.0) -> Delta:
        """What weights carry."""
        return Delta(self.session.carrier, self.tuned, scale)

    def _with(self, delta: Delta) -> dict[str, Tensor]:
        """The new base's tensors, as it stores them, with a change."""
        new = self.session.carrier.new
        return {name: new[name].to(change.dtype) + change for name, change in delta.changes(self._tied).items()}

    def by_weights(self, scale: Scale = 1.0) -> tuple[dict[str, Tensor], list[str]]:
        """The new base's tensors as weights carry them, and what of the change has a place there."""
        delta = self._moved(scale)
        return self._with(delta), delta.placed()

    @property
    def _untie(self) -> bool:
        return self.session.execution.storage.untie

    @property
    def _tied(self) -> str | None:
        """A head that stays the embedding's tensor."""
        return None if self._untie else self.session.bases.new.tied_head

    def _model(self, tensors: Mapping[str, Tensor]) -> Any:
        """The new base with some tensors changed, by the names of the carrier's architecture."""
        carrier, device = self.session.carrier, self.session.execution.device
        source = Replaced(carrier.new, tensors)
        model = Runner(
            self._model_config, source, carrier.architecture, [], untie=self._untie, device=device
        ).fill_all()
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()  # what is trained is not the source
        return model

    def _student(self, tensors: Mapping[str, Tensor]) -> Any:
        """What is trained: a model, or the factors of an adapter beside it."""
        if not self.rank:
            return self._model(tensors).requires_grad_(True)
        written, _ = adapter_of(Delta.of_solved(self.session.carrier, tensors), self.rank, self.session.bases.new)
        return adapter_in_training(self._model({}), written)

    def _distilled(
        self, work: Unfinished, tensors: dict[str, Tensor], data: Data, held_out: Data, own: Data
    ) -> tuple[dict[str, Tensor], Distilled]:
        config, device = self.config, self.session.execution.device
        work.of(f"{self.name} {self._old} {self._new} {config} {self.session.execution} {self.rank}")
        parts = [unpadded(part.batches, config.data) for part in (data, held_out)]
        keeps = own is not held_out and config.factor is None
        extra = self._own_text() if keeps else []
        lessons = Lessons([*parts[0], *parts[1]], extra, (len(parts[1]), max(1, round(HELD_OUT * len(extra)))))
        names = {"new": self._new, "old": self._old, "tuned": self.name}
        trained, report = distil(
            {which: partial(_on, name, device) for which, name in names.items()},
            lambda: self._student(tensors),
            lessons,
            PolishOptions(config.steps, self.rank, seed=config.seed),
            lambda model: sum(both(model, held_out, own)) if keeps else both(model, held_out, held_out)[0],
            work,
            self.progress,
        )
        return self._trained(self._student(tensors), trained), report

    def _own_text(self) -> list[Batch]:
        """More text of the new base's own, in batches of half the size."""
        config = replace(self.config, data=SELF, seed=self.config.seed + 2)
        return read_batches(SELF, local_path(self._new), load(self._new), **config.reading(AT_ONCE // 2)).batches

    def _trained(self, student: Any, trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What training changed, by the names of the carrier's architecture."""
        carrier = self.session.carrier
        with torch.no_grad():
            for name, parameter in student.named_parameters():
                if name in trained:
                    parameter.copy_(trained[name])
        model = student.merge_and_unload() if self.rank else student
        named = Renamed(model.state_dict(), architecture_of(model, self._untie), carrier.architecture)
        tensors: dict[str, Tensor] = {}
        for info in carrier.architecture.tensors():
            before, after = read_tensor(info, carrier.new), read_tensor(info, named)
            if info.name == self._tied or before is None or after is None:
                continue
            if not torch.equal(before.to(after), after):
                tensors |= unstack(info, after.detach())
        return tensors

    def _losses(self, delta: Delta, held_out: Data, own: Data) -> Losses:
        """Losses of all models, and of the new base with the change at every scale."""
        scales = sorted({0.0, *(SCALES if self.config.factor is None else (self.config.factor,))})
        carried = {}
        for scale in scales:
            model = self._model(dict(delta.scaled(scale).named(torch.float32)))
            carried[scale] = both(model, held_out, own)
        return Losses(*self._home(held_out), *carried[0.0], carried, own is not held_out)


def _on(name: str, device: str) -> Any:
    return load(name).to(device)
