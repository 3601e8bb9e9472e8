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


@dataclass(frozen=True)
class Table:
    """Rows of values under their headers."""

    headers: Sequence[str]
    rows: Iterable[Sequence[Any]]
    title: str = ""


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
        return "\n".join(_drawn(line) if isinstance(line, Table) else printable(line) for line in self.lines if line)


def on_terminal() -> bool:
    """Whether output goes to a person."""
    return sys.stdout.isatty()


def _drawn(table: Table) -> str:
    """A table as wide as the terminal, elsewhere as wide as it needs; columns of numbers are aligned right."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table as Grid

    rows = [[printable(words(cell)) for cell in row] for row in table.rows]
    grid = Grid(box=SIMPLE_HEAD if on_terminal() else None, pad_edge=False)
    for column, header in enumerate(table.headers):
        numbers = all(re.fullmatch(r"[-+.\d%e]*", row[column]) for row in rows)
        grid.add_column(header, justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        grid.add_row(*row)
    drawn = io.StringIO()
    width = None if on_terminal() else WIDE
    Console(file=drawn, width=width, markup=False, emoji=False, highlight=False).print(grid)
    return "\n".join(filter(None, [printable(table.title), *map(str.rstrip, drawn.getvalue().splitlines())]))


def words(value: Any) -> str:
    """A value as people read it."""
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) >= 1e-3 or value == 0 else f"{value:.3g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {words(part)}" for name, part in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(words, value))
    return "" if value is None else str(value)


def sentence(text: str) -> str:
    """A text that begins with a capital and ends with a full stop."""
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def note(text: str) -> None:
    """Print a line beside the output proper."""
    click.echo(printable(text), err=True)


def verbosity(hidden: bool = False) -> click.Option:
    """The option -v: logs of this package; twice: of every library."""

    def configure(context: click.Context, option: click.Parameter, count: int) -> None:
        logging.basicConfig(level=logging.WARNING)
        if count:
            logging.getLogger("rotation_merge").setLevel(logging.INFO if count == 1 else logging.DEBUG)
        if count > 1:
            logging.getLogger().setLevel(logging.DEBUG)

    text = "Print decisions; twice: everything, with tracebacks."
    return click.Option(
        ["-v", "--verbose"], count=True, expose_value=False, hidden=hidden, callback=configure, help=text
    )


def silence_libraries() -> None:
    """Keep the libraries below from printing bars and advice into our output."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "critical")  # heeded when it is imported
    if not logging.getLogger().isEnabledFor(logging.DEBUG):
        logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
    if "transformers" not in sys.modules:  # it heeds these when, and if, it is imported
        os.environ["TRANSFORMERS_VERBOSITY"] = "error"
        return
    from transformers.utils import logging as hf_logging

    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()


LINE_SECONDS = 30.0
"""Seconds between two lines of progress where there is no terminal."""


class Progress:
    """A bar on the terminal's stderr; elsewhere a line every half minute. Called as matching calls its `progress`."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._activity = ""
        self._began = self._printed = time.perf_counter()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(self, activity: str, done: float, total: float) -> None:
        if sys.stderr.isatty():
            self._draw(activity, done, total)
            return
        now = time.perf_counter()
        if now - self._printed >= LINE_SECONDS:
            self._printed = now
            amount = f" {done:.0f} of {total:.0f}" if total else ""
            note(f"{activity}{amount}, {now - self._began:.0f} s so far")

    def _draw(self, activity: str, done: float, total: float) -> None:
        from tqdm import tqdm

        if self._bar is None or activity != self._activity:
            self.close()
            self._bar, self._activity = tqdm(desc=printable(activity), leave=False), activity
        self._bar.total, self._bar.n = total, done
        self._bar.refresh()

    def note(self, text: str) -> None:
        """Print a line that stays, above the bar."""
        self.close()
        note(text)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
