"""One line instead of a traceback, in mergekit's commands as in ours."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

import click
from safetensors import SafetensorError

from rotation_merge.errors import RotationMergeError, no_space, printable, short
from rotation_merge.files import name_when_whole
from rotation_merge.mergekit_plugin.host import unfit

FEWER = "or run on fewer samples at once (--batch-size; align --learn: --checkpointing)"
MEANINGS = {
    ("os error 27", "Os { code: 27,", "Errno 27]"): (
        "a file grew over the limit",
        "raise the limit, or write smaller shards (--out-shard-size, or --shard-size)",
    ),
    ("inline_container",): ("a pickle cannot be written to its end, the disk may be full", "free some space"),
    ("'torch.storage.TypedStorage' object has no attribute 'execute'",): (
        "mergekit cannot read pickled weights lazily on Python 3.13 and newer",
        "leave out --lazy-unpickle",
    ),
    ("OutOfMemoryError:",): (
        "the GPU ran out of memory",
        f"match on another device (without --cuda or --device; merges: or with --low-cpu-memory), {FEWER}",
    ),
    ("MemoryError:", "DefaultCPUAllocator"): (
        "this machine ran out of memory",
        f"match fewer blocks at once (OMP_NUM_THREADS=1; merges: --low-cpu-memory), or on another device, {FEWER}",
    ),
}
"""Problem and remedy by what stands in the errors of other libraries, whose class and text come first."""


class OneLineError(click.ClickException):
    """Shown by click as `Error: ...` with exit code 2."""

    exit_code = 2


@contextmanager
def one_line() -> Iterator[None]:
    """Turn errors of a merge into one line; with debug logging (-vv) tracebacks stay.

    Outside a command (from Python) errors pass unchanged.
    """
    try:
        yield
    except (click.ClickException, click.exceptions.Exit, click.Abort):
        raise
    except Exception as error:
        if click.get_current_context(silent=True) is None or logging.getLogger().isEnabledFor(logging.DEBUG):
            raise
        raise OneLineError(printable(line(error))) from None


def line(error: Exception) -> str:
    """An error as one line for the user."""
    text = " ".join(f"{error}".split())
    if isinstance(error, RotationMergeError):
        return str(error)
    if isinstance(error, ImportError) and str(error.name).partition(".")[0] == "mergekit":
        return str(unfit(text))
    if no_space(error):
        return str(RotationMergeError(f"the disk is full ({text})", remedy="free some space and run again"))
    for marks, (problem, remedy) in MEANINGS.items():
        if any(mark in f"{type(error).__name__}: {text}" for mark in marks):
            size = re.search(r"ried to allocate [\d.]+ ?\w+", text)
            detail = f" (t{size[0]})" if size else f" ({short(text)})" if text else ""
            return str(RotationMergeError(f"{problem}{detail}", remedy=remedy))
    if isinstance(error, SafetensorError | OSError):
        return str(_file_error(error, text))
    if type(error) in (RuntimeError, ValueError) and text:
        return text
    return f"{type(error).__name__}: {text or 'no message'}; run again with -vv to see where"


def _file_error(error: Exception, text: str) -> RotationMergeError:
    """A file that cannot be read or written, named where the error names it."""
    if isinstance(error, SafetensorError) and not any(mark in text for mark in ("I/O", "IoError", "os error")):
        return RotationMergeError(f"a safetensors file is corrupt ({text})", remedy="download it again")
    remedy = "check the path and its permissions"
    if isinstance(error, OSError) and error.strerror and isinstance(error.filename, str):
        problem = f"cannot be read or written ({error.strerror.lower()})"
        return RotationMergeError(problem, where=name_when_whole(error.filename), remedy=remedy)
    return RotationMergeError(text, remedy=remedy)
