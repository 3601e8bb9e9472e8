"""Tables as records, and the columns of records: one or two texts, an image, and a label or score, by their names."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rotation_merge.errors import DataError

ENDINGS = {".csv": ",", ".tsv": "\t"}

PAIRS = (
    ("sentence1", "sentence2"), ("text1", "text2"), ("text_a", "text_b"), ("a", "b"), ("premise", "hypothesis"),
    ("query", "passage"), ("question", "answer"), ("question1", "question2"),
)  # fmt: skip
"""Names of two columns of texts."""

TEXTS = ("text", "sentence", "content", "review", "question", "document", "tweet", "comment")
IMAGES = ("image", "img")
LABELS = ("labels", "label", "score", "class")
"""Names of columns that are looked for, in this order."""


def read_table(path: Path) -> list[dict[str, Any]]:
    """Records of a table with a header.

    Raises:
        DataError: no header, or a row of another length; says where.
    """
    with open(path, encoding="utf-8-sig", newline="") as file:
        rows = [row for row in csv.reader(file, delimiter=ENDINGS[path.suffix.lower()]) if any(row)]
    if len(rows) < 2:
        raise DataError(
            "holds no rows below its header", where=str(path), remedy="write a header, then one row a sample"
        )
    odd = next((number for number, row in enumerate(rows, 1) if len(row) != len(rows[0])), None)
    if odd is not None:
        problem = f"row {odd} has {len(rows[odd - 1])} columns, the header has {len(rows[0])}"
        raise DataError(problem, where=str(path), remedy="put texts that hold commas into quotes")
    names, *cells = ([cell.strip() for cell in row] for row in rows)
    columns = [_values(column) for column in zip(*cells, strict=True)]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def roles(names: Iterable[str]) -> dict[str, str]:
    """The columns that are `text` and `text_pair`, or `image`, and `label`, by their names."""
    known = {name.strip().lower(): name for name in names}
    texts = next((pair for pair in PAIRS if all(name in known for name in pair)), ("", "text_pair"))
    if "text" in known or texts[0] not in known:
        texts = next((name for name in TEXTS if name in known), ""), "text_pair"
    image, label = (next((name for name in kind if name in known), "") for kind in (IMAGES, LABELS))
    columns = {"text": texts[0], "text_pair": texts[1], "image": "" if texts[0] in known else image, "label": label}
    return {role: known[name] for role, name in columns.items() if name in known}


def _values(column: Sequence[str]) -> Sequence[Any]:
    """Cells as whole numbers if all are, else as numbers if all are, else as they are."""
    for kind in (int, float):
        try:
            return [kind(cell) for cell in column]
        except ValueError:
            continue
    return column
