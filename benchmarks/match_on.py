"""What averages gain where maps are chosen by activations: three pairs of independent Llamas, half and half.

    python benchmarks/match_on.py checkpoints      to benchmarks/results/match-on.json

The checkpoints are those of benchmarks/train_checkpoints.py. Residual rotation and head order, matched on weights, on
activations of 64 sequences of which each model writes half, and on both. The barrier is that at the middle, in nats a
byte, over 80 windows of held-out Python; seconds are of the processor, running the models included.
"""

from __future__ import annotations

import argparse
import itertools
import time
from pathlib import Path

import torch
from record import Table

from rotation_merge.carrying.bases import open_bases
from rotation_merge.matching.alignment import Alignment, aligned_source
from rotation_merge.matching.match import Match, match_model
from rotation_merge.matching.match_on import SampleMatcher
from rotation_merge.matching.options import MATCH_ON, WEIGHTS, AlignConfig
from rotation_merge.run import demo
from rotation_merge.run.data import Data
from rotation_merge.run.evaluate import evaluate
from rotation_merge.run.functions import load

OPTIONS = AlignConfig(heads="permutation", residual="rotation")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", type=Path)
    folder = parser.parse_args().checkpoints
    torch.set_num_threads(1)
    table = Table("match-on")
    found: dict[str, list[tuple[float, float]]] = {how: [] for how in MATCH_ON}
    for pair in itertools.combinations(("llama-0", "llama-1", "llama-2"), 2):
        for how in MATCH_ON:
            found[how].append(barrier(*(str(folder / name) for name in pair), how))
    for how, figures in found.items():
        barriers = [one for one, _ in figures]
        each = {"0 and 1": barriers[0], "0 and 2": barriers[1], "1 and 2": barriers[2]}
        mean, seconds = sum(barriers) / len(barriers), sum(one for _, one in figures) / len(figures)
        cells = {f"Llamas {name}": f"{value:.3f}" for name, value in each.items()}
        table.add({"match_on": how, **cells, "mean": f"{mean:.3f}", "seconds": f"{seconds:.0f}"})


def barrier(anchor: str, donor: str, how: str) -> tuple[float, float]:
    """At the middle of two models, and the time that matching takes."""
    windows = demo.windows("python")[:80]
    data = Data([{"input_ids": part, "labels": part} for part in windows.split(40)], "next token", 80)
    bases, model = open_bases(anchor, donor), load(anchor)
    ends = [evaluate(one, data)[0] for one in (model, load(donor))]
    (first, second), architecture = bases.sources, bases.architecture
    began = time.process_time()
    match: Match = match_model if how == WEIGHTS else SampleMatcher(how, anchor, donor)
    alignment = match(architecture, first, second, OPTIONS, None)
    seconds = time.process_time() - began
    moved = aligned_source(architecture, second, alignment)
    folded = aligned_source(architecture, first, Alignment({}, alignment.folded))
    names = [name for name in architecture.named() if name in folded]
    model.load_state_dict({name: (folded[name] + moved[name]) / 2 for name in names}, strict=False)
    return evaluate(model, data)[0] - sum(ends) / 2, seconds


if __name__ == "__main__":
    main()
