"""transformers' tokenizer out of a GGUF's metadata.

Two kinds are read: byte pairs on bytes (`gpt2`), whose rule for splitting text into words llama.cpp knows by a name
(`splitting.json`), and sentencepiece's (`llama`), where scores tell in which order pieces are joined.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from rotation_merge.errors import CheckpointError
from rotation_merge.model.gguf.file import AGAIN, GgufFile

BYTE_PAIRS, SENTENCE_PIECES = "gpt2", "llama"
NONE = ("none", "no_vocab")
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of tokens."""
PADDING = re.compile(r"\[PAD\d+\]")
"""Converters' names of rows of the embedding without a token."""
SPACE = "\u2581"

BY_ARCHITECTURE = {"gpt2": "gpt-2", "falcon": "falcon", "qwen2": "qwen2", "starcoder2": "smollm"}
"""Pre-tokenizers of files that were written before files named theirs."""
OWN_TOKENIZER = "put the model's tokenizer.json into the folder of the file"


@cache
def splittings() -> dict[str, dict[str, Any]]:
    """Rules for splitting text, by llama.cpp's names."""
    content = json.loads(Path(__file__).with_name("splitting.json").read_text(encoding="utf-8"))
    return {name: rule for first, rule in content.items() for name in (first, *rule["also"])}


def check_size(gguf: GgufFile) -> None:
    """Check that the vocabulary, if stored, has as many tokens as the embedding has rows.

    Raises:
        CheckpointError: it has not.
    """
    rows, tokens = gguf.entries["token_embd.weight"].shape[0], gguf.metadata.get("tokenizer.ggml.tokens") or []
    if tokens and len(tokens) != rows:
        problem = f"its vocabulary has {len(tokens)} tokens, its embedding {rows} rows"
        raise CheckpointError(problem, where=gguf.paths[0], remedy=AGAIN)


def check_vocabulary(gguf: GgufFile, path: str) -> None:
    """Check that a tokenizer.json beside a file has the tokens of its vocabulary.

    Raises:
        CheckpointError: it has others at some ids.
    """
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        vocab = content["model"]["vocab"]
        beside = {number: token for token, number in vocab.items()} if isinstance(vocab, dict) else {}
        beside.update({token["id"]: token["content"] for token in content.get("added_tokens", [])})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError("cannot be read as a tokenizer", where=path, remedy="move it away") from error
    tokens = enumerate(vocabulary(gguf) or [])
    mismatches = [(number, token) for number, token in tokens if beside.get(number, token) != token]
    if mismatches:
        number, token = mismatches[0]
        words = f"at {len(mismatches)} ids, the first is {number}: '{beside[number]}', there '{token}'"
        problem = f"has other tokens than {os.path.basename(gguf.paths[0])} {words}"
        raise CheckpointError(problem, where=path, remedy="it is another model's; move it away")


def vocabulary(gguf: GgufFile) -> list[str] | None:
    """A file's tokens by id, without empty rows; None without a vocabulary."""
    tokens = gguf.metadata.get("tokenizer.ggml.tokens")
    if not tokens or gguf.metadata.get("tokenizer.ggml.model") in NONE:
        return None
    tokens, types = list(tokens), _types(gguf.metadata)
    while tokens and types[len(tokens) - 1] == UNUSED and PADDING.fullmatch(tokens[-1]):
        tokens.pop()
    return tokens


def _types(metadata: Mapping[str, Any]) -> Sequence[int]:
    tokens = metadata["tokenizer.ggml.tokens"]
    types: Sequence[int] = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    return types


def read_tokenizer(gguf: GgufFile) -> Any:
    """transformers' tokenizer; None if the file has no vocabulary.

    Raises:
        CheckpointError: the vocabulary is of a kind that is not read.
    """
    tokens = vocabulary(gguf)
    if tokens is None:
        return None
    return tokenizer_of(gguf.metadata, tokens, gguf.architecture, gguf.paths[0])


def tokenizer_of(metadata: Mapping[str, Any], tokens: Sequence[str], architecture: str, label: str) -> Any:
    """transformers' tokenizer of some metadata; see `read_tokenizer`.

    Args:
        tokens: by their ids.
        architecture: selects the pre-tokenizer if the metadata do not.
        label: name of the file for errors.
    """
    from tokenizers import AddedToken, processors
    from transformers import PreTrainedTokenizerFast

    kind = metadata.get("tokenizer.ggml.model")
    if kind == BYTE_PAIRS:
        fast, bos = _byte_pairs(metadata, tokens, architecture, label)
    elif kind == SENTENCE_PIECES:
        fast, bos = _sentence_pieces(metadata, tokens), True
    else:
        problem = f"its tokenizer is of kind '{kind}', which is not supported"
        raise CheckpointError(problem, where=label, remedy=OWN_TOKENIZER)
    types = _types(metadata)
    fast.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t, k in zip(tokens, types, strict=False) if k == CONTROL]
    )
    fast.add_tokens([AddedToken(t, normalized=False) for t, k in zip(tokens, types, strict=False) if k == USER_DEFINED])
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    ids = {short: metadata.get(f"tokenizer.ggml.{name}_token_id") for name, short in names.items()}
    special = {f"{short}_token": tokens[i] for short, i in ids.items() if i is not None and i < len(tokens)}
    around = {
        end: special.get(f"{end}_token") if metadata.get(f"tokenizer.ggml.add_{end}_token", default) else None
        for end, default in (("bos", bos), ("eos", False))
    }
    if any(around.values()):
        begin, end = ([word] if word else [] for word in (around["bos"], around["eos"]))
        marks = [(word, tokens.index(word)) for word in dict.fromkeys([*begin, *end])]
        pair = [*(f"{word}:1" for word in begin), "$B:1", *(f"{word}:1" for word in end)]
        template = processors.TemplateProcessing(
            single=[*begin, "$A", *end], pair=[*begin, "$A", *end, *pair], special_tokens=marks
        )
        fast.post_processor = template
    return PreTrainedTokenizerFast(
        tokenizer_object=fast,
        clean_up_tokenization_spaces=False,
        model_max_length=metadata.get(f"{architecture}.context_length"),
        chat_template=_read_templates(metadata),
        **special,
    )


TEMPLATE, TEMPLATES, DEFAULT = "tokenizer.chat_template", "tokenizer.chat_templates", "default"
"""Keys of the usual template and of the names of others, each under the first key and its name; transformers' name of
the usual one."""


def _read_templates(metadata: Mapping[str, Any]) -> str | dict[str, str] | None:
    """The chat template; several by name."""
    usual: str | None = metadata.get(TEMPLATE)
    by_name = {name: metadata[f"{TEMPLATE}.{name}"] for name in metadata.get(TEMPLATES) or []}
    return {**({DEFAULT: usual} if usual else {}), **by_name} if by_name else usual


def written_templates(templates: str | Mapping[str, str] | None) -> dict[str, Any]:
    """The metadata of a chat template, or of several by name."""
    by_name = {DEFAULT: templates} if isinstance(templates, str) else dict(templates or {})
    usual = {TEMPLATE: by_name.pop(DEFAULT)} if DEFAULT in by_name else {}
    entries = {f"{TEMPLATE}.{name}": template for name, template in by_name.items()}
    return {**usual, **({TEMPLATES: list(by_name), **entries} if entries else {})}


def _byte_pairs(metadata: Mapping[str, Any], tokens: Sequence[str], architecture: str, label: str) -> tuple[Any, bool]:
    """The tokenizer, and whether a text begins with a special token by default."""
    from tokenizers import Tokenizer, decoders, models

    name = metadata.get("tokenizer.ggml.pre") or BY_ARCHITECTURE.get(architecture)
    rule = splittings().get(str(name))
    if rule is None:
        rule_name = f"by '{name}', which is not known" if name else "in a way that it does not name"
        problem = f"its tokenizer splits text {rule_name}"
        raise CheckpointError(problem, where=label, remedy=OWN_TOKENIZER)
    merges = [tuple(merge.split(" ")) for merge in metadata.get("tokenizer.ggml.merges", [])]
    if any(len(merge) != 2 for merge in merges):
        raise CheckpointError("its tokenizer's merges are damaged", where=label, remedy=AGAIN)
    vocab = {token: number for number, token in enumerate(tokens)}
    whole = bool(rule.get("whole"))
    fast = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=False, byte_fallback=False, ignore_merges=whole))
    fast.pre_tokenizer = _component({"type": "Sequence", "pretokenizers": rule["parts"]})
    fast.decoder = decoders.ByteLevel()
    return fast, bool(rule.get("bos"))


def _component(parts: dict[str, Any]) -> Any:
    """A pre-tokenizer out of its JSON."""
    from tokenizers import Tokenizer

    empty = {"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}, "pre_tokenizer": parts}
    return Tokenizer.from_str(json.dumps(empty)).pre_tokenizer


def _sentence_pieces(metadata: Mapping[str, Any], tokens: Sequence[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocab = {token: number for number, token in enumerate(tokens)}
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    word = tokens[unknown] if unknown is not None and unknown < len(tokens) else None
    merges = _merges(tokens, vocab, metadata.get("tokenizer.ggml.scores") or [0.0] * len(tokens), _types(metadata))
    fast = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=word, fuse_unk=True, byte_fallback=True))
    prefixed = metadata.get("tokenizer.ggml.add_space_prefix", True)
    steps = [*([normalizers.Prepend(SPACE)] if prefixed else []), normalizers.Replace(" ", SPACE)]
    fast.normalizer = normalizers.Sequence(steps)
    undone = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    fast.decoder = decoders.Sequence([*undone, *([decoders.Strip(" ", 1, 0)] if prefixed else [])])
    return fast


def _merges(
    tokens: Sequence[str], vocab: Mapping[str, int], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    """Pairs of pieces that join to another, the ones of the highest score first, as sentencepiece joins them."""
    merges = []
    for number, token in enumerate(tokens):
        if types[number] in (NORMAL, USER_DEFINED, UNUSED):
            cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
            pairs = sorted((vocab[a], vocab[b], a, b) for a, b in cuts if a in vocab and b in vocab)
            merges += [(-scores[number], number, *pair) for pair in pairs]
    return [(a, b) for *_, a, b in sorted(merges, key=lambda merge: merge[:2])]
