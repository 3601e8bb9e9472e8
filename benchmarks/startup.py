"""What being installed costs every start of the Python interpreter.

Two bare virtual environments, one of them with the package copied in as a wheel would install it; `python -c pass` is
started in both by turns. Prints the medians and their difference; the goal is a difference under 1 ms.

    python benchmarks/startup.py --runs 300
"""

from __future__ import annotations

import argparse
import compileall
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

from record import ROOT, Table

ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def environment(where: Path, installed: bool) -> Path:
    """A virtual environment without pip; returns its interpreter."""
    venv.create(where, with_pip=False, symlinks=True)
    site = next(where.glob("lib/python*/site-packages"))
    if installed:
        ignored = shutil.ignore_patterns("__pycache__", "checkpoints")
        shutil.copytree(ROOT / "rotation_merge", site / "rotation_merge", ignore=ignored)
        shutil.copy(ROOT / "rotation_merge.pth", site)
        compileall.compile_dir(site / "rotation_merge", quiet=1)
    return where / "bin" / "python"


def started(python: Path) -> tuple[float, float]:
    """Milliseconds of one `python -c pass`: wall, and processor time of the child."""
    begin = time.perf_counter()
    process = subprocess.Popen([python, "-c", "pass"], env=ENVIRONMENT)
    used = os.wait4(process.pid, 0)[2]
    process.returncode = 0
    return 1e3 * (time.perf_counter() - begin), 1e3 * (used.ru_utime + used.ru_stime)


def check(python: Path) -> bool:
    """Whether the hook is in place in this environment."""
    code = "import sys; print(any('Mergekit' in type(f).__name__ for f in sys.meta_path))"
    done = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True, env=ENVIRONMENT)
    return done.stdout.strip() == "True"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=300)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as folder:
        pythons = {name: environment(Path(folder) / name, name == "with") for name in ("without", "with")}
        if {name: check(python) for name, python in pythons.items()} != {"without": False, "with": True}:
            sys.exit("the environments are not what they should be")
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in pythons}
        for _ in range(runs):
            for name, python in pythons.items():
                times[name].append(started(python))
    table = Table("startup")
    for i, words in enumerate(("wall, median", "processor, median")):
        without, both = ([t[i] for t in times[name]] for name in ("without", "with"))
        added = statistics.median(b - a for a, b in zip(without, both, strict=True))
        table.add({"case": words, "without": f"{statistics.median(without):.1f} ms", "added": f"{added:.2f} ms"})


if __name__ == "__main__":
    main()
