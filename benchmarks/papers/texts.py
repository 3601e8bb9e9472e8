"""Pairs of text models: classifiers of tokens with heads of their own, and byte-level Llamas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import kinds
import numpy as np
import torch
from apparatus import Given, spread
from corpora import training_tokens
from merges import PAPER, RESIDUAL, Pair, judged
from record import Row
from shipped import NAMES, load, loss
from torch import Tensor
from train_checkpoints import save
from transformers import BertForSequenceClassification

from rotation_merge import AlignConfig

NONE, MATCH = "no matching", "match"
CLASSIFIERS = {NONE: None, MATCH: PAPER, RESIDUAL: AlignConfig(heads="permutation", residual="permutation")}
"""Norms stand behind the residual sum there, so that the residual stream may be permuted, not turned."""
LLAMAS = {NONE: None, MATCH: PAPER, RESIDUAL: AlignConfig(heads="permutation", residual="rotation")}
AVERAGES = ("Simple", "Fisher", "RegMean", "OT-ACTS")
TITLES = {NONE: "{}", MATCH: "+ match", RESIDUAL: "+ match, residual"}
Pairs = list[tuple[str, str]]
Columns = dict[str, tuple[Pairs, str]]
"""Pairs by title, and which of a judge's words on them is shown."""
Work = tuple[
    Callable[[Given, tuple[str, str]], Pair],
    Callable[[Given, Path, Pair], dict[str, float]],
    Callable[[Given, str], dict[str, float]],
]
"""How a pair is opened, a merge of it judged, and a model by its name, in every domain."""
SAMPLES = 128
"""For statistics and plans: of both domains in equal parts, without labels."""


def domain_of(path: Path) -> str:
    """The domain that a checkpoint has learned, by its name."""
    last = path.name.rpartition("-")[2]
    return "python" if last.isdigit() else last


def classifier(given: Given, name: str) -> Path:
    """By name; one with random weights in a quick run, since none comes with the package."""
    if not given.quick:
        return given.model(name)
    if not (path := given.scratch / name).exists():
        torch.manual_seed(int(name.split("-")[1]))
        save(kinds.encoder(BertForSequenceClassification), path)
    return path


def classifiers(given: Given, names: tuple[str, str]) -> Pair:
    anchor, donor = (classifier(given, name) for name in names)
    count = 4 if given.quick else SAMPLES // 2
    ids = [kinds.samples(domain_of(path), False, 60 if given.quick else 1000)[0][:count] for path in (anchor, donor)]
    return _pair(given, (anchor, donor), torch.cat(ids), CLASSIFIERS, {"heads_of": "each"})


def llamas(given: Given, names: tuple[str, str]) -> Pair:
    anchor, donor = (given.model(name) for name in names)
    ids = [_windows(domain_of(path), 4 if given.quick else SAMPLES // 2) for path in (anchor, donor)]
    return _pair(given, (anchor, donor), torch.cat(ids), LLAMAS, {})


def _windows(domain: str, count: int) -> Tensor:
    """Of training text, 128 bytes each, spread over its documents."""
    text = training_tokens(domain)
    starts = torch.arange(count) * (len(text) // count)
    return text[starts[:, None] + torch.arange(128)].long()


def _pair(given: Given, paths: tuple[Path, Path], ids: Tensor, matchings: Any, parameters: dict[str, Any]) -> Pair:
    scratch = given.scratch / "_".join(path.name for path in paths)
    scratch.mkdir()
    mixed = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))]
    np.savez(scratch / "samples.npz", input_ids=mixed.numpy())
    return Pair(*paths, scratch, scratch / "samples.npz", parameters=parameters, matchings=matchings)


def told(given: Given, out: Path, pair: Pair) -> dict[str, float]:
    """Percent of token kinds that a merge tells, each head in its own domain; and both heads in all other domains."""
    own, (head,) = (domain_of(pair.anchor), domain_of(pair.donor)), (out / "heads").iterdir()
    models = [load(path) for path in (out, head)]
    inside = [_right(given, model, domain) for model, domain in zip(models, own, strict=True)]
    outside = [_right(given, model, domain) for model in models for domain in kinds.DOMAINS if domain not in own]
    return {"own": 100 * fmean(inside), "other": 100 * fmean(outside)}


def told_by(given: Given, name: str) -> dict[str, float]:
    """By domain, what a classifier tells there."""
    model = load(classifier(given, name))
    return {domain: 100 * _right(given, model, domain) for domain in kinds.DOMAINS}


def _right(given: Given, model: Any, domain: str) -> float:
    return kinds.accuracy(model, domain, 4 if given.quick else 60)


def nats_of(given: Given, out: Path, pair: Pair) -> dict[str, float]:
    """Nats per byte of held-out text: in the domains that the models have learned, and in the others."""
    losses, own = nats(given, out), (domain_of(pair.anchor), domain_of(pair.donor))
    return {
        "own": fmean(losses[domain] for domain in own),
        "other": fmean(loss for domain, loss in losses.items() if domain not in own),
    }


def nats_by(given: Given, name: str) -> dict[str, float]:
    """The same of a Llama, by domain."""
    return nats(given, given.model(name))


def nats(given: Given, path: Path) -> dict[str, float]:
    model, count = load(path), 4 if given.quick else 64
    return {domain: loss(model, domain, count=count) for domain in NAMES}


def alone(by_domain: dict[str, dict[str, float]], pair: tuple[str, str], side: str) -> float:
    """What the two models of a pair are worth by themselves, on average: each in its own domain, or in the domains
    that a merge of the two counts as others."""
    domains = [domain_of(Path(name)) for name in pair]
    if side == "own":
        return fmean(by_domain[name][domain] for name, domain in zip(pair, domains, strict=True))
    return fmean(value for name in pair for domain, value in by_domain[name].items() if domain not in domains)


def compared(
    given: Given, key: str, columns: Columns, few: Pairs, work: Work, matchings: dict[str, Any], form: str
) -> Iterator[Row]:
    """A row for the models alone, and one for each average with each matching; a quick run sees `few` pairs."""
    opener, judge, worth = work
    shown = {title: (few if given.quick else pairs, side) for title, (pairs, side) in columns.items()}
    named = {"+".join(pair): pair for pairs, _ in shown.values() for pair in pairs}
    opened = {words: lambda pair=pair: opener(given, pair) for words, pair in named.items()}
    chosen = list(matchings)[: 2 if given.quick else None]
    found = judged(given, key, opened, lambda out, pair: judge(given, out, pair), chosen, AVERAGES)
    place = {pair: number for number, pair in enumerate(named.values())}
    each = {m: given.kept(f"{key}, {m} alone", lambda m=m: worth(given, m)) for pair in place for m in pair}
    own = {title: [alone(each, pair, side) for pair in pairs] for title, (pairs, side) in shown.items()}
    yield {"average": "each model alone", **{title: spread(values, form) for title, values in own.items()}}
    for (average, matching), said in sorted(found.items(), key=lambda item: AVERAGES.index(item[0][0])):
        cells = {title: [said[place[pair]][side] for pair in pairs] for title, (pairs, side) in shown.items()}
        words = TITLES[matching].format(average)
        yield {"average": words, **{title: spread(values, form) for title, values in cells.items()}}
