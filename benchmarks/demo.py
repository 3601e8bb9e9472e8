"""What `rotation-merge demo` prints, kept for the README.

python benchmarks/demo.py
"""

from __future__ import annotations

from record import Table

import rotation_merge as rm

COLUMNS = {"plain": "plain", "local": "heads, neurons", "whole": "whole model", "learned": "learned"}


def main() -> None:
    table = Table("demo")
    for row in rm.demo().data["results"]:
        form = "{:.1%}" if row["measure"] == "accuracy" else "{:.3f}"
        figures = {title: row["merges"].get(way) for way, title in COLUMNS.items()}
        merges = {title: "" if figure is None else form.format(figure) for title, figure in figures.items()}
        parents = " / ".join(map(form.format, row["parents"]))
        table.add({"merge": row["title"], "measure": row["measure"], "parents": parents, **merges})


if __name__ == "__main__":
    main()
