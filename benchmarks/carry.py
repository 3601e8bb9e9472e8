"""What arrives of fine-tunes and a LoRA carried to another base: the shipped Llamas, on texts that training never saw.

    python benchmarks/carry.py            weights and refit, to benchmarks/results/carry.json
    python benchmarks/carry.py distil     50 steps from the refit on, to benchmarks/results/carry-distil.json

Llama 0's fine-tunes for English and C, and its LoRA for English, go to Llama 1 (another seed): added as they are, moved
by the alignment of weights, and refitted on 64 sequences that the fine-tune wrote itself. Losses in nats a byte on the
first 160 windows of the shipped texts; `own` is the new base's loss on Python, its own domain.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from merging import STILL, WHOLE
from record import Table
from shipped import CHECKPOINTS, loss

import rotation_merge as rm

OLD, NEW = (str(CHECKPOINTS / name) for name in ("llama-0", "llama-1"))
TUNED = (
    ("fine-tune for English", "llama-0-english", "english"),
    ("fine-tune for C", "llama-0-c", "c"),
    ("LoRA for English", "llama-0-lora-english", "english"),
)
"""Title, checkpoint, text."""
TOLD = "scale by held-out samples"


def weights(scale: float, groups: dict[str, Any]) -> rm.TransferConfig:
    return rm.TransferConfig(scale=scale, match=rm.AlignConfig(**groups))


def sampled(method: str, scale: float | None, rank: int = 0) -> rm.TransferConfig:
    return rm.TransferConfig(method, scale, rank=rank, match=rm.AlignConfig(**WHOLE))


def ways(distil: bool, adapter: bool) -> dict[str, rm.TransferConfig]:
    """Ways to carry, by words."""
    scale = 0.5 if adapter else 0.75
    if distil:
        ranks = {"": 0} if adapter else {"all weights, ": 0, "an adapter of rank 16, ": 16}
        scales = {"scale 1": 1.0, f"{TOLD}, own text kept": None}
        return {into + by: sampled("distil", scales[by], ranks[into]) for into in ranks for by in scales}
    refits = {"refit, scale 1": sampled("refit", 1.0), f"refit, {TOLD}": sampled("refit", None)}
    if not adapter:
        refits["refit as an adapter of rank 16, scale 1"] = sampled("refit", 1.0, 16)
    added, moved = (weights(scale, groups) for groups in (STILL, WHOLE))
    return {f"added as it is, scale {scale}": added, f"weights, scale {scale}": moved, **refits}


def carried(title: str, text: str, tuned: str, distil: bool) -> Iterator[dict[str, str]]:
    """A row for the new base alone, and one for each way to carry a fine-tune (a model or an adapter) to it."""
    adapter = (Path(tuned) / "adapter_config.json").exists()
    start = loss(NEW, text)
    gain = loss(OLD, text) - loss(f"{OLD}+{tuned}" if adapter else tuned, text)
    yield row(title, "the new base alone", start, "", loss(NEW, "python"), "")
    for how, config in ways(distil, adapter).items():
        with tempfile.TemporaryDirectory() as scratch:
            out, began = Path(scratch, "out"), time.process_time()
            rm.transfer(tuned, OLD, NEW, config).save_pretrained(out)
            seconds = f"{time.process_time() - began:.0f}"
            model = f"{NEW}+{out}" if (out / "adapter_config.json").exists() else str(out)
            found = loss(model, text)
            share = f"{(start - found) / gain:.0%}"
            yield row(title, how, found, share, loss(model, "python"), seconds)


def row(title: str, how: str, found: float, share: str, own: float, seconds: str) -> dict[str, str]:
    return {
        "carried": title,
        "how": how,
        "loss": f"{found:.3f}",
        "share of the gain at home": share,
        "own domain": f"{own:.3f}",
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("distil",))
    what = parser.parse_args().what
    torch.set_num_threads(1)
    table = Table(f"carry-{what}" if what else "carry")
    for title, name, text in TUNED:
        for cells in carried(title, text, str(CHECKPOINTS / name), bool(what)):
            table.add(cells)


if __name__ == "__main__":
    main()
