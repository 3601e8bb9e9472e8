"""Two Llamas of other seeds, half and half, under larger and larger groups.

    python benchmarks/independent.py

Loss of the middle and barrier by `rotation-merge barrier`, relative distance over all weights. And the loss
on the path between two Llamas, aligned and not: `docs/make_pictures.py` draws the picture of the README from it.
"""

from __future__ import annotations

import json
from typing import Any

from merging import command
from record import Table
from shipped import CHECKPOINTS

import rotation_merge as rm
from rotation_merge.model.open import open_model

LOCAL = ["--heads", "permutation"]
SIGNED, ROTATION = (["--residual", group] for group in ("signed_permutation", "rotation"))
WORDS = {
    "heads, neurons, scales": LOCAL,
    "the same and signed permutations of the residual stream": [*LOCAL, *SIGNED],
    "the same and a rotation of the residual stream": [*LOCAL, *ROTATION],
}
PYTHON = ["--data", "demo:python", "--limit", "128"]
PAIR = [str(CHECKPOINTS / f"llama-{seed}") for seed in (0, 1)]


def run(*arguments: str) -> Any:
    return json.loads(command(*arguments, "--json"))


def main() -> None:
    table = Table("independent-llama")
    for i, (title, options) in enumerate(WORDS.items()):
        plain, aligned = run("barrier", *PAIR, *PYTHON, "--points", "5", *options)[0]["curves"]
        alignment = rm.align(*PAIR, **{flag[2:]: word for flag, word in zip(options[::2], options[1::2], strict=True)})
        anchor = alignment.apply_anchor(PAIR[0])
        if i == 0:
            table.add(row("none", plain, distance(anchor, open_model(PAIR[1]))))
        table.add(row(title, aligned, distance(anchor, alignment.apply(PAIR[1]))))
    path()


def distance(anchor: rm.View, donor: rm.View) -> float:
    """Relative, over all weights."""
    pairs = [(x.double(), donor[name].double()) for name, x in anchor.items()]
    return float(sum((x - y).square().sum() for x, y in pairs) / sum(x.square().sum() for x, _ in pairs)) ** 0.5


def row(words: str, curve: dict[str, Any], distance: float) -> dict[str, str]:
    middle = curve["t"].index(0.5)
    line = [(1 - t) * curve["loss"][0] + t * curve["loss"][-1] for t in curve["t"]]
    barrier = max(loss - straight for loss, straight in zip(curve["loss"], line, strict=True))
    return {
        "alignment": words,
        "loss in the middle": f"{curve['loss'][middle]:.3f}",
        "barrier": f"{barrier:.3f}",
        "relative distance": f"{distance:.3f}",
    }


def path() -> None:
    plain, aligned = run("barrier", *PAIR, *PYTHON, "--points", "11", *LOCAL, *ROTATION)[0]["curves"]
    table = Table("path", "nats a byte of Python text; t from the anchor to the donor")
    for t, before, after in zip(plain["t"], plain["loss"], aligned["loss"], strict=True):
        table.add({"t": f"{t:.1f}", "plain": f"{before:.3f}", "aligned": f"{after:.3f}"})


if __name__ == "__main__":
    main()
