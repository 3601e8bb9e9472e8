"""Learned matching on checkpoints trained by benchmarks/train_checkpoints.py: what it reaches, and how long it takes.

    python benchmarks/fit.py vits CHECKPOINTS           two pairs, with labels and with 300 unlabelled images
    python benchmarks/fit.py joint CHECKPOINTS          four ViTs at once
    python benchmarks/fit.py llamas CHECKPOINTS         pairs of independent Llamas, 200k characters of text
    python benchmarks/fit.py step CHECKPOINTS           time and memory of one step of a pair of 300M parameters
    python benchmarks/fit.py step CHECKPOINTS --threads 1 2     the same on one thread and on two

CHECKPOINTS holds vit-0 ... vit-3, llama-0 ... llama-2. Times are
processor time on one thread; of a step on more threads, wall time, of an idle machine.
"""

from __future__ import annotations

import argparse
import itertools
import resource
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from corpora import in_windows, training_text
from merging import load, loss
from record import Table
from sizes import llama
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import rotation_merge as rm
from rotation_merge.matching import fit as learning
from rotation_merge.run.demo import digits

Batches = list[dict[str, Tensor]]


def images(count: int, size: int, labels: bool = True) -> Batches:
    """The first training images."""
    pixels, classes, _, _ = digits()
    parts = zip(pixels[:count].split(size), classes[:count].split(size), strict=True)
    return [{"pixel_values": some, **({"labels": truth} if labels else {})} for some, truth in parts]


def learned(models: Sequence[nn.Module], batches: Batches, steps: int) -> tuple[Any, str, str]:
    """The models as views in one set of coordinates; what the fit started from; processor time."""
    began = time.process_time()
    result = rm.fit(models[0], models[1:], batches, options=rm.FitConfig(steps=steps))
    seconds = f"{time.process_time() - began:.0f} s"
    moved = [alignment.apply(model) for alignment, model in zip(result.alignments, models[1:], strict=True)]
    return [result.alignments[0].apply_anchor(models[0]), *moved], result.report.start, seconds


def vits(root: Path, args: argparse.Namespace) -> None:
    table = Table("fit-vits")
    for title, count, labels in (("1257 images with labels", 1257, True), ("300 images without labels", 300, False)):
        for a, b in ((0, 1), (2, 3)):
            models = [load(root / f"vit-{seed}") for seed in (a, b)]
            views, start, seconds = learned(models, images(count, 64 if labels else 32, labels), args.steps or 1500)
            path = rm.barrier(*views, "demo:digits", rm.BarrierConfig(points=21))
            first, middle, last = (f"{100 * path.accuracy[i]:.1f}" for i in (0, path.middle(), -1))
            cells = {"data": title, "seeds": f"{a} and {b}", "parents": f"{first} / {last} %", "middle": f"{middle} %"}
            table.add({**cells, "barrier (nats)": f"{path.barrier():.3f}", "time": seconds, "from": start})


def joint(root: Path, args: argparse.Namespace) -> None:
    models = [load(root / f"vit-{seed}") for seed in range(4)]
    views, _, seconds = learned(models, images(1257, 64), args.steps or 2400)

    def words(model: Any) -> str:
        figures = rm.evaluate(model, "demo:digits")
        return f"{100 * figures['accuracy']:.1f} % ({figures['loss']:.3f})"

    cells = {"parents": ", ".join(map(words, models)), "plain": words(rm.average(models))}
    Table("fit-joint").add({**cells, "learned": words(rm.average(views)), "time": seconds})


def llamas(root: Path, args: argparse.Namespace) -> None:
    table = Table("fit-llamas")
    windows = in_windows(training_text("python", 200_000))
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))
    batches = [{"input_ids": ids, "labels": ids} for ids in windows[order].split(16)]
    for a, b in ((0, 1), (0, 2)):
        models = [load(root / f"llama-{seed}") for seed in (a, b)]
        views, _, seconds = learned(models, batches, args.steps or 400)
        ends = [loss(model, "python", count=None) for model in models]
        plain, middle = (loss(rm.average(some), "python", count=None) for some in (models, views))
        before, after = (value - fmean(ends) for value in (plain, middle))
        losses = {"plain middle": plain, "learned middle": middle, "barrier, plain": before, "learned": after}
        cells = {"seeds": f"{a} and {b}", "parents": f"{ends[0]:.3f} / {ends[1]:.3f}"}
        cells |= {title: f"{value:.3f}" for title, value in losses.items()}
        table.add({**cells, "ratio": f"1/{before / after:.1f}", "time": seconds})


def step(root: Path, args: argparse.Namespace) -> None:
    """One measured step of a 300M-parameter pair (random weights), and what a fit of 300 steps would take; each type of
    weights and each number of threads in a process of its own, because of the peaks."""
    table = Table("fit-step")
    for threads, dtype in itertools.product(args.threads, ("float32", "bfloat16")):
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            table.add(process.submit(one_step, threads, dtype, args.steps or 3).result())


def one_step(threads: int, dtype: str, steps: int) -> dict[str, str]:
    """Figures of a step between models of one type."""
    torch.set_num_threads(threads)
    clock = time.perf_counter if threads > 1 else time.process_time
    config = LlamaConfig(**llama(1024, 2816, 16, 8, 24, 8192))
    models = [LlamaForCausalLM(config).eval().to(getattr(torch, dtype)) for _ in range(2)]
    size = sum(p.numel() for p in models[0].parameters())
    batches = [{"input_ids": torch.randint(0, 8192, (4, 128))} for _ in range(2)]
    marks: list[float] = []
    learning.LOOKS = 1  # at the end only, so that the step before it is a step and nothing else
    match = rm.AlignConfig(residual="rotation", ffn="none", scaling=False)
    options = rm.FitConfig(steps=steps, objective="distill", start="identity")
    rm.fit(models[0], models[1], batches, match, options, progress=lambda *_: marks.append(clock()))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    seconds = min(b - a for a, b in itertools.pairwise(marks))
    return {
        "parameters": f"{size / 1e6:.0f}M",
        "stored as": dtype,
        "threads": str(threads),
        "seconds of": "wall" if threads > 1 else "processor",
        "a step of 4 x 128 tokens": f"{seconds:.1f} s",
        "300 steps": f"{seconds * 300 / 60:.0f} min",
        "peak memory": f"{peak:.1f} GiB",
    }


TASKS = {task.__name__: task for task in (vits, joint, llamas, step)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=TASKS)
    parser.add_argument("checkpoints", type=Path)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--threads", type=int, nargs="+", default=[1], help="of 'step': rows for so many threads each")
    args = parser.parse_args()
    torch.set_num_threads(args.threads[0])
    TASKS[args.what](args.checkpoints, args)


if __name__ == "__main__":
    main()
