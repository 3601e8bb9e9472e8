"""A GGUF's metadata out of transformers' tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rotation_merge.errors import CheckpointError
from rotation_merge.model.gguf.layout import CONVERTER
from rotation_merge.model.gguf.tokenizer import (
    BYTE,
    BYTE_PAIRS,
    CONTROL,
    NORMAL,
    SENTENCE_PIECES,
    SPACE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    splittings,
    tokenizer_of,
)

SAMPLE = (
    "The 12345 quick foxes aren't here,  they're THERE!\n\n\tüber naïve 東京 и привет (x == 3.14) — ok?",
    " leading",
    "a",
    "",
)
"""Texts that a tokenizer must split in the same way once it has been read back."""


def write_vocabulary(tokenizer: Any, rows: int, architecture: str, label: str) -> dict[str, Any]:
    """The metadata of a tokenizer.

    Args:
        tokenizer: transformers', a fast one.
        rows: of the embedding; those that have no token are padded, as llama.cpp does.
        architecture: as `general.architecture` says it.
        label: what to call the model in errors.

    Raises:
        CheckpointError: llama.cpp has no words for how it splits text.
    """
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    tokens, types = _tokens(content, rows, label)
    kind, special = _kind(content, tokens, types, label)
    ids = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    numbers = {name: getattr(tokenizer, f"{short}_token_id") for name, short in ids.items()}
    marked, plain = (tokenizer("a", add_special_tokens=added).input_ids for added in (True, False))
    metadata = {
        **kind,
        "tokenizer.ggml.tokens": tokens,
        **special,
        "tokenizer.ggml.token_type": types,
        **{f"tokenizer.ggml.{name}_token_id": number for name, number in numbers.items() if number is not None},
        "tokenizer.ggml.add_bos_token": len(marked) > len(plain) and marked[0] == numbers["bos"],
        "tokenizer.ggml.add_eos_token": len(marked) > len(plain) and marked[-1] == numbers["eos"],
    }
    if kind["tokenizer.ggml.model"] == SENTENCE_PIECES:
        metadata["tokenizer.ggml.add_space_prefix"] = tokenizer.tokenize("a")[:1] == [f"{SPACE}a"]
    if isinstance(tokenizer.chat_template, str):
        metadata["tokenizer.chat_template"] = tokenizer.chat_template
    _check(tokenizer, metadata, tokens, architecture, label)
    return metadata


def _tokens(content: Mapping[str, Any], rows: int, label: str) -> tuple[list[str], list[int]]:
    """Tokens by their ids, and their types."""
    vocab = content["model"].get("vocab")
    if content["model"].get("type") != "BPE" or not isinstance(vocab, dict):
        problem = f"its tokenizer is a {content['model'].get('type')}, which is not written to GGUF"
        raise CheckpointError(problem, where=label, remedy=CONVERTER)
    names = {number: token for token, number in vocab.items()}
    added = {token["id"]: token for token in content.get("added_tokens", [])}
    names.update({number: token["content"] for number, token in added.items()})
    if names and max(names) >= rows:
        problem = f"its tokenizer has {max(names) + 1} tokens, its embedding {rows} rows"
        raise CheckpointError(problem, where=label, remedy="they do not belong together; check tokenizer.json")
    unknown, bytewise = content["model"].get("unk_token"), content["model"].get("byte_fallback")
    types = []
    for number in range(rows):
        token = names.get(number)
        if token is None:
            types.append(UNUSED)
        elif token == unknown and bytewise:
            types.append(UNKNOWN)
        elif number in added:
            types.append(CONTROL if added[number]["special"] else USER_DEFINED)
        else:
            types.append(BYTE if bytewise and len(token) == 6 and token.startswith("<0x") else NORMAL)
    return [names.get(number, f"[PAD{number}]") for number in range(rows)], types


def _kind(
    content: Mapping[str, Any], tokens: list[str], types: list[int], label: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What says how text is split, and in which order pieces are joined."""
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in content["model"]["merges"]]
    if content["model"].get("byte_fallback"):
        ranks: dict[str, int] = {}
        for rank, (a, b) in enumerate(merges, 1):
            ranks.setdefault(a + b, rank)
        last = len(merges) + 1
        scores = [
            -float(ranks.get(token, last)) if kind == NORMAL else 0.0 for token, kind in zip(tokens, types, strict=True)
        ]
        return {"tokenizer.ggml.model": SENTENCE_PIECES, "tokenizer.ggml.pre": "default"}, {
            "tokenizer.ggml.scores": scores
        }
    whole = bool(content["model"].get("ignore_merges"))
    parts = content.get("pre_tokenizer") or {}
    parts = parts.get("pretokenizers", [parts])
    name = next(
        (n for n, rule in splittings().items() if rule["parts"] == parts and bool(rule.get("whole")) == whole), None
    )
    if name is None and not merges:  # where nothing is joined, it does not matter where text is cut
        name = "gpt-2"
    if name is None or content.get("normalizer") not in (None, {"type": "NFC"}):
        problem = "its tokenizer splits text in a way that llama.cpp has no name for, as far as is known here"
        raise CheckpointError(problem, where=label, remedy=CONVERTER)
    joined = [" ".join(merge) for merge in merges]
    return {"tokenizer.ggml.model": BYTE_PAIRS, "tokenizer.ggml.pre": name}, {"tokenizer.ggml.merges": joined}


def _check(tokenizer: Any, metadata: Mapping[str, Any], tokens: list[str], architecture: str, label: str) -> None:
    """Read back, it splits text as it did."""
    again = tokenizer_of(metadata, tokens, architecture, label)
    if any(again(text).input_ids != tokenizer(text).input_ids for text in SAMPLE):
        problem = "its tokenizer would split text otherwise once it is read from GGUF"
        raise CheckpointError(problem, where=label, remedy=CONVERTER)
