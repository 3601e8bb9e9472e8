"""What arrives of a fine-tune carried between bases of unlike shapes: Llamas of two widths and of two depths.

    python benchmarks/unlike.py --checkpoints FOLDER

The fine-tune for English of the shipped Llama 0 (width 96, four layers) goes to a Llama of half the width, and one of
that to the shipped Llama 1 and to a Llama of half the width with three layers, of other seeds. What is not in FOLDER
is trained first, for 400 steps (`half`, `three`) and 300 (`half-english`), a few processor minutes. Losses in nats a
byte on the first 160 windows of the shipped texts; `own domain` is the new base's loss on Python; `place` the share of
the change's squared norm that had a place; seconds of the processor.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from carry import NEW, OLD, Configs, carried, sampled, weights
from merging import STILL, WHOLE
from record import Table
from shipped import CHECKPOINTS
from train_checkpoints import finetune, save, train_llama
from transformers import PreTrainedModel

STEPS = 400
LARGE_TUNED = str(CHECKPOINTS / "llama-0-english")


def trained(folder: Path) -> dict[str, str]:
    """The checkpoints that are not shipped, by name: of width 48, with four layers and with three, and a fine-tune."""
    makers: dict[str, Callable[[], PreTrainedModel]] = {
        "half": lambda: train_llama(7, STEPS, 48),
        "three": lambda: train_llama(8, STEPS, 48, layers=3),
        "half-english": lambda: finetune(folder / "half", "english", "short", 9, None),
    }
    for number, (name, make) in enumerate(makers.items()):
        if not (folder / name / "config.json").exists():
            torch.manual_seed(number)
            save(make(), folder / name)
    return {name: str(folder / name) for name in makers}


def ways(resizing: dict[str, Any], way: str) -> Configs:
    """Ways to carry: by weights, and one that trains or solves.

    Args:
        resizing: what of the bases' shapes may differ, as `TransferConfig` has it.
    """
    if way == "distil":
        return {"50 steps, scale 1": sampled("distil", 1.0, **resizing)}
    by_weights = {
        "cut or padded as it is, scale 0.75": weights(0.75, STILL, **resizing),
        "weights, scale 0.75": weights(0.75, WHOLE, **resizing),
    }
    solved = {"refit, scale by held-out samples": sampled("refit", None, **resizing)} if way == "refit" else {}
    return {**by_weights, **solved}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints/unlike"))
    folder = parser.parse_args().checkpoints
    torch.set_num_threads(1)
    small = trained(folder)
    table = Table("unlike")
    widths, depth = {"widths": True}, {"layers_map": "auto"}
    for title, tuned, bases, resizing, way in (
        ("width 48 to 96", small["half-english"], (small["half"], NEW), widths, "refit"),
        ("four layers to three", small["half-english"], (small["half"], small["three"]), depth, "weights"),
        ("width 96 to 48", LARGE_TUNED, (OLD, small["half"]), widths, "weights"),
        ("width 96 to 48", LARGE_TUNED, (OLD, small["half"]), widths, "distil"),
    ):
        alone, *rows = carried(title, "english", tuned, bases, ways(resizing, way))
        for cells in rows if way == "distil" else (alone, *rows):
            table.add(cells)


if __name__ == "__main__":
    main()
