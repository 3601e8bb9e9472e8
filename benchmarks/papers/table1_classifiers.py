"""Table 1 of "Beyond the Permutation Symmetry of Transformers", on classifiers: encoders in pairs, own heads kept.

Percent of kinds of tokens told right by small encoders, fine-tuned from each of three bases in four domains (two
languages). Each head stays with its domain; "third": models of two languages, tested with both heads in the domains
that neither has seen. Mean and spread over the three pairs of a column. Statistics and plans see 128 samples of both
domains without labels (Fisher 64). The encoders' norms stand behind the residual sum, so that the residual stream may
be permuted, not turned.
"""

from __future__ import annotations

from collections.abc import Iterator

from apparatus import Given, run
from record import Row
from texts import CLASSIFIERS, Columns, Pairs, classifiers, compared, told, told_by

NAME = "papers-table1-classifiers"
LANGUAGE: Pairs = [
    ("encoder-0-python", "encoder-0-torch"),
    ("encoder-1-c", "encoder-1-c10"),
    ("encoder-2-python", "encoder-2-torch"),
]
LANGUAGES: Pairs = [
    ("encoder-0-python", "encoder-0-c"),
    ("encoder-1-torch", "encoder-1-c10"),
    ("encoder-2-python", "encoder-2-c10"),
]
TWO_BASES: Pairs = [
    ("encoder-0-python", "encoder-1-torch"),
    ("encoder-1-c", "encoder-2-c10"),
    ("encoder-2-python", "encoder-0-c"),
]
COLUMNS: Columns = {
    "one base, one language": (LANGUAGE, "own"),
    "one base, two languages": (LANGUAGES, "own"),
    "one base, third": (LANGUAGES, "other"),
    "two bases": (TWO_BASES, "own"),
    "two bases, third": (TWO_BASES, "other"),
}
TABLES = {NAME: ("average", *COLUMNS)}


def rows(given: Given) -> Iterator[tuple[str, Row]]:
    work = classifiers, told, told_by
    for row in compared(given, NAME, COLUMNS, LANGUAGE[1:2], work, CLASSIFIERS, "{:.1f}"):
        yield NAME, row


run(__name__)
