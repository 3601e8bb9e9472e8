"""Table 1 of "Beyond the Permutation Symmetry of Transformers", on byte models: Llamas merged, matched or not.

Nats per byte of held-out text (less is better), half of each of two. One base: fine-tunes on English and on C, each
domain counted, and Python as the third. Two bases, one domain: two seeds on Python. Two bases, two domains: a
fine-tune of one seed on English and the other seed, which knows Python, and C as the third. Statistics and plans see
128 windows of both domains' training text without labels (Fisher 64).
"""

from __future__ import annotations

from collections.abc import Iterator

from apparatus import Given, run
from record import Row
from texts import LLAMAS, Columns, compared, llamas, nats_alone, nats_of

NAME = "papers-table1"
NEAR, FAR, SEEDS = ("llama-0-english", "llama-0-c"), ("llama-0-english", "llama-1"), ("llama-0", "llama-1")
COLUMNS: Columns = {
    "one base, two domains": ([NEAR], "own"),
    "one base, third": ([NEAR], "other"),
    "two bases, one domain": ([SEEDS], "own"),
    "two bases, two domains": ([FAR], "own"),
    "two bases, third": ([FAR], "other"),
}
TABLES = {NAME: ("average", *COLUMNS)}


def rows(given: Given) -> Iterator[tuple[str, Row]]:
    for row in compared(given, NAME, COLUMNS, [NEAR], (llamas, nats_of, nats_alone), LLAMAS, "{:.3f}"):
        yield NAME, row


run(__name__)
