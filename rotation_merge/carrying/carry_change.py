"""A fine-tune carried by refitting its change: the models are run on samples, the new base's maps are solved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rotation_merge.architecture import Architecture
from rotation_merge.averaging.refit import Refit, Refitted
from rotation_merge.carrying.carrier import Carrier
from rotation_merge.carrying.carry_frame import FrameMaps
from rotation_merge.carrying.change import ChangedAnswers
from rotation_merge.matching.alignment import aligned_source
from rotation_merge.model.source import TensorSource
from rotation_merge.run.data import first_apart
from rotation_merge.run.functions import Batch, architecture_of
from rotation_merge.run.runner import Runner
from rotation_merge.run.store import Store
from rotation_merge.workers.progress import Progress


@dataclass(frozen=True)
class ChangeOptions:
    """How a change is refitted.

    Attributes:
        scale: what the change is multiplied by.
        ridge: pulls every map towards the new base's.
        rank: the rank that the change of every map is cut down to before the next one is solved; 0: none.
        untie: give a tied head its own tensor, which is then solved, too.
    """

    scale: float = 1.0
    ridge: float = 0.1
    rank: int = 0
    untie: bool = False
    device: str = "cpu"


def refit_change(
    carrier: Carrier,
    config: Any,
    tuned: TensorSource,
    batches: Sequence[Batch],
    options: ChangeOptions,
    store: Store | None = None,
    progress: Progress | None = None,
    pair: Sequence[Any] = (),
) -> tuple[dict[str, Tensor], Refitted]:
    """The new base's maps, solved to give what it gives by itself and the old pair's change.

    Args:
        carrier: of the old base to the new one.
        config: of transformers, the new base's.
        tuned: the fine-tune, under the names of the carrier's architecture.
        batches: samples, as the models take them.
        pair: where the bases' shapes differ: the old base and the fine-tune, loaded.

    Returns:
        The solved tensors by the new base's names, in float32, and what became of each map.
    """
    store, batches = Store() if store is None else store, first_apart(batches)
    architecture = carrier.architecture
    solved: dict[str, Tensor] = {}

    def write(name: str, tensor: Tensor) -> Tensor:
        solved[name] = tensor.to(torch.float32).contiguous()
        return solved[name]

    def runner(source: TensorSource, prefix: str, untie: bool) -> Runner:
        return Runner(config, source, architecture, batches, store, prefix, device=options.device, untie=untie)

    def loaded(model: Any, prefix: str) -> Runner:
        own = architecture_of(model)
        return Runner(model.config, model.state_dict(), own, batches, store, prefix, device=options.device)

    new = runner(carrier.new, "new", options.untie)
    if carrier.frame is None:
        aligned = [_aligned(architecture, source, carrier) for source in (carrier.old, tuned)]
        old, fine = (runner(source, name, True) for name, source in zip(("old", "tuned"), aligned, strict=True))
    else:
        old, fine = (loaded(model, name) for name, model in zip(("old", "tuned"), pair, strict=True))
    weights = [1.0] * len(batches)
    between = None if carrier.frame is None else FrameMaps(carrier)
    answers = ChangedAnswers(new, old, fine, store, weights, options.scale, between=between)
    merge = runner(carrier.new, "carried", options.untie)
    watch = progress or (lambda *_: None)
    shape = partial(of_rank, rank=options.rank) if options.rank else None
    result = Refit(merge, architecture, answers, weights, options.ridge, write, shape=shape, watch=watch).run()
    return solved, result


def of_rank(change: Tensor, gram: Tensor, rank: int) -> Tensor:
    """The change of this rank whose outputs are nearest on the samples: ``U U^T change``, U the first left singular
    vectors of ``change G^1/2``. A bias, the last column, stays as it is.

    Args:
        change: (out, in) or (out, in + 1).
        gram: X^T X of the inputs and a one, (in + 1, in + 1).
    """
    width = len(gram) - 1
    weight = change[:, :width]
    values, vectors = torch.linalg.eigh(weight @ gram[:width, :width] @ weight.mT)
    kept = vectors[:, values.argsort(descending=True)[:rank]]
    return torch.cat([kept @ (kept.mT @ weight), change[:, width:]], 1)


def _aligned(architecture: Architecture, source: TensorSource, carrier: Carrier) -> TensorSource:
    """A model of the old pair in the new base's coordinates."""
    return aligned_source(architecture, source, carrier.alignment)
