"""The pairs of different seeds that come with the package, half and half, under larger and larger groups.

    python benchmarks/independent.py

Loss of the middle and barrier by `rotation-merge barrier`, relative distance by `rotation-merge compare`.
"""

from __future__ import annotations

import json
import subprocess
from typing import Any

from record import Table

from rotation_merge.samples.demo import CHECKPOINTS

LOCAL = ["--heads", "permutation"]
SIGNED, ROTATION = (["--residual", group] for group in ("signed_permutation", "rotation"))
WORDS = {
    "heads, neurons, scales": LOCAL,
    "the same and signed permutations of the residual stream": [*LOCAL, *SIGNED],
    "the same and a rotation of the residual stream": [*LOCAL, *ROTATION],
}
DATA = {"llama": ["--data", "demo:python", "--limit", "128"], "vit": ["--data", "demo:digits"]}


def run(*arguments: str) -> Any:
    done = subprocess.run(["rotation-merge", *arguments, "--json"], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def main() -> None:
    for kind, data in DATA.items():
        pair = [str(CHECKPOINTS / f"{kind}-{seed}") for seed in (0, 1)]
        table = Table(f"independent-{kind}")
        shown = False
        for words, options in WORDS.items():
            if kind == "vit" and "signed" in words:
                continue  # LayerNorm does not let signs pass
            plain, aligned = run("barrier", *pair, *data, "--points", "5", *options)[0]["curves"]
            gap = run("compare", *pair, *options)["gaps"][-1]
            if not shown:
                table.add(row("none", plain, kind, gap["distance_before"]))
                shown = True
            table.add(row(words, aligned, kind, gap["distance_after"]))


def row(words: str, curve: dict[str, Any], kind: str, distance: float) -> dict[str, str]:
    middle = curve["t"].index(0.5)
    line = [(1 - t) * curve["loss"][0] + t * curve["loss"][-1] for t in curve["t"]]
    barrier = max(loss - straight for loss, straight in zip(curve["loss"], line, strict=True))
    value = f"{curve['accuracy'][middle]:.1%}" if kind == "vit" else f"{curve['loss'][middle]:.3f}"
    return {
        "alignment": words,
        "accuracy in the middle" if kind == "vit" else "loss in the middle": value,
        "barrier": f"{barrier:.3f}",
        "relative distance": f"{distance:.3f}",
    }


if __name__ == "__main__":
    main()
