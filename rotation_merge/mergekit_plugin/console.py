"""One line instead of a traceback, in mergekit's commands as in ours."""

from __future__ import annotations

import errno
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

import click
import yaml
from pydantic import ValidationError
from safetensors import SafetensorError

from rotation_merge.errors import CheckpointError, RecipeError, RotationMergeError, no_space, printable
from rotation_merge.files import name_when_whole
from rotation_merge.mergekit_plugin.host import lacks, unfit

BAD_INPUT = 2
"""Exit code for bad usage or input."""


class OneLineError(click.ClickException):
    """Shown by click as `Error: ...` with exit code 2."""

    exit_code = BAD_INPUT


@contextmanager
def one_line() -> Iterator[None]:
    """Turn errors of a merge into one line; with debug logging (-vv) tracebacks stay.

    Outside a command (from Python) errors pass unchanged, but for those that say that mergekit is not as we know it.
    """
    try:
        yield
    except (click.ClickException, click.exceptions.Exit, click.Abort):
        raise
    except Exception as found:
        error = unfit(str(found)) if lacks(found) else found
        if click.get_current_context(silent=True) is None or logging.getLogger().isEnabledFor(logging.DEBUG):
            if error is found:
                raise
            raise error from found
        raise OneLineError(printable(line(error))) from None


def line(error: Exception) -> str:
    """An error as one line for the user."""
    match error:
        case RotationMergeError():
            return str(error)
        case ValidationError():
            return str(_validation_error(error))
        case yaml.MarkedYAMLError():
            mark = error.problem_mark or error.context_mark
            place = f"recipe, line {mark.line + 1}, column {mark.column + 1}" if mark else "recipe"
            return str(RecipeError(f"not valid YAML ({error.problem})", where=place, remedy="correct the syntax"))
        case SafetensorError() | OSError():
            return str(_file_error(error))
    text = " ".join(f"{error}".split())
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in text:
        return str(_out_of_memory(text, "the GPU" if type(error).__name__ == "OutOfMemoryError" else "this machine"))
    if "inline_container" in text:  # how torch reports that a pickle could not be written to its end
        problem = "a weight file cannot be written to its end, the disk may be full"
        return str(RotationMergeError(problem, remedy="free some space"))
    if text == "'torch.storage.TypedStorage' object has no attribute 'execute'":  # mergekit's loader.py, Python 3.13
        problem = "mergekit cannot read pickled weights lazily on Python 3.13 and newer"
        return str(RotationMergeError(problem, remedy="leave out --lazy-unpickle"))
    if type(error) in (RuntimeError, ValueError) and text:
        return text
    return f"{type(error).__name__}: {text or 'no message'}; run again with -vv to see where"


_LESS = {
    "the GPU": "on another device (without --cuda or --device; merges: or with --low-cpu-memory)",
    "this machine": "fewer blocks at once (OMP_NUM_THREADS=1; merges: --low-cpu-memory), or on another device",
}


def _out_of_memory(text: str, device: str) -> RotationMergeError:
    """Build the error for a device without enough memory from the message of torch or Python."""
    size = re.search(r"[Tt]ried to allocate ([\d.]+ ?\w+)", text)
    return RotationMergeError(
        f"{device} ran out of memory" + (f" (tried to allocate {size[1]})" if size else ""),
        remedy=f"match {_LESS[device]}, or run on fewer samples at once (--batch-size; fit: --checkpointing)",
    )


def _file_error(error: Exception) -> RotationMergeError:
    text = " ".join(f"{error}".split())
    number = error.errno if isinstance(error, OSError) else None
    if no_space(error):
        return RotationMergeError(f"the disk is full ({text})", remedy="free some space and run again")
    if number == errno.EFBIG or _names(text, 27):
        return RotationMergeError(
            f"a file grew over the limit ({text})",
            remedy="raise the limit, or write smaller shards (--out-shard-size, or --shard-size)",
        )
    if isinstance(error, SafetensorError) and not any(mark in text for mark in ("I/O", "IoError", "os error")):
        return CheckpointError(f"a safetensors file is corrupt ({text})", remedy="download it again")
    if isinstance(error, OSError) and error.strerror and isinstance(error.filename, str):
        problem, path = f"cannot be read or written ({error.strerror.lower()})", name_when_whole(error.filename)
        return RotationMergeError(problem, where=path, remedy="check the path and its permissions")
    return RotationMergeError(text, remedy="check the path and its permissions")


def _names(text: str, code: int) -> bool:
    """Whether an error of safetensors names this code of the operating system, in its new form or its old."""
    return f"os error {code}" in text or f"Os {{ code: {code}," in text


def _validation_error(error: ValidationError) -> RecipeError:
    """The first fault that mergekit's own schema finds."""
    from rotation_merge.mergekit_plugin.document import dotted
    from rotation_merge.mergekit_plugin.rules import explain

    first = error.errors()[0]
    problem, remedy = explain(first)
    return RecipeError(problem, where=f"recipe, {dotted(first['loc'])}" if first["loc"] else "recipe", remedy=remedy)
