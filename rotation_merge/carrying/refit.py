r"""Refit of a change: solves a new base's maps for their own outputs plus a fine-tune's change of outputs.

Layer after layer, from the carried model's own inputs, a linear map aims at ``new + (tuned - old) M``: the new base's
own output, plus the change of the old pair's output on the same samples, mapped by the least-squares map M from the old
base's values to the new one's (which corrects the alignment). Writers aim at the stream. The outputs of the head,
tokens or classes, are not mapped, and the head is fitted to their probabilities. Text of the new base's own may stand
beside the samples: there, the change is zero.

Source: this project's study (benchmarks/carry.py); the layer-wise fit is that of RegMean++ (Nguyen and others, 2025),
maps between activations as in Theseus (2026).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from rotation_merge.averaging.refit import Answer, Answers, Refit, on_device
from rotation_merge.averaging.ridge import RidgeSums
from rotation_merge.carrying.delta import Delta
from rotation_merge.matching.moving import moved_tensors
from rotation_merge.model.tensors import Tensors
from rotation_merge.run.batches import Batch, with_small_first_batch
from rotation_merge.run.runner import Runner, StateStore
from rotation_merge.run.stages import BlockHooks
from rotation_merge.workers import Progress

RIDGE, MAP_RIDGE = 0.1, 0.2
"""Of the new base's maps, which it pulls towards the new base's; of the maps between activations of the bases."""


def refit_change(
    delta: Delta,
    samples: Sequence[Batch],
    base_texts: Sequence[Batch] = (),
    *,
    softmax: float | None = None,
    rank: int = 0,
    untie: bool = False,
    device: str = "cpu",
    progress: Progress = lambda *_: None,
) -> dict[str, Tensor]:
    """Solve the new base's maps for its own outputs plus the old pair's change.

    Args:
        delta: the change as it is moved by weights.
        samples: as the models take them.
        base_texts: text of the new base's own, where nothing shall change.
        softmax: ridge of the head, which is fitted to probabilities; None: to logits, by least squares.
        rank: the rank that the change of every map is cut down to before the next one is solved; 0: none.
        untie: give a tied head its own tensor, which is then solved, too.

    Returns:
        The solved tensors by the new base's names, in float32.
    """
    batches = [*with_small_first_batch(samples), *base_texts]
    base, maps = delta.base, (delta.alignment.transforms, delta.alignment.folded)

    def runner(tensors: Tensors, untied: bool) -> Runner:
        return Runner(replace(base, tensors=tensors, untie=untied), batches, device=device)

    new, merge = (runner(base.tensors, untie) for _ in range(2))
    old, fine = (runner(moved_tensors(base.architecture, x, *maps), True) for x in (delta.old, delta.tuned))
    refit = Refit(
        merge,
        base.architecture,
        [new, old, fine],
        changed_answers(len(batches), len(base_texts)),
        [1.0] * len(batches),
        RIDGE,
        StateStore(),
        watch=progress,
        shape=partial(of_rank, rank=rank) if rank else None,
        softmax=softmax,
    )
    return {name: tensor.float().contiguous() for name, tensor in refit.run().solved().items()}


def changed_answers(count: int, base_texts: int) -> Answers:
    """Targets of the refit: the new base's outputs plus the mapped change of the old pair.

    The target models are the new base, the old base and the fine-tune, the last two in the first one's coordinates.

    Args:
        count: number of batches.
        base_texts: number of the last of them, on which nothing changes.
    """

    def answers(hooks: Sequence[BlockHooks], keys: frozenset[str]) -> Iterator[Answer]:
        sums, waiting = dict[str, RidgeSums](), list[tuple[Answer, Answer]]()
        for batch in range(count):
            new, old, tuned = (model.pass_on(batch, keys) for model in hooks)
            common = sorted(new.keys() & old.keys() & tuned.keys())
            for key in common:
                if key in hooks[0].maps and not hooks[0].maps[key].outputs.parts:
                    continue  # tokens and classes mean the same in both models
                x, y = old[key].double(), new[key].double()
                if key not in sums:
                    sums[key] = RidgeSums(x, torch.float64)
                sums[key].add(x, {key: (y - x, x)}, 1.0)
                sums[key].flush()
            counts = float(batch < count - base_texts)
            outputs = {key: new[key].cpu() for key in common}
            waiting.append((outputs, {key: (counts * (tuned[key] - old[key])).cpu() for key in common}))
        # M - 1: directions without samples keep the identity
        maps = {key: sums.pop(key).change(key, MAP_RIDGE, biased=False) for key in [*sums]}
        device = hooks[0].runner.device
        while waiting:
            outputs, changes = (on_device(values, device) for values in waiting.pop(0))
            for key, change in changes.items():
                if (beyond_identity := maps.get(key)) is not None:
                    change = change + change @ beyond_identity.mT.to(change)
                outputs[key] = outputs[key] + change
            yield outputs

    return answers


def of_rank(change: Tensor, gram: Tensor, rank: int) -> Tensor:
    """The change of this rank with the nearest outputs on the samples: ``U U^T change``.

    U holds the first left singular vectors of ``change G^1/2``. A bias, the last column, is not changed.

    Args:
        change: (out, in) or (out, in + 1).
        gram: X^T X of the inputs and a one, (in + 1, in + 1).
    """
    width = len(gram) - 1
    weight = change[:, :width]
    values, vectors = torch.linalg.eigh(weight @ gram[:width, :width] @ weight.mT)
    basis = vectors[:, values.argsort(descending=True)[:rank]]
    return torch.cat([basis @ (basis.mT @ weight), change[:, width:]], 1)
