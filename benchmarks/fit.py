"""Learned matching on checkpoints trained by benchmarks/train_checkpoints.py: what it reaches, and how long it takes.

    python benchmarks/fit.py vits CHECKPOINTS           two pairs, with labels and with 300 unlabelled images
    python benchmarks/fit.py joint CHECKPOINTS          four ViTs at once
    python benchmarks/fit.py llamas CHECKPOINTS         pairs of independent Llamas, 200k characters of text
    python benchmarks/fit.py finetunes CHECKPOINTS      near and far fine-tunes of one base
    python benchmarks/fit.py step CHECKPOINTS           time and memory of one step of a pair of 300M parameters
    python benchmarks/fit.py step CHECKPOINTS --threads 1 2     the same on one thread and on two

CHECKPOINTS holds vit-0 ... vit-3, llama-0 ... llama-2, llama-0-english, llama-0-c and their `-long` kin. Times are
processor time on one thread; on a GPU, and of a step on more threads, wall time, of an idle machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import torch
from corpora import documents
from record import Table
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, ViTForImageClassification

from rotation_merge.matching import fit as learning
from rotation_merge.matching.engine import Path as ModelPath
from rotation_merge.matching.fit import FitResult, fit
from rotation_merge.matching.fit_records import FitConfig
from rotation_merge.matching.options import AlignConfig
from rotation_merge.run.demo import digits, windows


def load(kind: type, root: Path, names: Sequence[str]) -> list[nn.Module]:
    return [kind.from_pretrained(root / name, dtype=torch.float32).eval() for name in names]


def measure(models: Sequence[nn.Module], result: FitResult | None, shares: Sequence[float], score) -> object:
    """`score` of the model at these coefficients: of the fitted path, or of the plain average."""
    if result is None:
        state = {
            k: sum(s * m.state_dict()[k] for s, m in zip(shares, models, strict=True)) for k in models[0].state_dict()
        }
        weights, path = state, lambda batch: torch.func.functional_call(models[0], state, (), batch)
    else:
        states = [m.state_dict() for m in models]
        folded = result.alignments[0].folded
        between = ModelPath.between(models[0], result.architecture, states[0], states[1:], folded, torch.device("cpu"))
        weights = between.weights([a.transforms for a in result.alignments], torch.tensor(shares))
        path = lambda batch: between.outputs(weights, batch)  # noqa: E731
    with torch.no_grad():
        return score(path)


@torch.no_grad()
def on_digits(path) -> tuple[float, float]:
    _, _, pixels, classes = digits()
    logits = path({"pixel_values": pixels}).logits
    return 100 * float((logits.argmax(-1) == classes).float().mean()), float(functional.cross_entropy(logits, classes))


def on_text(name: str):
    @torch.no_grad()
    def score(path) -> float:
        tokens = windows(name)
        losses = []
        for part in tokens.split(64):
            logits = path({"input_ids": part}).logits
            losses.append(
                functional.cross_entropy(logits[:, :-1].flatten(0, 1), part[:, 1:].flatten(), reduction="sum")
            )
        return float(sum(losses)) / (tokens.numel() - len(tokens))

    return score


def images(count: int, labels: bool, size: int = 64) -> list[dict[str, torch.Tensor]]:
    pixels, classes, _, _ = digits()
    return [
        {
            "pixel_values": pixels[i : min(i + size, count)],
            **({"labels": classes[i : min(i + size, count)]} if labels else {}),
        }
        for i in range(0, count, size)
    ]


def text_of(domain: str, characters: int) -> bytes:
    """Training documents of a domain, in a seeded order; held-out documents and the demo's texts are not among them."""
    train, _ = documents(domain)
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0)).tolist()
    share = max(2000, characters // 100)
    return b"".join(train[i][:share] for i in order)[:characters]


def tokens_of(
    domains: Sequence[str], characters: int, size: int = 16, length: int = 128
) -> list[dict[str, torch.Tensor]]:
    parts = []
    for domain in domains:
        raw = torch.tensor(list(text_of(domain, characters // len(domains))))
        parts.append(raw[: len(raw) // length * length].view(-1, length))
    rows = torch.cat(parts)[torch.randperm(sum(map(len, parts)), generator=torch.Generator().manual_seed(0))]
    return [{"input_ids": batch, "labels": batch} for batch in rows.split(size)]


def timed(models: Sequence[nn.Module], batches, options: FitConfig) -> tuple[FitResult, str]:
    began = time.process_time()
    result = fit(models[0], models[1:], batches, options=options)
    return result, f"{time.process_time() - began:.0f} s"


def vits(root: Path, args: argparse.Namespace) -> None:
    table = Table("fit-vits")
    for title, count, labels in (("1257 images with labels", 1257, True), ("300 images without labels", 300, False)):
        for a, b in ((0, 1), (2, 3)):
            models = load(ViTForImageClassification, root, [f"vit-{a}", f"vit-{b}"])
            given = images(count, labels, 64 if labels else 32)
            result, seconds = timed(models, given, FitConfig(steps=args.steps or 1500))
            points = [measure(models, result, [1 - i / 20, i / 20], on_digits) for i in range(21)]
            ends, middle = (points[0], points[20]), points[10]
            barrier = max(p[1] - (ends[0][1] + (ends[1][1] - ends[0][1]) * i / 20) for i, p in enumerate(points))
            table.add(
                {
                    "data": title,
                    "seeds": f"{a} and {b}",
                    "parents": f"{ends[0][0]:.1f} / {ends[1][0]:.1f} %",
                    "middle": f"{middle[0]:.1f} %",
                    "barrier (nats)": f"{barrier:.3f}",
                    "time": seconds,
                    "from": result.report.start,
                }
            )


def joint(root: Path, args: argparse.Namespace) -> None:
    models = load(ViTForImageClassification, root, [f"vit-{i}" for i in range(4)])
    result, seconds = timed(models, images(1257, True), FitConfig(steps=args.steps or 2400))
    even = [0.25] * 4
    parents = [on_digits(lambda batch, m=m: m(**batch)) for m in models]
    plain, learned = measure(models, None, even, on_digits), measure(models, result, even, on_digits)
    cells = {"parents": ", ".join(f"{a:.1f} % ({loss:.3f})" for a, loss in parents)}
    cells |= {name: f"{a:.1f} % ({loss:.3f})" for name, (a, loss) in (("plain", plain), ("learned", learned))}
    Table("fit-joint").add(cells | {"time": seconds})


def llamas(root: Path, args: argparse.Namespace) -> None:
    table = Table("fit-llamas")
    for a, b in ((0, 1), (0, 2)):
        models = load(LlamaForCausalLM, root, [f"llama-{a}", f"llama-{b}"])
        batches = tokens_of(["python"], 200_000)
        result, seconds = timed(models, batches, FitConfig(steps=args.steps or 400))
        score = on_text("python")
        ends = [score(lambda batch, m=m: m(**batch)) for m in models]
        plain, learned = (measure(models, r, [0.5, 0.5], score) for r in (None, result))
        middle = sum(ends) / 2
        before, after = plain - middle, learned - middle
        table.add(
            {
                "seeds": f"{a} and {b}",
                "parents": f"{ends[0]:.3f} / {ends[1]:.3f}",
                "plain middle": f"{plain:.3f}",
                "learned middle": f"{learned:.3f}",
                "barrier, plain": f"{before:.3f}",
                "learned": f"{after:.3f}",
                "ratio": f"1/{before / after:.1f}",
                "time": seconds,
            }
        )


def finetunes(root: Path, args: argparse.Namespace) -> None:
    table = Table("fit-finetunes")
    for ending in ("", "-long"):
        models = load(LlamaForCausalLM, root, [f"llama-0-english{ending}", f"llama-0-c{ending}"])
        result, seconds = timed(models, tokens_of(["english", "c"], 200_000), FitConfig(steps=args.steps or 300))
        rows = {}
        for name, found in (("plain", None), ("learned", result)):
            rows[name] = [measure(models, found, [0.5, 0.5], on_text(domain)) for domain in ("english", "c")]
        means = mean(rows["plain"]), mean(rows["learned"])
        which = "far (2000 steps at 3e-3)" if ending else "near (300 steps at 3e-4)"
        cells = {"plain": f"{means[0]:.3f}", "learned": f"{means[1]:.3f}", "from": result.report.start}
        table.add({"fine-tunes": which, **cells, "time": seconds})


def step(root: Path, args: argparse.Namespace) -> None:
    """One measured step of a 300M-parameter pair (random weights), and what a fit of 300 steps would take; each type of
    weights and each number of threads in a process of its own, because of the peaks."""
    if args.dtype:
        print(json.dumps(one_step(args)))
        return
    table = Table("fit-step")
    for threads, dtype in itertools.product(args.threads, ("float32", "bfloat16")):
        command = [sys.executable, *sys.argv, "--threads", str(threads), "--dtype", dtype]
        table.add(json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout))


def one_step(args: argparse.Namespace) -> dict[str, str]:
    """Figures of a step between models of one type."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    wall = device == "cuda" or torch.get_num_threads() > 1
    clock = time.perf_counter if wall else time.process_time
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=8,
    )
    models = [LlamaForCausalLM(config).eval().to(device, getattr(torch, args.dtype)) for _ in range(2)]
    size = sum(p.numel() for p in models[0].parameters())
    batches = [{"input_ids": torch.randint(0, 8192, (4, 128), device=device)} for _ in range(2)]
    marks: list[float] = []
    learning.LOOKS = 1  # at the end only, so that the step before it is a step and nothing else
    match = AlignConfig(residual="rotation", ffn="none", scaling=False)
    options = FitConfig(steps=args.steps or 3, objective="distill", start="identity", half=device == "cuda")
    fit(models[0], models[1], batches, match, options, watch=lambda *_: marks.append(clock()))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    seconds = min(b - a for a, b in itertools.pairwise(marks))
    cells = {"parameters": f"{size / 1e6:.0f}M", "stored as": args.dtype, "device": device}
    cells |= {"threads": str(torch.get_num_threads()), "seconds of": "wall" if wall else "processor"}
    cells |= {
        "a step of 4 x 128 tokens": f"{seconds:.1f} s",
        "300 steps": f"{seconds * 300 / 60:.0f} min",
        "peak memory": f"{peak:.1f} GiB",
    }
    gpu = f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if device == "cuda" else ""
    return {**cells, "peak GPU memory": gpu}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["vits", "joint", "llamas", "finetunes", "step"])
    parser.add_argument("checkpoints", type=Path)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--dtype", help="of 'step': print one row, of weights of this type")
    parser.add_argument("--threads", type=int, nargs="+", default=[1], help="of 'step': rows for so many threads each")
    args = parser.parse_args()
    torch.set_num_threads(args.threads[0])
    {"vits": vits, "joint": joint, "llamas": llamas, "finetunes": finetunes, "step": step}[args.what](
        args.checkpoints, args
    )


if __name__ == "__main__":
    main()
