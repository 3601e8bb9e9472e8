"""Two ViTs that know five digits each: can one merge know all ten?

    python benchmarks/skills.py [--pairs 4]

Parents are trained here (half a minute a pair, `train_checkpoints.py`): seed 2n on the digits 0 to 4, seed 2n + 1 on
5 to 9. The merges see training images without labels, each of known origin: it belongs to the parent that knows its
digit. Accuracy on the 540 test digits, all ten classes, mean over the pairs; each merge runs through mergekit's
`run_merge` in this process, on one thread. The ensemble is the mean of both parents' probabilities.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from merging import STILL, WHOLE, merge, quiet
from record import Table
from shipped import digits as all_digits
from shipped import load
from torch import Tensor
from train_checkpoints import known, save, train_vit

HALVES = ("01234", "56789")
REFIT = {"delegate": "refit", "targets": "own", "ridge": 0.001}
MERGES: dict[str, tuple[int, dict[str, Any]]] = {
    "mean, not aligned": (0, {"delegate": "linear", **STILL}),
    "mean, residual rotation": (0, {"delegate": "linear", **WHOLE}),
    "refit, 300 images, not aligned, from the average": (300, {**REFIT, **STILL}),
    "refit, 300 images, not aligned, from the anchor": (300, {**REFIT, **STILL, "start": "anchor"}),
    "refit, 300 images, residual rotation, from the average": (300, {**REFIT, **WHOLE}),
    "refit, all 1257 images, not aligned, from the average": (1257, {**REFIT, **STILL}),
    "refit, all 1257 images, not aligned, from the anchor": (1257, {**REFIT, **STILL, "start": "anchor"}),
}
"""By words: how many images in all, and the parameters of the recipe."""

Right = tuple[float, float, float]
"""Share of right answers: all ten classes, images of the first five, of the last five (among all ten classes)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=4)
    pairs = parser.parse_args().pairs
    quiet()
    found: dict[str, list[tuple[Right, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="skills-") as folder:
        for pair in range(pairs):
            for words, cells in one_pair(Path(folder) / str(pair), pair).items():
                found[words].append(cells)
    table = Table("skills", f"{pairs} pairs")
    for words, some in found.items():
        every, first, last = (fmean(right[i] for right, _ in some) for i in range(3))
        worst, seconds = min(right[0] for right, _ in some), fmean(took for _, took in some)
        cells = {"all ten": f"{every:.1%}", "worst pair": f"{worst:.1%}", "0 to 4": f"{first:.1%}"}
        cells |= {"5 to 9": f"{last:.1%}", "processor time": f"{seconds:.1f} s" if seconds else ""}
        table.add({"model": words, **cells})


def one_pair(folder: Path, pair: int) -> dict[str, tuple[Right, float]]:
    """By words: what is right, and processor seconds of the merge."""
    parents = []
    for number, digits in enumerate(HALVES):
        torch.manual_seed(2 * pair + number)
        path = folder / digits
        save(train_vit(2 * pair + number, None, digits), path)
        parents.append(path)
    answers = [probabilities(path) for path in parents]
    found = {f"parent that knows {d[0]} to {d[-1]}": (right(a), 0.0) for d, a in zip(HALVES, answers, strict=True)}
    found["ensemble of both parents"] = right((answers[0] + answers[1]) / 2), 0.0
    for words, (images, parameters) in MERGES.items():
        began = time.process_time()
        out = merged(parents, folder, images, parameters, pair)
        found[words] = right(probabilities(out)), time.process_time() - began
    return found


def merged(parents: list[Path], folder: Path, images: int, parameters: dict[str, Any], seed: int) -> Path:
    """The merge of two parents, refitted where there are images."""
    pixels, labels, _, _ = all_digits()
    chosen = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(seed))[:images]
    models: dict[Path | str, dict[str, Any]] = {path: {"weight": 0.5} for path in parents}
    for path, digits in zip(parents, HALVES, strict=True):
        if images:
            mine = chosen[known(labels[chosen], digits)]
            file = folder / f"{digits}-{images}.npz"
            np.savez(file, pixel_values=pixels[mine].numpy())
            models[path] |= {"data": str(file), "samples": len(mine)}
    return merge(parents[0], models, folder / "merged", parameters)


@torch.no_grad()
def probabilities(path: Path) -> Tensor:
    """On the test digits, (540, 10)."""
    return load(path)(pixel_values=all_digits()[2]).logits.softmax(-1)


def right(answers: Tensor) -> Right:
    labels = all_digits()[3]
    hits = (answers.argmax(-1) == labels).float()
    return float(hits.mean()), *(float(hits[known(labels, digits)].mean()) for digits in HALVES)  # type: ignore[return-value]


if __name__ == "__main__":
    main()
