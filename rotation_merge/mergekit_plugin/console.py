"""One line instead of a traceback, in mergekit's commands as in ours."""

from __future__ import annotations

import errno
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

import click
from safetensors import SafetensorError

from rotation_merge.errors import CheckpointError, RotationMergeError, no_space, printable
from rotation_merge.files import name_when_whole
from rotation_merge.mergekit_plugin.host import unfit

BAD_INPUT = 2
"""Exit code for bad usage or input."""


class OneLineError(click.ClickException):
    """Shown by click as `Error: ...` with exit code 2."""

    exit_code = BAD_INPUT


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
    if isinstance(error, SafetensorError | OSError):
        return str(_file_error(error, text))
    if isinstance(error, ImportError) and str(error.name).partition(".")[0] == "mergekit":
        return str(unfit(text))
    on_gpu = type(error).__name__ == "OutOfMemoryError"  # torch's, which is not imported for a line
    if isinstance(error, MemoryError) or on_gpu or "DefaultCPUAllocator" in text:
        return str(_out_of_memory(text, on_gpu))
    if "inline_container" in text:  # how torch reports that a pickle could not be written to its end
        problem = "a weight file cannot be written to its end, the disk may be full"
        return str(RotationMergeError(problem, remedy="free some space"))
    if text == "'torch.storage.TypedStorage' object has no attribute 'execute'":  # mergekit's loader.py, Python 3.13
        problem = "mergekit cannot read pickled weights lazily on Python 3.13 and newer"
        return str(RotationMergeError(problem, remedy="leave out --lazy-unpickle"))
    if type(error) in (RuntimeError, ValueError) and text:
        return text
    return f"{type(error).__name__}: {text or 'no message'}; run again with -vv to see where"


def _out_of_memory(text: str, on_gpu: bool) -> RotationMergeError:
    """Build the error for a device without enough memory from the message of torch or Python."""
    size = re.search(r"[Tt]ried to allocate ([\d.]+ ?\w+)", text)
    less = "on another device (without --cuda or --device; merges: or with --low-cpu-memory)"
    if not on_gpu:
        less = "fewer blocks at once (OMP_NUM_THREADS=1; merges: --low-cpu-memory), or on another device"
    return RotationMergeError(
        f"{'the GPU' if on_gpu else 'this machine'} ran out of memory"
        + (f" (tried to allocate {size[1]})" if size else ""),
        remedy=f"match {less}, or run on fewer samples at once (--batch-size; align --learn: --checkpointing)",
    )


def _file_error(error: Exception, text: str) -> RotationMergeError:
    number = error.errno if isinstance(error, OSError) else None
    if no_space(error):
        return RotationMergeError(f"the disk is full ({text})", remedy="free some space and run again")
    if number == errno.EFBIG or "os error 27" in text or "Os { code: 27," in text:
        remedy = "raise the limit, or write smaller shards (--out-shard-size, or --shard-size)"
        return RotationMergeError(f"a file grew over the limit ({text})", remedy=remedy)
    if isinstance(error, SafetensorError) and not any(mark in text for mark in ("I/O", "IoError", "os error")):
        return CheckpointError(f"a safetensors file is corrupt ({text})", remedy="download it again")
    remedy = "check the path and its permissions"
    if isinstance(error, OSError) and error.strerror and isinstance(error.filename, str):
        problem = f"cannot be read or written ({error.strerror.lower()})"
        return RotationMergeError(problem, where=name_when_whole(error.filename), remedy=remedy)
    return RotationMergeError(text, remedy=remedy)
