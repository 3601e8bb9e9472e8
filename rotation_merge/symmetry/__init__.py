"""The symmetry groups: elements act on one dimension, transforms on the axes of a space, groups know the best ones."""

from rotation_merge.symmetry.element import Linear, Monomial
from rotation_merge.symmetry.group import Stats
from rotation_merge.symmetry.transform import ROLES, Space, Transform, orders_of

__all__ = ["ROLES", "Linear", "Monomial", "Space", "Stats", "Transform", "orders_of"]
