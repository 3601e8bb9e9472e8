"""Commands in forked processes, which send themselves a signal before one of their steps."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from mergekit.io.tasks import LoaderCache
from programs import PROGRAMS

torch.set_num_threads(1)  # a forked process has no other threads


def forked(name: str, *arguments: object, prepare: Callable[[], object] = int) -> subprocess.CompletedProcess[str]:
    """A command in a forked process, which has imported everything: a tiny merge takes well under a second.

    Args:
        prepare: done in the process before.

    Returns:
        How it ended; a negative code is the signal that killed it.
    """
    program = PROGRAMS[name].load()
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder, stream) for stream in ("out", "err")]
        if (child := os.fork()) == 0:
            _become(program, [name, *map(str, arguments)], streams, prepare)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out, err = (path.read_text("utf-8") if path.exists() else "" for path in streams)
    return subprocess.CompletedProcess([name, *arguments], code, out, err)


def _become(
    program: Callable[[], object], words: list[str], streams: list[Path], prepare: Callable[[], object]
) -> None:
    """Be the command, with its two streams in files, and end."""
    code = 1
    try:
        torch.set_num_threads(1)  # whatever a test before left: OpenMP waits forever for threads that are not forked
        gc.freeze()
        prepare()
        sys.stdout, sys.stderr = (open(path, "w", encoding="utf-8") for path in streams)  # noqa: SIM115
        for number, stream in ((1, sys.stdout), (2, sys.stderr)):
            os.dup2(stream.fileno(), number)
        logging.root.handlers.clear()
        logging.root.setLevel(logging.WARNING)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background inherit it ignored
        LoaderCache.loaders.clear()
        sys.argv = words
        program()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


STEPS = ("replace", "rename", "link", "symlink", "unlink", "remove", "rmdir", "mkdir", "fsync")
"""Functions of `os` in front of which a writer may be ended."""


def at_step(number: int, count: Path, names: Sequence[str] = STEPS) -> Callable[[], None]:
    """Make a process kill itself before its step of this number; it counts its steps in a file."""

    def prepare() -> None:
        steps, parent = 0, os.getpid()

        def counted(plain: Callable[..., Any]) -> Callable[..., Any]:
            def step(*arguments: Any, **options: Any) -> Any:
                nonlocal steps
                if os.getpid() == parent:
                    steps += 1
                    if steps == number:
                        os.kill(parent, signal.SIGKILL)
                    count.write_text(str(steps))
                return plain(*arguments, **options)

            return step

        for name in names:
            setattr(os, name, counted(getattr(os, name)))

    return prepare
