"""Models of other seeds, half and half: what groups, activations and refits gain, in how long.

    python benchmarks/independent.py groups                     two Llamas under larger and larger groups
    python benchmarks/independent.py match_on checkpoints       three pairs of Llamas, maps chosen by activations
    python benchmarks/independent.py refit_vits checkpoints     six pairs of ViTs
    python benchmarks/independent.py refit_llamas checkpoints   two Llamas, without data

Checkpoints are those of `train_checkpoints.py`; `groups` takes Llamas that come with the package. Losses are nats a
byte of windows of 128 bytes of held-out Python, accuracies those on the 540 test digits, seconds those of the
processor, on one thread.

`groups`: loss of the middle and barrier, as `rotation-merge barrier` gives them, and relative distance over all
weights; and the loss on the path between the two, aligned and not: `docs/make_pictures.py` draws the picture of the
README from it. `match_on`: residual rotation and head order, matched on weights, on activations of 64
sequences of which each model writes half, and on both; the barrier at the middle. Refits: samples are training images,
synthetic ones, or texts that the models write themselves; none is held-out data. Each merge runs through mergekit's
`run_merge` in this process.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from merging import STILL, WHOLE, accuracy, halves, loss, merge, quiet
from record import Table

import rotation_merge as rm
from rotation_merge.model.open import open_model
from rotation_merge.run.demo import CHECKPOINTS, digits
from rotation_merge.run.evaluate import Curve

ALIGNMENTS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "heads, neurons, scales": {"heads": "permutation"},
    "the same and signed permutations of the residual stream": {**WHOLE, "residual": "signed_permutation"},
    "the same and a rotation of the residual stream": WHOLE,
}
SCRATCH = tempfile.TemporaryDirectory(prefix="independent-")


def ends(pair: Sequence[Path], options: dict[str, Any] | None) -> Sequence[rm.View]:
    """Two models, in the same coordinates where options of an alignment are given."""
    if options is None:
        return [open_model(path) for path in pair]
    alignment = rm.align(*pair, **options)
    return alignment.apply_anchor(pair[0]), alignment.apply(pair[1])


def groups(_: Path) -> None:
    table, pair = Table("independent-llama"), [CHECKPOINTS / f"llama-{seed}" for seed in (0, 1)]

    def curve(options: dict[str, Any] | None, points: int) -> Curve:
        return rm.barrier(*ends(pair, options), "demo:python", rm.BarrierConfig(points=points, limit=128))

    for words, options in ALIGNMENTS.items():
        losses = curve(options, 5)
        cells = {"loss in the middle": f"{losses.loss[losses.middle()]:.3f}", "barrier": f"{losses.barrier():.3f}"}
        table.add({"alignment": words, **cells, "relative distance": f"{relative(*ends(pair, options)):.3f}"})
    plain, aligned = (curve(options, 11) for options in (None, WHOLE))
    table = Table("path", "nats a byte of Python text; t from the anchor to the donor")
    for t, before, after in zip(plain.t, plain.loss, aligned.loss, strict=True):
        table.add({"t": f"{t:.1f}", "plain": f"{before:.3f}", "aligned": f"{after:.3f}"})


def relative(anchor: rm.View, donor: rm.View) -> float:
    """The distance over all weights over the anchor's norm."""
    pairs = [(x.double(), donor[name].double()) for name, x in anchor.items()]
    return float(sum((x - y).square().sum() for x, y in pairs) / sum(x.square().sum() for x, _ in pairs)) ** 0.5


def match_on(root: Path) -> None:
    table, pairs = Table("match-on"), list(itertools.combinations(range(3), 2))
    for how in ("weights", "activations", "both"):
        options = {**WHOLE, "match_on": how, "samples": None if how == "weights" else "self"}
        began, barriers = time.process_time(), dict[str, float]()
        for a, b in pairs:
            models = ends([root / f"llama-{seed}" for seed in (a, b)], options)
            first, middle, last = rm.barrier(*models, "demo:python", rm.BarrierConfig(points=3, limit=80)).loss
            barriers[f"Llamas {a} and {b}"] = middle - (first + last) / 2
        seconds = (time.process_time() - began) / len(pairs)
        cells = {words: f"{value:.3f}" for words, value in barriers.items()}
        table.add({"match_on": how, **cells, "mean": f"{fmean(barriers.values()):.3f}", "seconds": f"{seconds:.0f}"})


def merged(paths: list[str], **parameters: Any) -> tuple[str, float]:
    """Half of each of two checkpoints: where it is, and the seconds it took."""
    out, began = tempfile.mkdtemp(dir=SCRATCH.name), time.process_time()
    merge(paths[0], halves(*paths), out, parameters)
    return out, time.process_time() - began


def refit_vits(root: Path) -> None:
    """Seeds of one task: the mean and the worst of six pairs."""
    table, pixels = Table("refit-vits"), digits()[0]
    chosen = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))[:300]
    images = str(Path(SCRATCH.name, "images.npz"))
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


def spread(accuracies: list[float]) -> dict[str, str]:
    return {"accuracy, mean": f"{fmean(accuracies):.1%}", "worst": f"{min(accuracies):.1%}"}


def refit_llamas(root: Path) -> None:
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


TASKS = {task.__name__: task for task in (groups, match_on, refit_vits, refit_llamas)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("checkpoints", type=Path, nargs="?", default=Path("checkpoints"))
    asked = parser.parse_args()
    quiet()
    with SCRATCH:
        TASKS[asked.task](asked.checkpoints)


if __name__ == "__main__":
    main()
