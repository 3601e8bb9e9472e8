"""A task for small encoders that has the same classes in several domains: what kind of token a byte of code belongs to.

A sample is 47 bytes of code, and before them once more the byte asked for, which is the one behind the first 16.
Domains are CPython's library and torch.nn (Python), CPython's headers (C) and torch's c10 (C++), each with every tenth
file held out (`corpora.documents`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from keyword import kwlist
from typing import Any

import torch
from corpora import documents, training_tokens
from torch import Tensor
from transformers import BertConfig

import rotation_merge as rm

KINDS = ("comment", "string", "number", "keyword", "name", "operator")
DOMAINS = ("python", "torch", "c", "c10")
BEFORE, LENGTH = 16, 47
MASK = 255
"""The token that hides others: no byte of UTF-8."""

C_WORDS = (
    "auto bool break case catch char class const constexpr continue default define do double else endif enum explicit "
    "extern float for friend if ifdef ifndef include inline int long namespace noexcept nullptr operator override "
    "private protected public return short signed sizeof static struct switch template this typedef typename union "
    "unsigned using virtual void volatile while"
)
STRING = r'"(?:\\.|[^"\\\n])*"|' + r"'(?:\\.|[^'\\\n])*'"
COMMENTS = {"python": r"\#[^\n]*", "c": r"/\*[\s\S]*?\*/|//[^\n]*"}
STRINGS = {"python": rf'"""[\s\S]*?"""|{STRING}', "c": STRING}
WORDS = {"python": "|".join(kwlist), "c": C_WORDS.replace(" ", "|")}


def language(domain: str) -> str:
    return "python" if domain in ("python", "torch") else "c"


def tokens(code: str, domain: str) -> Iterator[tuple[str, int, int]]:
    """Kind, start and end of every token but white space."""
    of = language(domain)
    numeral = r"\b\d[\w.]*"
    pattern = rf"({COMMENTS[of]})|({STRINGS[of]})|({numeral})|\b({WORDS[of]})\b|([^\W\d]\w*)|([^\w\s])"
    for match in re.finditer(pattern, code):
        yield KINDS[match.lastindex - 1], *match.span()  # type: ignore[operator]


@cache
def samples(domain: str, held_out: bool, each: int) -> tuple[Tensor, Tensor]:
    """`each` samples of every kind: bytes (N, 1 + 47) and kinds (N,), one byte of a token each.

    Documents are read in random order until there are three times as many of every kind.
    """
    draw = torch.Generator().manual_seed(int(held_out))
    found: dict[str, list[bytes]] = {kind: [] for kind in KINDS}
    everything = documents(domain)[held_out]
    for number in torch.randperm(len(everything), generator=draw).tolist():
        if min(map(len, found.values())) >= 3 * each:
            break
        document = everything[number]
        code = document.decode("latin-1")
        for kind, start, end in tokens(code, domain):
            first = start + int(torch.randint(end - start, (), generator=draw)) - BEFORE
            if first >= 0 and first + LENGTH <= len(code):
                asked = document[first + BEFORE : first + BEFORE + 1]
                found[kind].append(asked + document[first : first + LENGTH])
    rows, labels = [], []
    for number, some in enumerate(found.values()):
        some = list(dict.fromkeys(some))
        rows += [list(some[i]) for i in torch.randperm(len(some), generator=draw)[:each].tolist()]
        labels += [number] * min(each, len(some))
    order = torch.randperm(len(rows), generator=draw)
    return torch.tensor(rows)[order], torch.tensor(labels)[order]


def encoder(kind: Any) -> Any:
    """A byte-level BERT with random weights, of one of its classes."""
    config = BertConfig(
        vocab_size=256,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=1 + LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        id2label=dict(enumerate(KINDS)),
        label2id={kind: number for number, kind in enumerate(KINDS)},
        pad_token_id=0,
    )
    return kind(config)


def masked(generator: torch.Generator, size: int = 32) -> Iterator[dict[str, Tensor]]:
    """Windows of Python's library, a sixth of the bytes hidden."""
    text = training_tokens("python")
    while True:
        starts = torch.randint(len(text) - LENGTH, (size, 1), generator=generator)
        ids = text[starts + torch.arange(1 + LENGTH)].long()
        hidden = torch.rand(ids.shape, generator=generator) < 1 / 6
        yield {"input_ids": ids.masked_fill(hidden, MASK), "labels": ids.masked_fill(~hidden, -100)}


def labelled(domain: str, generator: torch.Generator, size: int = 32) -> Iterator[dict[str, Tensor]]:
    """Training samples of a domain in random order, again and again."""
    ids, kinds = samples(domain, False, 1000)
    while True:
        for rows in torch.randperm(len(ids), generator=generator).split(size):
            yield {"input_ids": ids[rows], "labels": kinds[rows]}


def accuracy(model: Any, domain: str, each: int = 150) -> float:
    """On held-out samples."""
    ids, kinds = samples(domain, True, each)
    return rm.evaluate(model, [{"input_ids": ids, "labels": kinds}])["accuracy"]
