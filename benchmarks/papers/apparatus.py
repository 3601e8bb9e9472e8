"""What every script of this folder begins with: its arguments, where checkpoints lie, rows that are kept.

    python benchmarks/papers/table2.py [--quick] [--checkpoints DIR] [--seeds N] [--out DIR]
    python benchmarks/papers/apparatus.py      all scripts, one after another (`make papers`)

A script is one table or figure. It has `TABLES` (columns by name of the table: `benchmarks/results/NAME.json`, some of
them shown on docs/results.md) and `rows`, which yields (name of a table, row). It ends with `run(__name__)`.

What took long is asked for by `given.kept(key, compute)`: found in the journal DIR/papers.json, it is not computed
again. `--quick` uses what comes with the package, one seed, few samples,
and writes to a folder of its own.

Import this module first: it makes the other benchmarks importable.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(folder) for folder in (HERE, HERE.parent) if str(folder) not in sys.path]

from journal import FILE, Journal  # noqa: E402
from merging import quiet  # noqa: E402
from record import RESULTS, Row, Table  # noqa: E402

from rotation_merge.run.demo import CHECKPOINTS  # noqa: E402


@dataclass
class Given:
    """What a script was asked for.

    Attributes:
        quick: seconds, with what comes with the package.
        seeds: how many seeds, or pairs of them, where there are several.
        checkpoints: where the trained ones lie (`benchmarks/train_checkpoints.py papers`).
        scratch: for files that nobody needs afterwards.
        kept: what is computed under a key, or was in an earlier run; anything that JSON holds.
    """

    quick: bool
    seeds: int
    checkpoints: Path
    scratch: Path
    kept: Callable[[str, Callable[[], Any]], Any]

    def model(self, name: str) -> Path:
        """A checkpoint by name: a trained one, or one that comes with the package."""
        found = [
            folder / name for folder in (self.checkpoints, CHECKPOINTS) if (folder / name / "config.json").exists()
        ]
        if not found:
            wanted = f"python benchmarks/train_checkpoints.py papers --out {self.checkpoints}"
            raise SystemExit(f"no checkpoint {name} in {self.checkpoints}; train it: {wanted}")
        return found[0]

    def pairs(self) -> list[tuple[int, int]]:
        """Seeds of models that were trained independently: (0, 1), (2, 3), ..."""
        return [(2 * number, 2 * number + 1) for number in range(self.seeds)]


def spread(values: Sequence[float], form: str = "{:.1f}") -> str:
    """Mean and standard deviation over seeds, as a cell."""
    shown = form.format(fmean(values))
    return f"{shown} ± {form.format(stdev(values)).lstrip('+')}" if len(values) > 1 else shown


def run(name: str, arguments: Sequence[str] | None = None) -> dict[str, list[Row]]:
    """A script's tables, written; `name` is its `__name__`, and nothing happens where it is imported."""
    module = sys.modules[name]
    if arguments is None and name != "__main__":
        return {}
    parser = argparse.ArgumentParser(description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="what comes with the package, one seed, few samples")
    parser.add_argument("--seeds", type=int, default=3, help="seeds, or pairs of them")
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"), help="what make papers trained")
    parser.add_argument("--out", type=Path, help="for tables; by default those of the pages")
    asked = parser.parse_args(arguments)
    quiet()
    quick = asked.quick
    out = asked.out or (Path(tempfile.mkdtemp(prefix="papers-")) if quick else RESULTS)
    note = "" if quick else "several runs: what an earlier one had kept was not computed again"
    with tempfile.TemporaryDirectory(prefix="papers-") as scratch:
        journal = Journal((out if quick else asked.checkpoints) / FILE)
        given = Given(quick, 1 if quick else asked.seeds, asked.checkpoints, Path(scratch), journal.kept)
        tables = {table: Table(table, note, out) for table in module.TABLES}
        for table, row in module.rows(given):
            if tuple(row) != tuple(module.TABLES[table]):
                raise SystemExit(f"{table}: columns {list(row)}, promised were {list(module.TABLES[table])}")
            tables[table].add(row)
    return {table: written.rows for table, written in tables.items()}


def scripts() -> Iterator[ModuleType]:
    """Every table and figure, imported."""
    for path in sorted(HERE.glob("*.py")):
        if "\nrun(__name__)" in path.read_text(encoding="utf-8"):
            yield importlib.import_module(path.stem)


def main() -> None:
    """All scripts with the same arguments."""
    for module in scripts():
        run(module.__name__, sys.argv[1:])


if __name__ == "__main__":
    main()
