"""What merges cost at the sizes that people have: plain linear and ours in the same run.

    python benchmarks/sizes.py --shape llama-300m             whole models
    python benchmarks/sizes.py --shape llama-300m --threads 0            wall time at torch's default of threads
    python benchmarks/sizes.py --shape llama-8b --layers 1 --vocabulary 4000 --whole
    python benchmarks/sizes.py --data                         `measure`, and a refit of two models, on samples
    python benchmarks/sizes.py --changes --shape llama-8b --layers 1 --vocabulary 4000    changes of two fine-tunes
    python benchmarks/sizes.py --align --layers 1 --vocabulary 128256    `align` and `carry`
    python benchmarks/sizes.py --curves                       cost by layers, width and donors

Two bf16 models of the shape (`shapes.py`) are merged half and half by `mergekit-yaml` in processes of their own, as
users run it. The donor is a fine-tune (2% noise), a planted twin, or independent. Seconds are processor time where a
title does not say wall; "after the start" leaves out what Python and its libraries take before a merge begins, as much
as `mergekit-yaml --help` takes.

With `--whole` so many layers, then twice as many, with a part of the vocabulary are measured, and the whole shape is
extrapolated from them: their difference is what layers take, the rest goes by the weights outside of layers. Passes
over a residual stream are as many as the measured part takes.
"""

from __future__ import annotations

import argparse
import math
import shutil
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
import yaml
from merging import BIN, STILL, Cost, halves, process, recipe
from record import Table
from shapes import OPTIONS, SHAPES, Shape, add_options, chosen, write

TURNED: dict[str, object] = {**OPTIONS, "residual": "rotation", "untie": True}
CASES: dict[str, tuple[str, Mapping[str, object]]] = {
    "near": ("near", OPTIONS),
    "planted": ("planted", OPTIONS),
    "far": ("far", OPTIONS),
    "near, residual: rotation": ("near", TURNED),
    "far, residual: rotation": ("far", TURNED),
}
LINEAR = "mergekit's linear"


def run(options: Mapping[str, object], anchor: Path, donors: Sequence[Path], threads: int) -> Cost:
    """One merge in a process of its own, all models alike.

    Args:
        options: none: by mergekit's own linear.
        threads: of torch; 0: as many as it takes by itself.
    """
    with tempfile.TemporaryDirectory(dir=anchor.parent) as name:
        folder = Path(name)
        merge = recipe(anchor, halves(anchor, *donors), {"delegate": "linear", **options} if options else {})
        merge |= {"dtype": "bfloat16"} if options else {"dtype": "bfloat16", "merge_method": "linear"}
        (folder / "recipe.yml").write_text(yaml.safe_dump(merge))
        command = [BIN / "mergekit-yaml", folder / "recipe.yml", folder / "out", "--quiet", "--out-shard-size", "1B"]
        return process(command, threads)


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
    costs: dict[str, list[Cost]] = {LINEAR: [], **{case: [] for case in cases}}
    for turn in range(repeats):
        costs[LINEAR].append(run({}, anchor, list(donors.values())[:1], threads))
        for case in cases:
            kind, options = CASES[case]
            if turn == 0 or kind != "far":
                costs[case].append(run(options, anchor, [donors[kind]], threads))
    linear = middle(costs[LINEAR])
    for case, measured in costs.items():
        cost = middle(measured)
        table.add(
            {
                "merge": case,
                "wall, s": f"{cost.wall:.1f}",
                "processor, s": f"{cost.processor:.1f}",
                "wall, times linear": f"{cost.wall / linear.wall:.2f}",
                "processor, times linear": f"{cost.processor / linear.processor:.2f}",
                "peak, MB": f"{cost.peak / 1e6:.0f}",
                "peak, times linear": f"{cost.peak / linear.peak:.2f}",
                "after the start": f"{after_start(cost, threads):.1f}",
            }
        )


def by_layers(part: Shape, full: Shape, cases: Sequence[str], threads: int, table: Table, folder: Path) -> None:
    """Some layers and twice as many measured, the whole shape extrapolated."""
    parts = [replace(part, layers=count * part.layers) for count in (1, 2)]
    models = [written(shape, cases, folder / str(shape.layers)) for shape in parts]
    outside = [shape.parameters - shape.layers * layer_size(shape) for shape in (full, part)]
    linear = 0.0
    for case in (LINEAR, *cases):
        kind, options = CASES.get(case, (CASES[cases[0]][0], {}))
        few, many = (run(options, anchor, [donors[kind]], threads) for anchor, donors in models)
        layer = (many.processor - few.processor) / part.layers
        rest = (after_start(few, threads) - part.layers * layer) * outside[0] / outside[1]
        whole = full.layers * layer + rest
        linear = linear or whole
        table.add(
            {
                "merge": case,
                "a layer, s": f"{layer:.2f}",
                "outside of layers, s": f"{rest:.1f}",
                f"{full.layers} layers, min": f"{whole / 60:.1f}",
                "times linear": f"{whole / linear:.2f}",
                "peak of the part, MB": f"{many.peak / 1e6:.0f}",
            }
        )


def layer_size(shape: Shape) -> int:
    return sum(math.prod(size) for name, size in shape.sizes.items() if ".layers.0." in name)


def with_data(shape: Shape, threads: int, table: Table, folder: Path) -> None:
    """Statistics of one model, and a refit of two, on 64 samples of 128 made-up tokens."""
    anchor, donor = write(shape, folder / "anchor"), write(shape, folder / "near", "near")
    tokens = torch.randint(0, shape.vocabulary, (64, 128), generator=torch.Generator().manual_seed(0))
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
    for delegate in ("linear", "wudi", "iso"):
        cost = run({"delegate": delegate, **STILL}, anchor, donors, threads)
        cells = {"after the start, s": f"{after_start(cost, threads):.0f}", "peak, MB": f"{cost.peak / 1e6:.0f}"}
        table.add({"merge": delegate, **cells})


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
    base = replace(SHAPES["llama-300m"], layers=4, vocabulary=8000)

    def wide(width: int) -> Shape:
        return replace(base, hidden=width, ffn=width * 11 // 4, heads=width // 64, kv_heads=width // 256, layers=2)

    shapes = {("layers", n): (replace(base, layers=n), 1) for n in (2, 4, 8)}
    shapes |= {("width", n): (wide(n), 1) for n in (512, 1024, 2048)}
    shapes |= {("donors", n): (base, n) for n in (1, 2, 3)}
    for kind in ("near", "far"):
        places = {case: folder / f"{kind}-{i}" for i, case in enumerate(dict.fromkeys(shapes.values()))}
        costs = {case: apart(*case, kind, place) for case, place in places.items()}
        for (by, count), case in shapes.items():
            cells = {"by": by, "number": str(count), "donor": kind}
            table.add({**cells, "after the start, s": f"{after_start(costs[case], 1):.2f}"})


def apart(shape: Shape, number: int, kind: str, place: Path) -> Cost:
    """A merge of so many donors, on models of its own."""
    anchor = write(shape, place / "anchor")
    cost = run(OPTIONS, anchor, [write(shape, place / f"donor{i}", kind, i) for i in range(number)], 1)
    shutil.rmtree(place)
    return cost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["near", "planted", "far"])
    parser.add_argument("--repeats", type=int, default=1, help="of everything but far donors")
    parser.add_argument("--threads", type=int, default=1, help="of torch; 0: as many as it takes by itself")
    parser.add_argument("--whole", action="store_true", help="extrapolate from these layers to the whole shape")
    parser.add_argument("--curves", action="store_true", help="cost by layers, width and donors instead")
    parser.add_argument("--data", action="store_true", help="measure and refit instead")
    parser.add_argument("--changes", action="store_true", help="average changes of fine-tunes instead")
    parser.add_argument("--align", action="store_true", help="align and carry instead")
    parser.add_argument("--folder", help="where models are written for the time being")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads or torch.get_num_threads())
    name = arguments.shape.removeprefix("llama-") + ("" if arguments.threads else "-default")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as place:
        if arguments.curves:
            return curves(Table("sizes-curves"), Path(place))
        modes = (
            ("align", arguments.align, outside),
            ("data", arguments.data, with_data),
            ("changes", arguments.changes, changes),
        )
        for kind, asked, work in modes:
            if asked:
                return work(chosen(arguments), arguments.threads, Table(f"sizes-{kind}-{name}"), Path(place))
        given, shape = (arguments.cases, arguments.threads), chosen(arguments)
        if arguments.whole:
            return by_layers(shape, SHAPES[arguments.shape], *given, Table(f"layers-{name}"), Path(place))
        compare(shape, given[0], arguments.repeats, given[1], Table(f"sizes-{name}"), Path(place))


if __name__ == "__main__":
    main()
