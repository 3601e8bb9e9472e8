"""Table 1 of "Beyond the Permutation Symmetry of Transformers": text models merged in pairs, with and without matching.

Classifiers: percent of kinds of tokens told right; four small encoders, fine-tuned from one base in four domains (two
languages), and from another base in two. Each head stays with its domain. `third`: the models of two languages, tested
with both heads in the domains that neither has seen. Byte models: nats per byte (less is better) of Llamas on held-out
text; `third` is Python for the pair that was tuned on English and C. Mean and spread over the pairs of a column.
Statistics and plans see 128 samples of both domains without labels (Fisher 64).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from apparatus import Given, run, spread
from merges import RESIDUAL, Pair, judged
from record import Row
from texts import (
    AVERAGES,
    CLASSIFIERS,
    LLAMAS,
    MATCH,
    NONE,
    classifiers,
    domain_of,
    llamas,
    nats,
    nats_alone,
    told,
    told_alone,
)

NAME = "papers-table1"
TITLES = {NONE: "{}", MATCH: "+ match", RESIDUAL: "+ match, residual"}
Pairs = list[tuple[str, str]]
LANGUAGE: Pairs = [("encoder-0-python", "encoder-0-torch"), ("encoder-0-c", "encoder-0-c10")]
LANGUAGES: Pairs = [("encoder-0-python", "encoder-0-c"), ("encoder-0-torch", "encoder-0-c10")]
TWO_BASES: Pairs = [("encoder-0-python", "encoder-1-torch"), ("encoder-0-python", "encoder-1-c10")]
TOLD: dict[str, tuple[Pairs, str]] = {
    "one base, one language": (LANGUAGE, "own"),
    "one base, two languages": (LANGUAGES, "own"),
    "one base, third": (LANGUAGES, "other"),
    "two bases": (TWO_BASES, "own"),
    "two bases, third": (TWO_BASES, "other"),
}
NEAR, FAR, SEEDS = ("llama-0-english", "llama-0-c"), ("llama-0-english", "llama-1-c"), ("llama-0", "llama-1")
NATS: dict[str, tuple[Pairs, str]] = {
    "one base, two domains": ([NEAR], "own"),
    "one base, third": ([NEAR], "other"),
    "two bases, one domain": ([SEEDS], "own"),
    "two bases, two domains": ([FAR], "own"),
    "two bases, third": ([FAR], "other"),
}
TABLES = {f"{NAME}-classifiers": ("average", *TOLD), f"{NAME}-bytes": ("average", *NATS)}


def rows(given: Given) -> Iterator[tuple[str, Row]]:
    few = LANGUAGE[1:], [NEAR]
    of_classifiers, of_llamas = (
        {title: (pairs if given.quick else wanted, side) for title, (wanted, side) in columns.items()}
        for pairs, columns in zip(few, (TOLD, NATS), strict=True)
    )
    yield from table(given, f"{NAME}-classifiers", of_classifiers, classifiers, told, told_alone, CLASSIFIERS, "{:.1f}")
    yield from table(given, f"{NAME}-bytes", of_llamas, llamas, loss, nats_alone, LLAMAS, "{:.3f}")


def loss(out: Path, pair: Pair) -> dict[str, float]:
    return nats(out, domain_of(pair.anchor), domain_of(pair.donor))


def table(
    given: Given,
    name: str,
    columns: dict[str, tuple[Pairs, str]],
    opener: Callable[[Given, tuple[str, str]], Pair],
    judge: Callable[[Path, Pair], dict[str, float]],
    alone: Callable[[Given, str], dict[str, float]],
    matchings: Any,
    form: str,
) -> Iterator[tuple[str, Row]]:
    """A row for the models alone, and one for each average with each matching."""
    named = {"+".join(pair): pair for pairs, _ in columns.values() for pair in pairs}
    opened = {key: lambda pair=pair: opener(given, pair) for key, pair in named.items()}
    wanted = list(matchings)[: 2 if given.quick else None]
    found = judged(given, name, opened, judge, wanted, AVERAGES)
    place = {pair: number for number, pair in enumerate(named.values())}
    each = {m: given.kept(f"{name}, {m} alone", lambda m=m: alone(given, m)) for pair in place for m in pair}
    own = {title: [each[m][side] for pair in pairs for m in pair] for title, (pairs, side) in columns.items()}
    yield name, {"average": "each model alone", **{title: spread(values, form) for title, values in own.items()}}
    for (average, matching), said in sorted(found.items(), key=lambda item: AVERAGES.index(item[0][0])):
        cells = {title: [said[place[p]][side] for p in pairs] for title, (pairs, side) in columns.items()}
        words = TITLES[matching].format(average)
        yield name, {"average": words, **{title: spread(values, form) for title, values in cells.items()}}


run(__name__)
