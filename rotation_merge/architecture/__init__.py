"""Architectures as data: one JSON file per family maps each tensor axis to its space."""

from rotation_merge.architecture.model import Architecture, Axis, Block, Part, Space, TensorInfo
from rotation_merge.architecture.registry import families, find, resolve

__all__ = ["Architecture", "Axis", "Block", "Part", "Space", "TensorInfo", "families", "find", "resolve"]
