"""Loss on the straight path between two Llamas of different seeds that come with the package, aligned and not.

    python benchmarks/path.py

The picture on the first screen of the README is drawn from what this writes (`python docs/make_pictures.py`).
"""

from __future__ import annotations

import json
import subprocess

from record import Table

from rotation_merge.run.demo import CHECKPOINTS

OPTIONS = ["--data", "demo:python", "--limit", "128", "--points", "11", "--heads", "permutation"]


def main() -> None:
    pair = [str(CHECKPOINTS / f"llama-{seed}") for seed in (0, 1)]
    command = ["rotation-merge", "barrier", *pair, *OPTIONS, "--residual", "rotation", "--json"]
    curves = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)[0]["curves"]
    table = Table("path", "nats a byte of Python text; t from the anchor to the donor")
    plain, aligned = curves[0], curves[-1]
    for t, before, after in zip(plain["t"], plain["loss"], aligned["loss"], strict=True):
        table.add({"t": f"{t:.1f}", "plain": f"{before:.3f}", "aligned": f"{after:.3f}"})


if __name__ == "__main__":
    main()
