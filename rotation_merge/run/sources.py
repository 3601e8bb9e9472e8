"""Sources of samples: files of text, rows, arrays or images, demo data, text that a language model writes itself."""

from __future__ import annotations

import csv
import json
import math
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rotation_merge.errors import DataError, named, nearest, short
from rotation_merge.model.hub import local_file
from rotation_merge.model.sentence import reading
from rotation_merge.model.vocabulary import tokenizer_in
from rotation_merge.run import demo
from rotation_merge.run.batches import Batch, by_rows, check_inputs, device_of, joined
from rotation_merge.run.functions import check_answers, fused_attention, local_path, outputs, predicts_next
from rotation_merge.run.pictures import image_rows, pixel_reader, split_arrays, synthetic_images
from rotation_merge.run.sample_kinds import DEMO, KINDS, SELF, SYNTHETIC, check_source, columns
from rotation_merge.run.sentence import is_sentence_model
from rotation_merge.workers import listener


def tokenizer_of(model_path: str) -> Any:
    """The tokenizer beside a model.

    Raises:
        DataError: there is none that can be loaded.
    """
    tokenizer = tokenizer_in(local_path(model_path)) if model_path else None
    if tokenizer is None:
        remedy = "add tokenizer.json, or give batches of input_ids"
        raise DataError("no tokenizer can be loaded for its texts", where=model_path or "the model", remedy=remedy)
    return tokenizer


def read_examples(source: str, model: Any, model_path: str, length: int, count: int, seed: int) -> list[Batch]:
    """All examples of a file; of a source without one, so many as are to be made.

    Raises:
        DataError: names the file and the expected content.
    """
    if source == SELF:
        return by_rows({"input_ids": self_written(model, model_path, count, length, seed)})
    if source == SYNTHETIC:
        folder = local_path(model_path) if model_path else ""
        return by_rows({"pixel_values": synthetic_images(model, folder, count, seed)})
    check_source(source)
    if source in DEMO:
        return _demo(source, length)
    path = Path(local_file(source))
    try:
        content = _content(path, model.config)
    except Exception as error:  # each library refuses in its own way
        raise DataError(f"cannot be read ({short(error)})", where=source, remedy=f"give {KINDS}") from error
    if isinstance(content, str) and is_sentence_model(model):
        content = [{"text": line} for line in content.splitlines() if line.strip()]
    if isinstance(content, list):
        return _examples(content, source, model, model_path, length)
    check_inputs(["input_ids"] if isinstance(content, str) else content, model, source)
    if isinstance(content, dict):
        return split_arrays(content, model, source)
    tokens = tokenizer_of(model_path)(content, return_tensors="pt", verbose=False)["input_ids"][0]
    return _windows(tokens, length, source)


def _content(path: Path, config: Any) -> dict[str, Tensor] | list[Any] | str:
    """Named arrays, rows, or running text."""
    if path.is_dir():
        return image_rows(path, config) or _dataset(path)
    read = READERS.get(path.suffix.lower())
    return path.read_text(encoding="utf-8") if read is None else read(path)


def _dataset(path: Path) -> list[Any]:
    """The rows of a dataset, in a file of Parquet or a folder; of a dictionary of splits, of its first."""
    from datasets import Dataset, DatasetDict, load_from_disk
    from pyarrow.parquet import read_table

    rows = load_from_disk(str(path)) if path.is_dir() else Dataset(read_table(path))
    return [*(next(iter(rows.values())) if isinstance(rows, DatasetDict) else rows)]


def _table(path: Path) -> list[Any]:
    with open(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
        rows = [{name and name.strip(): value for name, value in row.items()} for row in reader if any(row.values())]
    odd = next((number for number, row in enumerate(rows, 2) if None in row or None in row.values()), None)
    if odd is not None:
        raise ValueError(f"row {odd} has other columns than the header; put texts that hold commas into quotes")
    label = columns(rows[0] if rows else ()).get("label")
    return [row if label is None else {**row, label: _number(row[label].strip())} for row in rows]


def _number(text: str) -> int | float | str:
    """A cell's number, or its text."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _json(path: Path) -> list[Any]:
    """The objects of a list, of one line each, or the only one."""
    text = path.read_text(encoding="utf-8")
    with suppress(json.JSONDecodeError):
        content = json.loads(text)
        return content if isinstance(content, list) else [content]
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number} is not JSON: {error}") from error
    return rows


def _arrays(path: Path) -> dict[str, Tensor]:
    import numpy as np
    from safetensors.torch import load_file

    if path.suffix.lower() == ".safetensors":
        arrays = load_file(path)
    elif zipfile.is_zipfile(path):
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: torch.as_tensor(file[name]) for name in file.files}
    else:
        raise ValueError("it is not an archive of arrays")
    return {name: array.float() if array.is_floating_point() else array.long() for name, array in arrays.items()}


READERS: dict[str, Callable[[Path], dict[str, Tensor] | list[Any]]] = {
    ".csv": _table,
    ".tsv": _table,
    ".parquet": _dataset,
    ".json": _json,
    ".jsonl": _json,
    ".npz": _arrays,
    ".safetensors": _arrays,
}
"""Files by suffix; all others are text."""


def _demo(source: str, length: int) -> list[Batch]:
    """Samples that come with the package."""
    if (name := DEMO[source]) == "digits":
        _, _, pixels, labels = demo.digits()
        return by_rows({"pixel_values": pixels, "labels": labels})
    return _windows(demo.text(name), length, source)


def _windows(tokens: Tensor, length: int, source: str) -> list[Batch]:
    count = len(tokens) // length
    if count == 0:
        raise DataError(f"holds {len(tokens)} tokens, a window takes {length}", where=source, remedy="give more text")
    return by_rows({"input_ids": tokens[: count * length].view(count, length)})


# --- rows ------------------------------------------------------------------------------------------------------------


def _examples(rows: list[Any], source: str, model: Any, model_path: str, length: int) -> list[Batch]:
    """Rows with an image, a text (or two) or `input_ids`, and a label where there is one.

    Raises:
        DataError: names the row.
    """
    names = columns(name for row in rows if isinstance(row, dict) for name in row)
    labelled = "label" in names and not ("text" in names and predicts_next(model))
    if "image" in names:
        check_inputs(["pixel_values"], model, source)
    elif "text" not in names:
        _check_columns(rows, source)
    read = _row_reader(names, model, model_path, length)
    examples = []
    for number, row in enumerate(rows, 1):
        try:
            if not isinstance(row, Mapping):
                raise ValueError(f"{short(row)} has no columns")
            example = read(row)
            if labelled and row.get(names["label"]) is not None:
                example["labels"] = _label(row[names["label"]], model)[None]
        except Exception as error:  # of Pillow, processors and tokenizers, of every kind
            problem = f"{short(row)} cannot be read ({short(error)})"
            remedy = 'write {"text": ..., "label": ...} or {"input_ids": [3, 14, 15], "labels": ...}, or give images'
            raise DataError(problem, where=f"{source}, record {number}", remedy=remedy) from error
        examples.append(example)
    return examples


def _check_columns(rows: list[Any], source: str) -> None:
    """Check that rows without text and images hold tokens.

    Raises:
        DataError: no row does; names the columns.
    """
    present = list(dict.fromkeys(str(name) for row in rows if isinstance(row, Mapping) for name in row))
    if present and "input_ids" not in present:
        problem = f"holds no column of texts, images or tokens, but {named(present)}"
        raise DataError(problem, where=source, remedy="rename the right one to 'text', 'image' or 'input_ids'")


RowReader = Callable[[Mapping[str, Any]], Batch]
"""Gives the inputs in a row, or raises an error of any kind."""


def _row_reader(names: Mapping[str, str], model: Any, model_path: str, length: int) -> RowReader:
    """Reads pictures, texts or token ids, as the columns say."""
    if "image" in names:
        pixels = pixel_reader(local_path(model_path) if model_path else "", model.config)
        return lambda row: {"pixel_values": pixels(row[names["image"]])[None]}
    texts = [names[role] for role in ("text", "text_pair") if role in names]
    return _words_reader(texts, model, model_path, length) if texts else lambda row: _tokens(row["input_ids"])


def _words_reader(names: Sequence[str], model: Any, model_path: str, length: int) -> RowReader:
    """Two texts are one input, divided; of a model that gives embeddings two, behind its prompt: (1, 2, tokens)."""
    tokenizer, embeds = tokenizer_of(model_path), is_sentence_model(model)
    prompt, longest = reading(local_path(model_path)) if embeds else ("", None)

    def tokens(*texts: str) -> Batch:
        return _tokens(tokenizer(*texts, truncation=True, max_length=min(length, longest or length))["input_ids"])

    def read(row: Mapping[str, Any]) -> Batch:
        texts = [prompt + str(row[name]) for name in names if row.get(name) is not None]
        if row.get(names[0]) is None or (embeds and len(texts) < len(names)):
            raise ValueError("a text is missing")
        if not embeds or len(texts) == 1:
            return tokens(*texts)
        return {name: x[None] for name, x in joined([tokens(text) for text in texts]).items()}

    return read


def _tokens(ids: Any) -> Batch:
    """Token ids, int64, with their mask, (1, tokens)."""
    tokens = torch.tensor(ids)
    if tokens.ndim != 1 or tokens.dtype != torch.long:
        raise ValueError(f"'input_ids' are {short(ids)}, no row of token ids")
    return {"input_ids": tokens[None], "attention_mask": torch.ones_like(tokens)[None]}


def _label(label: Any, model: Any) -> Tensor:
    """A row's label, or row of labels: a class by its number or name, or numbers."""
    if isinstance(label, str):
        names = getattr(model.config, "label2id", None) or {}
        classes = {str(name).lower(): int(i) for name, i in names.items()}
        try:
            label = classes[label.lower()] if label.lower() in classes else json.loads(label)
        except ValueError as error:
            raise ValueError(f"the model has no class '{label}'; {nearest(label.lower(), classes)}") from error
    value = torch.tensor(label)
    return value.float() if value.is_floating_point() or is_sentence_model(model) else value.long()


# --- text that a model writes -----------------------------------------------------------------------------------------

AT_ONCE = 64
"""Sequences that are written together."""
PLAUSIBLE = 0.01
"""A token that a fine-tune prefers to its base is written if it is at least so likely as the likeliest, as a share."""


def writes_text(model: Any) -> bool:
    """Whether a model predicts the next token."""
    return type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))


@torch.no_grad()
def self_written(model: Any, model_path: str, count: int, length: int = 128, seed: int = 0, base: Any = None) -> Tensor:
    """Token ids sampled from a causal language model itself, int64, (count, length).

    Every sequence begins with the tokenizer's BOS; with a token drawn uniformly only where there is none.

    Args:
        base: of a fine-tune, on the same device: the model writes what it has learned, as tokens that it finds likelier
            than its base does get likelier by the same factor.

    Raises:
        DataError: the model does not write text.

    Source: Li and others 2023 (Contrastive decoding, arXiv 2210.15097), here of a fine-tune and its base, and sampled.
    """
    if not writes_text(model):
        remedy = "give a file, or 'synthetic' for image models"
        raise DataError(f"{type(model).__name__} does not write text", remedy=remedy)
    models = [model] if base is None else [model, base]
    configs = [each.config.get_text_config() for each in models]
    known = min(text.vocab_size for text in configs)
    length = min(length, *(getattr(text, "max_position_embeddings", None) or length for text in configs))
    tokenizer = tokenizer_in(local_path(model_path)) if model_path else None
    draw, first = torch.Generator().manual_seed(seed), getattr(tokenizer, "bos_token_id", None)
    if first is None or first >= known:
        begins = torch.randint(known, (count, 1), generator=draw)
    else:
        begins = torch.full((count, 1), first)
    prompt = {"input_ids": torch.arange(min(length, 32))[None] % known}
    check_answers(model, outputs(model, prompt).values(), model_path)
    parts, written = begins.split(AT_ONCE), list[Tensor]()
    with ExitStack() as fused:
        for each in models:
            fused.enter_context(fused_attention(each, prompt))
        for part in parts:
            written.append(_continued(models, part, length, draw, len(written) * length, len(parts) * length))
    return torch.cat(written)


def _continued(models: Sequence[Any], ids: Tensor, length: int, draw: torch.Generator, done: int, total: int) -> Tensor:
    """Sequences (count, length) that begin with these ids; `done` of `total` tokens a sequence have been written."""
    pasts, progress = [None for _ in models], listener()
    while ids.shape[1] < length:
        steps = [ids if past is None else ids[:, -1:] for past in pasts]
        results = [
            model(input_ids=step.to(device_of(model)), past_key_values=past, use_cache=True)
            for model, step, past in zip(models, steps, pasts, strict=True)
        ]
        pasts = [getattr(result, "past_key_values", None) for result in results]
        chances = _chances(*(result.logits[:, -1].float() for result in results))
        ids = torch.cat([ids, torch.multinomial(chances.cpu(), 1, generator=draw)], 1)
        progress("writing samples, tokens", done + ids.shape[1], total)
    return ids


def _chances(logits: Tensor, of_base: Tensor | None = None) -> Tensor:
    """Probabilities of the next token (sequences, vocabulary), of those that the base has, too, if there is one."""
    if of_base is None:
        return logits.softmax(-1)
    known = min(logits.shape[-1], of_base.shape[-1])
    tuned, base = (x[:, :known].log_softmax(-1) for x in (logits, of_base))
    implausible = tuned < tuned.amax(-1, keepdim=True) + math.log(PLAUSIBLE)
    return (2 * tuned - base).masked_fill(implausible, -math.inf).softmax(-1)
