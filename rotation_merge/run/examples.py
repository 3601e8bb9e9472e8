"""Examples from files: text, records (tables, JSON lines, dataset directories), arrays, image folders, demo data."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rotation_merge.errors import DataError, nearest, nearest_path, short
from rotation_merge.model.hub import local_file
from rotation_merge.model.sentence import reading
from rotation_merge.model.vocabulary import has_only_special_tokens
from rotation_merge.run.arrays import ExampleBatches, by_example
from rotation_merge.run.functions import Batch, local_path, predicts_next, read_config
from rotation_merge.run.images import preparer, read_images
from rotation_merge.run.sample_kinds import KINDS as KINDS
from rotation_merge.run.sentence import is_sentence_model
from rotation_merge.run.tables import ENDINGS, read_table, roles

ARRAYS = (".npz", ".safetensors")


def read_examples(
    source: str, model_path: str, model: Any, length: int
) -> dict[str, Tensor] | list[Batch] | ExampleBatches:
    """All examples of a source: one tensor for each input of the model, or one for each example.

    Raises:
        DataError: names the file and the expected content.
    """
    if source.startswith("demo:"):
        return _demo(source, length)
    path = Path(local_file(source))
    if not path.exists():
        raise DataError("no such file", where=source, remedy=nearest_path(source, f"give {KINDS}", os.path.exists))
    try:
        if path.is_dir() and not any((path / mark).exists() for mark in DATASET):
            return read_images(path, local_path(model_path), model.config)
        if path.suffix in ARRAYS:
            return by_example(_arrays(path), model, source)
        records = _records(path)
        text = path.read_text(encoding="utf-8") if records is None else ""
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise DataError(f"cannot be read ({error})", where=source, remedy=f"give {KINDS}") from error
    if records is None and is_sentence_model(model):
        records = [{"text": line} for line in text.splitlines() if line.strip()]
    if records is not None:
        return _of_records(records, source, model_path, model, length)
    return _windows(tokenizer_of(model_path)(text, return_tensors="pt", verbose=False)["input_ids"][0], length, source)


DATASET = ("dataset_info.json", "state.json", "dataset_dict.json")
"""Files that tell a directory of `datasets` from a folder of images."""


def _records(path: Path) -> list[Any] | None:
    """The records of a table, of JSON, or of a dataset's directory; None for other files.

    Raises:
        ValueError: it cannot be read.
    """
    if path.is_dir():
        return [*_dataset(path)]
    if path.suffix.lower() in ENDINGS:
        return read_table(path)
    if path.suffix not in (".jsonl", ".json"):
        return None
    text = path.read_text(encoding="utf-8")
    try:
        if text.lstrip().startswith("["):
            return list(json.loads(text))
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except json.JSONDecodeError as error:
        raise DataError(f"is not JSON ({error})", where=str(path), remedy="one object a line") from error


def _dataset(path: Path) -> Iterable[dict[str, Any]]:
    """The rows of a dataset; of a dictionary of splits, of its first."""
    from datasets import DatasetDict, load_from_disk

    try:
        rows = load_from_disk(str(path))
    except Exception as error:  # of many classes
        raise ValueError(str(error)) from error
    return next(iter(rows.values())) if isinstance(rows, DatasetDict) else rows


def _of_records(
    records: Sequence[Any], source: str, model_path: str, model: Any, length: int
) -> dict[str, Tensor] | list[Batch]:
    """Images of all records, or the tokens of each."""
    columns = roles(name for record in records if isinstance(record, dict) for name in record)
    if "image" not in columns:
        return _encoded(records, columns, source, model_path, length, model)
    prepare, label = preparer(local_path(model_path), model.config), columns.get("label")
    examples = {"pixel_values": torch.stack([prepare(record[columns["image"]]) for record in records])}
    return examples if label is None else {**examples, "labels": torch.tensor([record[label] for record in records])}


def _demo(source: str, length: int) -> dict[str, Tensor]:
    from rotation_merge.run import demo as data

    name = source.removeprefix("demo:")
    if name == "digits":
        _, _, pixels, labels = data.digits()
        return {"pixel_values": pixels, "labels": labels}
    if name not in data.NAMES:
        known = ", ".join(f"demo:{known}" for known in ("digits", *data.NAMES))
        raise DataError(f"the demo has no data '{name}'", remedy=f"known: {known}")
    return _windows(data.text(name), length, source)


def tokenizer_of(model_path: str) -> Any:
    """The tokenizer beside a model.

    Raises:
        DataError: there is none.
    """
    from transformers import AutoTokenizer

    folder = local_path(model_path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        problem, remedy = f"no tokenizer can be loaded ({short(error)})", "add its files"
        if not any(name.startswith(("tokenizer", "vocab")) for name in os.listdir(folder)):
            config, problem, remedy = read_config(folder), "no tokenizer is there", "add tokenizer.json"
            if "image_size" in config and "vocab_size" not in config:
                problem, remedy = "takes images, no text", "give a folder of images, or 'synthetic'"
        raise DataError(problem, where=model_path, remedy=remedy) from error
    if has_only_special_tokens(tokenizer):
        raise DataError("no tokenizer can be loaded (there is none)", where=model_path, remedy="add its files")
    return tokenizer


def _windows(tokens: Tensor, length: int, source: str) -> dict[str, Tensor]:
    count = len(tokens) // length
    if count == 0:
        raise DataError(f"holds {len(tokens)} tokens, a window takes {length}", where=source, remedy="give more text")
    return {"input_ids": tokens[: count * length].view(count, length)}


def _arrays(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            arrays = load_file(path)
        except SafetensorError as error:
            raise ValueError(str(error)) from error
    else:
        import numpy as np

        if not zipfile.is_zipfile(path):
            raise ValueError("is not an archive of arrays")
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: torch.as_tensor(file[name]) for name in file.files}
    return {name: array.float() if array.is_floating_point() else array.long() for name, array in arrays.items()}


def _encoded(
    records: Sequence[Any], columns: Mapping[str, str], source: str, model_path: str, length: int, model: Any
) -> list[Batch]:
    """Records with a text (or two) or `input_ids`, and a label where there is one, as one batch each.

    Two texts are read as one input, divided; by a model that gives embeddings, as two inputs (2, tokens), each with its
    default prompt before it.

    Args:
        columns: see `roles`.
    """
    tokenizer, result, embeds = None, [], is_sentence_model(model)
    text, second, label = (columns.get(role, "") for role in ("text", "text_pair", "label"))
    prompt, most = reading(local_path(model_path)) if embeds else ("", None)
    length = min(length, most or length)
    pairs = embeds and any(isinstance(record, dict) and record.get(second) is not None for record in records)
    for number, record in enumerate(records, 1):
        place = f"{source}, record {number}"
        if not isinstance(record, dict) or not ({text, "input_ids"} & set(record)):
            names = ", ".join(map(str, record)) if isinstance(record, dict) else short(record)
            remedy = 'write {"text": ..., "label": ...} or {"input_ids": [...], "labels": ...}'
            raise DataError(f"columns are {names}; none holds texts or 'input_ids'", where=place, remedy=remedy)
        if text in record:
            tokenizer = tokenizer or tokenizer_of(model_path)
            both = [str(record[name]) for name in (text, second) if record.get(name) is not None]
            if pairs and len(both) < 2:
                raise DataError("holds one text, other records hold two", where=place, remedy="give pairs, or texts")
            inputs = [[prompt + part] for part in both] if embeds else [both]
            ids: Any = [tokenizer(*texts, truncation=True, max_length=length)["input_ids"] for texts in inputs]
            longest = max(map(len, ids))
            ids = [row + [-1] * (longest - len(row)) for row in ids] if pairs else ids[0]
        else:
            ids = record["input_ids"]
            pairs = pairs or (embeds and isinstance(ids, list) and bool(ids) and isinstance(ids[0], list))
        example = {"input_ids": _tokens(ids, 1 + pairs, place)}
        if record.get(label) is not None and not (text in record and predicts_next(model)):
            example["labels"] = _label(record[label], model.config, embeds, place)
        result.append(example)
    return result


def _label(label: Any, config: Any, is_float: bool, place: str) -> Tensor:
    """A record's label, or row of labels: a class by its number or name, or numbers."""
    if isinstance(label, str):
        classes = {str(name).lower(): int(i) for name, i in (getattr(config, "label2id", None) or {}).items()}
        if label.lower() not in classes:
            raise DataError(f"the model has no class '{label}'", where=place, remedy=nearest(label.lower(), classes))
        label = classes[label.lower()]
    value = _tensor(label)
    if value is None:
        raise DataError(f"its label is {short(label)}", where=place, remedy="give a number, a class, or a row")
    return value.float() if value.is_floating_point() or is_float else value.long()


def _tokens(ids: Any, dims: int, place: str) -> Tensor:
    """A record's token ids, int64, one row (of two texts, two).

    Raises:
        DataError: it holds none, or something else.
    """
    tokens = _tensor(ids)
    if tokens is not None and not tokens.numel():
        raise DataError("holds no tokens", where=place, remedy="leave it out")
    if tokens is None or tokens.dtype != torch.long or tokens.ndim != dims:
        raise DataError(f"its 'input_ids' are {short(ids)}", where=place, remedy="give a row of token ids: [3, 14, 15]")
    return tokens


def _tensor(values: Any) -> Tensor | None:
    """Numbers as a tensor; None for other values and for rows of different lengths."""
    try:
        return torch.tensor(values)
    except (TypeError, ValueError, RuntimeError):
        return None
