"""Work carried to a new base with samples: refitted, its scale chosen and its effect measured on samples held out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rotation_merge.architectures.model import Block
from rotation_merge.averaging.carry_change import ChangeOptions, refit_change
from rotation_merge.checkpoints.adapters import Adapter, is_adapter
from rotation_merge.checkpoints.aligned import write_checkpoint
from rotation_merge.checkpoints.bases import open_bases
from rotation_merge.checkpoints.carried import Done, Settings, Work, aligned, card
from rotation_merge.checkpoints.lora_of_tuned import lora_of_tuned
from rotation_merge.errors import DataError
from rotation_merge.matching.carry import Carrier, Change
from rotation_merge.matching.model import Progress
from rotation_merge.matching.state import read_tensor
from rotation_merge.matching.tuned import of_low_rank
from rotation_merge.samples.data import Data, read_batches, unpadded
from rotation_merge.samples.evaluate import evaluate
from rotation_merge.samples.functions import load, local_path
from rotation_merge.samples.written import SELF, writes_text

AT_ONCE = 16
HELD_OUT = 0.25
"""Share of the samples that nothing is solved from."""
SCALES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25)
"""Of the solved change, among which held-out samples choose."""


@dataclass(frozen=True)
class Samples:
    """What the models are run on.

    Attributes:
        data: a file, or `self`: text that the fine-tune writes.
        count: how many, those held out included.
        scale: of the solved change; None: the best on the samples held out.
    """

    data: str = SELF
    count: int = 64
    length: int = 128
    seed: int = 0
    scale: float | None = None


@dataclass(frozen=True)
class Losses:
    """Mean losses in nats on samples held out: of the fine-tune's kind, and on text that the new base writes.

    Attributes:
        old, tuned: of the old pair, on the fine-tune's kind; new, own: of the new base, on either.
        carried: by scale, on both.
    """

    old: float
    tuned: float
    new: float
    own: float
    carried: dict[float, tuple[float, float]]

    @property
    def best(self) -> float:
        """The scale with the least sum of both losses."""
        return min(self.carried, key=lambda scale: sum(self.carried[scale]))

    def words(self, scale: float) -> list[str]:
        """What the user should know of the scale that was taken."""
        there, own = self.carried[scale]
        home = self.old - self.tuned
        lines = [
            f"On samples held out (loss in nats): the old base {self.old:.3f}, its fine-tune {self.tuned:.3f}; the new "
            f"base {self.new:.3f}, carried {there:.3f} at scale {scale:g}.",
            f"On text that the new base writes itself: {self.own:.3f} before, {own:.3f} after.",
        ]
        if scale == 0:
            return [*lines, "Nothing is worth carrying: every scale is worse than none. Train on the new base instead."]
        if home > 0:
            lines.append(f"That is {(self.new - there) / home:.0%} of what fine-tuning gained at home.")
        if there >= self.new:
            lines.append("Nothing of it arrives. Train on the new base instead.")
        return lines


def carry_by_refit(
    works: Mapping[str, str],
    old: str,
    new: str,
    settings: Settings,
    samples: Samples,
    progress: Progress | None = None,
) -> list[Done]:
    """Carry adapters and fine-tunes of one base to another by refitting their change.

    Args:
        works: directories of adapters and of whole models, by the directory that each is to be written to.

    Raises:
        RotationMergeError: a model, an adapter or the samples cannot be read, or they do not fit together.
    """
    bases = open_bases(new, old, settings.device, untie=True)
    names = {out: f"{old}+{path}" if is_adapter(path) else path for out, path in works.items()}
    sources = {out: bases.tuned(name) for out, name in names.items()}
    alignment, report = aligned(bases, settings, progress)
    work = Work(bases, bases.carrier(alignment), report, settings)
    config = bases.new.reference.config()
    done = []
    for out, source in sources.items():
        rank = settings.lora or (largest_rank(works[out]) if is_adapter(works[out]) else 0)
        options = ChangeOptions(ridge=0.1, rank=rank, untie=settings.storage.untie)
        data, held_out, own = _samples(names[out], new, samples)
        solved, _ = refit_change(work.carrier, config, source, unpadded(data.batches, samples.data), options)
        losses = _losses(old, names[out], new, solved, held_out, own, samples.scale)
        scale = losses.best if samples.scale is None else samples.scale
        solution = Solution(work.carrier, solved, scale)
        notes = [f"Refitted on {data.examples} samples ({samples.data}).", *losses.words(scale)]
        if rank:
            written, _ = lora_of_tuned(solution, rank, bases.new.config, str(bases.new.reference))
            done.append(work.write(works[out], out, written, notes))
            continue
        full = replace(report, notes=[*report.notes, *notes])
        text = card(bases, works[out], full, out, "finetune")
        write_checkpoint(bases.new, solution.tensors(), full, text, out, settings.storage, progress)
        done.append(Done(works[out], out, full.notes))
    return done


def largest_rank(path: str) -> int:
    """The largest rank in an adapter, which what is carried of it may have everywhere."""
    adapter = Adapter(path)
    return max((adapter.shapes[c.a][0] for c in adapter.changes.values() if c.a is not None), default=1)


@dataclass
class Solution:
    """Solved maps of a new base, as whole tensors or as changes of low rank."""

    carrier: Carrier
    solved: Mapping[str, Tensor]
    scale: float

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The solved tensors, at their scale, in the new base's storage dtype."""
        for block in self.carrier.architecture.blocks:
            for info in block.tensors:
                for name in info.names:
                    if name in self.solved and (new := read_tensor(info, self.carrier.new)) is not None:
                        change = self.solved[name].double() - new.double()
                        yield name, (new.double() + self.scale * change).to(new.dtype)

    def factors(self, block: Block, rank: int) -> tuple[dict[str, Change], dict[str, tuple[float, float]]]:
        """A block's changes, matrices by factors of a rank that they already have."""
        found: dict[str, Change] = {}
        kept: dict[str, tuple[float, float]] = {}
        for info in block.tensors:
            new = read_tensor(info, self.carrier.new)
            if new is not None and info.name in self.solved:
                change = self.scale * (self.solved[info.name].double() - new.double())
                found[info.key] = of_low_rank(change, info, rank) if change.ndim > 1 else change
                kept[info.key] = (float(change.square().sum()),) * 2
        return found, kept


def _samples(tuned: str, new: str, samples: Samples) -> tuple[Data, Data, Data]:
    """What is solved from, what is held out of it, and text of the new base's own.

    Raises:
        DataError: the model writes no text and no data are given, or too few.
    """
    model = load(tuned, like=new)
    if samples.data == SELF and not writes_text(model):
        raise DataError(f"{type(model).__name__} writes no text of its own", where=tuned, remedy="give --data FILE")
    read = {"limit": samples.count, "batch_size": AT_ONCE, "length": samples.length, "seed": samples.seed}
    whole = read_batches(samples.data, local_path(tuned), model, **read)
    held = max(1, round(HELD_OUT * len(whole.batches)))
    if len(whole.batches) <= held:
        raise DataError(
            f"holds {whole.examples} samples, at least {2 * AT_ONCE} are needed", where=samples.data, remedy="give more"
        )
    parts = [
        Data(batches, whole.task, sum(len(next(iter(b.values()))) for b in batches))
        for batches in (whole.batches[:-held], whole.batches[-held:])
    ]
    base: Any = load(new)
    if not writes_text(base):
        return parts[0], parts[1], parts[1]
    own = read_batches(SELF, local_path(new), base, **{**read, "limit": AT_ONCE, "seed": samples.seed + 1})
    return parts[0], parts[1], own


@torch.no_grad()
def _losses(
    old: str, tuned: str, new: str, solved: Mapping[str, Tensor], held_out: Data, own: Data, scale: float | None
) -> Losses:
    """Losses of all models, and of the new base with the solved change at every scale."""
    home, taught = (evaluate(load(name, like=new), held_out)[0] for name in (old, tuned))
    model = load(new)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items() if name in solved}
    carried = {}
    for step in sorted({0.0, *(SCALES if scale is None else (scale,))}):
        state = {name: x + step * (solved[name] - x) for name, x in before.items()}
        model.load_state_dict(state, strict=False)
        carried[step] = evaluate(model, held_out)[0], evaluate(model, own)[0]
    return Losses(home, taught, *carried[0.0], carried)
