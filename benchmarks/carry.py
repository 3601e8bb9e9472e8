"""What arrives of fine-tunes and a LoRA carried to another base: the shipped Llamas, on texts that training never saw.

    python benchmarks/carry.py            weights and refit, to benchmarks/results/carry.json
    python benchmarks/carry.py scale      scales of each block, to benchmarks/results/carry-scale.json
    python benchmarks/carry.py distil     50 steps from the refit on, to benchmarks/results/carry-distil.json

Llama 0's fine-tunes for English and C, and its LoRA for English, go to Llama 1 (another seed): added as they are, moved
by the alignment of weights, and refitted on 64 sequences that the fine-tune wrote itself. Losses in nats a byte on the
first 160 windows of the shipped texts; `own` is the new base's loss on Python, its own domain.
"""

from __future__ import annotations

import argparse
import re
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

Bases = tuple[str, str]
"""The old one and the new one."""
Configs = dict[str, rm.TransferConfig]
"""Ways to carry, by words."""


def weights(scale: float | str, groups: dict[str, Any], **options: Any) -> rm.TransferConfig:
    return rm.TransferConfig(scale=scale, match=rm.AlignConfig(**groups), **options)


def sampled(method: str, scale: float | None, rank: int = 0, **options: Any) -> rm.TransferConfig:
    return rm.TransferConfig(method, scale, rank=rank, match=rm.AlignConfig(**WHOLE), **options)


def ways(what: str, adapter: bool) -> Configs:
    scale = 0.5 if adapter else 0.75
    moved = {f"weights, scale {scale}": weights(scale, WHOLE)}
    if what == "scale":
        return {**moved, "weights, scale of each block by held-out samples": weights("auto", WHOLE)}
    if what == "distil":
        ranks = {"": 0} if adapter else {"all weights, ": 0, "an adapter of rank 16, ": 16}
        scales = {"scale 1": 1.0, f"{TOLD}, own text kept": None}
        return {into + by: sampled("distil", scales[by], ranks[into]) for into in ranks for by in scales}
    refits = {"refit, scale 1": sampled("refit", 1.0), f"refit, {TOLD}": sampled("refit", None)}
    if not adapter:
        refits["refit as an adapter of rank 16, scale 1"] = sampled("refit", 1.0, 16)
    return {f"added as it is, scale {scale}": weights(scale, STILL), **moved, **refits}


def carried(title: str, text: str, tuned: str, bases: Bases, configs: Configs) -> Iterator[dict[str, str]]:
    """A row for the new base alone, and one for each way to carry a fine-tune (a model or an adapter) to it."""
    (old, new), adapter = bases, (Path(tuned) / "adapter_config.json").exists()
    start = loss(new, text)
    gain = loss(old, text) - loss(f"{old}+{tuned}" if adapter else tuned, text)
    yield row(title, "the new base alone", start, "", loss(new, "python"), "", "")
    for how, config in configs.items():
        with tempfile.TemporaryDirectory() as scratch:
            out, began = Path(scratch, "out"), time.process_time()
            result = rm.transfer(tuned, old, new, config)
            result.save_pretrained(out)
            seconds = f"{time.process_time() - began:.0f}"
            model = f"{new}+{out}" if (out / "adapter_config.json").exists() else str(out)
            place = re.search(r"(\S+) of the change's squared norm fits", " ".join(getattr(result, "notes", ())))
            found = loss(model, text)
            share = f"{(start - found) / gain:.0%}"
            yield row(title, how, found, share, loss(model, "python"), place[1] if place else "", seconds)


def row(title: str, how: str, found: float, share: str, own: float, place: str, seconds: str) -> dict[str, str]:
    return {
        "carried": title,
        "how": how,
        "loss": f"{found:.3f}",
        "share of the gain at home": share,
        "own domain": f"{own:.3f}",
        "place": place,
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("scale", "distil"))
    what = parser.parse_args().what
    torch.set_num_threads(1)
    table = Table(f"carry-{what}" if what else "carry")
    for title, name, text in TUNED:
        for cells in carried(title, text, str(CHECKPOINTS / name), (OLD, NEW), ways(what, "lora" in name)):
            table.add({column: cell for column, cell in cells.items() if column != "place"})


if __name__ == "__main__":
    main()
