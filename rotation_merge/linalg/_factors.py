"""A similarity given by its factors: single entries in float64, or the whole matrix."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

Pairs = tuple[tuple[Tensor, Tensor], ...]

_GATHERED = 1 << 17  # entries of one factor gathered at a time
_FORMED_ROWS = 1024
_DOUBLE_UP_TO = 4096


@dataclass(frozen=True)
class Factors:
    """C_ij = sum_k <A_k[i], B_k[j]> + |sum_l <S_l[i], T_l[j]>|.

    Attributes:
        plain: the pairs (A_k, B_k), each (n, d_k).
        signed: the pairs (S_l, T_l), each (n, d_l).
    """

    plain: Pairs
    signed: Pairs

    @property
    def pairs(self) -> Pairs:
        """All pairs, plain ones first."""
        return self.plain + self.signed

    @property
    def n(self) -> int:
        """Size of the problem."""
        return int(self.pairs[0][0].shape[0])

    @property
    def width(self) -> int:
        """Multiplications in one entry."""
        return sum(anchor.shape[1] for anchor, _ in self.pairs)

    def equal(self) -> bool:
        """Whether every donor factor equals its anchor factor; then the identity is optimal (Cauchy-Schwarz)."""
        return all(torch.equal(anchor, donor) for anchor, donor in self.pairs)

    def entries(self, rows: Tensor, columns: Tensor) -> Tensor:
        """C[rows, columns] in float64 on the CPU, shape (len(rows),)."""
        plain, signed = _summed(self.plain, rows, columns, len(rows)), _summed(self.signed, rows, columns, len(rows))
        return plain + signed.abs()

    def diagonal(self) -> Tensor:
        """C_ii in float64 on the CPU, shape (n,)."""
        return _summed(self.plain, None, None, self.n) + _summed(self.signed, None, None, self.n).abs()


def _summed(pairs: Pairs, rows: Tensor | None, columns: Tensor | None, count: int) -> Tensor:
    total = torch.zeros(count, dtype=torch.float64)
    for anchor, donor in pairs:
        device = anchor.device
        step = max(1, (_GATHERED if device.type == "cpu" else _GATHERED << 8) // max(1, anchor.shape[1]))
        for start in range(0, count, step):
            part = slice(start, start + step)
            first = anchor[part if rows is None else rows[part].to(device)].double()
            second = donor[part if columns is None else columns[part].to(donor.device)].to(device).double()
            total[part] += torch.linalg.vecdot(first, second).cpu()
    return total


def form(factors: Factors) -> Tensor:
    """C, shape (n, n), on the factors' device: float32, or float64 if all factors are and n is at most 4096."""
    n = factors.n
    double = n <= _DOUBLE_UP_TO and all(side.dtype == torch.float64 for pair in factors.pairs for side in pair)
    dtype = torch.float64 if double else torch.float32
    device = factors.pairs[0][0].device
    plain = [(anchor.to(device, dtype), donor.to(device, dtype)) for anchor, donor in factors.plain]
    signed = [(anchor.to(device, dtype), donor.to(device, dtype)) for anchor, donor in factors.signed]
    formed = torch.zeros(n, n, dtype=dtype, device=device)
    for start in range(0, n, _FORMED_ROWS):
        part = slice(start, start + _FORMED_ROWS)
        rows = formed[part]
        for anchor, donor in signed:
            rows.addmm_(anchor[part], donor.T)
        rows.abs_()
        for anchor, donor in plain:
            rows.addmm_(anchor[part], donor.T)
    return formed
