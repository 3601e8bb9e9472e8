"""Statistics of a model: second moments of its inputs by (block, axis), Fisher diagonals by tensor.

All maps that read one input have one Gram: queries, keys and values of a layer, gate and up. It goes by the block and
the axis that is read, `model.layers.0/residual.read`; further inputs along the same axis of a block are numbered,
`model.layers.0/residual.read/2`.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rotation_merge.errors import StatisticsError, short
from rotation_merge.files import CONTINUES, Output, check_output, replacing, writing
from rotation_merge.linalg.finite import all_finite
from rotation_merge.model.contents import Header
from rotation_merge.model.tensors import Tensors, by_name
from rotation_merge.run.maps import LinearMap, along_inputs

FORMAT = "rotation_merge.statistics.2"

NAME = "statistics.safetensors"
"""Name of the file beside a model."""

ANEW = "measure again with 'rotation-merge measure'"

HEAD = ("made", "axes", "split", "uncalled")
"""Entries of its header beside the format, as JSON."""

_DTYPES = {torch.float32: "F32", torch.float64: "F64", torch.int64: "I64"}


@dataclass
class Statistics:
    """What was measured of a model on samples; tensors are read, or computed, when they are asked for.

    Attributes:
        tensors: `AXIS.gram` and `AXIS.count` by (block, axis); `TENSOR.fisher` by tensor name.
        axes: by name of a map's tensor, the (block, axis) that it reads.
        split: those whose Gram is of a norm's normalised output.
        uncalled: maps that never ran on the samples.
        metadata: origin: model, fingerprint, family, data, samples, tokens, labels, versions.
        path: of the file, or the model's name.
    """

    tensors: Tensors = field(repr=False)
    axes: Mapping[str, str]
    split: frozenset[str]
    uncalled: frozenset[str]
    metadata: dict[str, Any] = field(default_factory=dict)
    path: str = ""

    @classmethod
    def open(cls, path: Path | str) -> Statistics:
        """Read the head of a file.

        Raises:
            StatisticsError: it cannot be read, or is none.
        """
        try:
            file = safe_open(str(path), framework="pt")
            head = Header.of(file)
            if head.metadata.get("format") != FORMAT:
                raise StatisticsError("is not a statistics file of this version", where=str(path), remedy=ANEW)
            metadata, axes, split, uncalled = (json.loads(head.metadata[name]) for name in HEAD)
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise StatisticsError(f"cannot be read ({short(error)})", where=str(path), remedy=ANEW) from error
        tensors = Tensors(head.shapes, head.dtypes, by_name(file.get_tensor))
        return cls(tensors, axes, frozenset(split), frozenset(uncalled), metadata, str(path))

    def check(self, kind: str, fingerprint: str, model: str, remedy: str) -> None:
        """Refuse statistics of other weights, or without a kind of numbers.

        Args:
            fingerprint: of the model.

        Raises:
            StatisticsError: names their kinds, or their model.
        """
        problem, kinds = "", self.metadata.get("kinds", ())
        if kind not in kinds:
            problem = f"'{self.path}' holds {', '.join(kinds) or 'nothing'}, the averaging needs {kind}"
        elif self.metadata.get("fingerprint") != fingerprint:
            problem = f"'{self.path}' was measured on other weights than these ('{self.metadata.get('model')}')"
        if problem:
            raise StatisticsError(problem, where=model, remedy=remedy)

    def save(self, path: Path | str) -> None:
        """Write the file that `rotation-merge measure` writes, which recipes name under `statistics`.

        Raises:
            SpaceError: it cannot be written; nothing is left behind.
            RotationMergeError: there is a file at that place that holds no statistics; it stays as it is.
        """
        holds_statistics = partial(has_format, name=FORMAT)
        check_output(Output(str(path), wrote=holds_statistics, remedy="name another file, or move it away"))
        self.write(path)

    def write(self, path: Path | str) -> None:
        """Write the file, one tensor in memory at a time, whatever is at its place.

        Raises:
            SpaceError: it cannot be written; nothing is left behind.
            StatisticsError: a number is none; nothing is left behind.
        """
        values = self.metadata, self.axes, sorted(self.split), sorted(self.uncalled)
        parts = (json.dumps(value, sort_keys=True, default=str) for value in values)
        meta = {"format": FORMAT, **dict(zip(HEAD, parts, strict=True))}
        with writing(path, CONTINUES), replacing(path) as temporary, open(temporary, "wb") as file:
            file.write(_head(self.tensors, meta))
            for key in self:
                file.write(self[key].to("cpu", self.tensors.dtypes[key]).contiguous().numpy().tobytes())

    def renamed(self, names: Mapping[str, str]) -> Statistics:
        """The same of a model whose tensors have other names.

        Args:
            names: by new name of a tensor the present one, one layer after the other: a layer may stand in several
                places, each with inputs of its own; tensors that are not here are left out.
        """
        axes, present, copies = dict[str, str](), dict[str, str](), Counter[str]()
        for new, old in names.items():
            present[f"{new}.fisher"] = f"{old}.fisher"
            if (axis := self.axes.get(old)) is not None:
                copies[old] += 1
                axes[new] = axis if copies[old] == 1 else f"{axis} ({copies[old]})"
                present |= {f"{axes[new]}.{kind}": f"{axis}.{kind}" for kind in ("gram", "count")}
        split = frozenset(axis for new, axis in axes.items() if self.axes[names[new]] in self.split)
        uncalled = frozenset(new for new, old in names.items() if old in self.uncalled)
        tensors = self.tensors.renamed(present).only(present)
        return replace(self, tensors=tensors, axes=axes, split=split, uncalled=uncalled)

    def __repr__(self) -> str:
        facts = self.metadata
        kinds = ", ".join(facts.get("kinds", ()))
        return f"Statistics({facts.get('model')}, {kinds}, {facts.get('samples')} samples of {facts.get('data')})"

    def __contains__(self, key: object) -> bool:
        return key in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self.tensors))

    def __getitem__(self, key: str) -> Tensor:
        """One tensor; it must hold finite numbers.

        Raises:
            StatisticsError: it holds NaN or infinity, or cannot be read.
        """
        try:
            tensor = self.tensors[key]
        except (OSError, SafetensorError) as error:
            raise StatisticsError(f"'{key}' cannot be read ({short(error)})", where=self.path, remedy=ANEW) from error
        if not all_finite([tensor]):
            raise StatisticsError(f"'{key}' holds NaN or infinity", where=self.path, remedy=ANEW)
        return tensor

    def gram(self, name: str) -> Tensor | None:
        """The Gram of a map's inputs (x, 1), (..., n + 1, n + 1), by the name of its tensor; None if it has none."""
        key = f"{self.axes.get(name)}.gram"
        return self[key] if key in self.tensors else None


def behind_norm(gram: Tensor, linear: LinearMap, gain: Tensor | None, shift: Tensor | None) -> Tensor:
    """The Gram of what a map reads, ``x = D x_hat + c``, from that of a norm's normalised output, in float64.

    Args:
        gram: of (x_hat, 1), (..., n + 1, n + 1).
        gain: D, of the norm that feeds the map, the offset added.
        shift: c.

    Raises:
        StatisticsError: there is no gain.
    """
    if gain is None:
        problem = f"'{linear.info.name}' is fed by a norm whose gain is missing"
        raise StatisticsError(problem, remedy="the checkpoint is incomplete")
    gains, shift = along_inputs(linear, gain.double(), None if shift is None else shift.double())
    gains, shift = torch.nn.functional.pad(gains, (0, 1), value=1.0), torch.nn.functional.pad(shift, (0, 1))
    scaled = gains[:, None] * gram.double() * gains
    means, share = scaled[..., -1], scaled[..., -1, -1]  # the latter is one, or zero where no row was seen
    crossed = means[..., :, None] * shift
    return scaled + crossed + crossed.mT + share[..., None, None] * torch.outer(shift, shift)


def first_readers(axes: Mapping[str, str]) -> dict[str, str]:
    """The first map that reads each input, by (block, axis)."""
    return {axis: name for name, axis in reversed([*axes.items()])}


def _head(tensors: Tensors, meta: Mapping[str, str]) -> bytes:
    """The beginning of a safetensors file with these tensors in the order of their names; the same on every run."""
    head: dict[str, Any] = {"__metadata__": meta}
    begin = 0
    for key in sorted(tensors):
        shape, dtype = tensors.shapes[key], tensors.dtypes[key]
        end = begin + torch.Size(shape).numel() * dtype.itemsize
        head[key] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(head, separators=(",", ":"), sort_keys=True).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def has_format(path: str, name: str) -> bool:
    """Whether a safetensors file says that it has a format of ours, whatever its number."""
    try:
        with safe_open(path, framework="pt") as file:
            return str((file.metadata() or {}).get("format")).startswith(name.rpartition(".")[0])
    except (OSError, SafetensorError):
        return False
