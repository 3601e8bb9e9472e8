"""What commands print: lines and tables for readers, JSON where asked for, logs, and the progress of long work."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from rotation_merge.errors import printable

WIDE = 10_000
"""Characters of a line of a table, at most, where there is no terminal."""
LINE_SECONDS = 30.0
"""Seconds between two lines of progress where there is no terminal."""


@dataclass(frozen=True)
class Table:
    """Rows of values by their columns; a row may lack some."""

    rows: Iterable[Mapping[str, Any]]
    title: str = ""

    def __str__(self) -> str:
        """As wide as the terminal, elsewhere as wide as it needs; columns of numbers are aligned right."""
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table as Grid

        rows, on_terminal = list(self.rows), sys.stdout.isatty()
        grid = Grid(box=SIMPLE_HEAD if on_terminal else None, pad_edge=False)
        columns = {
            name: [words(row.get(name)) for row in rows] for name in dict.fromkeys(n for row in rows for n in row)
        }
        for name, column in columns.items():
            numbers = all(re.fullmatch(r"[-+.\d%e]*", cell) for cell in column)
            grid.add_column(words(name), justify="right" if numbers else "left", overflow="fold")
        for cells in zip(*columns.values(), strict=True):
            grid.add_row(*cells)
        drawn = io.StringIO()
        width = None if on_terminal else WIDE
        Console(file=drawn, width=width, markup=False, emoji=False, highlight=False).print(grid)
        return "\n".join(filter(None, [self.title, *map(str.rstrip, drawn.getvalue().splitlines())]))


@dataclass(frozen=True)
class Answer:
    """What a command gives.

    Attributes:
        data: printed with --json.
        lines: lines and tables for readers; empty ones are left out.
        code: the exit code.
    """

    data: Any
    lines: Sequence[str | Table] = ()
    code: int = 0

    def text(self, as_json: bool = False) -> str:
        """The answer as it is printed."""
        if as_json:
            return json.dumps(self.data, indent=1, allow_nan=False, default=str)
        return "\n".join(printable(str(line)) for line in self.lines if line)

    __str__ = text


JSON = f"{__name__}.json"
"""Whether the running command was given --json, in its context's `meta`."""


def print_ahead(lines: Iterable[str]) -> bool:
    """Print lines of a command's answer before the rest is known; False from Python, and with --json."""
    context = click.get_current_context(silent=True)
    if context is None or context.meta.get(JSON):
        return False
    for line in lines:
        click.echo(printable(line))
    sys.stdout.flush()
    return True


def words(value: Any) -> str:
    """A value as people read it."""
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {words(part)}" for name, part in value.items())
    if isinstance(value, list | tuple):
        parts = list(map(words, value))
        return (" " if all(part.endswith(".") for part in parts) else ", ").join(parts)
    return "" if value is None else printable(str(value))


def sentence(text: str) -> str:
    """A text that begins with a capital and ends with a full stop."""
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def note(text: str) -> None:
    """Print a line beside the output proper, above a bar."""
    from tqdm import tqdm

    tqdm.write(printable(text), file=sys.stderr)


def _concerns_users(record: logging.LogRecord) -> bool:
    """Whether a record of a log is an error, or of this package."""
    return record.levelno >= logging.ERROR or record.name.startswith("rotation_merge")


def verbosity(hidden: bool = False) -> click.Option:
    """The option -v: logs of this package; twice: of every library, whose warnings are left out otherwise."""

    def configure(context: click.Context, option: click.Parameter, count: int) -> None:
        root = logging.getLogger()
        if not root.handlers:
            logging.basicConfig(level=logging.WARNING)
            root.handlers[0].addFilter(_concerns_users)
        if count > 1:
            root.handlers[0].removeFilter(_concerns_users)
        if count:
            logging.getLogger("rotation_merge").setLevel(logging.INFO if count == 1 else logging.DEBUG)
        if count > 1:
            logging.getLogger().setLevel(logging.DEBUG)

    help = "Print decisions; twice: everything, with tracebacks."
    more: dict[str, Any] = {"count": True, "expose_value": False, "hidden": hidden, "help": help}
    return click.Option(["-v", "--verbose"], callback=configure, **more)


def silence_libraries() -> None:
    """Keep the libraries below from printing bars and advice into our output."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "critical")  # heeded, as the next, when the library is imported
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    if not logging.getLogger().isEnabledFor(logging.DEBUG):
        logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
    if "transformers" in sys.modules:
        from transformers.utils import logging as hf_logging

        hf_logging.set_verbosity_error()
        hf_logging.disable_progress_bar()


class Progress:
    """A bar on the terminal's stderr; elsewhere a line every half minute. Called as matching calls its `progress`."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._began = self._printed = time.perf_counter()

    def __call__(self, activity: str, done: float, total: float) -> None:
        if sys.stderr.isatty():
            self._draw(printable(activity), done, total)
            return
        now = time.perf_counter()
        if now - self._printed >= LINE_SECONDS:
            self._printed = now
            amount = f" {done:.0f} of {total:.0f}" if total else ""
            note(f"{activity}{amount}, {now - self._began:.0f} s so far")

    def _draw(self, activity: str, done: float, total: float) -> None:
        from tqdm import tqdm

        if self._bar is None or not self._bar.desc.startswith(activity):
            self.close()
            self._bar = tqdm(desc=activity, leave=False)
        self._bar.total, self._bar.n = total, done
        self._bar.refresh()

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
