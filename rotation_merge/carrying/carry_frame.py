"""From what an old base of other sizes or depth gives, as it stands, to what it is in a new base: block by block."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rotation_merge.architecture.model import Axis, Block, TensorInfo
from rotation_merge.averaging.refit import same_place
from rotation_merge.carrying.carrier import Carrier
from rotation_merge.model.apply import transform_tensor
from rotation_merge.model.widen import cut_axis, padded_axis
from rotation_merge.run.maps import linear_map
from rotation_merge.run.stages import LAYER


@dataclass(frozen=True)
class FrameMaps:
    """How what the old base's maps and streams hold becomes what the new base's do, by widening, alignment and cutting.

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
        """What turns values of a map's output, or of a place of the stream: (old size, new size), float64,
        ``new ~ old @ it``; None: tokens or classes, which mean the same in both."""
        frame = self.carrier.frame
        assert frame is not None
        there = next((b for b in self.carrier.architecture.blocks if same_place(b, block)), None)
        if there is None or frame.block(there) is None:
            return None
        blocks = [
            next(b for b in one.blocks if b.name == there.name)
            for one in (frame.grow_old.own, frame.common, frame.grow_new.own)
        ]
        found = [_given(one, key) for one in blocks]
        if any(one is None or not one.axes[1].parts for one in found):
            return None
        old, common, new = (one for one in found if one is not None)
        x = torch.eye(old.axes[1].size or 0, dtype=torch.float64)
        transforms, fold = self.carrier.alignment.transforms, self.carrier.fold
        if any(part.role == "write" and part.space.name in fold.centred for part in old.axes[1].parts):
            x = x - x.mean(1, keepdim=True)
        x = padded_axis(x, 1, old.axes[1], common.axes[1], 0.0) * frame.grow_old.factor(blocks[0], old)
        x = transform_tensor(x, common, transforms, change=True)
        return cut_axis(x, 1, new.axes[1], common.axes[1]) / frame.grow_new.factor(blocks[2], new)


def _given(block: Block, key: str) -> TensorInfo | None:
    """Rows of what a map gives, or of the stream at a place, as a tensor with axes (rows, coordinates)."""
    info = block.tensor(key)
    norm = next((norm for norm in block.norms if norm.gain == key), None)
    if norm is None and key != LAYER:
        one = None if info is None else linear_map(block, info)
        return None if one is None else replace(one.info, axes=(Axis(), one.outputs), common=None)
    for other in block.tensors:
        for axis in other.axes:
            alone = len(axis.parts) == 1 and axis.parts[0].role == "write"
            if alone and (norm is None or axis.parts[0].space.name == norm.stream):
                return replace(other, axes=(Axis(), axis), common=None)
    return None
