"""What averages gain where maps are chosen by activations: three pairs of independent Llamas, half and half.

    python benchmarks/match_on.py checkpoints      to benchmarks/results/match-on.json

The checkpoints are those of benchmarks/train_checkpoints.py. Residual rotation and head order, matched on weights, on
activations of 64 sequences of which each model writes half, and on both. The barrier is that at the middle, in nats a
byte, over 80 windows of held-out Python; seconds are of the processor.
"""

from __future__ import annotations

import argparse
import itertools
import time
from pathlib import Path
from statistics import fmean

from merging import WHOLE
from record import Table
from shipped import loss

import rotation_merge as rm

PAIRS = {f"Llamas {a} and {b}": (f"llama-{a}", f"llama-{b}") for a, b in itertools.combinations(range(3), 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", type=Path)
    folder = parser.parse_args().checkpoints
    table = Table("match-on")
    for how in ("weights", "activations", "both"):
        began = time.process_time()
        barriers = {words: barrier(*(folder / name for name in pair), how) for words, pair in PAIRS.items()}
        seconds = (time.process_time() - began) / len(PAIRS)
        cells = {words: f"{value:.3f}" for words, value in barriers.items()}
        table.add({"match_on": how, **cells, "mean": f"{fmean(barriers.values()):.3f}", "seconds": f"{seconds:.0f}"})


def barrier(anchor: Path, donor: Path, how: str) -> float:
    """At the middle of two models."""
    alignment = rm.align(anchor, donor, match_on=how, samples=None if how == "weights" else "self", **WHOLE)
    middle = rm.average([alignment.apply_anchor(anchor), alignment.apply(donor)])
    return loss(middle, "python", count=80) - fmean(loss(model, "python", count=80) for model in (anchor, donor))


if __name__ == "__main__":
    main()
