"""CPU time and peak memory of the assignment solver against scipy's, on synthetic neurons.

Instances: ft50s = fine-tune with 50% noise, pl200s = hidden permutation with 200% noise, ind = independent Gaussian,
inds = independent with heavy-tailed row norms, clusters and a common mean. Every solve runs in a process of its own on
one thread; times are CPU seconds, memory is the growth of its peak resident size over the bytes of the similarity.

    python benchmarks/assignment.py                          # all instances at 2048 and 4096
    python benchmarks/assignment.py --sizes 14336 --instances ft50s inds --repeats 1
    python benchmarks/assignment.py --factored --sizes 8192 --dim 4096
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from record import Table
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from rotation_merge.linalg._factors import Factors, form
from rotation_merge.linalg.assignment import assign, assign_factored

INSTANCES = ("ft50s", "pl200s", "ind", "inds")
Result = dict[str, float | str]


def neurons(kind: str, n: int, d: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Rows of the anchor and of the donor, each (n, d)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    if kind == "ind":
        return normal(n, d), normal(n, d)
    centres, mean = 0.5 * normal(32, d), 0.3 * normal(d)

    def shaped() -> Tensor:
        rows = normal(n, d) + centres[torch.randint(0, 32, (n,), generator=generator)] + mean
        return rows * torch.exp(0.5 * normal(n, 1))

    anchor = shaped()
    if kind == "inds":
        return anchor, shaped()
    noise = int("".join(filter(str.isdigit, kind))) / 100
    donor = anchor + noise * normal(n, d) * anchor.norm(dim=1, keepdim=True) / d**0.5
    return anchor, donor[torch.randperm(n, generator=generator)] if kind.startswith("pl") else donor


def resident() -> float:
    """Peak resident size so far, bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def solve(solver: str, path: str) -> Result:
    """Load a similarity, solve it, and tell time, memory and objective."""
    assign(torch.eye(4) + torch.ones(4, 4).tril())  # first-call costs
    linear_sum_assignment(np.eye(4))
    baseline = resident()
    scores = np.load(path)
    start = time.process_time()
    if solver == "scipy":
        rows, columns = linear_sum_assignment(scores, maximize=True)
        seconds = time.process_time() - start
        found: Result = {"value": float(scores[rows, columns].sum(dtype=np.float64)), "gap": 0.0, "method": "scipy"}
    else:
        result = assign(torch.from_numpy(scores))
        seconds = time.process_time() - start
        found = {"value": result.value, "gap": result.gap, "method": result.method}
    return found | {"seconds": seconds, "memory": (resident() - baseline) / scores.nbytes}


def write_instance(kind: str, n: int, d: int, path: str) -> Result:
    """Write the similarity of an instance as float32."""
    anchor, donor = neurons(kind, n, d)
    np.save(path, (anchor @ donor.T).numpy())
    return {}


def factored(noise: int, n: int, d: int, signed: bool) -> Result:
    """Three matrices of a near fine-tune without forming the similarity, and what forming it would take."""
    pairs = [neurons(f"ft{noise}s", n, d, seed) for seed in range(3)]
    plain, rest = (pairs[:2], pairs[2:]) if signed else (pairs, [])
    start = time.process_time()
    result = assign_factored(plain, rest)
    seconds = time.process_time() - start
    part = slice(0, max(1, n // 16))
    start = time.process_time()
    for left, right in pairs:
        left[part] @ right.T
    product = (time.process_time() - start) * n / (part.stop - part.start)
    if n <= 4096:
        formed = assign(form(Factors(tuple(plain), tuple(rest))))
        assert abs(formed.value - result.value) <= 1e-6 * abs(result.value)
    return {"seconds": seconds, "product": product, "gap": result.gap, "method": result.method}


def in_child(*arguments: str) -> Result:
    """Run one step in a fresh process on one thread."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--child", *arguments]
    return dict(json.loads(subprocess.run(command, env=environment, check=True, capture_output=True).stdout))


def child(arguments: list[str]) -> Result:
    """Dispatch a step named on the command line."""
    torch.set_num_threads(1)
    step, *rest = arguments
    if step == "write":
        return write_instance(rest[0], int(rest[1]), int(rest[2]), rest[3])
    if step == "factored":
        return factored(int(rest[0]), int(rest[1]), int(rest[2]), rest[3] == "signed")
    return solve(step, rest[0])


def dense_table(sizes: list[int], instances: list[str], d: int, with_scipy: bool, repeats: int) -> None:
    """One row for each instance and size; the fastest of the repeats."""
    table = Table("assignment-large" if max(sizes) > 8192 else "assignment")
    titles = [
        "instance",
        "n",
        "scipy s",
        "ours s",
        "ratio",
        "scipy memory / C",
        "ours memory / C",
        "gap",
        "value, relative to scipy's",
        "route",
    ]
    for n in sizes:
        for kind in instances:
            with tempfile.TemporaryDirectory() as folder:
                path = str(Path(folder) / "similarity.npy")
                in_child("write", kind, str(n), str(d), path)
                ours = min((in_child("ours", path) for _ in range(repeats)), key=lambda r: float(r["seconds"]))
                row = [
                    kind,
                    str(n),
                    "",
                    f"{ours['seconds']:.2f}",
                    "",
                    "",
                    f"{ours['memory']:.2f}",
                    f"{ours['gap']:.1g}",
                ]
                row += ["", str(ours["method"])]
                if with_scipy:
                    reference = in_child("scipy", path)
                    row[2], row[5] = f"{reference['seconds']:.2f}", f"{reference['memory']:.2f}"
                    row[4] = f"{float(reference['seconds']) / float(ours['seconds']):.1f}x"
                    row[8] = f"{float(ours['value']) / float(reference['value']) - 1:.1g}"
                table.add(dict(zip(titles, row, strict=True)))


def factored_table(sizes: list[int], d: int) -> None:
    """Near fine-tunes of three matrices, plain and with one of them signed."""
    table = Table("assignment-factored")
    titles = ["noise", "one matrix signed", "n", "d", "assign_factored s", "full product s", "gap", "route"]
    for n in sizes:
        for noise in (10, 30):
            for signs in ("plain", "signed"):
                found = in_child("factored", str(noise), str(n), str(d), signs)
                row = [
                    f"{noise}%",
                    "yes" if signs == "signed" else "no",
                    str(n),
                    str(d),
                    f"{found['seconds']:.2f}",
                    f"{found['product']:.1f}",
                ]
                table.add(dict(zip(titles, [*row, f"{found['gap']:.1g}", str(found["method"])], strict=True)))


def main() -> None:
    """Parse the command line and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument("--instances", nargs="+", choices=INSTANCES, default=list(INSTANCES))
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--no-scipy", action="store_true")
    parser.add_argument("--factored", action="store_true", help="near fine-tunes given by factors instead")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(options.child)))
    elif options.factored:
        factored_table(options.sizes, options.dim)
    else:
        dense_table(options.sizes, options.instances, options.dim, not options.no_scipy, options.repeats)


if __name__ == "__main__":
    main()
