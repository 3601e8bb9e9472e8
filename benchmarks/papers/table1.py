"""Table 1 of "Beyond the Permutation Symmetry of Transformers", on byte models: Llamas merged, matched or not.

Nats per byte of held-out text (less is better), half of each of two, mean and spread over three pairs of each kind.
One base: fine-tunes on English and on C, each domain counted, and Python as the third. Two bases, one domain: two
seeds on Python. Two bases, two domains: a fine-tune of one seed on English and the next seed, which knows Python, and
C as the third. Statistics and plans see 128 windows of both domains' training text without labels (Fisher 64).
"""

from __future__ import annotations

from collections.abc import Iterator

from apparatus import Given, run
from record import Row
from texts import LLAMAS, Columns, Pairs, compared, llamas, nats_by, nats_of

NAME = "papers-table1"
NEAR: Pairs = [(f"llama-{seed}-english", f"llama-{seed}-c") for seed in range(3)]
SEEDS: Pairs = [("llama-0", "llama-1"), ("llama-2", "llama-3"), ("llama-1", "llama-2")]
FAR: Pairs = [(f"llama-{seed}-english", f"llama-{seed + 1}") for seed in range(3)]
COLUMNS: Columns = {
    "one base, two domains": (NEAR, "own"),
    "one base, third": (NEAR, "other"),
    "two bases, one domain": (SEEDS, "own"),
    "two bases, two domains": (FAR, "own"),
    "two bases, third": (FAR, "other"),
}
TABLES = {NAME: ("average", *COLUMNS)}


def rows(given: Given) -> Iterator[tuple[str, Row]]:
    for row in compared(given, NAME, COLUMNS, NEAR[:1], (llamas, nats_of, nats_by), LLAMAS, "{:.3f}"):
        yield NAME, row


run(__name__)
