"""What `rotation-merge demo` prints, kept for the README.

python benchmarks/demo.py
"""

from __future__ import annotations

import json
import subprocess

from record import Table

from rotation_merge.cli.demo import cells

COLUMNS = ("merge", "measure", "parents", "plain", "heads, neurons", "whole model", "learned")


def main() -> None:
    done = subprocess.run(["rotation-merge", "demo", "--json"], check=True, capture_output=True, text=True)
    table = Table("demo")
    for row in json.loads(done.stdout)["results"]:
        table.add(dict(zip(COLUMNS, cells(row), strict=False)))


if __name__ == "__main__":
    main()
