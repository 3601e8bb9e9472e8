"""Programs killed at any moment, and directories that load as a model only if they are one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

MERGE = "from mergekit.scripts.run_yaml import main"
OURS = "from rotation_merge.cli.app import app as main; import rotation_merge.checkpoints.aligned"

SERVER = """
import json, os, signal, sys, time
import rotation_merge.planning.planner, torch
PROGRAM
torch.set_num_threads(1)
print("ready", flush=True)
for line in sys.stdin:
    delay, number, watched, arguments = json.loads(line)
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background inherit it ignored
        try:
            main(arguments, standalone_mode=False)
        except SystemExit as end:
            os._exit(end.code or 0)
        except BaseException:
            os._exit(1)
        os._exit(0)
    ended = 0, 0
    while watched and not os.path.exists(watched) and not ended[0]:
        time.sleep(0.0005)
        ended = os.waitpid(child, os.WNOHANG)
    if number and not ended[0]:
        time.sleep(delay)
        os.kill(child, number)
    print(os.waitstatus_to_exitcode((ended if ended[0] else os.waitpid(child, 0))[1]), flush=True)
"""
"""Forks a program for every request: it has imported everything, so a tiny merge takes well under a second.

It sends the signals itself, since only a parent knows for sure that a process id still is its child's.
"""


@contextmanager
def serve(program: str) -> Iterator[subprocess.Popen[str]]:
    """A server for one of the programs above."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", SERVER.replace("PROGRAM", program)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        assert process.stdin is not None
        process.stdin.close()


def run(
    server: subprocess.Popen[str],
    *arguments: object,
    after: float = 0.0,
    signal_number: int = 0,
    watched: Path | str = "",
) -> int:
    """A run of the program, sent a signal (0: none) some seconds after it began, or after a path has appeared.

    Returns:
        Its exit code.
    """
    assert server.stdin is not None
    assert server.stdout is not None
    request = [after, int(signal_number), str(watched), [str(argument) for argument in arguments]]
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    return int(server.stdout.readline())


def load(where: Path) -> dict[str, torch.Tensor] | None:
    """What transformers makes of a directory; None where it does not load. Weights made up are an error."""
    try:
        model, info = AutoModelForCausalLM.from_pretrained(where, output_loading_info=True)
    except (OSError, ValueError):
        return None
    assert not info["missing_keys"], where
    assert not info["mismatched_keys"], where
    return model.state_dict()


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return set(a) == set(b) and all(torch.equal(a[name], b[name]) for name in a)


def assert_whole_or_not_at_all(folder: Path, *models: dict[str, torch.Tensor]) -> int:
    """Every directory that loads is one of the models; returns how many do."""
    found = 0
    for path in [folder, *folder.rglob("*")]:
        if path.is_dir() and (path / "config.json").exists():
            loaded = load(path)
            if loaded is not None:
                assert any(equal(loaded, model) for model in models), path
                found += 1
    return found
