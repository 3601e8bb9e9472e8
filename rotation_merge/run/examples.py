"""Examples from files: text, rows of named columns, arrays, images, demo data; each is a batch of one."""

from __future__ import annotations

import csv
import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rotation_merge.errors import DataError, nearest, nearest_path, short
from rotation_merge.model.hub import local_file
from rotation_merge.model.sentence import reading
from rotation_merge.model.vocabulary import tokenizer_in
from rotation_merge.run import demo
from rotation_merge.run.arrays import joined, split_arrays
from rotation_merge.run.data_checks import check_inputs
from rotation_merge.run.functions import Batch, local_path, predicts_next
from rotation_merge.run.images import image_rows, pixel_reader
from rotation_merge.run.sample_kinds import KINDS, columns
from rotation_merge.run.sentence import is_sentence_model

DELIMITERS = {".csv": ",", ".tsv": "\t"}


def read_examples(source: str, model: Any, model_path: str, length: int) -> list[Batch]:
    """All examples of a source.

    Raises:
        DataError: names the file and the expected content.
    """
    if source.startswith("demo:"):
        return _demo(source, length)
    path = Path(local_file(source))
    if not path.exists():
        raise DataError("no such file", where=source, remedy=nearest_path(source, f"give {KINDS}", os.path.exists))
    try:
        content = _content(path, model.config)
    except Exception as error:  # each library refuses in its own way
        raise DataError(f"cannot be read ({short(error)})", where=source, remedy=f"give {KINDS}") from error
    if isinstance(content, dict):
        return split_arrays(content, model, source)
    if isinstance(content, list):
        return _examples(content, source, model, model_path, length)
    if is_sentence_model(model):
        lines = [{"text": line} for line in content.splitlines() if line.strip()]
        return _examples(lines, source, model, model_path, length)
    check_inputs(["input_ids"], model, source)
    tokens = tokenizer_of(model_path)(content, return_tensors="pt", verbose=False)["input_ids"][0]
    return _windows(tokens, length, source)


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


def _content(path: Path, config: Any) -> dict[str, Tensor] | list[Any] | str:
    """Named arrays, rows, or running text."""
    kind = path.suffix.lower()
    if path.is_dir() or kind == ".parquet":
        return image_rows(path, config) or _dataset(path)
    if kind in (".npz", ".safetensors"):
        return _arrays(path)
    if kind in DELIMITERS:
        return _table(path)
    text = path.read_text(encoding="utf-8")
    if kind in (".json", ".jsonl"):
        return _json(text)
    return text


def _dataset(path: Path) -> list[Any]:
    """The rows of a dataset, in a file of Parquet or a folder; of a dictionary of splits, of its first."""
    from datasets import Dataset, DatasetDict, load_from_disk
    from pyarrow.parquet import read_table

    rows = load_from_disk(str(path)) if path.is_dir() else Dataset(read_table(path))
    return [*(next(iter(rows.values())) if isinstance(rows, DatasetDict) else rows)]


def _table(path: Path) -> list[Any]:
    with open(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, delimiter=DELIMITERS[path.suffix.lower()])
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


def _json(text: str) -> list[Any]:
    """The objects of a list, or of one line each."""
    if text.lstrip().startswith("["):
        return list(json.loads(text))
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number} is not JSON: {error}") from error
    return rows


def _arrays(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        arrays = load_file(path)
    else:
        import numpy as np

        if not zipfile.is_zipfile(path):
            raise ValueError("it is not an archive of arrays")
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: torch.as_tensor(file[name]) for name in file.files}
    return {name: array.float() if array.is_floating_point() else array.long() for name, array in arrays.items()}


def _demo(source: str, length: int) -> list[Batch]:
    name = source.removeprefix("demo:")
    if name == "digits":
        _, _, pixels, labels = demo.digits()
        return [{"pixel_values": pixels[i : i + 1], "labels": labels[i : i + 1]} for i in range(len(labels))]
    if name not in demo.NAMES:
        known = ", ".join(f"demo:{known}" for known in ("digits", *demo.NAMES))
        raise DataError(f"the demo has no data '{name}'", remedy=f"known: {known}")
    return _windows(demo.text(name), length, source)


def _windows(tokens: Tensor, length: int, source: str) -> list[Batch]:
    count = len(tokens) // length
    if count == 0:
        raise DataError(f"holds {len(tokens)} tokens, a window takes {length}", where=source, remedy="give more text")
    return [{"input_ids": window[None]} for window in tokens[: count * length].view(count, length)]


def _examples(rows: Sequence[Any], source: str, model: Any, model_path: str, length: int) -> list[Batch]:
    """Rows with an image, a text (or two) or `input_ids`, and a label where there is one.

    Raises:
        DataError: names the row.
    """
    names = columns(name for row in rows if isinstance(row, dict) for name in row)
    column = names.get("image", names.get("text", "input_ids"))
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict) or row.get(column) is None:
            words = ", ".join(map(str, row)) if isinstance(row, dict) else short(row)
            problem, where = f"columns are {words}; none holds texts or 'input_ids'", f"{source}, record {number}"
            remedy = 'write {"text": ..., "label": ...} or {"input_ids": [...], "labels": ...}'
            raise DataError(problem, where=where, remedy=remedy)
    if "image" in names:
        check_inputs(["pixel_values"], model, source)
        examples = _images([row[column] for row in rows], source, model, model_path)
    else:
        examples = _tokens(_token_ids(rows, names, model, model_path, length), source)
    for number, (row, example) in enumerate(zip(rows, examples, strict=True), 1):
        label = row.get(names.get("label"))
        if label is not None and not ("text" in names and predicts_next(model)):
            example["labels"] = _label(label, model, f"{source}, record {number}")[None]
    return examples


def _images(images: Sequence[Any], source: str, model: Any, model_path: str) -> list[Batch]:
    """Pictures, or the places of their files.

    Raises:
        DataError: names the one that cannot be read.
    """
    pixels, examples = pixel_reader(model_path, model.config), list[Batch]()
    for number, image in enumerate(images, 1):
        try:
            examples.append({"pixel_values": pixels(image)[None]})
        except Exception as error:  # of Pillow and of processors, of every kind
            where = str(image) if isinstance(image, str | Path) else f"{source}, record {number}"
            raise DataError(f"cannot be read ({short(error)})", where=where, remedy="give images") from error
    return examples


def _token_ids(
    rows: Sequence[Any], names: Mapping[str, str], model: Any, model_path: str, length: int
) -> list[list[Any]]:
    """For each row the token ids of its inputs.

    Two texts are one input, divided; of a model that gives embeddings two, each with the default prompt before it.
    """
    if "text" not in names:
        return [[row["input_ids"]] for row in rows]
    used = [names[role] for role in ("text", "text_pair") if role in names]
    texts = [[str(row[name]) for name in used if row.get(name) is not None] for row in rows]
    embeds, prompt, longest = is_sentence_model(model), "", None
    if embeds:
        prompt, longest = reading(local_path(model_path))
    encode = partial(tokenizer_of(model_path), truncation=True, max_length=min(length, longest or length))
    inputs = [[(prompt + text,) for text in row] if embeds else [tuple(row)] for row in texts]
    return [[encode(*part)["input_ids"] for part in row] for row in inputs]


def _tokens(rows: Sequence[Sequence[Any]], source: str) -> list[Batch]:
    """Token ids, int64, with their mask; of two inputs (1, 2, tokens).

    Raises:
        DataError: a row holds none, or something else.
    """
    examples, count = [], max(map(len, rows), default=1)
    for number, inputs in enumerate(rows, 1):
        where, parts = f"{source}, record {number}", []
        if len(inputs) != count:
            raise DataError("holds one text, other records hold two", where=where, remedy="give pairs, or texts")
        for ids in inputs:
            tokens = _tensor(ids)
            if tokens is not None and not tokens.numel():
                raise DataError("holds no tokens", where=where, remedy="leave it out")
            if tokens is None or tokens.dtype != torch.long or tokens.ndim != 1:
                remedy = "give a row of token ids: [3, 14, 15]"
                raise DataError(f"its 'input_ids' are {short(ids)}", where=where, remedy=remedy)
            parts.append({"input_ids": tokens[None], "attention_mask": torch.ones_like(tokens)[None]})
        example = joined(parts)
        examples.append({name: x[None] for name, x in example.items()} if count == 2 else example)
    return examples


def _label(label: Any, model: Any, place: str) -> Tensor:
    """A row's label, or row of labels: a class by its number or name, or numbers."""
    if isinstance(label, str):
        classes = {str(name).lower(): int(i) for name, i in (getattr(model.config, "label2id", None) or {}).items()}
        try:
            label = classes[label.lower()] if label.lower() in classes else json.loads(label)
        except ValueError as error:
            remedy = nearest(label.lower(), classes)
            raise DataError(f"the model has no class '{label}'", where=place, remedy=remedy) from error
    value = _tensor(label)
    if value is None:
        raise DataError(f"its label is {short(label)}", where=place, remedy="give a number, a class, or a row")
    return value.float() if value.is_floating_point() or is_sentence_model(model) else value.long()


def _tensor(values: Any) -> Tensor | None:
    """Numbers as a tensor; None for other values and for rows of different lengths."""
    try:
        return torch.tensor(values)
    except (TypeError, ValueError, RuntimeError):
        return None
