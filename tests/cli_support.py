"""Commands of rotation-merge, run in this process, and the checkpoints and texts that come with it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from plugin_support import one_error

import rotation_merge
from rotation_merge.cli.app import COMMANDS as COMMANDS
from rotation_merge.cli.app import app as app
from rotation_merge.run.demo import digits as digits

CHECKPOINTS = Path(rotation_merge.__file__).parent / "run" / "checkpoints"
TEXTS = CHECKPOINTS.with_name("texts")


def run(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def parsed(*args: object) -> Any:
    """What a command prints with --json."""
    done = run(*args, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def output_of(*args: object, code: int = 0) -> str:
    """What a command prints that ends with this code."""
    done = run(*args)
    assert done.exit_code == code, done.output
    return done.output


def error_of(*args: object) -> str:
    """The one line of a command that ends with an error."""
    return one_error(output_of(*args, code=2))


def hasten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a minute pass with every look at the clock: states of unfinished work are written at once."""
    clock = itertools.count(step=60.0)
    monkeypatch.setattr("time.monotonic", lambda: next(clock))


def stop_training(monkeypatch: pytest.MonkeyPatch, at: int) -> list[int]:
    """Let a training end as Ctrl-C ends it at its so manieth step; the list grows by one with each step."""
    train, steps = torch.optim.AdamW.step, list[int]()

    def step(self: torch.optim.AdamW, *arguments: Any) -> Any:
        steps.append(1)
        if len(steps) == at:
            raise KeyboardInterrupt
        return train(self, *arguments)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    return steps
