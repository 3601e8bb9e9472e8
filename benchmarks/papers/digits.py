"""Pairs of ViTs on scikit-learn's digits, trained from different seeds: what table 2 and figures 3 and 4 are about."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from apparatus import Given
from merges import MATCHINGS, RESIDUAL, Judged, Pair, judged
from shipped import accuracy, images

SAMPLES = 200
"""Training images without labels, for statistics, plans, learned matching and refit."""


def pair(given: Given, seeds: tuple[int, int]) -> Pair:
    batches = images(32 if given.quick else SAMPLES, False, 16 if given.quick else 32)
    scratch = given.scratch / "vit-{}-{}".format(*seeds)
    scratch.mkdir()
    np.savez(scratch / "images.npz", pixel_values=np.concatenate([batch["pixel_values"] for batch in batches]))
    anchor, donor = (given.model(f"vit-{seed}") for seed in seeds)
    learned = (2, "identity") if given.quick else (300, "auto")
    return Pair(anchor, donor, scratch, scratch / "images.npz", batches, *learned)


def pairs(given: Given) -> dict[str, Callable[[], Pair]]:
    return {f"ViTs {a} and {b}": lambda seeds=(a, b): pair(given, seeds) for a, b in given.pairs()}


def accuracies(given: Given) -> Judged:
    """Percent of the 540 test digits, by average and matching, of each pair; a quick run turns no residual stream."""
    matchings = [matching for matching in MATCHINGS if matching != RESIDUAL or not given.quick]
    return judged(given, f"accuracy, {SAMPLES} images", pairs(given), lambda out, _: percent(out), matchings)


def percent(path: Path) -> float:
    return 100 * accuracy(path)
