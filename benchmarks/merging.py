"""What benchmarks share: merges by recipes through mergekit, commands and what they take, losses of models."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
from transformers.utils import logging

import rotation_merge as rm
from rotation_merge.model.open import ModelLike, open_model

STILL: dict[str, Any] = {"attention": "none", "heads": "none", "ffn": "none", "scaling": False}
"""Nothing is aligned."""
WHOLE: dict[str, Any] = {"heads": "permutation", "residual": "rotation"}
Models = Mapping[Path | str, Mapping[str, Any]]
"""Parameters of each model, by its path."""
BIN = Path(sys.executable).parent
"""Where commands lie."""


@dataclass(frozen=True)
class Cost:
    """What a command took.

    Attributes:
        wall, processor: seconds.
        peak: resident bytes at most; allocated: without mapped files, which the system takes back when it needs memory.
        output: what it printed; code: its exit code.
    """

    wall: float
    processor: float
    peak: int
    allocated: int
    output: str
    code: int


def process(command: Sequence[object], threads: int | None = None, may_fail: bool = False) -> Cost:
    """A command in a process of its own; ends everything where it fails.

    Args:
        threads: of torch; 0: as many as it takes by itself; None: as many as this process was told to take.
    """
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS" or threads is None}
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    begin, allocated = time.perf_counter(), 0
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(list(map(str, command)), stdout=output, stderr=subprocess.STDOUT, env=environment)
        while not (ended := os.wait4(child.pid, os.WNOHANG))[0]:
            allocated = max(allocated, _allocated(child.pid))
            time.sleep(0.02)
        wall, (_, status, used) = time.perf_counter() - begin, ended
        child.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read()
    if child.returncode and not may_fail:
        sys.exit(f"{' '.join(map(str, command))}\n{text}")
    seconds = used.ru_utime + used.ru_stime
    return Cost(wall, seconds, used.ru_maxrss * 1024, allocated, text, child.returncode)


def _allocated(pid: int) -> int:
    """Resident bytes of a process without mapped files."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def recipe(base: Path | str, models: Models, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe of our merge method, in float32."""
    return {
        "merge_method": "rotation_merge",
        "base_model": str(base),
        "models": [{"model": str(path), "parameters": dict(values)} for path, values in models.items()],
        "parameters": dict(parameters),
        "dtype": "float32",
    }


def merge(base: Path | str, models: Models, out: Path | str, parameters: Mapping[str, Any]) -> Path:
    """The merge of a recipe, written to a folder."""
    content = recipe(base, models, parameters)
    options, text = MergeOptions(quiet=True, random_seed=0), yaml.safe_dump(content, sort_keys=False)
    run_merge(MergeConfiguration.model_validate(content), str(out), options, config_source=text)
    return Path(out)


def quiet() -> None:
    """One thread of torch, and nothing from transformers."""
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def halves(*paths: Path | str) -> Models:
    """Models that count equally."""
    return {path: {"weight": 1 / len(paths)} for path in paths}


def load(folder: Path | str) -> Any:
    """A checkpoint as a module, in float32."""
    return open_model(folder).to(torch.float32).to_module()


def accuracy(model: ModelLike) -> float:
    """On all 540 test images of the digits."""
    return rm.evaluate(model, "demo:digits")["accuracy"]


def loss(model: ModelLike, domain: str, count: int | None = 160) -> float:
    """Nats a byte of so many windows of 128 bytes of held-out text; None: of all."""
    return rm.evaluate(model, f"demo:{domain}", rm.EvaluateConfig(limit=count))["loss"]
