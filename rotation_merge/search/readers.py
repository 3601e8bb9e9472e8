"""Readers of held-out samples for models whose token ids differ: by token, or as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rotation_merge.errors import DataError
from rotation_merge.run.data import Data
from rotation_merge.run.examples import tokenizer_of
from rotation_merge.run.functions import Batch, local_path, read_config

PER_TOKEN = ("input_ids", "attention_mask", "token_type_ids")
"""Inputs that hold an entry for each token, and can be made anew from the text."""

IGNORED = -100
"""A label that does not count."""


@dataclass(frozen=True)
class Reader:
    """Reads samples with the anchor's token ids for one model; this class for models with the same ids.

    Attributes:
        name: the model.
        columns: for each of the anchor's tokens its id in this model, -1 where it has none; None: ids are the same, or
            it reads text.
    """

    name: str
    columns: Tensor | None = None
    by_text = False

    def read(self, data: Data) -> tuple[Data, list[Tensor] | None]:
        """The samples in this model's ids; for running text also the bytes per token, by batch."""
        if self.columns is None:
            return data, None
        columns = self.columns
        return replace(data, batches=[_mapped(b, columns) for b in data.batches]), None


def _mapped(batch: Batch, columns: Tensor) -> Batch:
    """Map token ids to another model's; labels keep the anchor's."""
    names = [name for name in ("input_ids", "decoder_input_ids") if name in batch]
    return {**batch, **{name: columns[batch[name]].clamp_min(0) for name in names}}


@dataclass(frozen=True)
class TextReader(Reader):
    """Reads the text of the samples with the model's own tokenizer.

    Attributes:
        anchor: the tokenizer by which the samples were read.
        tokenizer: this model's.
        longest: so many tokens it can take; None: any number.
    """

    anchor: Any = field(default=None, repr=False)
    tokenizer: Any = field(default=None, repr=False)
    longest: int | None = None
    by_text = True

    def read(self, data: Data) -> tuple[Data, list[Tensor] | None]:
        """See `Reader.read`.

        Raises:
            DataError: the samples hold more for each token than can be made anew.
        """
        read = [self._encoded(batch, data.task) for batch in data.batches]
        sizes = [size for _, size in read] if data.task == "next token" else None
        return replace(data, batches=[batch for batch, _ in read]), sizes

    def _encoded(self, batch: Batch, task: str) -> tuple[Batch, Tensor]:
        ids = batch["input_ids"]
        shape = ids.shape
        labelled = "labels" in batch and batch["labels"].shape == shape and task != "next token"
        beside = {
            name for name, x in batch.items() if name not in (*PER_TOKEN, "labels") and x.shape[: ids.ndim] == shape
        }
        if labelled or beside or task == "masked token":
            problem = f"{self.name} has another tokenizer, but these samples have labels for single tokens"
            raise DataError(problem, remedy="give text for language models, or examples with one label each")
        encoded = [self._ids(text) for text in texts(batch, self.anchor)]
        longest = max(len(row) for row, _ in encoded)
        rows = torch.zeros(len(encoded), longest, dtype=torch.long)
        mask = torch.zeros_like(rows)
        for i, (row, _) in enumerate(encoded):
            rows[i, : len(row)], mask[i, : len(row)] = torch.tensor(row), 1
        lead = shape[:-1]
        inputs = {**{n: x for n, x in batch.items() if n not in PER_TOKEN}, "input_ids": rows.view(*lead, longest)}
        inputs["attention_mask"] = mask.view(*lead, longest)
        if task == "next token":
            inputs["labels"] = rows.masked_fill(mask == 0, IGNORED).view(*lead, longest)
        return inputs, torch.tensor([size for _, size in encoded], dtype=torch.float64)

    def _ids(self, text: str) -> tuple[list[int], int]:
        """A text's tokens, and the number of bytes after the first token."""
        ids = self.tokenizer(text, truncation=self.longest is not None, max_length=self.longest)["input_ids"] or [0]
        whole = len(text.encode())
        if self.longest is not None and len(ids) == self.longest:
            whole = min(whole, len(self.tokenizer.decode(ids, skip_special_tokens=True).encode()))
        first = 0 if ids[0] in self.tokenizer.all_special_ids else len(self.tokenizer.decode(ids[:1]).encode())
        return list(ids), max(whole - first, 1)


def texts(batch: Batch, tokenizer: Any) -> list[str]:
    """The texts of a batch by row, without characters that a window splits."""
    ids = batch["input_ids"].flatten(0, -2)
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).flatten(0, -2)
    rows = [row[row_mask == 1].tolist() for row, row_mask in zip(ids, mask, strict=True)]
    return [tokenizer.decode(row, skip_special_tokens=True).strip("\ufffd") for row in rows]


def readers_of(names: Sequence[str], sets: Sequence[Data]) -> dict[str, Reader]:
    """Readers of the first model's samples for models with other token ids.

    Where all divide the samples' text into the same tokens, ids are mapped by token; else each reads text.

    Raises:
        DataError: a tokenizer is missing.
    """
    tokenizers = {name: tokenizer_of(name) for name in names}
    anchor = tokenizers[names[0]]
    all_texts = [text for data in sets for batch in data.batches for text in texts(batch, anchor)]
    ids = torch.cat([batch["input_ids"].flatten() for data in sets for batch in data.batches]).unique()
    vocabulary = anchor.get_vocab()
    columns = {name: _columns(vocabulary, tokenizers[name].get_vocab()) for name in names[1:]}
    alike = all(
        _divides_alike(anchor, tokenizers[name], all_texts) and bool((columns[name][ids] >= 0).all())
        for name in names[1:]
    )
    if alike:
        return {name: Reader(name, columns.get(name)) for name in names}
    return {name: TextReader(name, None, anchor, tokenizers[name], _longest(name)) for name in names}


def _columns(anchor: Mapping[str, int], vocabulary: Mapping[str, int]) -> Tensor:
    columns = torch.full((max(anchor.values()) + 1,), -1)
    for token, number in anchor.items():
        columns[number] = vocabulary.get(token, -1)
    return columns


def _divides_alike(anchor: Any, tokenizer: Any, sample_texts: Sequence[str]) -> bool:
    return all(anchor.tokenize(text) == tokenizer.tokenize(text) for text in sample_texts)


def _longest(name: str) -> int | None:
    positions = read_config(local_path(name)).get("max_position_embeddings")
    return positions if isinstance(positions, int) else None
