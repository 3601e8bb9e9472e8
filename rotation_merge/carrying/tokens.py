"""Chat template and tokens that a fine-tune has beyond its base, brought to a new base with the tokens' rows.

Rows of embedding and head are no change of anything the old base has, so they are carried whole: both bases are given
them first, the old one as the fine-tune has them, the new one moved by the alignment. Between the bases with these
rows everything else is carried as it is between bases of any vocabulary.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rotation_merge.carrying.bases import Bases, sized
from rotation_merge.carrying.carrier import Carrier
from rotation_merge.files import TemporaryFolder
from rotation_merge.model.adapters import Adapter, placed_changes
from rotation_merge.model.blocks import read_tensor
from rotation_merge.model.headers import TOKENIZER, read_json
from rotation_merge.model.low_rank import dense
from rotation_merge.model.rows import resized_vocabulary, vocabulary_subset
from rotation_merge.model.tensors import TensorSource, as_tensors
from rotation_merge.model.view import View
from rotation_merge.model.vocabulary import tokenizer_in, vocabulary_size
from rotation_merge.model.writing import small_files

SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Entries of a config and of generation_config.json that name tokens."""

GENERATION = "generation_config.json"
NAMED = 8
"""Tokens that a line names, at most."""

NO_ROWS = "the adapter holds no whole embedding and head"
OF_MERGE = "a merge keeps its anchor's tokenizer; carry the fine-tune first ('rotation-merge carry'), and merge that"


@dataclass(frozen=True)
class AddedTokens:
    """Tokens and chat template that a fine-tune adds to its base, and their place at the new base.

    Attributes:
        bases: the old one and the new one.
        folder: where the tokenizer of the fine-tune or adapter lies; empty: it is in memory.
        length: rows of its vocabulary; 0: it has none of its own.
        model: the fine-tune; None: it is an adapter.
        rows_held: whether it has rows of its own, and the output can store them.
    """

    bases: Bases
    folder: str
    length: int = 0
    model: View | None = None
    rows_held: bool = True

    @classmethod
    def of(cls, bases: Bases, model: View, rows_held: bool = True) -> AddedTokens:
        """The tokens that a fine-tune adds to the old base.

        Args:
            rows_held: whether the output can store their rows, as an adapter of its own cannot.
        """
        lora = model.reference.lora
        folder = lora.path if lora is not None else "" if model.files is None else model.folder
        return cls(bases, folder, vocabulary_size(model) or 0, model, rows_held)

    @classmethod
    def of_adapter(cls, bases: Bases, adapter: Adapter) -> tuple[AddedTokens, dict[str, Tensor]]:
        """The tokens that an adapter adds, with its whole embedding and head by tensor name."""
        rows = saved_rows(adapter, bases)
        length = min((tensor.shape[0] for tensor in rows.values()), default=0)
        return cls(bases, adapter.path, length, None, bool(rows)), rows

    @cached_property
    def tokenizers(self) -> tuple[Any, Any, Any]:
        """Tokenizers of the new base, the old base and the fine-tune; None for each that is missing."""
        stored = self.bases.new.files is not None and self.bases.old.files is not None
        if not self.old_length or not stored or not os.path.isdir(self.folder):
            return None, None, None
        new, old, tuned = map(tokenizer_in, (self.bases.new.folder, self.bases.old.folder, self.folder))
        return new, old, tuned

    @cached_property
    def tokens(self) -> dict[str, int]:
        """Tokens that the old base lacks, by their numbers in the fine-tune, in the order of these."""
        _, old, tuned = self.tokenizers
        if old is None or tuned is None or old is tuned:
            return {}
        known = old.get_vocab()
        return dict(sorted(((t, n) for t, n in tuned.get_vocab().items() if t not in known), key=lambda pair: pair[1]))

    @property
    def template(self) -> bool:
        """Whether it has a chat template that the old base has not."""
        _, old, tuned = self.tokenizers
        template = getattr(tuned, "chat_template", None)
        return template is not None and template != getattr(old, "chat_template", None)

    @property
    def special(self) -> dict[str, str]:
        """Special tokens that are others than the old base's, by role (`eos_token`)."""
        _, old, tuned = self.tokenizers
        if old is None or tuned is None:
            return {}
        before = old.special_tokens_map
        changed = {role: token for role, token in tuned.special_tokens_map.items() if before.get(role) != token}
        return {role: token for role, token in changed.items() if isinstance(token, str)}

    @property
    def empty(self) -> bool:
        """Whether there is nothing to bring along."""
        return not (self.tokens or self.template or self.nameless)

    @property
    def nameless(self) -> int:
        """Rows beyond the old base's that no token has."""
        beyond = max(0, self.length - self.old_length)
        return beyond - sum(number >= self.old_length for number in self.tokens.values() if number < self.length)

    @property
    def old_length(self) -> int:
        return vocabulary_size(self.bases.old) or 0

    @property
    def new_length(self) -> int:
        return vocabulary_size(self.bases.new) or 0

    @property
    def whole(self) -> bool:
        """Whether the fine-tune's tokenizer serves the new base unchanged."""
        length = self.length if self.rows_held else self.old_length
        return self.bases.rows is None and all(number < length for number in self.tokens.values())

    @cached_property
    def tokenizer(self) -> Any | None:
        """The new base's tokenizer with the added tokens and template; None if the fine-tune's own files are used."""
        new, _, tuned = self.tokenizers
        if self.whole or new is None or tuned is None:
            return None
        grown, known = copy.deepcopy(new), tuned.added_tokens_decoder
        for token, number in self.tokens.items():
            if self.rows_held and number < self.length:
                grown.add_tokens([known.get(number, token)])
        vocabulary = grown.get_vocab()
        for role, token in self.special.items():
            if token in vocabulary:
                setattr(grown, role, token)
        if self.template:
            grown.chat_template = tuned.chat_template
        return grown

    @cached_property
    def rows(self) -> dict[int, int]:
        """Rows that are copied: id in the output by id in the fine-tune."""
        if not self.rows_held:
            return {}
        if self.whole:
            numbers = {*self.tokens.values(), *range(self.old_length, self.length)}
            return {number: number for number in sorted(numbers)}
        vocabulary = {} if self.tokenizer is None else self.tokenizer.get_vocab()
        return {n: vocabulary[token] for token, n in self.tokens.items() if n < self.length and token in vocabulary}

    @property
    def lengths(self) -> tuple[int, int]:
        """Rows of the new base's vocabulary and of the old one's, once both have the added ones."""
        new, old = max(self.rows.values(), default=-1), max(self.rows, default=-1)
        return max(self.new_length, new + 1), max(self.old_length, old + 1)

    def words(self, merged: bool = False) -> list[str]:
        """Lines for the report.

        Args:
            merged: the change goes into a merge, which keeps its anchor's tokenizer.
        """
        carried = {token for token, number in self.tokens.items() if not merged and number in self.rows}
        named = {token for token in self.tokens if not merged and self.whole} - carried
        lost = [token for token in self.tokens if token not in carried | named]
        parts = [f"tokens {_listed(lost)}"] if lost else []
        if self.nameless and (merged or not (self.whole and self.rows_held)):
            parts.append(f"{self.nameless} rows of its vocabulary without a token")
        if self.template and merged:
            parts.append("its chat template")
        lines = [f"Its added tokens were moved with their rows: {_listed(sorted(carried))}."] if carried else []
        if named:
            lines.append(f"Its added tokens were moved; their rows are the new base's: {_listed(sorted(named))}.")
        if self.template and not merged:
            lines.append("Its chat template was copied.")
        if parts:
            reason = OF_MERGE if merged else "" if self.rows_held else NO_ROWS
            lines.append(
                f"Not carried of what it added to its base{f' ({reason})' if reason else ''}: {'; '.join(parts)}."
            )
        return lines

    def extended(self, carrier: Carrier, tuned: TensorSource) -> Carrier:
        """The carrier between the two bases with the added rows.

        Args:
            tuned: the fine-tune's tensors that have a vocabulary, at least.
        """
        if not self.rows:
            return carrier
        here, there = torch.tensor([*self.rows]), torch.tensor([*self.rows.values()])
        architecture, (new_length, old_length) = carrier.architecture, self.lengths
        old = resized_vocabulary(architecture, carrier.old, old_length, tuned, (here, here))
        moved = _moved(carrier, vocabulary_subset(architecture, old, here), len(here))
        new = resized_vocabulary(architecture, carrier.new, new_length, moved, (there, torch.arange(len(here))))
        rows = carrier.rows
        if rows is not None:
            rows = torch.cat([rows[0], there]), torch.cat([rows[1], here])
        return replace(carrier, old=old, new=new, rows=rows)

    def with_rows(self, base: View, tensors: TensorSource) -> View:
        """A base with the added rows, written with the tokenizer and template that were carried.

        Args:
            tensors: of the base, with the rows.
        """
        grown = replace(base, tensors=as_tensors(tensors))
        if self.empty:
            return grown
        changed = sized(base.config, self.new_length, self.lengths[0]) if self.rows else {}
        if self.model is not None:
            changed |= self._numbers(self.model, "config.json")
        beside = self.files({} if base.files is None else small_files(base.folder))
        return replace(grown, config={**base.config, **changed}, changed={**base.changed, **changed}, beside=beside)

    def sized_old(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The old base's config with the vocabulary size including added tokens."""
        return {**config, **sized(config, self.old_length, self.lengths[1])}

    def files(self, base_files: Mapping[str, bytes] | None) -> dict[str, bytes]:
        """Small files of the output: tokenizer, template and special tokens in place of the new base's.

        Args:
            base_files: the new base's, of a model; None, of an adapter.
        """
        files = dict(base_files or {})
        if self.tokenizers[2] is not None and (self.tokens or self.template) and (self.whole or self.tokenizer):
            with TemporaryFolder() as folder:
                if self.tokenizer is not None:
                    self.tokenizer.save_pretrained(folder)
                files = {name: content for name, content in files.items() if not TOKENIZER.fullmatch(name)}
                files |= _tokenizer_files(self.folder if self.tokenizer is None else folder)
        if self.model is None or base_files is None:
            return files
        if changed := self._numbers(self.model, GENERATION):
            entries = {**json.loads(files.get(GENERATION, b"{}")), **changed}
            files[GENERATION] = f"{json.dumps(entries, indent=2)}\n".encode()
        return files

    def _numbers(self, model: View, file: str) -> dict[str, Any]:
        """Entries of a file that name other tokens than the old base's file, with ids of the output."""
        old, tuned = _read(self.bases.old, file), _read(model, file)
        result = {}
        for key in SPECIAL:
            value = tuned.get(key)
            if value is None or value == old.get(key):
                continue
            numbers = [self._number(number) for number in (value if isinstance(value, list) else [value])]
            if all(number is not None for number in numbers):
                result[key] = numbers if isinstance(value, list) else numbers[0]
        return result

    def _number(self, number: int) -> int | None:
        """The id in the output of a token of the fine-tune; None: it has none."""
        if self.whole:
            return number
        tuned = self.tokenizers[2]
        token = None if tuned is None else tuned.convert_ids_to_tokens(number)
        return None if token is None or self.tokenizer is None else self.tokenizer.get_vocab().get(token)


def _listed(tokens: Iterable[str]) -> str:
    names = [f"`{token}`" for token in tokens]
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _tokenizer_files(folder: str) -> dict[str, bytes]:
    names = filter(TOKENIZER.fullmatch, sorted(os.listdir(folder)))
    return {name: Path(folder, name).read_bytes() for name in names}


def _read(model: View, file: str) -> dict[str, Any]:
    path = "" if model.files is None else os.path.join(model.folder, file)
    return read_json(path) if os.path.exists(path) else {}


def _moved(carrier: Carrier, rows: TensorSource, count: int) -> dict[str, Tensor]:
    """Whole rows of a vocabulary in the new base's coordinates, as it stores them, by tensor name, float64.

    Args:
        rows: the old base with these rows alone, its tensors under the names of the carrier's architecture.
    """
    nothing = torch.zeros(0, dtype=torch.int64)
    new = resized_vocabulary(carrier.architecture, carrier.new, count, rows, (nothing, nothing))
    small = replace(carrier, old=rows, new=new, rows=None)
    moved: dict[str, Tensor] = {}
    for block in carrier.architecture.blocks:
        infos = {info.key: info for info in block.tensors if info.vocabulary_axis is not None and not info.stacked}
        tensors = {key: read_tensor(info, rows) for key, info in infos.items()}
        changes = {key: tensor.double() for key, tensor in tensors.items() if tensor is not None}
        for key, change in small.block(block, changes).items():
            if key in infos:
                moved[infos[key].name] = dense(change, infos[key])
    return moved


def saved_rows(adapter: Adapter, bases: Bases) -> dict[str, Tensor]:
    """An adapter's whole embedding and head, by tensor name; empty if either is missing."""
    whole = [change for change in placed_changes(adapter, bases.old.config) if change.value]
    held = {c.spot.info.name: c.value for c in whole if c.spot.info.vocabulary_axis is not None}
    tied = bases.new.tied_head
    names = [i.name for i in bases.old.architecture.tensors() if i.vocabulary_axis is not None and i.name != tied]
    if not held or any(name not in held for name in names if name in bases.old.shapes):
        return {}
    return {name: adapter.tensor(key) for name, key in held.items()}
