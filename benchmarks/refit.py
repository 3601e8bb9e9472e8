"""Refit: what it gains, in how long.

    python benchmarks/refit.py vits checkpoints            six pairs of ViTs with one skill
    python benchmarks/refit.py llamas checkpoints          two Llamas with one skill, without data

Checkpoints are those of `train_checkpoints.py`. ViTs are measured by accuracy on the 540 test digits, Llamas by nats a
byte of 160 windows of 128 held-out bytes of each domain. Samples are training images, synthetic ones, or texts that the
models write themselves; none is held-out data. Each merge runs through mergekit's `run_merge` in this process, on one
thread; seconds are processor time.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from merging import STILL, WHOLE, halves, merge, quiet
from record import Table
from shipped import accuracy, digits, loss

SCRATCH = tempfile.TemporaryDirectory(prefix="refit-")
NUMBERS = itertools.count()


def place(ending: str = "") -> str:
    """Where nothing is yet."""
    return str(Path(SCRATCH.name, f"{next(NUMBERS)}{ending}"))


def merged(paths: list[str], **parameters: Any) -> tuple[str, float]:
    """Half of each of two checkpoints: where it is, and the seconds it took."""
    out, began = place(), time.process_time()
    merge(paths[0], halves(*paths), out, parameters)
    return out, time.process_time() - began


def vits(root: Path) -> None:
    """Seeds of one task: the mean and the worst of six pairs."""
    table, pixels = Table("refit-vits"), digits()[0]
    chosen = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))[:300]
    images = place(".npz")
    np.savez(images, pixel_values=pixels[chosen].numpy())
    given: dict[str, Any] = {"delegate": "refit", "ridge": 0.001, "data": images, "samples": 300}
    made = {**given, "data": "synthetic", "samples": 2048}
    variants: dict[str, dict[str, Any]] = {
        "mean, aligned": {"delegate": "linear"},
        "refit, 300 images": given,
        "refit, 300 images, not rescaled": {**given, "scaling": False},
        "refit, 300 images, not aligned": {**given, **STILL, "residual": "none"},
        "refit, 2048 synthetic images, not rescaled": {**made, "scaling": False},
    }
    pairs = list(itertools.combinations([str(root / f"vit-{seed}") for seed in range(4)], 2))
    parents = [accuracy(path) for path in dict.fromkeys(itertools.chain(*pairs))]
    table.add({"merge": "parents", **spread(parents), "processor time": ""})
    for words, parameters in variants.items():
        done = [merged(list(pair), **{**WHOLE, **parameters}) for pair in pairs]
        found = spread([accuracy(out) for out, _ in done])
        table.add({"merge": words, **found, "processor time": f"{fmean(took for _, took in done):.1f} s"})


def spread(found: list[float]) -> dict[str, str]:
    return {"accuracy, mean": f"{fmean(found):.1%}", "worst": f"{min(found):.1%}"}


def llamas(root: Path) -> None:
    """Two seeds of one task: barrier at the middle."""
    variants: dict[str, dict[str, Any]] = {"mean, aligned": {"delegate": "linear"}}
    for count, targets in ((32, "own"), (32, "mean"), (64, "mean"), (256, "mean")):
        words = f"refit, {count} texts of each model, targets: {targets}"
        variants[words] = {"delegate": "refit", "data": "self", "samples": count, "targets": targets}
    table, names = Table("refit-llamas"), [str(root / name) for name in ("llama-0", "llama-1")]
    ends = fmean(loss(name, "python") for name in names)
    for words, parameters in variants.items():
        out, seconds = merged(names, **WHOLE, **parameters)
        middle = loss(out, "python")
        cells = {"loss": f"{middle:.3f}", "barrier": f"{middle - ends:.3f}", "processor time": f"{seconds:.1f} s"}
        table.add({"merge": words, **cells})


TASKS = {task.__name__: task for task in (vits, llamas)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("checkpoints", type=Path)
    given = parser.parse_args()
    quiet()
    with SCRATCH:
        TASKS[given.task](given.checkpoints)


if __name__ == "__main__":
    main()
