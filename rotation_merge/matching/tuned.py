"""What fine-tuning changed in a whole model, carried to another base: as whole tensors, or cut down to low rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rotation_merge.architectures.model import Block, TensorInfo
from rotation_merge.errors import AlignmentError
from rotation_merge.matching.carry import Carrier, Change, Changes, folded_keys, is_bias, weight_key
from rotation_merge.matching.factors import LowRank, dense, stacks, transposed
from rotation_merge.matching.fold import Folded
from rotation_merge.matching.state import TensorSource, read_tensor, unstack

Scale = float | Mapping[str, float]
"""What a change is multiplied by: everywhere, or by name of a block (one, where it is not named)."""


def scale_at(scale: Scale, block: str) -> float:
    """The scale in one block."""
    return scale.get(block, 1.0) if isinstance(scale, Mapping) else scale


@dataclass(frozen=True)
class Tuned:
    """A fine-tune of a carrier's old base.

    Attributes:
        source: its tensors, under the names of the carrier's architecture.
        scale: what its change is multiplied by.
        dtype: of the results; None: the new base's for storage.
    """

    carrier: Carrier
    source: TensorSource
    scale: Scale = 1.0
    dtype: torch.dtype | None = None

    def tensors(self) -> Iterator[tuple[TensorInfo, dict[str, Tensor], float, float]]:
        """The new base with the carried change, tensor by tensor, in the new base's storage dtype.

        Yields:
            The tensor, its pieces by name, and the squared norms of its change and of the old base's tensor.
        """
        carrier = self.carrier
        new = self._folded(carrier.new)
        for block in carrier.architecture.blocks:
            for info in block.tensors:
                stored, base = read_tensor(info, carrier.new), read_tensor(info, new)
                if stored is None or base is None:
                    continue
                if not stored.is_floating_point():
                    yield info, unstack(info, stored), 0.0, 0.0
                    continue
                change, before = self._change(block, info)
                moved = carrier.respelled(block, info, carrier.moved(info, change))
                result = (base + scale_at(self.scale, block.name) * moved).to(self.dtype or stored.dtype).contiguous()
                yield info, unstack(info, result), float(change.square().sum()), before

    def factors(self, block: Block, rank: int | None) -> tuple[Changes, dict[str, tuple[float, float]]]:
        """A block's change for the new base as it is stored, that of every matrix cut down to low rank (None: not).

        What norms of folded streams changed goes into the maps that read them.

        Returns:
            The changes by key, those of biases and of other norms whole; and by key the squared norm of each, and what
            of it is kept.
        """
        result: Changes = {}
        kept: dict[str, tuple[float, float]] = {}
        absorbed = folded_keys(block, self.carrier.alignment.folded)
        for info in sorted(block.tensors, key=lambda i: is_bias(i.key)):
            if info.key in absorbed or read_tensor(info, self.carrier.new) is None:
                continue
            change, _ = self._change(block, info)
            weight = block.tensor(weight_key(info.key)) if is_bias(info.key) else None
            beside = dense(result[weight.key], weight) if weight is not None and weight.key in result else None
            whole = scale_at(self.scale, block.name) * self.carrier.stored(block, info, change.double(), beside)
            if not bool(whole.any()):
                continue
            result[info.key] = cut = (
                of_low_rank(whole, info, rank) if rank is not None and len(info.axes) > 1 else whole
            )
            norm = float(whole.square().sum())
            kept[info.key] = norm, norm - float((whole - dense(cut, info)).square().sum())
        return result, kept

    def _folded(self, source: TensorSource) -> TensorSource:
        streams = self.carrier.alignment.folded
        return Folded(self.carrier.architecture, source, streams, self.carrier.dtype) if streams else source

    def _change(self, block: Block, info: TensorInfo) -> tuple[Tensor, float]:
        """What fine-tuning changed in a tensor of the folded model, and the squared norm of it before."""
        old, tuned = (read_tensor(info, self._folded(source)) for source in (self.carrier.old, self.source))
        if old is None or tuned is None or old.shape != tuned.shape:
            why = "the fine-tune's has another shape" if old is not None and tuned is not None else "a model lacks it"
            raise AlignmentError(
                f"'{info.name}' cannot be carried: {why}",
                where=block.name,
                remedy="name the base that it was tuned from, of the same class, by --from",
            )
        old = old.to(torch.promote_types(old.dtype, torch.float32))
        return tuned.to(old.dtype) - old, float(old.square().sum())


def of_low_rank(change: Tensor, info: TensorInfo, rank: int) -> Change:
    """The nearest change of this rank (Eckart and Young), its factors equally large."""
    matrix = change.mT if transposed(info) else change
    shape = matrix.shape
    if matrix.ndim > 2 and not stacks(info):
        matrix = matrix.flatten(1)
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    root = s[..., :rank].sqrt()
    a, b = root[..., :, None] * v[..., :rank, :], u[..., :rank] * root[..., None, :]
    if matrix.shape != shape:
        a, b = a.reshape(-1, *shape[1:]), b.reshape(*b.shape, *[1] * (len(shape) - 2))
    return LowRank(a, b)


def share(kept: Mapping[str, tuple[float, float]]) -> float:
    """What of all changes is kept: squared norm after cutting over squared norm before."""
    whole = sum(norm for norm, _ in kept.values())
    return sum(rest for _, rest in kept.values()) / whole if whole else 1.0
