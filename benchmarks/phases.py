"""`mergekit-yaml` with a watch on what its tasks do: processor seconds by phase.

    python benchmarks/phases.py RECIPE OUT RESULT.json [--passes N]

Used by `sizes.py`; runs mergekit's own command in this process. A phase's seconds are those of the threads that call
torch (with `OMP_NUM_THREADS=1`: all); what a memory-mapped file costs falls to whoever touches its pages first.
`--passes` ends matching of a residual stream after so many passes, to see what one of them takes.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

TASKS = {
    "LoadTensor": "reading",
    "LabelledLoad": "reading",
    "GatherTensors": "gathering",
    "SaveTensor": "writing",
    "FinalizeModel": "writing",
    "TensorWriterTask": "writing",
}
"""What tasks do; every other one averages."""


class Watch:
    """Processor seconds by phase, each without what other phases inside it took; calls inside layers are told apart."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self.inside: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        self._threads, self._lock = threading.local(), threading.Lock()

    def over(self, owner: Any, name: str, phase: str, in_layer: Callable[..., bool]) -> None:
        """Watch a function; `in_layer`: says of its arguments whether they belong to a layer."""
        function: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(function)
        def watched(*arguments: Any, **named: Any) -> Any:
            stack = self._threads.__dict__.setdefault("stack", [])
            stack.append(0.0)
            begin = time.thread_time()
            try:
                return function(*arguments, **named)
            finally:
                took = time.thread_time() - begin
                own = took - stack.pop()
                if stack:
                    stack[-1] += took
                inside = in_layer(*arguments)
                with self._lock:
                    self.spent[phase] += own
                    self.inside[phase] += own if inside else 0.0
                    self.calls[name if inside else f"{name}, not in a layer"] += 1

        setattr(owner, name, watched)

    def everything(self) -> None:
        """Watch mergekit's tasks and ours, and what matching is made of."""
        from mergekit.graph import Task

        from rotation_merge.matching import visit
        from rotation_merge.matching.moving import Mover
        from rotation_merge.matching.stream import StreamMeasurement, StreamSums
        from rotation_merge.mergekit_plugin import run, views

        for task in every_task(Task):
            if not getattr(task.__dict__.get("execute"), "__isabstractmethod__", "execute" not in task.__dict__):
                self.over(task, "execute", TASKS.get(task.__name__, "averaging"), _task_in_layer)
        for owner in (visit, views):
            self.over(owner, "match_block", "matching", _in_layer)
        self.over(Mover, "tensor", "moving", lambda _, block, *__: _in_layer(block))
        self.over(visit, "read_block", "reading", _in_layer)
        self.over(visit, "squared_distances", "stream", _in_layer)
        self.over(StreamMeasurement, "of", "stream", lambda *_: False)
        self.over(StreamSums, "_count", "stream", lambda *_: False)
        self.over(StreamSums, "solve", "solving", lambda *_: False)
        self.over(run, "complete", "checking", lambda *_: False)


def _in_layer(block: Any, *_: Any) -> bool:
    return block.index is not None


def _task_in_layer(task: Any) -> bool:
    return re.search(r"\.\d+(\.|$)", str(getattr(task, "tensor_name", None) or task.group_label())) is not None


def every_task(base: Any) -> list[Any]:
    """All classes of tasks, with those below them."""
    return [base, *(below for cls in base.__subclasses__() for below in every_task(cls))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("out")
    parser.add_argument("result", type=Path)
    parser.add_argument("--passes", type=int)
    arguments = parser.parse_args()
    from mergekit.scripts.run_yaml import main as mergekit_yaml

    logging.disable(logging.WARNING)
    watch = Watch()
    watch.everything()
    if arguments.passes:
        from rotation_merge.matching import match

        match.MOST_PASSES = arguments.passes
    start = time.process_time()
    mergekit_yaml([arguments.recipe, arguments.out, "--quiet", "--out-shard-size", "1B"], standalone_mode=False)
    total = time.process_time() - start
    spent = {**watch.spent, "rest": total - sum(watch.spent.values())}
    found = {"total": total, "spent": spent, "inside": watch.inside, "calls": watch.calls}
    arguments.result.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
