"""Tables as data: CSV and TSV files with a header, as records with one or two texts and a label or score."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rotation_merge.errors import DataError

ENDINGS = {".csv": ",", ".tsv": "\t"}

PAIRS = (
    ("sentence1", "sentence2"), ("text1", "text2"), ("text_a", "text_b"), ("a", "b"), ("premise", "hypothesis"),
    ("query", "passage"), ("question", "answer"), ("question1", "question2"), ("text", "text_pair"),
)  # fmt: skip
"""Names of two columns of texts."""

TEXTS = ("text", "sentence", "content", "review", "question", "document", "tweet", "comment")
LABELS = ("label", "labels", "score", "class", "category", "target", "similarity", "rating", "y")
"""Names of columns that are looked for, in this order."""


def read_table(path: Path) -> list[dict[str, Any]]:
    """Records of a table: `text` (and `text_pair`), with `label` if there is one.

    Columns are found by their names; else by content: the longest texts, and a column of numbers or of few different
    words.

    Raises:
        DataError: no header, no texts, or a row of another length; says where.
    """
    text = path.read_text(encoding="utf-8-sig")
    rows = [row for row in csv.reader(io.StringIO(text), delimiter=ENDINGS[path.suffix.lower()]) if any(row)]
    if len(rows) < 2:
        raise DataError(
            "holds no rows below its header", where=str(path), remedy="write a header, then one row a sample"
        )
    head = [name.strip() for name in rows[0]]
    odd = next((i for i, row in enumerate(rows) if len(row) != len(head)), None)
    if odd is not None:
        problem = f"row {odd + 1} has {len(rows[odd])} columns, the header has {len(head)}"
        raise DataError(problem, where=str(path), remedy="put texts that hold commas into quotes")
    columns = {name: [row[i].strip() for row in rows[1:]] for i, name in enumerate(head)}
    texts, label = _columns(columns, str(path))
    values = _values(columns[label]) if label is not None else None
    return [
        {
            "text": columns[texts[0]][i],
            **({"text_pair": columns[texts[1]][i]} if len(texts) > 1 else {}),
            **({"label": values[i]} if values is not None else {}),
        }
        for i in range(len(rows) - 1)
    ]


def _columns(columns: Mapping[str, Sequence[str]], source: str) -> tuple[list[str], str | None]:
    """The columns of the texts, and the column of the labels."""
    known = {name.lower(): name for name in columns}
    label = next((known[name] for name in LABELS if name in known), None)
    pair = next((names for names in PAIRS if all(name in known for name in names)), None)
    text_column = next((known[name] for name in TEXTS if name in known), None)
    if pair is not None:
        return [known[name] for name in pair], label
    if text_column is not None:
        return [text_column], label
    wordy = [name for name, column in columns.items() if name != label and sum(map(_number, column)) < len(column) / 2]
    few = [n for n in wordy if len(set(columns[n])) <= max(2, len(columns[n]) // 4)]
    short = [n for n in few if all(len(text.split()) < 3 for text in columns[n])]
    texts = sorted((name for name in wordy if name not in short), key=lambda n: -sum(map(len, columns[n])))[:2]
    if not texts:
        names = ", ".join(columns)
        raise DataError(
            f"columns are {names}; none holds texts", where=source, remedy="call one 'text' (and one 'label')"
        )
    if label is None:
        numbers = [name for name in columns if name not in wordy]
        label = numbers[-1] if numbers else short[-1] if short else None
    return sorted(texts, key=list(columns).index), label


def _number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _values(column: Sequence[str]) -> list[Any]:
    """Convert cells: whole numbers to int, other numbers to float, words unchanged."""
    if all(text.lstrip("-").isdigit() for text in column):
        return [int(text) for text in column]
    return [float(text) for text in column] if all(map(_number, column)) else list(column)
