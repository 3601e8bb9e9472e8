"""Matrices in slices of their rows: what they give is what the whole matrix gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rotation_merge.averaging.sliced import SlicedMatrix, combined


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def sliced(matrix: Tensor, step: int) -> SlicedMatrix:
    parts = [slice(start, start + step) for start in range(0, len(matrix), step)]
    return SlicedMatrix(lambda part: matrix[part], parts)


@pytest.mark.parametrize("step", [3, 7, 50])
def test_the_decomposition_of_slices(step: int) -> None:
    """Slices of fewer rows than columns, of more, and one of all; singular values from 1 to 1e-10."""
    matrix = random(50, 6) * torch.logspace(0, -10, 6, dtype=torch.float64)
    left_vectors, values, right = sliced(matrix, step).svd()
    u = left_vectors(6).whole()
    torch.testing.assert_close(values, torch.linalg.svdvals(matrix), rtol=1e-5, atol=0)
    torch.testing.assert_close(u * values @ right, matrix, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(u.mT @ u, torch.eye(6, dtype=u.dtype), atol=1e-5, rtol=0)
    torch.testing.assert_close(left_vectors(2).whole(), u[:, :2])
    left_vectors, values, _ = sliced(torch.zeros(50, 6, dtype=torch.float64), step).svd()
    assert torch.isfinite(left_vectors(6).whole()).all()
    assert not values.any()


@pytest.mark.parametrize("step", [3, 50])
def test_the_polar_factor_of_slices(step: int) -> None:
    """Orthonormal and nearest; of less than full rank it is zero where the matrix is."""
    matrix = random(50, 6)
    factor = sliced(matrix, step).polar().whole()
    torch.testing.assert_close(factor.mT @ factor, torch.eye(6, dtype=factor.dtype), atol=1e-12, rtol=0)
    stretch = factor.mT @ matrix
    torch.testing.assert_close(stretch, stretch.mT)
    assert torch.linalg.eigvalsh(stretch).min() > 0
    twice = combined([sliced(matrix, step), sliced(matrix, step)], lambda rows: torch.cat(rows, 1))
    torch.testing.assert_close(twice.polar().whole(), torch.cat([factor, factor], 1) / 2**0.5)
    wide = SlicedMatrix.of(torch.cat([matrix, matrix], 1).mT).polar().whole()
    torch.testing.assert_close(wide.mT, torch.cat([factor, factor], 1) / 2**0.5)


def test_sums_and_products_of_slices() -> None:
    one, two, right = random(50, 6), random(50, 6, seed=1), random(6, 4, seed=2)
    first, second = sliced(one, 8), sliced(two, 8)
    torch.testing.assert_close((first @ right * 3.0).whole(), 3 * one @ right)
    torch.testing.assert_close(
        combined([first, second], lambda rows: 0.5 * rows[0] + 2 * rows[1]).whole(), 0.5 * one + 2 * two
    )
    torch.testing.assert_close(first.gram(), one.mT @ one)
    assert first.norm == pytest.approx(float(one.norm()))
