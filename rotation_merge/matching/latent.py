"""Matching a latent: one element for the coordinates between the map that writes it and those that read it."""

from __future__ import annotations

import torch

from rotation_merge.architecture.model import Space
from rotation_merge.matching.options import AlignConfig
from rotation_merge.matching.sides import Side
from rotation_merge.symmetry.admitted import latent
from rotation_merge.symmetry.latent import LatentTransform


def match_latent(space: Space, sides: list[Side], options: AlignConfig) -> LatentTransform:
    """The best element: an assignment of coordinates with their signs, or Procrustes where gains are folded."""
    group = latent(space, options)
    if all(torch.equal(side.anchor, side.donor) for side in sides):
        return group.identity()
    products = torch.zeros(group.size, group.size, dtype=torch.float64)
    gains = torch.zeros_like(products)
    for side in sides:
        product = side.anchor.double() @ side.donor.to(side.anchor.device).double().T
        (gains if side.role == "gain" else products).add_(product.cpu())
    return group.solve(products, gains)
