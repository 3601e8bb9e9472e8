"""What merges cost at the sizes that people have: plain linear and ours in the same run, by phase.

    python benchmarks/sizes.py --shape llama-300m             whole models
    python benchmarks/sizes.py --shape llama-300m --threads 0            wall time at torch's default of threads
    python benchmarks/sizes.py --shape llama-8b --layers 1 --vocabulary 4000 --whole
    python benchmarks/sizes.py --data                         `measure`, and a refit of two models, on samples
    python benchmarks/sizes.py --changes --shape llama-8b --layers 1 --vocabulary 4000    changes of two fine-tunes
    python benchmarks/sizes.py --align --layers 1 --vocabulary 128256    `align` and `carry`
    python benchmarks/sizes.py --curves                       cost by layers, width and donors

Two bf16 models of the shape (`shapes.py`) are merged half and half by `mergekit-yaml` in processes of their own: once
as users run it, which gives time and memory, and once watched, which gives phases (`phases.py`). The donor is a
fine-tune (2% noise), a planted twin, or independent. Seconds are processor time where a title does not say wall.
"Start" is what Python and its libraries take before a merge begins.

With `--whole` some layers and a part of the vocabulary are measured and the whole shape is extrapolated from them: what
was spent in layers by their number, the rest by the weights outside of layers. For a residual stream of independent
models two passes are measured and `PASSES` counted.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from merging import STILL, halves, recipe
from record import Table
from shapes import OPTIONS, SHAPES, Shape, add_options, chosen, write

from rotation_merge.matching.match import PARTS, SAMPLE

TURNED: dict[str, object] = {**OPTIONS, "residual": "rotation", "untie": True}
CASES: dict[str, tuple[str, Mapping[str, object]]] = {
    "near": ("near", OPTIONS),
    "planted": ("planted", OPTIONS),
    "far": ("far", OPTIONS),
    "near, residual: rotation": ("near", TURNED),
    "far, residual: rotation": ("far", TURNED),
}
LINEAR = "mergekit's linear"
PASSES = 4
"""Passes over two independent models that matching their stream takes from its better start, about as many as between
ViTs and between Llamas of other seeds."""
EACH_PASS = ("reading", "matching", "stream")
"""Phases that every pass over the model takes anew."""


@dataclass(frozen=True)
class Cost:
    """What one merge took.

    Attributes:
        wall, processor: seconds of the whole command.
        peak: resident bytes at most.
        found: what `phases.py` wrote.
    """

    wall: float
    processor: float
    peak: int
    found: Mapping[str, Any]

    @property
    def total(self) -> float:
        """Seconds after the start."""
        return self.found["total"]

    @property
    def solved(self) -> int:
        """How often the stream was solved for."""
        return self.found["calls"].get("solve, not in a layer", 0)

    def rounds(self, layers: int) -> float:
        """How often a layer was matched."""
        return self.found["calls"].get("match_block", 0) / layers


def run(
    options: Mapping[str, object],
    anchor: Path,
    donors: Sequence[Path],
    threads: int,
    passes: int = 0,
    plain: bool = False,
) -> Cost:
    """One merge in a process of its own, all models alike.

    Args:
        options: none: by mergekit's own linear.
        threads: of torch; 0: as many as it takes by itself.
        passes: at most so many for a residual stream; 0: as ever.
        plain: take time and memory from a second run, of mergekit's own command with nobody watching.
    """
    with tempfile.TemporaryDirectory(dir=anchor.parent) as name:
        folder = Path(name)
        merge = recipe(anchor, halves(anchor, *donors), {"delegate": "linear", **options} if options else {})
        merge |= {"dtype": "bfloat16"} if options else {"dtype": "bfloat16", "merge_method": "linear"}
        (folder / "recipe.yml").write_text(yaml.safe_dump(merge))
        command = [sys.executable, Path(__file__).with_name("phases.py"), folder / "recipe.yml", folder / "out"]
        command += [folder / "found.json", *(["--passes", passes] if passes else [])]
        used = process(command, threads)
        if plain:
            shutil.rmtree(folder / "out")
            command = [Path(sys.executable).with_name("mergekit-yaml"), folder / "recipe.yml", folder / "out"]
            used = process([*command, "--quiet", "--out-shard-size", "1B"], threads)
        return replace(used, found=json.loads((folder / "found.json").read_text()))


def process(command: Sequence[object], threads: int) -> Cost:
    """A command in a process of its own; ends everything where it fails."""
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    begin = time.perf_counter()
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log, env=environment)
        _, status, used = os.wait4(child.pid, 0)
        wall = time.perf_counter() - begin
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            log.seek(0)
            sys.exit(log.read().decode())
    return Cost(wall, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, {})


def middle(costs: Sequence[Cost]) -> Cost:
    """The one of median processor time, with the median wall time and the largest peak."""
    typical = sorted(costs, key=lambda cost: cost.processor)[len(costs) // 2]
    return replace(typical, wall=statistics.median(cost.wall for cost in costs), peak=max(cost.peak for cost in costs))


def compare(shape: Shape, cases: Sequence[str], repeats: int, threads: int, table: Table, folder: Path) -> None:
    """Plain linear and each case in turn, so often."""
    anchor = write(shape, folder / "anchor")
    donors = {kind: write(shape, folder / kind, kind) for kind in dict.fromkeys(CASES[case][0] for case in cases)}
    costs: dict[str, list[Cost]] = {LINEAR: [], **{case: [] for case in cases}}
    for turn in range(repeats):
        costs[LINEAR].append(run({}, anchor, list(donors.values())[:1], threads, plain=True))
        for case in cases:
            kind, options = CASES[case]
            if turn == 0 or kind != "far":
                costs[case].append(run(options, anchor, [donors[kind]], threads, plain=True))
    linear = middle(costs[LINEAR])
    for case, found in costs.items():
        cost = middle(found)
        table.add(
            {
                "merge": case,
                "wall, s": f"{cost.wall:.1f}",
                "processor, s": f"{cost.processor:.1f}",
                "wall, times linear": f"{cost.wall / linear.wall:.2f}",
                "processor, times linear": f"{cost.processor / linear.processor:.2f}",
                "peak, MB": f"{cost.peak / 1e6:.0f}",
                "peak, times linear": f"{cost.peak / linear.peak:.2f}",
                "after the start": f"{cost.total:.1f}",
            }
        )


def extrapolated(cost: Cost, part: Shape, full: Shape, rounds: float, solved: float) -> tuple[float, float]:
    """Seconds of a layer, and of what stands outside of layers, in the whole shape.

    Args:
        rounds: how often a layer is matched in a whole model.
        solved: how often the stream is.
    """
    again = rounds / cost.rounds(part.layers) if cost.rounds(part.layers) else 1.0
    outside = [shape.parameters - shape.layers * _layer(shape) for shape in (full, part)]
    layer, other = 0.0, cost.found["spent"]["rest"]
    for phase, spent in cost.found["spent"].items():
        inside = cost.found["inside"].get(phase, 0.0)
        times = again if phase in EACH_PASS else 1.0
        if phase == "solving":
            other += spent * solved / max(cost.solved, 1)
        elif phase == "writing":  # whole files, wherever their last tensor stands
            layer += spent * _layer(part) / part.parameters
            other += spent * outside[0] / part.parameters
        elif phase != "rest":
            layer += inside / part.layers * times
            other += (spent - inside) * outside[0] / outside[1]
    return layer, other


def _layer(shape: Shape) -> int:
    return sum(math.prod(size) for name, size in shape.sizes.items() if ".layers.0." in name)


def by_layers(part: Shape, full: Shape, cases: Sequence[str], threads: int, table: Table, folder: Path) -> None:
    """Some layers measured, the whole shape extrapolated."""
    anchor = write(part, folder / "anchor")
    donors = {kind: write(part, folder / kind, kind) for kind in dict.fromkeys(CASES[case][0] for case in cases)}
    linear = 0.0
    for case in (LINEAR, *cases):
        kind, options = CASES.get(case, (next(iter(donors)), {}))
        turned = CASES.get(case) == ("far", TURNED)
        cost = run(options, anchor, [donors[kind]], threads, passes=2 if turned else 0)
        rounds = PASSES + 1 + 2 * SAMPLE / full.layers if turned else cost.rounds(part.layers)
        solved = 2 + PARTS * PASSES if turned else cost.solved
        layer, other = extrapolated(cost, part, full, rounds, solved)
        whole = full.layers * layer + other
        linear = linear or whole
        table.add(
            {
                "merge": case,
                "a layer, s": f"{layer:.2f}",
                "outside of layers, s": f"{other:.1f}",
                f"{full.layers} layers, min": f"{whole / 60:.1f}",
                "times linear": f"{whole / linear:.2f}",
                "peak of the part, MB": f"{cost.peak / 1e6:.0f}",
            }
        )


def with_data(shape: Shape, threads: int, table: Table, folder: Path) -> None:
    """Statistics of one model, and a refit of two, on 64 samples of 128 made-up tokens."""
    anchor, donor = write(shape, folder / "anchor"), write(shape, folder / "near", "near")
    tokens = torch.randint(0, shape.vocabulary, (64, 128), generator=torch.Generator().manual_seed(0))
    np.savez(samples := folder / "samples.npz", input_ids=tokens.numpy())
    measure = [Path(sys.executable).with_name("rotation-merge"), "measure", anchor, "--data", samples, "--by-layer"]
    refit = {**OPTIONS, "delegate": "refit", "data": str(samples), "targets": "mean"}
    done = {
        "`measure`, gram": lambda: process([*measure, "--out", folder / "statistics.safetensors"], threads),
        "`delegate: refit` of two models": lambda: run(refit, anchor, [donor], threads),
    }
    one_by_one(done, table)


def changes(shape: Shape, threads: int, table: Table, folder: Path) -> None:
    """Averages of the changes of two fine-tunes."""
    anchor = write(shape, folder / "anchor")
    donors = [write(shape, folder / f"near{number}", "near", number) for number in (0, 1)]
    for delegate in ("linear", "wudi", "iso"):
        cost = run({"delegate": delegate, **STILL}, anchor, donors, threads)
        cells = {"after the start, s": f"{cost.total:.0f}", "peak, MB": f"{cost.peak / 1e6:.0f}"}
        table.add({"merge": delegate, **cells})


def outside(shape: Shape, threads: int, table: Table, folder: Path) -> None:
    """`align` of an independent model, and `carry` of a fine-tune to one, under a rotation of the stream."""
    anchor, far, near = (write(shape, folder / str(kind), kind) for kind in (None, "far", "near"))
    program = Path(sys.executable).with_name("rotation-merge")
    turned = ["--residual", "rotation", "--untie"]
    align = [program, "align", anchor, far, folder / "aligned", *turned, "--no-verify"]
    carry = [program, "carry", near, folder / "carried", "--from", anchor, "--to", far, *turned]
    one_by_one({"`align`": lambda: process(align, threads), "`carry`": lambda: process(carry, threads)}, table)


def one_by_one(done: Mapping[str, Callable[[], Cost]], table: Table) -> None:
    """What each takes."""
    for what, work in done.items():
        cost = work()
        cells = {"wall, s": f"{cost.wall:.0f}", "processor, s": f"{cost.processor:.0f}"}
        table.add({"what": what, **cells, "peak, MB": f"{cost.peak / 1e6:.0f}"})


def curves(table: Table, folder: Path) -> None:
    """Near and far donors of 300M shape with other numbers of layers, widths and donors, one at a time."""
    base = replace(SHAPES["llama-300m"], layers=4, vocabulary=8000)

    def wide(width: int) -> Shape:
        return replace(base, hidden=width, ffn=width * 11 // 4, heads=width // 64, kv_heads=width // 256, layers=2)

    shapes = {("layers", n): (replace(base, layers=n), 1) for n in (2, 4, 8)}
    shapes |= {("width", n): (wide(n), 1) for n in (512, 1024, 2048)}
    shapes |= {("donors", n): (base, n) for n in (1, 2, 3)}
    for kind in ("near", "far"):
        costs = {
            case: apart(*case, kind, folder / f"{kind}-{i}") for i, case in enumerate(dict.fromkeys(shapes.values()))
        }
        for (what, count), case in shapes.items():
            cost = costs[case]
            cells = {"by": what, "number": str(count), "donor": kind, "after the start, s": f"{cost.total:.2f}"}
            table.add(cells | {"matching, s": f"{cost.found['spent']['matching']:.2f}"})


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
