"""Where the time of an aligned merge goes, against mergekit's plain linear: checking and planning, each kind of task.

The 300M-parameter models of `memory.py`, both merges in one process with one thread, processor seconds. Loading is
from the page cache. Tasks: LoadTensor, MatchBlock (matching), MoveTensor (applying the transforms and rounding),
gathering, averaging (ExecuteMergeMethodTask), SaveTensor and FinalizeModel (writing).

    python benchmarks/end_to_end.py --donor fine-tune
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import memory
import torch
from mergekit.config import MergeConfiguration
from mergekit.graph import Task
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
from record import Table

KINDS = {"LabelledLoad": "LoadTensor", "AlignedGather": "GatherTensors"}


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


def measure(method: str, anchor: Path, other: Path, folder: Path) -> dict[str, float]:
    """Processor seconds of one merge by kind of task; `rest` is planning, scheduling and everything else."""
    import rotation_merge.planning.planner  # noqa: F401  (its tasks are to be found below Task)

    config = MergeConfiguration.model_validate(memory.recipe(method, anchor, other))
    spent: dict[str, float] = defaultdict(float)
    originals = {cls: cls.__dict__["execute"] for cls in every_task(Task) if "execute" in cls.__dict__}
    for cls, execute in originals.items():
        if not getattr(execute, "__isabstractmethod__", False):
            cls.execute = timed(execute, KINDS.get(cls.__name__, cls.__name__), spent)  # type: ignore[method-assign]
    begin = time.process_time()
    try:
        run_merge(config, str(folder / method), MergeOptions(quiet=True, copy_tokenizer=False))
    finally:
        for cls, execute in originals.items():
            cls.execute = execute  # type: ignore[method-assign]
    total = time.process_time() - begin
    parts = {name: seconds for name, seconds in spent.items() if seconds > 0.005}
    return {"total": total, **parts, "rest": total - sum(spent.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--donor", choices=memory.KINDS, default="fine-tune")
    parser.add_argument("--layers", type=int, default=24)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config, architecture = memory.llama(arguments.layers)
        state = memory.random_state(architecture, 1)
        other = memory.write(memory.donor(arguments.donor, architecture, state), config, folder / "donor")
        anchor = memory.write(state, config, folder / "anchor")
        plain, aligned = (measure(method, anchor, other, folder) for method in ("linear", "rotation_merge"))
    table = Table("merge-parts")
    for part in dict.fromkeys([*aligned, *plain]):
        cells = (f"{found[part]:.2f}" if part in found else "" for found in (plain, aligned))
        table.add(dict(zip(("part", "plain linear", "aligned"), (part, *cells), strict=True)))


if __name__ == "__main__":
    main()
