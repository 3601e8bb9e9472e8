"""Data for measuring models: text, JSON lines, arrays, image folders, and what the demo ships."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rotation_merge.cli.dataset import is_dataset, read_dataset
from rotation_merge.cli.functions import Batch, local_path
from rotation_merge.errors import RotationMergeError

KINDS = (
    "text (.txt, .md, .py ...), .jsonl or .json, .npz, .safetensors, a folder of images, a directory written by "
    "datasets' save_to_disk, or demo:NAME"
)
IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tiff")
ARRAYS = (".npz", ".safetensors")


class DataError(RotationMergeError):
    """The data cannot be read, or are of no use to the model."""


@dataclass(frozen=True)
class Data:
    """Batches of model inputs, with `labels` where there are any.

    Attributes:
        batches: tensors by the names that the model's forward takes.
        task: next token, masked token, class, or none (no labels).
        examples: how many.
    """

    batches: list[Batch]
    task: str
    examples: int


def read_batches(
    source: str,
    model_path: str,
    model: Any,
    limit: int | None = None,
    batch_size: int = 32,
    length: int = 128,
    seed: int = 0,
) -> Data:
    """Read data for a model.

    Args:
        source: a path, or `demo:digits`, `demo:python`, `demo:english`, `demo:c`.
        model_path: where tokenizer and preprocessor lie.
        model: the loaded model; says what inputs and labels it takes.
        limit: at most so many examples.
        length: tokens in a window of running text.
        seed: of the masks for masked language models.

    Raises:
        DataError: names the file and what it should hold.
    """
    examples = _read(source, model_path, model, length)
    count = len(next(iter(examples.values()))) if isinstance(examples, dict) else len(examples)
    if count == 0:
        raise DataError("holds no examples", where=source, remedy=f"give {KINDS}")
    rows = range(min(count, limit) if limit else count)
    batches = [_batch(examples, rows[i : i + batch_size]) for i in range(0, len(rows), batch_size)]
    task = task_of(model, batches[0])
    if task == "masked token":
        generator = torch.Generator().manual_seed(seed)
        batches = [_masked(batch, model_path, generator) for batch in batches]
    elif task == "next token" and "labels" not in batches[0]:
        batches = [{**b, "labels": _labels(b)} for b in batches]
    return Data(batches, task, len(rows))


def task_of(model: Any, batch: Batch) -> str:
    """What a loss can be measured of."""
    name = type(model).__name__
    if "input_ids" in batch and name.endswith(("ForCausalLM", "LMHeadModel")):
        return "next token"
    if "input_ids" in batch and name.endswith("ForMaskedLM") and "labels" not in batch:
        return "masked token"
    return "class" if "labels" in batch else "none"


def _read(source: str, model_path: str, model: Any, length: int) -> Any:
    if source.startswith("demo:"):
        return _demo(source, length)
    path = Path(source)
    if not path.exists():
        raise DataError("no such file", where=source, remedy=f"give {KINDS}")
    try:
        if path.is_dir() and is_dataset(path):
            return _dataset(path, model_path, model, length)
        if path.is_dir():
            return _images(path, model_path, model)
        if path.suffix in ARRAYS:
            return _arrays(path)
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise DataError(f"cannot be read ({error})", where=source, remedy=f"give {KINDS}") from error
    if path.suffix in (".jsonl", ".json"):
        return _records(text, source, model_path, length)
    return _windows(tokenizer_of(model_path)(text, return_tensors="pt", verbose=False)["input_ids"][0], length, source)


def _demo(source: str, length: int) -> dict[str, Tensor]:
    from rotation_merge.cli.demo import data

    name = source.removeprefix("demo:")
    if name == "digits":
        _, _, pixels, labels = data.digits()
        return {"pixel_values": pixels, "labels": labels}
    if name not in data.NAMES:
        known = ", ".join(f"demo:{known}" for known in ("digits", *data.NAMES))
        raise DataError(f"the demo has no data '{name}'", remedy=f"known: {known}")
    return {"input_ids": data.windows(name, length)}


def tokenizer_of(model_path: str) -> Any:
    """The tokenizer that lies beside a model.

    Raises:
        DataError: there is none.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(local_path(model_path), local_files_only=True)
    except Exception as error:
        detail = " ".join(str(error).split())[:120]
        raise DataError(f"no tokenizer can be loaded ({detail})", where=model_path, remedy="add its files") from error


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
            found = load_file(path)
        except SafetensorError as error:
            raise ValueError(str(error)) from error
    else:
        import numpy as np

        with np.load(path, allow_pickle=False) as file:
            found = {name: torch.as_tensor(file[name]) for name in file.files}
    if len({len(array) for array in found.values()}) != 1:
        lengths = ", ".join(f"{name} {len(array)}" for name, array in found.items())
        raise ValueError(f"arrays of different lengths: {lengths or 'none'}")
    return {name: array.float() if array.is_floating_point() else array.long() for name, array in found.items()}


def _records(text: str, source: str, model_path: str, length: int) -> list[Batch]:
    try:
        lines = [line for line in text.splitlines() if line.strip()]
        records = json.loads(text) if text.lstrip().startswith("[") else [json.loads(line) for line in lines]
    except json.JSONDecodeError as error:
        raise DataError(f"is no JSON ({error})", where=source, remedy="one object a line") from error
    return _encoded(records, source, model_path, length)


def _encoded(records: Sequence[Any], source: str, model_path: str, length: int) -> list[Batch]:
    tokenizer = None
    result = []
    for number, record in enumerate(records, 1):
        if not isinstance(record, dict) or not ({"text", "input_ids"} & set(record)):
            remedy = 'write {"text": ..., "label": ...} or {"input_ids": [...], "labels": ...}'
            raise DataError("has neither 'text' nor 'input_ids'", where=f"{source}, record {number}", remedy=remedy)
        if "text" in record:
            tokenizer = tokenizer or tokenizer_of(model_path)
            ids = tokenizer(str(record["text"]), truncation=True, max_length=length)["input_ids"]
        else:
            ids = record["input_ids"]
        label = record.get("labels", record.get("label"))
        example = {"input_ids": torch.tensor(ids, dtype=torch.long)}
        if label is not None:
            example["labels"] = torch.tensor(label, dtype=torch.long)
        result.append(example)
    return result


def _dataset(path: Path, model_path: str, model: Any, length: int) -> Any:
    prepare = _preparer(Path(local_path(model_path)) / "preprocessor_config.json", model.config)
    found = read_dataset(path, prepare, lambda: _extractor(model_path))
    return _encoded(found, str(path), model_path, length) if isinstance(found, list) else found


def _extractor(model_path: str) -> Any:
    from transformers import AutoFeatureExtractor

    try:
        return AutoFeatureExtractor.from_pretrained(local_path(model_path), local_files_only=True)
    except Exception as error:
        detail = " ".join(str(error).split())[:120]
        raise DataError(f"no feature extractor ({detail})", where=model_path, remedy="add its files") from error


def _images(folder: Path, model_path: str, model: Any) -> dict[str, Tensor]:
    files = sorted(f for f in folder.rglob("*") if f.suffix.lower() in IMAGES)
    if not files:
        raise ValueError("holds no images")
    classes = sorted({f.parent.name for f in files if f.parent != folder})
    prepare = _preparer(Path(local_path(model_path)) / "preprocessor_config.json", model.config)
    pixels = torch.stack([prepare(f) for f in files])
    if not classes:
        return {"pixel_values": pixels}
    numbers = _numbers(classes, model.config)
    return {"pixel_values": pixels, "labels": torch.tensor([numbers[f.parent.name] for f in files])}


def _numbers(classes: Sequence[str], config: Any) -> dict[str, int]:
    """Class of each subfolder: by the model's label names, else by number, else in alphabetical order."""
    known = {str(k): int(v) for k, v in (getattr(config, "label2id", None) or {}).items()}
    if all(name in known for name in classes):
        return {name: known[name] for name in classes}
    if all(name.isdigit() for name in classes):
        return {name: int(name) for name in classes}
    return {name: i for i, name in enumerate(classes)}


def _preparer(path: Path, config: Any) -> Any:
    """A function from an image file to pixels (channels, height, width), as preprocessor_config.json says."""
    import numpy as np

    try:
        from PIL import Image
    except ImportError as error:
        raise DataError("images need Pillow", remedy="pip install pillow") from error
    says = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    vision = getattr(config, "vision_config", config)
    side = getattr(vision, "image_size", 224)
    size = tuple(side) if isinstance(side, list | tuple) else (side, side)
    channels = getattr(vision, "num_channels", 3)
    factor = says.get("rescale_factor", 1 / 255) if says.get("do_rescale", True) else 1.0
    normalise = says.get("do_normalize", True)
    mean = torch.tensor(says.get("image_mean", [0.5] * channels) if normalise else [0.0]).view(-1, 1, 1)
    deviation = torch.tensor(says.get("image_std", [0.5] * channels) if normalise else [1.0]).view(-1, 1, 1)

    def prepare(file: Any) -> Tensor:
        with Image.open(file) if isinstance(file, Path) else nullcontext(file) as image:
            converted = image.convert("L" if channels == 1 else "RGB")
            if converted.size != (size[1], size[0]):
                converted = converted.resize((size[1], size[0]), Image.Resampling.BICUBIC)
            array = np.asarray(converted, dtype=np.float32).reshape(size[0], size[1], -1).transpose(2, 0, 1)
        return (torch.as_tensor(array.copy()) * factor - mean) / deviation

    return prepare


def _batch(examples: Any, rows: Sequence[int]) -> Batch:
    if isinstance(examples, dict):
        return {name: array[rows[0] : rows[-1] + 1] for name, array in examples.items()}
    chosen = [examples[row] for row in rows]
    longest = max(len(example["input_ids"]) for example in chosen)
    batch: Batch = {
        "input_ids": torch.stack([_padded(example["input_ids"], longest, 0) for example in chosen]),
        "attention_mask": torch.stack([_padded(torch.ones_like(e["input_ids"]), longest, 0) for e in chosen]),
    }
    if all("labels" in example for example in chosen):
        labels = [example["labels"] for example in chosen]
        batch["labels"] = torch.stack([_padded(label, longest, -100) if label.ndim else label for label in labels])
    return batch


def _padded(row: Tensor, length: int, value: int) -> Tensor:
    return torch.nn.functional.pad(row, (0, length - len(row)), value=value)


def _labels(batch: Batch) -> Tensor:
    mask = batch.get("attention_mask")
    return batch["input_ids"] if mask is None else batch["input_ids"].masked_fill(mask == 0, -100)


def _masked(batch: Batch, model_path: str, generator: torch.Generator) -> Batch:
    """15% of the tokens behind the mask token; only they are labelled."""
    token = tokenizer_of(model_path).mask_token_id
    if token is None:
        raise DataError("the tokenizer has no mask token", where=model_path, remedy="give records with 'labels'")
    hidden = torch.rand(batch["input_ids"].shape, generator=generator) < 0.15
    hidden &= batch.get("attention_mask", torch.ones_like(batch["input_ids"])) == 1
    labels = batch["input_ids"].masked_fill(~hidden, -100)
    return {**batch, "input_ids": batch["input_ids"].masked_fill(hidden, token), "labels": labels}


def unlabelled(data: Data) -> Iterator[Batch]:
    """The batches without their labels."""
    for batch in data.batches:
        yield {name: tensor for name, tensor in batch.items() if name != "labels"}
