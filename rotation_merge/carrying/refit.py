r"""Refit of a change: solves a new base's maps for their own outputs plus a fine-tune's change of outputs.

Layer after layer, from the carried model's own inputs, a linear map aims at ``new + scale * (tuned - old) M``: the new
base's own output, plus the change of the old pair's output on the same samples, mapped by the least-squares map M from
the old base's values to the new one's (which corrects the alignment). Writers aim at the stream. The outputs of the
head, tokens or classes, are not mapped, and the head is fitted to their probabilities. Text of the new base's own may
stand beside the samples: there, the change is zero. An old pair of other sizes or depth runs as it stands: M is
rectangular then, and starts at the aligned values of the old base; layers without a partner are not solved.

Source: this project's study (benchmarks/carry.py); the layer-wise fit is that of RegMean++ (Nguyen and others, 2025),
maps between activations as in Theseus (2026).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rotation_merge.architecture import Architecture
from rotation_merge.architecture.model import Axis, Block, TensorInfo
from rotation_merge.averaging.refit import Answer, Refit, RefitResult, same_place
from rotation_merge.carrying.carrier import Carrier
from rotation_merge.linalg.ridge import ridge_change
from rotation_merge.matching.alignment import aligned_source
from rotation_merge.model.apply import transform_tensor
from rotation_merge.model.source import TensorSource
from rotation_merge.model.widen import cut_axis, padded_axis
from rotation_merge.run.data import with_small_first_batch
from rotation_merge.run.functions import Batch, architecture_of
from rotation_merge.run.maps import linear_map
from rotation_merge.run.recorder import LAYER, BlockHooks
from rotation_merge.run.runner import Runner
from rotation_merge.run.stages import rows
from rotation_merge.run.store import BatchStore, Store
from rotation_merge.workers.progress import Progress

HEAD_RIDGE = 3e-3
"""Of a head that is fitted to probabilities, per position and mean square of its inputs."""


@dataclass(frozen=True)
class FrameMaps:
    """Maps from values of the old base to values of the new one: widening, alignment and cutting.

    Attributes:
        carrier: between bases of unlike shapes.
    """

    carrier: Carrier

    def partner(self, block: Block) -> int | None:
        """The old base's layer that meets one of the new base's; None: none does."""
        frame = self.carrier.frame
        assert frame is not None
        return dict(frame.layers.get(block.module, ())).get(block.index or 0)

    def of(self, block: Block, key: str) -> Tensor | None:
        """The matrix M (old size, new size), float64, with ``new ~ old @ M``, for a map's output or a stream place.

        None for tokens and classes, which mean the same in both.
        """
        frame = self.carrier.frame
        assert frame is not None
        frame_block = next((b for b in self.carrier.architecture.blocks if same_place(b, block)), None)
        if frame_block is None or frame.block(frame_block) is None:
            return None
        blocks = [
            next(b for b in architecture.blocks if b.name == frame_block.name)
            for architecture in (frame.grow_old.narrow, frame.common, frame.grow_new.narrow)
        ]
        infos = [_given(sized_block, key) for sized_block in blocks]
        if any(info is None or not info.axes[1].parts for info in infos):
            return None
        old, common, new = (info for info in infos if info is not None)
        x = torch.eye(old.axes[1].size or 0, dtype=torch.float64)
        transforms, fold = self.carrier.alignment.transforms, self.carrier.fold
        if any(part.role == "write" and part.space.name in fold.centred for part in old.axes[1].parts):
            x = x - x.mean(1, keepdim=True)
        x = padded_axis(x, 1, old.axes[1], common.axes[1], 0.0) * frame.grow_old.factor(blocks[0], old)
        x = transform_tensor(x, common, transforms, change=True)
        return cut_axis(x, 1, new.axes[1], common.axes[1]) / frame.grow_new.factor(blocks[2], new)


def _given(block: Block, key: str) -> TensorInfo | None:
    """Rows of a map's output, or of the stream at a place, as a tensor with axes (rows, coordinates)."""
    info = block.tensor(key)
    norm = next((norm for norm in block.norms if norm.gain == key), None)
    if norm is None and key != LAYER:
        linear = None if info is None else linear_map(block, info)
        return None if linear is None else replace(linear.info, axes=(Axis(), linear.outputs), common=None)
    for tensor in block.tensors:
        for axis in tensor.axes:
            alone = len(axis.parts) == 1 and axis.parts[0].role == "write"
            if alone and (norm is None or axis.parts[0].space.name == norm.stream):
                return replace(tensor, axes=(Axis(), axis), common=None)
    return None


@dataclass
class ChangedAnswers:
    """Targets of the refit: the new base's outputs plus the mapped change of the old pair.

    Attributes:
        new, old, tuned: the models on the same batches; the last two in the new one's coordinates, or as they stand.
        between: for an old pair of other sizes or depth: the map of its values to the new base's.
        weights: weight of each batch in fitting the maps.
        scale: factor of the change.
        ridge: of the maps.
    """

    new: Runner
    old: Runner
    tuned: Runner
    store: Store
    weights: list[float]
    scale: float = 1.0
    ridge: float = 0.2
    base_texts: int = 0
    between: FrameMaps | None = None
    _kept: BatchStore = field(init=False)

    def __post_init__(self) -> None:
        self._kept = BatchStore(self.store, "answer")

    @property
    def runners(self) -> tuple[Runner, ...]:
        """All three models."""
        return self.new, self.old, self.tuned

    def compute_answers(self, block: Block, answer_keys: frozenset[str]) -> bool:
        """Run all three through the block, find the maps, and keep the answers to every batch."""
        runners = self.runners
        new_block = self.new.advance()
        if new_block is None:
            return False
        met = [self._meeting(runner, new_block) for runner in runners[1:]]
        aligned_blocks = [new_block, *(partner for partner in met if partner is not None)]
        if len(aligned_blocks) < len(runners) or not same_place(new_block, block):
            _pass(self.new)
            return False
        taps = [BlockHooks(runner, runner_block) for runner, runner_block in zip(runners, aligned_blocks, strict=True)]
        starts = {} if self.between is None else {key: self.between.of(new_block, key) for key in answer_keys}
        maps = _Maps(self.ridge, {key: start for key, start in starts.items() if start is not None})
        weights, keys = self.weights if answer_keys or block.index is not None else [], list[str]()
        for batch, weight in enumerate(weights):
            values = [_seen(tap, batch, answer_keys) for tap in taps]
            keys = [key for key in sorted(answer_keys) if all(key in answers for answers in values)]
            keys = [key for key in keys if maps.fits(key, values[1][key], values[0][key])]
            new, old, tuned = ([answers[key] for key in keys] for answers in values)
            if weight:
                maps.add(dict(zip(keys, zip(old, new, strict=True), strict=True)))
            self.store.put(f"own:{batch}", new)
            counts = float(batch < len(weights) - self.base_texts)
            self.store.put(f"change:{batch}", [counts * (t - o) for t, o in zip(tuned, old, strict=True)])
        solved = maps.solve({key for key in keys if self._is_mapped(taps[0], key)})
        for batch in range(len(weights)):
            base_answers, change = (self.store.get(f"{kind}:{batch}", self.new.device) for kind in ("own", "change"))
            moved = [c if key not in solved else c @ solved[key].to(c) for key, c in zip(keys, change, strict=True)]
            self._kept.put(batch, {k: o + self.scale * m for k, o, m in zip(keys, base_answers, moved, strict=True)})
            self.store.drop(f"own:{batch}")
            self.store.drop(f"change:{batch}")
        return True

    def computes_as_anchor(self, merge: Runner, names: Collection[str]) -> bool:
        """They are no model's own: a change is added to them."""
        return False

    def _meeting(self, runner: Runner, new_block: Block) -> Block | None:
        """The block of the old pair that meets one of the new base's; those before it are passed through."""
        if self.between is None or new_block.index is None:
            candidate = runner.advance()
            while self.between is not None and candidate is not None and candidate.index is not None:
                _pass(runner)  # layers that meet none
                candidate = runner.advance()
            return candidate if candidate is not None and same_place(candidate, new_block) else None
        if (index := self.between.partner(new_block)) is None:
            return None
        while (candidate := runner.advance()) is not None:
            if (candidate.module, candidate.place, candidate.index) == (new_block.module, new_block.place, index):
                return candidate
            _pass(runner)
        return None

    def __call__(self, batch: int) -> Answer:
        return self._kept.get(batch, self.new.device)

    def keep(self, answer_keys: frozenset[str]) -> None:
        self._kept.keep(answer_keys)

    @staticmethod
    def _is_mapped(taps: BlockHooks, key: str) -> bool:
        """Tokens and classes mean the same in both models."""
        linear = taps.maps.get(key)
        return linear is None or bool(linear.outputs.parts)


def _seen(taps: BlockHooks, batch: int, answer_keys: frozenset[str]) -> dict[str, Tensor]:
    activations = taps.pass_on(batch, answer_keys)
    return {**activations.outputs, **activations.stream}


def _pass(runner: Runner) -> None:
    """Run every batch through the present block, for those after it."""
    with runner.recording():
        for batch in range(len(runner.batches)):
            runner.run(batch)


class _Maps:
    """Least-squares maps M, ``new ~ old M``; directions without samples keep their start (the identity)."""

    def __init__(self, ridge: float, starts: Mapping[str, Tensor]) -> None:
        self.ridge, self.starts = ridge, starts
        self.grams: dict[str, Tensor] = {}
        self.crosses: dict[str, Tensor] = {}

    def add(self, values: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        for key, (old, new) in values.items():
            x, y = rows(old).double(), rows(new).double()
            gram, cross = x.mT @ x, x.mT @ (y - x @ self._start(key, x))
            self.grams[key] = self.grams[key] + gram if key in self.grams else gram
            self.crosses[key] = self.crosses[key] + cross if key in self.crosses else cross

    def solve(self, keys: set[str]) -> dict[str, Tensor]:
        maps = {}
        for key in keys & self.grams.keys():
            gram = self.grams[key]
            penalty = torch.full((len(gram),), self.ridge * float(gram.diagonal().mean())).to(gram)
            change = ridge_change(gram, self.crosses[key], penalty)
            if change is not None:
                maps[key] = self._start(key, gram) + change.mT
        return maps

    def fits(self, key: str, old: Tensor, new: Tensor) -> bool:
        """Whether a map between values of these sizes exists."""
        start = self.starts.get(key)
        sizes = (old.shape[-1], new.shape[-1])
        return sizes[0] == sizes[1] if start is None else tuple(start.shape) == sizes

    def _start(self, key: str, like: Tensor) -> Tensor:
        return self.starts[key].to(like) if key in self.starts else torch.eye(like.shape[-1]).to(like)


@dataclass(frozen=True)
class ChangeOptions:
    """Options of the refit of a change.

    Attributes:
        scale: factor of the change.
        ridge: pulls every map towards the new base's.
        softmax: ridge of the head, which is fitted to probabilities; None: to logits, by least squares.
        rank: the rank that the change of every map is cut down to before the next one is solved; 0: none.
        untie: give a tied head its own tensor, which is then solved, too.
    """

    scale: float = 1.0
    ridge: float = 0.1
    softmax: float | None = None
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
    base_texts: Sequence[Batch] = (),
) -> tuple[dict[str, Tensor], RefitResult]:
    """Solve the new base's maps for its own outputs plus the old pair's change.

    Args:
        carrier: of the old base to the new one.
        config: of transformers, the new base's.
        tuned: the fine-tune, under the names of the carrier's architecture.
        batches: samples, as the models take them.
        pair: where the bases' shapes differ: the old base and the fine-tune, loaded.
        base_texts: text of the new base's own, where nothing shall change.

    Returns:
        The solved tensors by the new base's names, in float32, and the errors of each map.
    """
    store, batches = Store() if store is None else store, [*with_small_first_batch(batches), *base_texts]
    architecture = carrier.architecture
    solved: dict[str, Tensor] = {}

    def write(name: str, tensor: Tensor) -> Tensor:
        solved[name] = tensor.to(torch.float32).contiguous()
        return solved[name]

    def runner(source: TensorSource, prefix: str, untie: bool) -> Runner:
        return Runner(config, source, architecture, batches, store, prefix, device=options.device, untie=untie)

    def loaded(model: Any, prefix: str) -> Runner:
        architecture = architecture_of(model)
        return Runner(model.config, model.state_dict(), architecture, batches, store, prefix, device=options.device)

    new = runner(carrier.new, "new", options.untie)
    if carrier.frame is None:
        aligned = [_aligned(architecture, source, carrier) for source in (carrier.old, tuned)]
        old, fine = (runner(source, name, True) for name, source in zip(("old", "tuned"), aligned, strict=True))
    else:
        old, fine = (loaded(model, name) for name, model in zip(("old", "tuned"), pair, strict=True))
    weights = [1.0] * len(batches)
    between = None if carrier.frame is None else FrameMaps(carrier)
    answers = ChangedAnswers(new, old, fine, store, weights, options.scale, base_texts=len(base_texts), between=between)
    merge = runner(carrier.new, "carried", options.untie)
    watch = progress or (lambda *_: None)
    shape = partial(of_rank, rank=options.rank) if options.rank else None
    refit = Refit(
        merge,
        architecture,
        answers,
        weights,
        options.ridge,
        write,
        watch=watch,
        shape=shape,
        softmax=options.softmax,
    )
    return solved, refit.run()


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


def _aligned(architecture: Architecture, source: TensorSource, carrier: Carrier) -> TensorSource:
    """A model of the old pair in the new base's coordinates."""
    return aligned_source(architecture, source, carrier.alignment)
