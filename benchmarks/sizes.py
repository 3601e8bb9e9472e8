"""What merges cost at the sizes that people have: plain linear and ours in the same run.

    python benchmarks/sizes.py --shape llama-300m             whole models
    python benchmarks/sizes.py --shape llama-300m --threads 0            wall time at torch's default of threads
    python benchmarks/sizes.py --shape llama-8b --layers 1 --vocabulary 4000 --whole
    python benchmarks/sizes.py --data                         `measure`, and a refit of two models, on samples
    python benchmarks/sizes.py --changes --shape llama-8b --layers 1 --vocabulary 4000    changes of two fine-tunes
    python benchmarks/sizes.py --precision --shape llama-8b   float32 beside float64 in `wudi`
    python benchmarks/sizes.py --align --layers 1 --vocabulary 128256    `align` and `carry`
    python benchmarks/sizes.py --curves                       cost by layers, width and donors

Two bf16 models of the shape, with made-up weights, are merged half and half by `mergekit-yaml` in processes of their
own, as users run it. The donor is a fine-tune of the anchor (`near`: 2% noise), a twin that was moved by a random
element of every local group and has the noise, too (`planted`), or drawn anew (`far`). The same arguments give the same
bytes. Seconds are processor time where a title does not say wall; "after the start" leaves out what Python and its
libraries take before a merge begins, as much as `mergekit-yaml --help` takes.

With `--whole` so many layers, then twice as many, with a part of the vocabulary are measured, and the whole shape is
extrapolated from them: their difference is what layers take, the rest goes by the weights outside of layers. Passes
over a residual stream are as many as the measured part takes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shutil
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import yaml
from mergekit.io import TensorWriter
from merging import BIN, STILL, Cost, halves, process, recipe
from record import Table
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import rotation_merge as rm
from rotation_merge.averaging import wudi
from rotation_merge.averaging.task_vectors import change_of
from rotation_merge.mergekit_plugin import SWITCH

OPTIONS: dict[str, Any] = {"attention": "rotation", "heads": "permutation", "ffn": "permutation", "scaling": True}
NOISE = 0.02
SHARD = 10**9
Shape = dict[str, Any]
"""The config of a Llama."""
TURNED: dict[str, object] = {**OPTIONS, "residual": "rotation", "untie": True}
CASES: dict[str, tuple[str, Mapping[str, object]]] = {
    "near": ("near", OPTIONS),
    "planted": ("planted", OPTIONS),
    "far": ("far", OPTIONS),
    "near, residual: rotation": ("near", TURNED),
    "far, residual: rotation": ("far", TURNED),
}
LINEAR, BARE = "mergekit's linear", "the same without this plugin"


def llama(hidden: int, ffn: int, heads: int, kv_heads: int, layers: int, vocabulary: int, tied: bool = False) -> Shape:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "dtype": "bfloat16",
    }


SHAPES = {
    "llama-tiny": llama(256, 688, 8, 4, 4, 1000, tied=True),
    "llama-300m": llama(1024, 2816, 16, 4, 24, 32000, tied=True),
    "llama-1b": llama(2048, 8192, 32, 8, 16, 128256, tied=True),
    "llama-8b": llama(4096, 14336, 32, 8, 32, 128256),
    "llama-70b": llama(8192, 28672, 64, 8, 80, 128256),
}


def sizes_of(shape: Shape) -> dict[str, torch.Size]:
    """The shape of every tensor of a checkpoint, by name."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**shape))
    tensors = model.model.state_dict(prefix="model.") if shape["tie_word_embeddings"] else model.state_dict()
    return {name: tensor.shape for name, tensor in tensors.items()}


def drawn(name: str, size: torch.Size, seed: int) -> Tensor:
    """A tensor, float32: gains near one, weights whose rows have heavy-tailed norms, as trained ones have."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    x = torch.randn(size, generator=generator)
    if len(size) == 1:
        return x.mul_(0.1).add_(1)
    return x.mul_(0.02 * (0.3 * torch.randn(size[:1], generator=generator)).exp_()[:, None])


def tensor(name: str, size: torch.Size, donor: str | None, number: int = 0) -> Tensor:
    """A tensor of the anchor, or of a donor before it is moved, bfloat16.

    Args:
        donor: `near` or `far`; None: the anchor.
        number: which of several such donors.
    """
    result = drawn(name, size, 10 + number if donor == "far" else 1).bfloat16()
    if donor != "near":
        return result
    noise = drawn(f"noise of {name}", size, 100 + number)
    unit = noise.div_(0.02) if len(size) > 1 else noise.sub_(1).div_(0.1)
    return unit.mul_(NOISE * float(result[:4096].float().std())).add_(result).bfloat16()


def write(shape: Shape, where: Path, donor: str | None = None, number: int = 0) -> Path:
    """A checkpoint in a folder, one shard of it and one tensor in memory."""
    if donor == "planted":
        near = write(shape, where.with_name(f"{where.name}-still"), "near", number)
        rm.Alignment.random(near, seed=7, **OPTIONS).apply(near).save_pretrained(where)
        return where
    writer = TensorWriter(str(where), max_shard_size=SHARD)
    for name, size in sizes_of(shape).items():
        writer.save_tensor(name, tensor(name, size, donor, number))
    writer.finalize()
    (where / "config.json").write_text(json.dumps(shape, indent=1))
    return where


def run(options: Mapping[str, object], anchor: Path, donors: Sequence[Path], threads: int, plugin: int = 1) -> Cost:
    """One merge in a process of its own, all models alike.

    Args:
        options: none: by mergekit's own linear.
        plugin: 0: switched off.
        threads: of torch; 0: as many as it takes by itself.
    """
    with tempfile.TemporaryDirectory(dir=anchor.parent) as name:
        folder = Path(name)
        merge = recipe(anchor, halves(anchor, *donors), {"delegate": "linear", **options} if options else {})
        merge |= {"dtype": "bfloat16"} if options else {"dtype": "bfloat16", "merge_method": "linear"}
        (folder / "recipe.yml").write_text(yaml.safe_dump(merge))
        switch, command = f"{SWITCH}={plugin}", [BIN / "mergekit-yaml", folder / "recipe.yml", folder / "out"]
        return process(["env", switch, *command, "--quiet", "--out-shard-size", "1B"], threads)


def after_start(cost: Cost, threads: int) -> float:
    """Processor seconds of a merge after the start."""
    return cost.processor - started(threads)


@cache
def started(threads: int) -> float:
    """Processor seconds of mergekit's help."""
    return process([BIN / "mergekit-yaml", "--help"], threads).processor


def middle(costs: Sequence[Cost]) -> Cost:
    """The one of median processor time, with the median wall time and the largest peak."""
    typical = sorted(costs, key=lambda cost: cost.processor)[len(costs) // 2]
    return replace(typical, wall=statistics.median(cost.wall for cost in costs), peak=max(cost.peak for cost in costs))


def written(shape: Shape, cases: Sequence[str], folder: Path) -> tuple[Path, dict[str, Path]]:
    """The anchor of a shape, and the donor of every kind that is asked for."""
    kinds = dict.fromkeys(CASES[case][0] for case in cases)
    return write(shape, folder / "anchor"), {kind: write(shape, folder / kind, kind) for kind in kinds}


def compare(shape: Shape, cases: Sequence[str], repeats: int, threads: int, table: Table, folder: Path) -> None:
    """Plain linear and each case in turn, so often."""
    anchor, donors = written(shape, cases, folder)
    costs: dict[str, list[Cost]] = {LINEAR: [], BARE: [], **{case: [] for case in cases}}
    for turn in range(repeats):
        for plugin, case in enumerate((BARE, LINEAR)):
            costs[case].append(run({}, anchor, list(donors.values())[:1], threads, plugin))
        for case in cases:
            kind, options = CASES[case]
            if turn == 0 or kind != "far":
                costs[case].append(run(options, anchor, [donors[kind]], threads))
    linear = middle(costs[LINEAR])
    for case, measured in costs.items():
        cost = middle(measured)
        figures = {"wall, s": cost.wall, "processor, s": cost.processor, "after the start": after_start(cost, threads)}
        cells = {"merge": case, **{title: f"{seconds:.1f}" for title, seconds in figures.items()}}
        for name in ("wall", "processor", "peak"):
            cells[f"{name}, times linear"] = f"{getattr(cost, name) / getattr(linear, name):.2f}"
        table.add({**cells, "peak, MB": f"{cost.peak / 1e6:.0f}"})


def by_layers(part: Shape, full: Shape, cases: Sequence[str], threads: int, table: Table, folder: Path) -> None:
    """Some layers and twice as many measured, the whole shape extrapolated."""
    layers = part["num_hidden_layers"]
    parts = [part, {**part, "num_hidden_layers": 2 * layers}]
    models = [written(shape, cases, folder / str(shape["num_hidden_layers"])) for shape in parts]
    outside = [[x for name, x in sizes_of(shape).items() if ".layers." not in name] for shape in (full, part)]
    whole, some = (sum(map(math.prod, sizes)) for sizes in outside)
    linear = 0.0
    for case in (LINEAR, *cases):
        kind, options = CASES.get(case, (CASES[cases[0]][0], {}))
        few, many = (run(options, anchor, [donors[kind]], threads) for anchor, donors in models)
        layer = (many.processor - few.processor) / layers
        rest = (after_start(few, threads) - layers * layer) * whole / some
        seconds = full["num_hidden_layers"] * layer + rest
        linear = linear or seconds
        cells = {"merge": case, "a layer, s": f"{layer:.2f}", "outside of layers, s": f"{rest:.1f}"}
        cells |= {f"{full['num_hidden_layers']} layers, min": f"{seconds / 60:.1f}"}
        cells |= {"times linear": f"{seconds / linear:.2f}", "peak of the part, MB": f"{many.peak / 1e6:.0f}"}
        table.add(cells)


def with_data(shape: Shape, threads: int, table: Table, folder: Path) -> None:
    """Statistics of one model, and a refit of two, on 64 samples of 128 made-up tokens."""
    anchor, donor = write(shape, folder / "anchor"), write(shape, folder / "near", "near")
    tokens = torch.randint(0, shape["vocab_size"], (64, 128), generator=torch.Generator().manual_seed(0))
    np.savez(samples := folder / "samples.npz", input_ids=tokens.numpy())
    measure = [BIN / "rotation-merge", "measure", anchor, "--data", samples, "--by-layer"]
    refit = {**OPTIONS, "delegate": "refit", "data": str(samples), "targets": "mean"}
    commands = {
        "`measure`, gram": lambda: process([*measure, "--out", folder / "statistics.safetensors"], threads),
        "`delegate: refit` of two models": lambda: run(refit, anchor, [donor], threads),
    }
    one_by_one(commands, table)


def changes(shape: Shape, threads: int, table: Table, folder: Path) -> None:
    """Averages of the changes of two fine-tunes."""
    anchor = write(shape, folder / "anchor")
    donors = [write(shape, folder / f"near{number}", "near", number) for number in (0, 1)]
    for delegate, svc in (("linear", {}), ("wudi", {}), ("iso", {}), ("tsv", {}), ("tsv", {"calibrate": "svc"})):
        cost = run({"delegate": delegate, **svc, **STILL}, anchor, donors, threads)
        cells = {"after the start, s": f"{after_start(cost, threads):.0f}", "peak, MB": f"{cost.peak / 1e6:.0f}"}
        table.add({"merge": f"{delegate}, calibrated" if svc else delegate, **cells})


def precision(shape: Shape, threads: int, table: Table, folder: Path) -> None:
    """How far float32 takes `wudi` from float64, on maps of a layer: two changes of rank 16 with as much noise."""
    maps = {size for name, size in sizes_of(shape).items() if ".layers.0." in name and len(size) > 1}
    options, types = {"ridge": wudi.WUDI_RIDGE}, {"bfloat16": torch.bfloat16, "float32": torch.float32}
    for size, (stored, dtype) in itertools.product(sorted(maps), types.items()):
        base, changes = drawn("base", size, 0).to(dtype), []
        for seed in (1, 2):
            left, right, noise = (drawn("", x, seed) for x in ((size[0], 16), (size[1], 16), size))
            low = left @ right.mT
            change = low / low.norm() + noise / noise.norm()
            changes.append(change_of(base, (base + NOISE * float(base.norm()) * change).to(dtype)))
        merged, cells = [], {"map": f"{size[0]} x {size[1]}", "stored as": stored}
        for title, least in (("float32, s", wudi.SINGLE), ("float64, s", math.inf)):
            start = time.process_time()
            with patch.object(wudi, "SINGLE", least):
                merged.append(wudi.Wudi().change(changes, [1.0, 1.0], options).whole())
            cells[title] = f"{time.process_time() - start:.0f}"
        table.add({**cells, "difference": f"{float((merged[0] - merged[1]).norm() / merged[1].norm()):.1e}"})


def outside(shape: Shape, threads: int, table: Table, folder: Path) -> None:
    """`align` of an independent model, and `carry` of a fine-tune to one, under a rotation of the stream."""
    anchor, far, near = (write(shape, folder / str(kind), kind) for kind in (None, "far", "near"))
    turned = ["--residual", "rotation", "--untie"]
    align = [BIN / "rotation-merge", "align", anchor, far, folder / "aligned", *turned, "--no-verify"]
    carry = [BIN / "rotation-merge", "carry", near, folder / "carried", "--from", anchor, "--to", far, *turned]
    one_by_one({"`align`": lambda: process(align, threads), "`carry`": lambda: process(carry, threads)}, table)


def one_by_one(commands: Mapping[str, Callable[[], Cost]], table: Table) -> None:
    """What each takes."""
    for words, work in commands.items():
        cost = work()
        cells = {"wall, s": f"{cost.wall:.0f}", "processor, s": f"{cost.processor:.0f}"}
        table.add({"what": words, **cells, "peak, MB": f"{cost.peak / 1e6:.0f}"})


def curves(table: Table, folder: Path) -> None:
    """Near and far donors of 300M shape with other numbers of layers, widths and donors, one at a time."""
    cases = {("layers", n): (n, 1024, 1) for n in (2, 4, 8)}
    cases |= {("width", n): (2, n, 1) for n in (512, 1024, 2048)}
    cases |= {("donors", n): (4, 1024, n) for n in (1, 2, 3)}
    for kind in ("near", "far"):
        costs = {case: apart(*case, kind, folder / kind) for case in dict.fromkeys(cases.values())}
        for (by, count), case in cases.items():
            cells = {"by": by, "number": str(count), "donor": kind}
            table.add({**cells, "after the start, s": f"{after_start(costs[case], 1):.2f}"})


def apart(layers: int, width: int, donors: int, kind: str, place: Path) -> Cost:
    """A merge of so many donors, on models of its own."""
    shape = llama(width, width * 11 // 4, width // 64, width // 256, layers, 8000, tied=True)
    anchor = write(shape, place / "anchor")
    cost = run(OPTIONS, anchor, [write(shape, place / f"donor{i}", kind, i) for i in range(donors)], 1)
    shutil.rmtree(place)
    return cost


MODES = {
    "data": (with_data, "measure and refit instead"),
    "changes": (changes, "average changes of fine-tunes instead"),
    "precision": (precision, "compare float32 to float64 in wudi instead"),
    "align": (outside, "align and carry instead"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-300m")
    parser.add_argument("--layers", type=int, help="other than the shape has")
    parser.add_argument("--vocabulary", type=int, help="tokens, other than the shape has")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["near", "planted", "far"])
    parser.add_argument("--repeats", type=int, default=1, help="of everything but far donors")
    parser.add_argument("--threads", type=int, default=1, help="of torch; 0: as many as it takes by itself")
    parser.add_argument("--whole", action="store_true", help="extrapolate from these layers to the whole shape")
    parser.add_argument("--curves", action="store_true", help="cost by layers, width and donors instead")
    for mode, (_, words) in MODES.items():
        parser.add_argument(f"--{mode}", dest="mode", action="store_const", const=mode, help=words)
    parser.add_argument("--folder", help="where models are written for the time being")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads or torch.get_num_threads())
    part = {"num_hidden_layers": asked.layers, "vocab_size": asked.vocabulary}
    shape = SHAPES[asked.shape] | {key: value for key, value in part.items() if value is not None}
    name = asked.shape.removeprefix("llama-") + ("" if asked.threads else "-default")
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        place = Path(folder)
        if asked.curves:
            curves(Table("sizes-curves"), place)
        elif asked.mode:
            MODES[asked.mode][0](shape, asked.threads, Table(f"sizes-{asked.mode}-{name}"), place)
        elif asked.whole:
            table = Table(f"layers-{name}")
            by_layers(shape, SHAPES[asked.shape], asked.cases, asked.threads, table, place)
        else:
            compare(shape, asked.cases, asked.repeats, asked.threads, Table(f"sizes-{name}"), place)


if __name__ == "__main__":
    main()
