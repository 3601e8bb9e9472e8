"""Table 1 of "Beyond the Permutation Symmetry of Transformers": text models merged, matched or not.

Byte-level Llamas: nats per byte of held-out text (less is better), half of each of two, mean and spread over three
pairs of each kind. One base: fine-tunes on English and on C, each domain counted, and Python as the third. Two bases,
one domain: two seeds on Python. Two bases, two domains: a fine-tune of one seed on English and the next seed, which
knows Python, and C as the third.

Encoders: percent of kinds of tokens told right, fine-tuned from each of three bases in four domains (two languages).
Each head stays with its domain; "third": models of two languages, tested with both heads in the domains that neither
has seen. Their norms stand behind the residual sum, so that the residual stream may be permuted, not turned.

Statistics and plans see 128 samples of both domains' training text without labels (Fisher 64).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import kinds
import torch
from apparatus import Given, run, spread
from corpora import training_tokens
from merges import FULL, NONE, PAPER, RESIDUAL, Pair, judged
from merging import load, loss
from record import Row
from torch import Tensor
from train_checkpoints import save
from transformers import BertForSequenceClassification

from rotation_merge import AlignConfig
from rotation_merge.run.demo import NAMES

Names = list[tuple[str, str]]
"""Pairs of checkpoints."""
MATCH = "match"
AVERAGES = ("Simple", "Fisher", "RegMean", "OT-ACTS")
TITLES = {NONE: "{}", MATCH: "+ match", RESIDUAL: "+ match, residual"}
LLAMAS, CLASSIFIERS = "papers-table1", "papers-table1-classifiers"
MATCHINGS = {
    LLAMAS: {NONE: None, MATCH: PAPER, RESIDUAL: FULL},
    CLASSIFIERS: {NONE: None, MATCH: PAPER, RESIDUAL: AlignConfig(heads="permutation", residual="permutation")},
}
NEAR: Names = [(f"llama-{seed}-english", f"llama-{seed}-c") for seed in range(3)]
SEEDS: Names = [("llama-0", "llama-1"), ("llama-2", "llama-3"), ("llama-1", "llama-2")]
FAR: Names = [(f"llama-{seed}-english", f"llama-{seed + 1}") for seed in range(3)]
LANGUAGE: Names = [
    ("encoder-0-python", "encoder-0-torch"),
    ("encoder-1-c", "encoder-1-c10"),
    ("encoder-2-python", "encoder-2-torch"),
]
LANGUAGES: Names = [
    ("encoder-0-python", "encoder-0-c"),
    ("encoder-1-torch", "encoder-1-c10"),
    ("encoder-2-python", "encoder-2-c10"),
]
TWO_BASES: Names = [
    ("encoder-0-python", "encoder-1-torch"),
    ("encoder-1-c", "encoder-2-c10"),
    ("encoder-2-python", "encoder-0-c"),
]
OWN, OTHER = "own", "other"
COLUMNS: dict[str, dict[str, tuple[Names, str]]] = {
    LLAMAS: {
        "one base, two domains": (NEAR, OWN),
        "one base, third": (NEAR, OTHER),
        "two bases, one domain": (SEEDS, OWN),
        "two bases, two domains": (FAR, OWN),
        "two bases, third": (FAR, OTHER),
    },
    CLASSIFIERS: {
        "one base, one language": (LANGUAGE, OWN),
        "one base, two languages": (LANGUAGES, OWN),
        "one base, third": (LANGUAGES, OTHER),
        "two bases": (TWO_BASES, OWN),
        "two bases, third": (TWO_BASES, OTHER),
    },
}
"""By table and title: pairs, and whether they are judged in their own domains or in the others."""
FEW = {LLAMAS: NEAR[:1], CLASSIFIERS: LANGUAGE[1:2]}
"""Pairs of a quick run."""
FORMS = {LLAMAS: "{:.3f}", CLASSIFIERS: "{:.1f}"}
TABLES = {table: ("average", *columns) for table, columns in COLUMNS.items()}
SAMPLES = 128


def rows(given: Given) -> Iterator[tuple[str, Row]]:
    """A row for the models alone, and one for each average with each matching."""
    for table, columns in COLUMNS.items():
        shown = {title: (FEW[table] if given.quick else names, side) for title, (names, side) in columns.items()}
        pairs = {names: opened(given, names) for each, _ in shown.values() for names in each}
        values = {("each model alone", NONE): [alone(given, pair) for pair in pairs.values()]}
        chosen = list(MATCHINGS[table])[: 2 if given.quick else None]
        merges = judged(given, table, pairs.values(), lambda out, pair: worth(given, out, pair), chosen, AVERAGES)
        values |= dict(sorted(merges.items(), key=lambda item: AVERAGES.index(item[0][0])))
        for (average, matching), worths in values.items():
            of_pair = dict(zip(pairs, worths, strict=True))
            cells = {title: [of_pair[names][side] for names in each] for title, (each, side) in shown.items()}
            figures = {title: spread(numbers, FORMS[table]) for title, numbers in cells.items()}
            yield table, {"average": TITLES[matching].format(average), **figures}


def opened(given: Given, names: tuple[str, str]) -> Pair:
    """Two checkpoints with samples of both domains; encoders of a quick run have random weights."""
    if names[0].startswith("llama"):
        anchor, donor = map(given.model, names)
        samples = [windows(domain_of(path), 4 if given.quick else SAMPLES // 2) for path in (anchor, donor)]
        return Pair(given, anchor, donor, mixed(samples), matchings=MATCHINGS[LLAMAS])
    anchor, donor = (random_encoder(given, name) if given.quick else given.model(name) for name in names)
    each, count = (60, 4) if given.quick else (1000, SAMPLES // 2)
    samples = [kinds.samples(domain_of(path), False, each)[0][:count] for path in (anchor, donor)]
    return Pair(given, anchor, donor, mixed(samples), {"heads_of": "each"}, MATCHINGS[CLASSIFIERS])


def random_encoder(given: Given, name: str) -> Path:
    """None comes with the package."""
    if not (path := given.scratch / name).exists():
        torch.manual_seed(int(name.split("-")[1]))
        save(kinds.encoder(BertForSequenceClassification), path)
    return path


def windows(domain: str, count: int) -> Tensor:
    """Of training text, 128 bytes each, spread over its documents."""
    text = training_tokens(domain)
    starts = torch.arange(count) * (len(text) // count)
    return text[starts[:, None] + torch.arange(128)].long()


def mixed(samples: list[Tensor]) -> dict[str, Tensor]:
    ids = torch.cat(samples)
    return {"input_ids": ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))]}


def domain_of(path: Path) -> str:
    """The domain that a checkpoint has learned, by its name."""
    last = path.name.rpartition("-")[2]
    return "python" if last.isdigit() else last


def worth(given: Given, out: Path, pair: Pair) -> dict[str, float]:
    """Of a merge, under both heads where each model keeps its own."""
    heads = (out / "heads").glob("*")
    return sides(pair, by_domain(given, out), by_domain(given, next(heads, out)))


def alone(given: Given, pair: Pair) -> dict[str, float]:
    """Of the two models by themselves."""
    return sides(
        pair, *(given.kept(f"{p.name} alone", lambda p=p: by_domain(given, p)) for p in (pair.anchor, pair.donor))
    )


def by_domain(given: Given, path: Path) -> dict[str, float]:
    """Nats per byte of a Llama, percent told right by an encoder."""
    model = load(path)
    if model.config.model_type == "llama":
        return {domain: loss(model, domain, count=4 if given.quick else 64) for domain in NAMES}
    return {domain: 100 * kinds.accuracy(model, domain, 4 if given.quick else 60) for domain in kinds.DOMAINS}


def sides(pair: Pair, *worths: dict[str, float]) -> dict[str, float]:
    """The mean of two models in their own domains, and in those that neither has learned."""
    domains = [domain_of(path) for path in (pair.anchor, pair.donor)]
    own = [values[domain] for values, domain in zip(worths, domains, strict=True)]
    others = [value for values in worths for domain, value in values.items() if domain not in domains]
    return {OWN: fmean(own), OTHER: fmean(others)}


run(__name__)
