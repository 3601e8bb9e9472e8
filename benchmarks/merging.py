"""Merges by recipes through mergekit, and commands of the package."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
from transformers.utils import logging

STILL: dict[str, Any] = {"attention": "none", "heads": "none", "ffn": "none", "scaling": False}
"""Nothing is aligned."""
WHOLE: dict[str, Any] = {"heads": "permutation", "residual": "rotation"}
Models = Mapping[Path | str, Mapping[str, Any]]
"""Parameters of each model, by its path."""


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
    run_recipe(yaml.safe_dump(recipe(base, models, parameters), sort_keys=False), out)
    return Path(out)


def quiet() -> None:
    """One thread of torch, and nothing from transformers."""
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def run_recipe(text: str, out: Path | str) -> None:
    logging.disable_progress_bar()
    options = MergeOptions(quiet=True, random_seed=0)
    run_merge(MergeConfiguration.model_validate(yaml.safe_load(text)), str(out), options, config_source=text)


def halves(*paths: Path | str, **of_last: Any) -> Models:
    """Models that count equally; parameters of the last one."""
    even = {path: {"weight": 1 / len(paths)} for path in paths}
    return {**even, paths[-1]: {**even[paths[-1]], **of_last}}


def command(*arguments: object, ends: tuple[int, ...] = (0,)) -> str:
    """What one of our commands prints; ends the script where it ends with another code."""
    program = Path(sys.executable).with_name("rotation-merge")
    done = subprocess.run([str(word) for word in (program, *arguments)], capture_output=True, text=True)
    if done.returncode not in ends:
        sys.exit(done.stderr + done.stdout)
    return done.stdout
