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
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from carry import loss
from record import Table
from train_checkpoints import SCHEDULES, byte_tokenizer, fit, new_llama, text_batches, warm_cosine
from transformers import LlamaForCausalLM, PreTrainedModel

from rotation_merge.carrying.config import TransferConfig
from rotation_merge.carrying.transfer import carry
from rotation_merge.matching.options import NOTHING, AlignConfig
from rotation_merge.run import demo

STEPS = 400
WHOLE = AlignConfig(heads="permutation", residual="rotation")
OLD, TUNED, NEW = (str(demo.CHECKPOINTS / name) for name in ("llama-0", "llama-0-english", "llama-1"))


def half() -> PreTrainedModel:
    """A Llama of width 48."""
    return python(new_llama(48), 7)


def three() -> PreTrainedModel:
    """A Llama of width 48 with three layers."""
    config = new_llama(48).config
    config.num_hidden_layers = 3
    return python(LlamaForCausalLM(config), 8)


def python(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    batches = text_batches("python", torch.Generator().manual_seed(seed))
    fit(model, batches, STEPS, warm_cosine(STEPS, 40, 0.05), lr=2e-3, weight_decay=0.1, betas=(0.9, 0.95))
    return model


def english(base: Path) -> PreTrainedModel:
    """A short fine-tune for English."""
    model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    steps, rate = SCHEDULES["short"]
    batches = text_batches("english", torch.Generator().manual_seed(9))
    fit(model, batches, steps, warm_cosine(steps, 30, 0.05), lr=rate, weight_decay=0.1, betas=(0.9, 0.95))
    return model


def trained(folder: Path) -> dict[str, str]:
    """The checkpoints that are not shipped, by name."""
    makers = {"half": half, "three": three, "half-english": lambda: english(folder / "half")}
    for number, (name, make) in enumerate(makers.items()):
        if not (folder / name / "config.json").exists():
            torch.manual_seed(number)
            make().save_pretrained(folder / name)
            byte_tokenizer().save_pretrained(folder / name)
    return {name: str(folder / name) for name in makers}


def ways(resizing: Mapping[str, Any], way: str) -> dict[str, Callable[[dict[str, str], str, str], Any]]:
    """Ways to carry, as functions of what goes where, the old base and the new one.

    Args:
        resizing: what of the bases' shapes may differ, as `TransferConfig` has it.
        way: weights, and one that trains or solves.
    """

    def weights(match: AlignConfig, scale: float) -> Any:
        config = TransferConfig(scale=scale, match=match, **resizing)
        return lambda jobs, old, new: carry(jobs, old, new, config)

    def sampled(method: str, scale: float | str) -> Any:
        config = TransferConfig(method, scale, match=WHOLE, **resizing)
        return lambda jobs, old, new: carry(jobs, old, new, config)

    if way == "distil":
        return {"50 steps, scale 1": sampled("distil", 1.0)}
    found = {
        "cut or padded as it is, scale 0.75": weights(NOTHING, 0.75),
        "weights, scale 0.75": weights(WHOLE, 0.75),
    }
    return {**found, "refit, scale by held-out samples": sampled("refit", "auto")} if way == "refit" else found


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--checkpoints", type=Path, default=Path("checkpoints/unlike"))
    folder = asked.parse_args().checkpoints
    torch.set_num_threads(1)
    made = trained(folder)
    table = Table("unlike")
    widths, depth = {"widths": True}, {"layers_map": "auto"}
    for title, old, tuned, new, resizing, way in (
        ("width 48 to 96", made["half"], made["half-english"], NEW, widths, "refit"),
        ("four layers to three", made["half"], made["half-english"], made["three"], depth, "weights"),
        ("width 96 to 48", OLD, TUNED, made["half"], widths, "weights"),
        ("width 96 to 48", OLD, TUNED, made["half"], widths, "distil"),
    ):
        before, after, start = loss(old, "english"), loss(tuned, "english"), loss(new, "english")
        if way != "distil":
            table.add(row(title, "the new base alone", start, "", loss(new, "python"), "", ""))
        for how, transfer in ways(resizing, way).items():
            with tempfile.TemporaryDirectory() as scratch:
                out, began = f"{scratch}/out", time.process_time()
                lines = " ".join(transfer({out: tuned}, old, new)[0].lines)
                seconds = f"{time.process_time() - began:.0f}"
                found = loss(out, "english")
                place = re.search(r"change (\S+) has a place", lines)
                share = f"{(start - found) / (before - after):.0%}"
                table.add(row(title, how, found, share, loss(out, "python"), place[1] if place else "", seconds))


def row(what: str, how: str, found: float, share: str, own: float, place: str, seconds: str) -> dict[str, str]:
    return {
        "carried": what,
        "how": how,
        "loss": f"{found:.3f}",
        "share of the gain at home": share,
        "own domain": f"{own:.3f}",
        "place": place,
        "seconds": seconds,
    }


if __name__ == "__main__":
    main()
