"""A parent's twin: the same function in other coordinates, every space moved by a random element of its group."""

from __future__ import annotations

from pathlib import Path

import torch

from rotation_merge.matching.aligned_output import write_aligned
from rotation_merge.matching.alignment import Alignment
from rotation_merge.matching.gauge import random_gauge
from rotation_merge.matching.open_pair import open_pair
from rotation_merge.matching.options import AlignConfig
from rotation_merge.matching.run import Run
from rotation_merge.model.writing import Storage


def make_twin(parent: Path, out: Path) -> None:
    """Write the twin of a checkpoint: heads and neurons reordered, rotated, rescaled; the residual stream rotated."""
    options = AlignConfig(heads="permutation", residual="rotation")
    pair = open_pair(str(parent), str(parent), options)
    moves = random_gauge(pair.architecture, options, torch.Generator().manual_seed(0))
    report = Run().report(parent, "none", "")
    alignment = Alignment(moves, folded=tuple(pair.architecture.streams))
    write_aligned(pair, alignment, report, str(out), Storage(dtype="float32"))
