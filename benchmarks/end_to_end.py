"""Where the time of an aligned merge goes, against mergekit's plain linear: checking and planning, each kind of task.

The 300M-parameter models of `memory.py`, both merges in one process with one thread, processor seconds. Loading is
from the page cache; moving the donor's tensors is applying the transforms and rounding.

    python benchmarks/end_to_end.py --donor fine-tune
"""

from __future__ import annotations

import argparse
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import memory
import torch
from mergekit.config import MergeConfiguration
from mergekit.graph import Task
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
from record import Table

PARTS = {
    "loading (memory-mapped)": ("LoadTensor", "LabelledLoad"),
    "gathering, with the check for NaN and infinity": ("GatherTensors", "AlignedGather"),
    "matching": ("MatchBlock",),
    "moving the donor's tensors": ("MoveTensor",),
    "averaging": (),
    "writing": ("SaveTensor", "FinalizeModel", "TensorWriterTask"),
}
"""Tasks by what they do; every other one averages."""


def every_task(base: type[Task]) -> list[type[Task]]:
    """All classes of tasks, with those below them."""
    return [base, *(below for cls in base.__subclasses__() for below in every_task(cls))]


def timed(execute: Callable[..., Any], name: str, spent: dict[str, float]) -> Callable[..., Any]:
    def run(self: Task, **arguments: Any) -> Any:
        begin = time.process_time()
        try:
            return execute(self, **arguments)
        finally:
            spent[name] += time.process_time() - begin

    return run


def measure(options: Mapping[str, object], anchor: Path, other: Path, folder: Path) -> dict[str, float]:
    """Processor seconds of one merge by what its tasks do."""
    import rotation_merge.planning.planner  # noqa: F401  (its tasks are to be found below Task)

    config = MergeConfiguration.model_validate(memory.recipe(options, anchor, other))
    spent: dict[str, float] = defaultdict(float)
    parts = {task: part for part, tasks in PARTS.items() for task in tasks}
    originals = {cls: cls.__dict__["execute"] for cls in every_task(Task) if "execute" in cls.__dict__}
    for cls, execute in originals.items():
        if not getattr(execute, "__isabstractmethod__", False):
            cls.execute = timed(execute, parts.get(cls.__name__, "averaging"), spent)  # type: ignore[method-assign]
    begin = time.process_time()
    try:
        run_merge(config, str(folder / "out"), MergeOptions(quiet=True, copy_tokenizer=False))
    finally:
        for cls, execute in originals.items():
            cls.execute = execute  # type: ignore[method-assign]
    total = time.process_time() - begin
    return {**spent, "checks, planning, scheduling": total - sum(spent.values()), "all": total}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--donor", choices=memory.KINDS, default="fine-tune")
    parser.add_argument("--layers", type=int, default=24)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    with memory.written(arguments.donor, arguments.layers) as places:
        plain, aligned = (measure(options, *places) for options in ({}, memory.OPTIONS))
    table = Table("merge-parts")
    for part in (*PARTS, "checks, planning, scheduling", "all"):
        cells = (f"{found[part]:.2f}" if found.get(part, 0.0) >= 0.005 else "" for found in (plain, aligned))
        table.add(dict(zip(("part", "plain linear", "aligned"), (part, *cells), strict=True)))


if __name__ == "__main__":
    main()
