"""Refit and polish on the checkpoints that come with the package: what they gain, in how long.

    python benchmarks/refit.py vits | llamas | near

ViTs are measured by accuracy on the 540 test digits, Llamas by nats per byte of 160 windows of 128 held-out bytes of
each domain. Samples are training images, synthetic ones, or texts that the models write themselves; none is held out
data. Each merge runs through mergekit's `run_merge` in this process, on one thread; seconds are processor time.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from record import Table
from transformers.utils import logging

from rotation_merge.cli.polish import _ask, _with_lora
from rotation_merge.learning.polish import PolishOptions, polish
from rotation_merge.samples import demo
from rotation_merge.samples.functions import load
from rotation_merge.seam.merging import merge_recipe

WHOLE = {"heads": "permutation", "residual": "rotation"}
ALONE = {"attention": "none", "heads": "none", "ffn": "none", "rescale": False, "residual": "none"}
SCRATCH = Path(tempfile.mkdtemp(prefix="refit-"))


def merged(names: tuple[str, str], **parameters: Any) -> tuple[str, float]:
    """Half of each of two checkpoints: where it is, and the seconds it took."""
    paths = [str(demo.CHECKPOINTS / name) for name in names]
    recipe = {
        "merge_method": "rotation_merge",
        "base_model": paths[0],
        "models": [{"model": path, "parameters": {"weight": 0.5}} for path in paths],
        "parameters": parameters,
        "dtype": "float32",
    }
    out = tempfile.mkdtemp(dir=SCRATCH)
    began = time.process_time()
    merge_recipe(yaml.safe_dump(recipe, sort_keys=False), out)
    return out, time.process_time() - began


@torch.no_grad()
def accuracy(path: str) -> float:
    _, _, pixels, labels = demo.digits()
    return float((load(path)(pixel_values=pixels).logits.argmax(-1) == labels).float().mean())


@torch.no_grad()
def loss(path: str, *domains: str) -> float:
    model, total = load(path), 0.0
    for domain in domains:
        ids = demo.windows(domain)[:160]
        total += float(model(input_ids=ids, labels=ids).loss) / len(domains)
    return total


def vits() -> None:
    """Two seeds of one task."""
    table, names = Table("refit-vits"), ("vit-0", "vit-1")
    pixels = demo.digits()[0]
    chosen = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))[:300]
    images = SCRATCH / "images.npz"
    np.savez(images, pixel_values=pixels[chosen].numpy())
    for number, name in enumerate(names):
        table.add(
            {
                "merge": f"parent {number}",
                "accuracy": f"{accuracy(str(demo.CHECKPOINTS / name)):.1%}",
                "processor time": "",
            }
        )
    own = {"delegate": "refit", "ridge": 0.001}
    variants: dict[str, dict[str, Any]] = {
        "mean, aligned": {"delegate": "linear"},
        "refit, 300 images": {**own, "data": str(images), "samples": 300},
        "refit, 300 images, not rescaled": {**own, "data": str(images), "samples": 300, "rescale": False},
        "refit, 300 images, not aligned": {**own, "data": str(images), "samples": 300, **ALONE},
        "refit, 2048 synthetic images": {**own, "data": "synthetic", "samples": 2048},
        "refit, 2048 synthetic images, not rescaled": {**own, "data": "synthetic", "samples": 2048, "rescale": False},
    }
    for words, parameters in variants.items():
        out, seconds = merged(names, **{**WHOLE, **parameters})
        table.add({"merge": words, "accuracy": f"{accuracy(out):.1%}", "processor time": f"{seconds:.1f} s"})


def llamas() -> None:
    """Two seeds of one task: barrier at the middle."""
    table, names = Table("refit-llamas"), ("llama-0", "llama-1")
    ends = [loss(str(demo.CHECKPOINTS / name), "python") for name in names]
    variants: dict[str, dict[str, Any]] = {"mean, aligned": {"delegate": "linear"}}
    for count, targets in ((32, "own"), (32, "mean"), (64, "mean"), (256, "mean")):
        words = f"refit, {count} texts of each model, targets: {targets}"
        variants[words] = {"delegate": "refit", "data": "self", "samples": count, "targets": targets}
    for words, parameters in variants.items():
        out, seconds = merged(names, **WHOLE, **parameters)
        found = loss(out, "python")
        cells = {
            "loss": f"{found:.3f}",
            "barrier": f"{found - sum(ends) / 2:.3f}",
            "processor time": f"{seconds:.1f} s",
        }
        table.add({"merge": words, **cells})


def near() -> None:
    """Two fine-tunes of one base on different domains: mean loss of the two; then polished."""
    table, names, domains = Table("refit-near"), ("llama-0-english", "llama-0-c"), ("english", "c")
    paths = tuple(str(demo.CHECKPOINTS / name) for name in names)

    def add(words: str, path: str, seconds: float) -> None:
        each = [loss(path, domain) for domain in domains]
        cells = {domain: f"{value:.3f}" for domain, value in zip(domains, each, strict=True)}
        table.add(
            {
                "merge": words,
                **cells,
                "mean": f"{sum(each) / 2:.3f}",
                "processor time": f"{seconds:.1f} s" if seconds else "",
            }
        )

    for name, path in zip(names, paths, strict=True):
        add(name, path, 0.0)
    add("mean", *merged(names, delegate="linear"))
    refitted, seconds = merged(names, delegate="refit", data="self", samples=64)
    add("refit, 64 texts of each model", refitted, seconds)
    for lora in (0, 16):
        began = time.process_time()
        answered = _ask(Path(tempfile.mkdtemp(dir=SCRATCH)), refitted, paths, ["self"] * 2, 64, 128, 0, "cpu")
        model = load(refitted).requires_grad_(True)
        model = _with_lora(model, lora, 0) if lora else model
        polish(model, answered, PolishOptions(50, lora))
        seconds = time.process_time() - began
        polished = tempfile.mkdtemp(dir=SCRATCH)
        (model.merge_and_unload() if lora else model).save_pretrained(polished)
        add(f"then polished, 50 steps, {f'LoRA of rank {lora}' if lora else 'all weights'}", polished, seconds)


TASKS = {task.__name__: task for task in (vits, llamas, near)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    TASKS[parser.parse_args().task]()


if __name__ == "__main__":
    main()
