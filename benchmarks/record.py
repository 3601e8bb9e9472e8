"""What benchmarks measured, one JSON file a table: rows, command, commit, machine and versions.

    Table("startup").add({...})       in a benchmark: prints a row, keeps it in benchmarks/results/startup.json
    python benchmarks/record.py       fills every table of the pages from the files in benchmarks/results

A page shows a file between two comments, all columns or those named, all rows or those with a value, or with one of
several set apart by semicolons:

    <!-- figures: matching-layer | shape, donor, seconds | what=straight; bent | seeds=2 -->
    <!-- end -->

Names are set apart by commas, or by semicolons where one of them has a comma. A name that ends in `=title` gives a
column another title; `--check` says what is out of date, and changes nothing.

A sentence shows one cell, or with `#1`, `#2`, ... one of the numbers in it, of the row with these values:

    <!-- figure: demo | plain | merge=two Llamas, seeds 0 and 1 -->3.290<!-- /figure -->
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "benchmarks").glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
VERSIONS = ("torch", "transformers", "mergekit", "scipy", "lapx")
MARK = re.compile(r"<!-- figures: (?P<what>[^>]*?) -->\n(?:(?!<!-- )[\s\S])*<!-- end -->")
INLINE = re.compile(r"<!-- figure: (?P<what>[^>]*?) -->(?P<value>[^<]*)<!-- /figure -->")

Row = Mapping[str, Any]


class Table:
    """Rows of one table: printed and kept in `benchmarks/results/NAME.json` as they come.

    Args:
        name: of the file and in the pages' comments.
        note: what a reader must know of this run beyond its command.
        folder: where the file is kept.
        keep: columns that tell rows apart. Rows in the file stay until one with the same cells there replaces them,
            and new ones follow the last one that was added; empty: the file begins anew.
    """

    def __init__(self, name: str, note: str = "", folder: Path = RESULTS, keep: Sequence[str] = ()) -> None:
        self.path, self.rows, self.keep, self.printed = folder / f"{name}.json", list[Row](), keep, False
        if keep and self.path.exists():
            self.rows = json.loads(self.path.read_text(encoding="utf-8"))["rows"]
        self.next = len(self.rows)
        self.run = {
            "command": shlex.join(["python", os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]]),
            "commit": _commit(),
            "date": datetime.date.today().isoformat(),
            "machine": machine(),
            "versions": {"python": platform.python_version(), **{package: version(package) for package in VERSIONS}},
            **({"note": note} if note else {}),
        }

    def add(self, row: Row) -> None:
        """One row: cells by column title as they are to be shown, every row with the same titles."""
        if not self.printed:
            print(_line(row), _line(["---"] * len(row)), sep="\n")
        self.printed = True
        print(_line(row.values()), flush=True)
        same = [number for number, other in enumerate(self.rows) if self.keep and self._name(other) == self._name(row)]
        at = same[0] if same else self.next
        self.rows[at : at + len(same)] = [dict(row)]
        self.next = at + 1
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = {**self.run, "rows": self.rows}
        self.path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    def _name(self, row: Row) -> list[Any]:
        return [row[column] for column in self.keep]


def machine() -> str:
    """Processor, cores, load and accelerator in words."""
    import torch

    cpus = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", cpus.read_text()) if cpus.exists() else []
    load = f"load {os.getloadavg()[0]:.1f}, " if hasattr(os, "getloadavg") else ""
    threads = f"{torch.get_num_threads()} thread" + "s" * (torch.get_num_threads() > 1)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{os.cpu_count()} cores of {names[0] if names else platform.processor()}, {load}{threads}, {gpu}"


def _commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "rotation_merge", "benchmarks/*.py")
    return git("rev-parse", "--short", "HEAD") + (" with changes" if changed else "")


def table(what: str, origin: bool) -> str:
    """The table that a page's comment asks for, in Markdown; with `origin`, followed by where it was measured."""
    name, columns, *conditions = [*(part.strip() for part in what.split("|")), ""]
    found = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    rows = found["rows"]
    for key, _, values in (condition.partition("=") for condition in conditions if condition):
        rows = [row for row in rows if str(row[key.strip()]) in map(str.strip, values.split(";"))]
    apart = ";" if ";" in columns else ","
    pairs = [column.strip().partition("=") for column in columns.split(apart)] if columns else []
    known = dict.fromkeys(key for row in rows for key in row)
    titles = {key: title or key for key, _, title in pairs} or {key: key for key in known}
    if odd := [key for key in titles if key not in known]:
        raise KeyError(f"{name}.json has no column {odd[0]!r}")
    lines = [titles.values(), ["---"] * len(titles), *([row.get(key, "") for key in titles] for row in rows)]
    whence = f"\n\n*Commit {found['commit']}, {found['date']}; {found['machine']}.*" if origin else ""
    return "\n".join(map(_line, lines)) + whence


def cell(what: str) -> str:
    """The figure that a sentence's comment asks for."""
    name, column, *conditions = (part.strip() for part in what.split("|"))
    column, _, number = column.partition(" #")
    rows = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["rows"]
    wanted = dict(condition.split("=", 1) for condition in conditions)
    (found,) = (
        row[column] for row in rows if wanted.items() <= {key: str(value) for key, value in row.items()}.items()
    )
    text = str(found).replace("*", "")
    return re.findall(r"-?\d[\d.]*%?", text)[int(number) - 1] if number else text


def _line(cells: Iterable[object]) -> str:
    return "".join(f"| {cell} " if str(cell) else "| " for cell in cells) + "|"


def filled(page: str, origin: bool) -> str:
    """A page with all its tables, and the figures of its sentences, as the results have them."""
    page = INLINE.sub(lambda m: f"<!-- figure: {m['what']} -->{cell(m['what'])}<!-- /figure -->", page)
    return MARK.sub(lambda m: f"<!-- figures: {m['what']} -->\n{table(m['what'], origin)}\n<!-- end -->", page)


def main() -> None:
    stale = []
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        if (new := filled(text, path.parent.name == "benchmarks")) != text:
            stale.append(str(path.relative_to(ROOT)))
            if "--check" not in sys.argv:
                path.write_text(new, encoding="utf-8")
    if stale and "--check" in sys.argv:
        sys.exit(f"out of date: {', '.join(stale)}; run python benchmarks/record.py")


if __name__ == "__main__":
    main()
