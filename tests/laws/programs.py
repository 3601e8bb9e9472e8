"""Console scripts in this process, by their names."""

from __future__ import annotations

import contextlib
import io
import sys
from importlib.metadata import entry_points
from typing import NamedTuple

import pytest
from mergekit.io.tasks import LoaderCache

PROGRAMS = {entry.name: entry for entry in entry_points(group="console_scripts")}


class Ended(NamedTuple):
    """How a program ended."""

    code: int
    out: str
    err: str


def run(program: str, *words: object) -> Ended:
    """A console script with its arguments, as a terminal starts it."""
    out, err = io.StringIO(), io.StringIO()
    LoaderCache.loaders.clear()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", [program, *map(str, words)])
        try:
            PROGRAMS[program].load()()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return Ended(code, out.getvalue(), err.getvalue())
