"""Examples from files: text, JSON lines, arrays, image folders, dataset directories, and the demo's data."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rotation_merge.errors import DataError, nearest, nearest_path, short
from rotation_merge.model.hub import local_file
from rotation_merge.model.sentence import reading
from rotation_merge.model.vocabulary import has_only_special_tokens
from rotation_merge.run.arrays import ExampleBatches, by_example
from rotation_merge.run.functions import Batch, local_path, read_config
from rotation_merge.run.images import preparer, read_images
from rotation_merge.run.sample_kinds import KINDS as KINDS
from rotation_merge.run.sentence import is_sentence_model
from rotation_merge.run.tables import ENDINGS, read_table

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
        if path.is_dir() and is_dataset(path):
            return _dataset(path, model_path, model, length)
        if path.is_dir():
            return read_images(path, local_path(model_path), model.config)
        if path.suffix in ARRAYS:
            return by_example(_arrays(path), model, source)
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise DataError(f"cannot be read ({error})", where=source, remedy=f"give {KINDS}") from error
    if path.suffix.lower() in ENDINGS:
        records = read_table(path)
        if type(model).__name__.endswith(("ForCausalLM", "LMHeadModel")):  # what follows a text is its label
            records = [{name: value for name, value in record.items() if name != "label"} for record in records]
        return _encoded(records, source, model_path, length, model)
    if path.suffix in (".jsonl", ".json"):
        return _records(text, source, model_path, length, model)
    if is_sentence_model(model):
        records = [{"text": line} for line in text.splitlines() if line.strip()]
        return _encoded(records, source, model_path, length, model)
    return _windows(tokenizer_of(model_path)(text, return_tensors="pt", verbose=False)["input_ids"][0], length, source)


def _demo(source: str, length: int) -> dict[str, Tensor]:
    from rotation_merge.run import demo as data

    name = source.removeprefix("demo:")
    if name == "digits":
        _, _, pixels, labels = data.digits()
        return {"pixel_values": pixels, "labels": labels}
    if name not in data.NAMES:
        known = ", ".join(f"demo:{known}" for known in ("digits", *data.NAMES))
        raise DataError(f"the demo has no data '{name}'", remedy=f"known: {known}")
    return {"input_ids": data.windows(name, length)}


def tokenizer_of(model_path: str) -> Any:
    """The tokenizer beside a model.

    Raises:
        DataError: there is none.
    """
    tokenizer = _processor("AutoTokenizer", model_path)
    if has_only_special_tokens(tokenizer):
        raise DataError("no tokenizer can be loaded (there is none)", where=model_path, remedy="add its files")
    return tokenizer


def _processor(name: str, model_path: str) -> Any:
    """The processor that one of transformers' Auto classes finds beside a model."""
    import transformers

    try:
        return getattr(transformers, name).from_pretrained(local_path(model_path), local_files_only=True)
    except Exception as error:
        kind, folder = "tokenizer" if name == "AutoTokenizer" else "feature extractor", local_path(model_path)
        if kind == "tokenizer" and not any(n.startswith(("tokenizer", "vocab")) for n in os.listdir(folder)):
            config = read_config(folder)
            if "image_size" in config and "vocab_size" not in config:
                remedy = "give a folder of images, or 'synthetic'"
                raise DataError("takes images, no text", where=model_path, remedy=remedy) from error
            raise DataError("no tokenizer is there", where=model_path, remedy="add tokenizer.json") from error
        raise DataError(
            f"no {kind} can be loaded ({short(error)})", where=model_path, remedy="add its files"
        ) from error


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


def _records(text: str, source: str, model_path: str, length: int, model: Any) -> list[Batch]:
    try:
        lines = [line for line in text.splitlines() if line.strip()]
        records = json.loads(text) if text.lstrip().startswith("[") else [json.loads(line) for line in lines]
    except json.JSONDecodeError as error:
        raise DataError(f"is not JSON ({error})", where=source, remedy="one object a line") from error
    return _encoded(records, source, model_path, length, model)


def _encoded(records: Sequence[Any], source: str, model_path: str, length: int, model: Any) -> list[Batch]:
    """Records with `text` (and `text_pair`) or `input_ids`, and a label where there is one, as one batch each.

    Two texts are read as one input, divided; by a model that gives embeddings, as two inputs (2, tokens), each with its
    default prompt before it.
    """
    tokenizer, result, embeds = None, [], is_sentence_model(model)
    prompt, most = reading(local_path(model_path)) if embeds else ("", None)
    length = min(length, most or length)
    pairs = embeds and any(isinstance(record, dict) and record.get("text_pair") is not None for record in records)
    for number, record in enumerate(records, 1):
        place = f"{source}, record {number}"
        if not isinstance(record, dict) or not ({"text", "input_ids"} & set(record)):
            remedy = 'write {"text": ..., "label": ...} or {"input_ids": [...], "labels": ...}'
            raise DataError("has neither 'text' nor 'input_ids'", where=place, remedy=remedy)
        if "text" in record:
            tokenizer = tokenizer or tokenizer_of(model_path)
            both = [str(record[name]) for name in ("text", "text_pair") if record.get(name) is not None]
            if pairs and len(both) < 2:
                raise DataError("holds one text, other records hold two", where=place, remedy="give pairs, or texts")
            inputs = [[prompt + text] for text in both] if embeds else [both]
            ids: Any = [tokenizer(*texts, truncation=True, max_length=length)["input_ids"] for texts in inputs]
            longest = max(map(len, ids))
            ids = [row + [-1] * (longest - len(row)) for row in ids] if pairs else ids[0]
        else:
            ids = record["input_ids"]
            pairs = pairs or (embeds and isinstance(ids, list) and bool(ids) and isinstance(ids[0], list))
        example = {"input_ids": _tokens(ids, 1 + pairs, place)}
        label = record.get("labels", record.get("label"))
        if label is not None:
            value = _tensor(_number(label, model.config, place) if isinstance(label, str) else label)
            if value is None:
                raise DataError(f"its label is {short(label)}", where=place, remedy="give a number, a class, or a row")
            example["labels"] = value.float() if value.is_floating_point() or embeds else value.long()
        result.append(example)
    return result


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


def _number(label: str, config: Any, place: str) -> int:
    """The class that a word names."""
    known = {str(name).lower(): int(i) for name, i in (getattr(config, "label2id", None) or {}).items()}
    if label.lower() not in known:
        raise DataError(f"the model has no class '{label}'", where=place, remedy=nearest(label.lower(), known))
    return known[label.lower()]


def _dataset(path: Path, model_path: str, model: Any, length: int) -> Any:
    examples = read_dataset(
        path,
        lambda: preparer(local_path(model_path), model.config),
        lambda: _processor("AutoFeatureExtractor", model_path),
    )
    return _encoded(examples, str(path), model_path, length, model) if isinstance(examples, list) else examples


MARKS = ("dataset_info.json", "state.json", "dataset_dict.json")
"""Files that tell such a directory from a folder of images."""

TEXT, IMAGE, AUDIO, LABEL = ("text", "sentence", "content"), ("image", "img"), ("audio",), ("labels", "label")
"""Names of columns that are looked for, in this order."""


def is_dataset(path: Path) -> bool:
    return any((path / mark).exists() for mark in MARKS)


def rows_of(path: Path) -> Any:
    """The rows of a dataset; of a dictionary of splits, its first.

    Raises:
        ValueError: it cannot be read, or `datasets` is not installed.
    """
    try:
        from datasets import load_from_disk
    except ImportError as error:
        raise ValueError("the package 'datasets' is not installed") from error
    try:
        splits = load_from_disk(str(path))
    except Exception as error:  # of many classes
        raise ValueError(str(error)) from error
    return (
        splits
        if hasattr(splits, "column_names") and isinstance(splits.column_names, list)
        else next(iter(splits.values()))
    )


def column(rows: Any, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in rows.column_names), None)


def read_dataset(path: Path, preparer: Callable[[], Callable[[Any], Tensor]], extractor: Callable[[], Any]) -> Any:
    """Examples of a dataset: records with `text`, or arrays by input name, with optional `labels`.

    Args:
        path: the directory.
        preparer: returns the function from a picture to pixels (channels, height, width); called only for images.
        extractor: gives the model's feature extractor; asked only for audio.

    Raises:
        ValueError: no column of a known name.
    """
    rows = rows_of(path)
    label = column(rows, LABEL)
    text, image, audio = (column(rows, names) for names in (TEXT, IMAGE, AUDIO))
    if text is not None:
        return [{"text": row[text], **({"label": row[label]} if label else {})} for row in rows]
    if image is not None:
        prepare = preparer()
        examples = {"pixel_values": torch.stack([prepare(row[image]) for row in rows])}
    elif audio is not None:
        examples = _audio([row[audio] for row in rows], extractor())
    else:
        known_columns = ", ".join((*TEXT, *IMAGE, *AUDIO))
        raise ValueError(f"columns are {', '.join(rows.column_names)}; one of {known_columns} is needed")
    if label is not None:
        examples["labels"] = torch.tensor([row[label] for row in rows])
    return examples


def _audio(clips: list[Any], extractor: Any) -> dict[str, Tensor]:
    rate = getattr(extractor, "sampling_rate", 16000)
    wrong = next((clip["sampling_rate"] for clip in clips if clip["sampling_rate"] != rate), None)
    if wrong is not None:
        raise ValueError(f"audio is sampled at {wrong} Hz, the model takes {rate} Hz")
    inputs = extractor([clip["array"] for clip in clips], sampling_rate=rate, return_tensors="pt", padding=True)
    return {name: tensor for name, tensor in inputs.items() if name != "attention_mask"}
