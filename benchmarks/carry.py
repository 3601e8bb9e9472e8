"""What arrives of fine-tunes and a LoRA carried to another base: the shipped Llamas, on texts that training never saw.

    python benchmarks/carry.py            weights and refit, to benchmarks/results/carry.json
    python benchmarks/carry.py scale      scales of each block, to benchmarks/results/carry-scale.json
    python benchmarks/carry.py distil     50 steps from the refit on, to benchmarks/results/carry-distil.json

Llama 0's fine-tunes for English and C, and its LoRA for English, go to Llama 1 (another seed): added as they are, moved
by the alignment of weights, and refitted on 64 sequences that the fine-tune wrote itself. Losses in nats a byte on the
first 160 windows of the shipped texts; `own` is the new base's loss on Python, its own domain.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from typing import Any

import torch
from record import Table

from rotation_merge.carrying.config import TransferConfig
from rotation_merge.carrying.transfer import carry
from rotation_merge.matching.options import NOTHING, AlignConfig
from rotation_merge.run import demo
from rotation_merge.run.data import Data
from rotation_merge.run.evaluate import evaluate
from rotation_merge.run.functions import load

NAMES = {
    "llama-0-english": "fine-tune for English",
    "llama-0-c": "fine-tune for C",
    "llama-0-lora-english": "LoRA for English",
}
ASKED = next((word for word in ("scale", "distil") if word in sys.argv[1:]), "")
WHOLE = AlignConfig(heads="permutation", residual="rotation")
OLD, NEW = (str(demo.CHECKPOINTS / name) for name in ("llama-0", "llama-1"))


def loss(model: str, text: str) -> float:
    parts = demo.windows(text)[:160].split(32)
    return evaluate(load(model), Data([{"input_ids": p, "labels": p} for p in parts], "next token", 160))[0]


def ways(work: str, out: str, adapter: bool) -> dict[str, Any]:
    """Ways to carry, as functions that write to `out`."""

    def weights(match: AlignConfig, scale: float) -> Any:
        return lambda: carry({out: work}, OLD, NEW, TransferConfig(scale=scale, match=match))

    def refit(lora: int, scale: float | None, steps: int = 0) -> Any:
        method = "distil" if steps else "refit"
        config = TransferConfig(method, scale, steps=steps or 50, rank=lora, match=WHOLE)
        return lambda: carry({out: work}, OLD, NEW, config)

    def scaled() -> Any:
        return carry({out: work}, OLD, NEW, TransferConfig(scale="auto", match=WHOLE))

    scale = 0.5 if adapter else 0.75
    moved = {f"weights, scale {scale}": weights(WHOLE, scale)}
    if ASKED == "scale":
        return {**moved, "weights, scale of each block by held-out samples": scaled}
    if ASKED == "distil":
        what = {0: "" if adapter else "all weights", 16: "an adapter of rank 16"}
        return {
            f"{what[lora]}{', ' * bool(what[lora])}{words}": refit(lora, scale, 50)
            for lora in what
            if not (adapter and lora)
            for words, scale in {"scale 1": 1.0, "scale by held-out samples, own text kept": None}.items()
        }
    found = {
        f"added as it is, scale {scale}": weights(NOTHING, scale),
        **moved,
        "refit, scale 1": refit(0, 1.0),
        "refit, scale by held-out samples": refit(0, None),
    }
    return found if adapter else {**found, "refit as an adapter of rank 16, scale 1": refit(16, 1.0)}


def main() -> None:
    torch.set_num_threads(1)
    table = Table(f"carry-{ASKED}" if ASKED else "carry")
    for name, text in (("llama-0-english", "english"), ("llama-0-c", "c"), ("llama-0-lora-english", "english")):
        work = str(demo.CHECKPOINTS / name)
        adapter = "lora" in name
        title = NAMES[name]
        old, new, own = loss(OLD, text), loss(NEW, text), loss(NEW, "python")
        tuned = loss(f"{OLD}+{work}" if adapter else work, text)
        table.add(row(title, "the new base alone", new, "", own, ""))
        with tempfile.TemporaryDirectory() as scratch:
            for number, (way, transfer) in enumerate(ways(work, f"{scratch}/out", adapter).items()):
                began = time.perf_counter()
                transfer()
                seconds = time.perf_counter() - began
                out = os.path.join(scratch, str(number))
                os.rename(f"{scratch}/out", out)
                model = f"{NEW}+{out}" if os.path.exists(f"{out}/adapter_config.json") else out
                found = loss(model, text)
                share = f"{(new - found) / (old - tuned):.0%}"
                table.add(row(title, way, found, share, loss(model, "python"), f"{seconds:.0f}"))


def row(carried: str, how: str, found: float, share: str, own: float, seconds: str) -> dict[str, str]:
    return {
        "carried": carried,
        "how": how,
        "loss": f"{found:.3f}",
        "share of the gain at home": share,
        "own domain": f"{own:.3f}",
        "seconds": seconds,
    }


if __name__ == "__main__":
    main()
