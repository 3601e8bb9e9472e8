"""Output: rich tables and colours on a terminal, plain text in a pipe, JSON where asked for."""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import click

from rotation_merge.errors import INTERRUPTED, RotationMergeError, printable
from rotation_merge.mergekit_plugin.console import BAD_INPUT, OneLineError, one_line

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Answer:
    """What a command found.

    Attributes:
        data: printed with --json.
        show: prints the same for readers.
        code: the exit code.
    """

    data: Any
    show: Callable[[], None]
    code: int = 0


Command = Callable[..., Answer]

BROKEN_PIPE = 141
"""Exit code of a process whose output nobody reads any more."""

RESUMES = ("align", "measure", "merge", "polish")
"""Commands that go on where they were interrupted."""


def shown(function: Command) -> Callable[..., None]:
    """Wrap a command: its answer is printed, as JSON with --json; errors become one line (or JSON) and exit code 2.

    Ctrl-C ends it with 130, a closed pipe with 141 and no message.
    """

    @functools.wraps(function)
    def wrapped(*args: Any, as_json: bool = False, **kwargs: Any) -> None:
        silence_libraries()
        began = time.perf_counter()
        if verbose():
            from rotation_merge.record import versions

            LOG.info("%s", ", ".join(f"{name} {number}" for name, number in versions().items()))
        try:
            code = _run(function, as_json, *args, **kwargs)
            sys.stdout.flush()
        except KeyboardInterrupt:
            resumes = function.__module__.rpartition(".")[2] in RESUMES
            note("Interrupted" + ("; run the same command to continue." if resumes else "."))
            code = INTERRUPTED
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python complains once more when it closes its output
            code = BROKEN_PIPE
        except OneLineError as error:
            if not as_json:
                raise
            print_json({"error": _parts(error)})
            code = BAD_INPUT
        LOG.info("done in %.1f s", time.perf_counter() - began)
        sys.exit(code)

    return click.option("--json", "as_json", is_flag=True, help="Print machine-readable JSON.")(wrapped)


def _run(function: Command, as_json: bool, *args: Any, **kwargs: Any) -> int:
    with one_line():
        try:
            answer = function(*args, **kwargs)
            if as_json:
                print_json(answer.data)
            else:
                answer.show()
            return answer.code
        except BrokenPipeError as error:
            broken = error
    raise broken


def _parts(error: OneLineError) -> dict[str, str | None]:
    """An error as JSON: problem, place, remedy."""
    cause = error.__context__
    if isinstance(cause, RotationMergeError):
        return {"what": cause.what, "where": cause.where, "remedy": cause.remedy}
    return {"what": error.message, "where": None, "remedy": None}


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


def print_json(data: Any) -> None:
    click.echo(json.dumps(data, indent=1, allow_nan=False, default=str))


def verbose() -> bool:
    """Whether -v was given."""
    return LOG.isEnabledFor(logging.INFO)


def on_terminal() -> bool:
    """Whether output goes to a person, and colours are wanted (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def table(title: str, headers: Sequence[str], rows: Sequence[Sequence[object]], numbers: Sequence[int] = ()) -> None:
    """Print a table.

    Args:
        title: line above it; empty for none.
        numbers: columns that are aligned right.
    """
    title, cells = printable(title), [["" if cell is None else printable(str(cell)) for cell in row] for row in rows]
    if on_terminal():
        _rich_table(title, headers, cells, numbers)
        return
    if title:
        click.echo(title)
    widths = [max(len(line[i]) for line in [list(headers), *cells]) for i in range(len(headers))]
    for line in [list(headers), *cells]:
        padded = [c.rjust(w) if i in numbers else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))]
        click.echo("  ".join(padded).rstrip())


def _rich_table(title: str, headers: Sequence[str], cells: list[list[str]], numbers: Sequence[int]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title or None, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for i, header in enumerate(headers):
        table.add_column(header, justify="right" if i in numbers else "left", overflow="fold")
    for line in cells:
        table.add_row(*line)
    Console(markup=False, highlight=False).print(table)


def say(text: str, style: str | None = None) -> None:
    """A line of prose; coloured on a terminal."""
    text = printable(text)
    click.echo(click.style(text, fg=style) if style and on_terminal() else text)


def note(text: str) -> None:
    """A line beside the output proper."""
    click.echo(printable(text), err=True)


LINE_SECONDS = 30.0
"""Seconds between two lines of progress where there is no terminal."""


class Progress:
    """A bar on the terminal's stderr; elsewhere a line every half minute. Called as matching calls its `progress`."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._what = ""
        self._began = self._said = time.perf_counter()

    def __call__(self, activity: str, done: float, total: float) -> None:
        if not sys.stderr.isatty():
            self._line(activity, done, total)
            return
        from tqdm import tqdm

        if self._bar is None or activity != self._what:
            self.close()
            self._bar, self._what = tqdm(total=total, desc=printable(activity), leave=False), activity
        self._bar.total = total
        self._bar.n = done
        self._bar.refresh()

    def _line(self, activity: str, done: float, total: float) -> None:
        now = time.perf_counter()
        if now - self._said < LINE_SECONDS:
            return
        self._said = now
        amount = f" {done:.0f} of {total:.0f}" if total else ""
        note(f"{activity}{amount}, {now - self._began:.0f} s so far")

    def note(self, text: str) -> None:
        """A line that stays, above the bar."""
        self.close()
        note(text)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def bytes_text(count: float) -> str:
    """1536 as '1.5 KB'; decimal units."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
