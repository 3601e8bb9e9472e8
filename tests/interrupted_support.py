"""Commands in forked processes, killed at any moment."""

from __future__ import annotations

import gc
import glob
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from mergekit.io.tasks import LoaderCache
from programs import PROGRAMS

torch.set_num_threads(1)  # a forked process has no other threads


def start(name: str, arguments: Sequence[object], said: Path, prepare: Callable[[], object] = int) -> int:
    """A command in a forked process, which has imported everything: a tiny merge takes well under a second.

    Args:
        said: folder that takes what it writes, as `out` and `err`.
        prepare: done in the process before.

    Returns:
        The id of the process, to wait for.
    """
    program = PROGRAMS[name].load()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        torch.set_num_threads(1)  # whatever a test before left: OpenMP waits forever for threads that are not forked
        gc.freeze()
        prepare()
        sys.stdout, sys.stderr = (open(said / file, "w", encoding="utf-8") for file in ("out", "err"))  # noqa: SIM115
        for number, stream in ((1, sys.stdout), (2, sys.stderr)):
            os.dup2(stream.fileno(), number)
        logging.root.handlers.clear()
        logging.root.setLevel(logging.WARNING)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background inherit it ignored
        LoaderCache.loaders.clear()
        sys.argv = [name, *map(str, arguments)]
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


def forked(name: str, *arguments: object, prepare: Callable[[], object] = int) -> subprocess.CompletedProcess[str]:
    """A command in a forked process, waited for."""
    with tempfile.TemporaryDirectory() as folder:
        code = os.waitstatus_to_exitcode(os.waitpid(start(name, arguments, Path(folder), prepare), 0)[1])
        out, err = (Path(folder, file).read_text("utf-8") for file in ("out", "err"))
    return subprocess.CompletedProcess([name, *arguments], code, out, err)


def run(name: str, *arguments: object, after: float = 0.0, signal_number: int = 0, watched: Path | str = "") -> int:
    """A command, sent a signal (0: none) some seconds after it began, or after a path has appeared (a pattern).

    Returns:
        Its exit code.
    """
    with tempfile.TemporaryDirectory() as folder:
        child, ended = start(name, arguments, Path(folder)), (0, 0)
        while watched and not glob.glob(str(watched)) and not ended[0]:
            time.sleep(0.0005)
            ended = os.waitpid(child, os.WNOHANG)
        if signal_number and not ended[0]:
            time.sleep(after)
            os.kill(child, signal_number)
        return os.waitstatus_to_exitcode((ended if ended[0] else os.waitpid(child, 0))[1])
