"""Architectures as data: one JSON file a family says which axis of which tensor lives in which space."""

from rotation_merge.architecture.model import Architecture, Axis, Block, Part, Space, TensorInfo
from rotation_merge.architecture.registry import families, find, register, resolve

__all__ = ["Architecture", "Axis", "Block", "Part", "Space", "TensorInfo", "families", "find", "register", "resolve"]
