"""One line instead of a traceback, in mergekit's commands as in ours."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import click
from safetensors import SafetensorError

from rotation_merge.errors import CheckpointError, RotationMergeError

BAD_INPUT = 2
"""Exit code for bad usage or input."""


class OneLineError(click.ClickException):
    """Shown by click as `Error: ...` with exit code 2."""

    exit_code = BAD_INPUT


@contextmanager
def one_line() -> Iterator[None]:
    """Turn what can go wrong in a merge into one line; with debug logging (-vv) tracebacks stay."""
    try:
        yield
    except RotationMergeError as error:
        _raise(error, str(error))
    except SafetensorError as error:
        _raise(error, str(CheckpointError(f"a safetensors file is corrupt ({error})", remedy="download it again")))
    except OSError as error:
        remedy = "free some space" if error.errno == errno.ENOSPC else "check the path and its permissions"
        _raise(error, str(RotationMergeError(f"{error}", remedy=remedy)))
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, click.ClickException):
            raise
        _raise(error, " ".join(f"{error}".split()) or type(error).__name__)


def _raise(error: BaseException, line: str) -> None:
    if logging.getLogger().isEnabledFor(logging.DEBUG):
        raise error
    raise OneLineError(line) from None
