"""Table 3 of "Beyond the Permutation Symmetry of Transformers": seconds of training, of matching and of each merge.

Processor seconds on one thread, mean and spread over three pairs: ViTs of other seeds, fine-tuned encoders of table 1,
and whole RoBERTa-bases with random weights, whose donor is a fine-tune (2% noise) or drawn anew. Training is measured
over 20 steps and multiplied. Statistics count to the merge that needs them, as in the paper: gram or Fisher diagonal of
both models. Merges run through mergekit, files included; Simple of RoBERTa-base is an average in memory, as theirs.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import kinds
import table1
import torch
from apparatus import Given, run, spread
from merges import AVERAGES, Pair, vits
from record import Row
from train_checkpoints import fit, image_batches, new, warm_cosine
from transformers import BertForSequenceClassification, RobertaConfig, RobertaForMaskedLM

import rotation_merge as rm

NAME = "papers-table3"
OURS = ("ViT", "encoder", "RoBERTa-base, fine-tune", "RoBERTa-base, drawn anew")
PAPER = {
    "training": ("", "3071.49"),
    "matching": ("3.48", "1.71"),
    "Simple": ("0.22", "0.09"),
    "Fisher": ("83.67", "69.57"),
    "RegMean": ("71.02", "36.44"),
}
"""Seconds in the paper's table 3: its ViT, its RoBERTa."""
TABLES = {NAME: ("what", *OURS, "paper, ViT", "paper, RoBERTa")}


def rows(given: Given) -> Iterator[tuple[str, Row]]:
    found: dict[str, list[dict[str, float]]] = {column: [] for column in OURS}
    for number, (seeds, pair) in enumerate(zip(given.pairs(), vits(given), strict=True)):
        works: tuple[Callable[[], dict[str, float]], ...] = (
            lambda p=pair: of_vits(p),
            lambda n=number: of_encoders(given, n),
            lambda s=seeds: of_roberta(given.quick, s, 0.02),
            lambda s=seeds: of_roberta(given.quick, s, None),
        )
        for column, work in zip(OURS, works, strict=True):
            found[column].append(given.kept(f"seconds, {column}, {number}", work))
    for what in ("training", "matching", *AVERAGES):
        some = {column: [one[what] for one in found[column] if what in one] for column in OURS}
        ours = {column: spread(values, "{:.2f}") if values else "" for column, values in some.items()}
        yield NAME, {"what": what, **ours, **dict(zip(TABLES[NAME][-2:], PAPER.get(what, ("", "")), strict=True))}


def seconds(work: Callable[[], Any]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def trained(model: Any, batches: Any, steps: int, quick: bool) -> float:
    """Seconds of so many steps, measured over 20."""
    some = 1 if quick else 20
    next(batches)  # reads data, where there are any
    return seconds(lambda: fit(model, batches, some, warm_cosine(some, 1, 0.0))) * steps / some


def of_vits(pair: Pair) -> dict[str, float]:
    images = image_batches(torch.Generator().manual_seed(0))
    return of_pair(pair, trained(new("vit-0"), images, 1200, pair.given.quick), "both")


def of_encoders(given: Given, base: int) -> dict[str, float]:
    """Training: of the classifier, not of its base."""
    model = kinds.encoder(BertForSequenceClassification)
    ids, labels = torch.randint(256, (32, 1 + kinds.LENGTH)), torch.randint(len(kinds.KINDS), (32,))
    batches = itertools.repeat({"input_ids": ids, "labels": labels})
    pair = table1.opened(given, (f"encoder-{base}-c", f"encoder-{base}-c10"))
    return of_pair(pair, trained(model, batches, 300, given.quick), table1.MATCH)


def of_pair(pair: Pair, training: float, matching: str) -> dict[str, float]:
    """Refit is measured where heads are not kept apart."""
    pair.aligned(matching)
    found = {"training": training, "matching": median(seconds(lambda: pair.alignment(matching)) for _ in range(3))}
    for average in list(AVERAGES)[: 1 if pair.given.quick else None]:
        if average != "refit" or not pair.parameters:
            found[average] = seconds(lambda a=average: pair.merged(a, matching))
    return found


def of_roberta(quick: bool, seeds: tuple[int, int], noise: float | None) -> dict[str, float]:
    """Matching by the paper's groups, and the average in memory."""
    config = RobertaConfig(vocab_size=50265, num_hidden_layers=1 if quick else 12, max_position_embeddings=514)
    if quick:
        config.update({"vocab_size": 64, "hidden_size": 48, "intermediate_size": 96})
    anchor, donor = (roberta(config, seed) for seed in (seeds if noise is None else seeds[:1] * 2))
    torch.manual_seed(seeds[1])
    with torch.no_grad():
        for x in donor.parameters() if noise else ():
            x += noise * x.std() * torch.randn_like(x)
    first, second = anchor.state_dict(), donor.state_dict()
    averaging = seconds(lambda: [(first[name] + second[name]) / 2 for name in first])
    return {"matching": seconds(lambda: rm.align(anchor, donor)), "Simple": averaging}


def roberta(config: RobertaConfig, seed: int) -> RobertaForMaskedLM:
    torch.manual_seed(seed)
    return RobertaForMaskedLM(config)


run(__name__)
