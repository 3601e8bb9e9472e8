"""Merges of the models that `models.py` makes: losses on held-out text, seconds, memory. Goes on where it was stopped.

    python benchmarks/real/measure.py real merges            fine-tunes of all weights, each method's defaults
    python benchmarks/real/measure.py real loras             the same tasks as LoRAs, merged into one LoRA
    python benchmarks/real/measure.py real carry             to the second base, with controls
    python benchmarks/real/measure.py real command           `rotation-merge merge`, as a user calls it

Losses are nats a token on 8 pieces of 256 tokens of each text; `own` is text that the base wrote itself. Methods see
other documents (`samples`) than the ones they are judged on. Products are in bfloat16;
`lambda` is searched on 4 pieces of each text's samples. Seconds are processor time, GB the largest resident memory of
the commands, each a process of its own. All runs on a GPU where there is one; then products are in float32.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
import yaml
from models import DEVICE, in_halves, loss, sequences, split
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from journal import Journal
from merging import BIN, process, recipe
from random_changes import DRAWS, random_change
from record import Table

from rotation_merge.averaging.wudi import BESIDE_RIDGE, WudiBeside

PIECES, LENGTH = 8, 256
SEEDS = (0, 1)
"""Of the fine-tunes."""
SCALES = (0.4, 0.7, 1.0, 1.3)
ON_DEVICE = ("--device", DEVICE)
NOT_ALIGNED = {"attention": "none", "ffn": "none", "scaling": False}
OWN_METHODS = ("wudi", "tsv", "iso", "regmean", "refit")
"""Which are delegates of our method."""
REFIT = {"method": "refit", "samples": 32, "weight": 1.0}
MERGES: dict[str, dict[str, Any]] = {
    "linear": {"method": "linear", "weight": 1.0},
    "slerp": {"method": "slerp", "t": 0.5},
    "task_arithmetic": {"method": "task_arithmetic", "weight": 1.0, "searched": True},
    "ties, density 0.5": {"method": "ties", "weight": 1.0, "density": 0.5, "searched": True},
    "dare_ties, density 0.5": {"method": "dare_ties", "weight": 1.0, "density": 0.5},
    "wudi": {"method": "wudi", "searched": True},
    "wudi, sides: both": {"method": "wudi", "sides": "both", "searched": True},
    "tsv": {"method": "tsv"},
    "iso": {"method": "iso"},
    "regmean, own text": {"method": "regmean", "measured": "self", "weight": 1.0},
    "refit, own text": {**REFIT, "data": "self"},
    "refit, 32 texts": {**REFIT, "data": "file"},
    "refit from wudi, 32 texts": {**REFIT, "data": "file", "start": "wudi"},
    "wudi, polished, 64 texts": {"method": "wudi", "polished": 64},
}
"""By title: the merge method and its settings; `searched`: also at the best of SCALES; `polished`: then polished on so
many texts of each task."""
KEPT = "rows of several runs: what an earlier one measured is kept"
NAMES = ("de", "fr", "c", "own")
OWN = "each fine-tune on its own text"
SHORT = (
    "base",
    "tuned on de alone",
    OWN,
    "linear",
    "task_arithmetic, best lambda",
    "ties, density 0.5",
    "wudi",
    "refit, 32 texts",
)
"""Rows that the README shows."""
NOT_OF_RECIPE = ("weight", "density", "data", "measured", "searched", "method", "polished")
FINE_TUNES = {
    "two": (("de-0", "fr-0"), ("de-1", "fr-1")),
    "three": (("de-0", "fr-0", "c-0"), ("de-1", "fr-1", "c-1")),
    "long": (("de-long", "fr-0"),),
}
"""Fine-tunes that are merged, for each seed; `long`: one is trained three times as long as the other."""


class Bench:
    """A folder of models, the texts they are judged on, and the figures that are measured already."""

    def __init__(self, root: Path, only: list[str]) -> None:
        self.root, self.only = root.resolve(), only
        self.tokenizer = AutoTokenizer.from_pretrained(root / "base")
        self.journal = Journal(self.root / "measured.json")
        (self.root / "texts").mkdir(exist_ok=True)

    def pieces(self, name: str, part: str = "held-out", count: int = PIECES) -> list[Tensor]:
        """Token ids of one text: `own` is what the base writes."""
        if name == "own":
            file = self.root / "texts" / "own.pt"
            if not file.exists():
                torch.save(self_written(self.root / "base"), file)
            return list(torch.load(file))
        texts = split(name)[{"samples": 1, "held-out": 2}[part]]
        pieces = sequences(texts, self.tokenizer, LENGTH)
        random.Random(1).shuffle(pieces)
        return pieces[:count]

    def samples(self, name: str) -> str:
        """A text file of the documents that methods may see."""
        file = self.root / "texts" / f"{name}.txt"
        if not file.exists():
            file.write_text("\n\n".join(text[:4000] for text in split(name)[1]))
        return str(file)

    def judge(self, model: PreTrainedModel, names: Iterable[str], halves: bool = True) -> dict[str, float]:
        return {name: loss(model, self.pieces(name), halves) for name in names}

    def judged(self, name: str) -> dict[str, Any]:
        """The losses of one of the models."""
        return self.once(name, lambda: self.judge(read(self.root / name), NAMES))

    def due(self, key: str, title: str) -> bool:
        """Whether a row is asked for, or measured already."""
        return self.known(key) or not self.only or title in self.only

    def once(self, key: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What `make` measured, now or in an earlier run."""
        known = self.known(key)
        figures: dict[str, Any] = self.journal.kept(key, make)
        if not known:
            print(key, figures, flush=True)
        return figures

    def known(self, key: str) -> bool:
        return key in self.journal.found

    def made(self, name: str) -> bool:
        """Whether there is such a model, or an earlier run has judged it."""
        return (self.root / name).exists() or self.known(name)


@torch.no_grad()
def self_written(folder: Path) -> Tensor:
    """Pieces that a model writes from nothing, at temperature 1."""
    model, tokenizer = read(folder), AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    start = torch.full((PIECES, 1), tokenizer.bos_token_id, device=model.device)
    stop = {"eos_token_id": None, "pad_token_id": tokenizer.eos_token_id}
    return model.generate(start, do_sample=True, top_k=0, max_new_tokens=LENGTH - 1, **stop).cpu()


def read(folder: Path | str) -> PreTrainedModel:
    if (Path(folder) / "adapter_config.json").exists():
        from peft import AutoPeftModelForCausalLM

        return AutoPeftModelForCausalLM.from_pretrained(folder, dtype=torch.float32).merge_and_unload().to(DEVICE)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().to(DEVICE)


def run(*words: object, may_fail: bool = False) -> dict[str, Any]:
    """One command as a process of its own: seconds of the processor and on the clock, largest resident memory in GB,
    with mapped files and without, its output, its exit code."""
    cost = process(words, may_fail=may_fail)
    memory = {"GB": round(cost.peak / 2**30, 2), "GB allocated": round(cost.allocated / 2**30, 2)}
    seconds = {"seconds": round(cost.processor, 1), "clock": round(cost.wall, 1)}
    return {**seconds, **memory, "output": cost.output, "code": cost.code}


def merged(
    bench: Bench, models: list[Path], tasks: Iterable[str], settings: dict[str, Any], out: Path
) -> dict[str, float]:
    """The commands that merge by one method: their seconds and largest memory; the merge lies in `out`."""
    of_recipe = {key: value for key, value in settings.items() if key not in NOT_OF_RECIPE}
    method, data, measured = settings["method"], settings.get("data"), settings.get("measured")
    steps, entries = [], dict[Path | str, dict[str, Any]]()
    for model, task in zip(models, tasks, strict=True):
        parameters: dict[str, Any] = {key: settings[key] for key in ("weight", "density") if key in settings}
        if data:
            parameters["data"] = data if data == "self" else bench.samples(task)
        if measured:
            file = bench.root / "texts" / f"{model.name}.safetensors"
            kinds = ("--kinds", "gram", "--samples", 32, "--out", file, "--force")
            steps.append(run(BIN / "rotation-merge", "measure", model, "--data", measured, *kinds, *ON_DEVICE))
            parameters["statistics"] = str(file)
        entries[model] = parameters
    if method in ("regmean", "refit"):  # averages: the base is the anchor, with no share of its own
        entries = {bench.root / "base": {**entries[models[0]], "weight": 0.0}, **entries}
    merge = recipe(bench.root / "base", entries, {"delegate": method, **NOT_ALIGNED, **of_recipe})
    if method not in OWN_METHODS:
        merge |= {"merge_method": method, "parameters": of_recipe}
    if method == "linear":
        del merge["base_model"]
    if method == "slerp":
        merge["base_model"] = str(models[0])
    steps.append(by_recipe(merge, out))
    if texts := settings.get("polished"):
        unpolished = out.with_name("unpolished")
        shutil.rmtree(unpolished, ignore_errors=True)
        out.rename(unpolished)
        data = ("--data", *map(bench.samples, tasks), "--samples", texts)
        steps.append(run(BIN / "rotation-merge", "polish", unpolished, out, "--teachers", *models, *data, *ON_DEVICE))
    most = {key: max(step[key] for step in steps) for key in ("GB", "GB allocated")}
    return {"seconds": sum(step["seconds"] for step in steps), **most}


@torch.no_grad()
def best_scale(bench: Bench, out: Path, tasks: Iterable[str]) -> tuple[float, PreTrainedModel]:
    """The model on the line from the base through the merge that loses least on samples of the tasks."""
    model, start = read(out), read(bench.root / "base").state_dict()
    ends = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    pieces = {task: bench.pieces(task, "samples", 4) for task in tasks}

    def at(scale: float) -> float:
        for name, tensor in model.state_dict().items():
            tensor.copy_(torch.lerp(start[name], ends[name], scale))
        return mean(loss(model, part, halves=True) for part in pieces.values())

    best = min(SCALES, key=at)
    at(best)
    return best, model


@torch.no_grad()
def ensemble(models: list[PreTrainedModel], pieces: list[Tensor]) -> float:
    """Loss of the mean of the models' probabilities."""
    losses = []
    for ids in (piece.to(DEVICE) for piece in pieces):
        with in_halves():
            logits = [model(ids[None]).logits[0, :-1].float() for model in models]
        chances = torch.stack(logits).softmax(-1).mean(0)
        losses.append(float(-chances.gather(1, ids[1:, None]).log().mean()))
    return mean(losses)


def merges(bench: Bench) -> None:
    for size, groups in reversed(FINE_TUNES.items()):
        for seed, names in enumerate(groups):
            merges_of(bench, f"{size}-{seed}", names)
    for size, groups in FINE_TUNES.items():
        write_merges(bench, size, groups)


def task_of(model: str) -> str:
    return model.partition("-")[0]


def merges_of(bench: Bench, key: str, names: tuple[str, ...]) -> None:
    models, tasks = [bench.root / name for name in names], [task_of(name) for name in names]
    if not all(model.exists() for model in models):
        return
    for name in ("base", *names):
        bench.judged(name)

    def together() -> dict[str, Any]:
        loaded = [read(model) for model in models]
        return {name: ensemble(loaded, bench.pieces(name)) for name in NAMES}

    bench.once(f"{key} ensemble", together)
    if len(names) == 3 and (bench.root / "all-0").exists():
        bench.judged("all-0")
    out = bench.root / "merged"
    for title, settings in MERGES.items():
        if not bench.due(f"{key} {title}", title) or (title == "slerp" and len(names) != 2):
            continue
        searched = settings.get("searched") and f"{key} {title}, best lambda"
        missing = [name for name in (f"{key} {title}", searched) if name and not bench.known(name)]
        if not missing:
            continue
        paid = merged(bench, models, tasks, settings, out)
        figures = {**bench.judge(read(out), NAMES), **paid}
        bench.once(f"{key} {title}", partial(dict, figures))
        if searched:
            scale, model = best_scale(bench, out, tasks)
            bench.once(searched, partial(dict, {**bench.judge(model, NAMES), **paid, "lambda": scale}))


def write_merges(bench: Bench, size: str, groups: tuple[tuple[str, ...], ...]) -> None:
    """The table of one number of tasks: means over the seeds, and half their range."""
    table = Table(f"real-merges-{size}", KEPT, keep=["merge"])
    tasks, seeds = [task_of(name) for name in groups[0]], range(len(groups))
    keys = {"base": ["base"]}
    for place, task in enumerate(tasks):
        keys[f"tuned on {task} alone"] = [names[place] for names in groups]
    keys[OWN] = []
    keys["ensemble of the fine-tunes"] = [f"{size}-{seed} ensemble" for seed in seeds]
    if size == "three":
        keys["one model trained on all texts"] = ["all-0"]
    for title in MERGES:
        for variant in (title, f"{title}, best lambda"):
            keys[variant] = [f"{size}-{seed} {variant}" for seed in seeds]
    rows = {title: [bench.journal.found[key] for key in each if bench.known(key)] for title, each in keys.items()}
    rows[OWN] = [
        {task: bench.journal.found[name][task] for task, name in zip(tasks, names, strict=True)}
        for names in groups
        if all(bench.known(name) for name in names)
    ]
    for title, figures in rows.items():
        if not figures or (bench.only and title.removesuffix(", best lambda") not in bench.only):
            continue
        scales = ", ".join(f"{row['lambda']:g}" for row in figures if "lambda" in row)
        readme = "yes" if title in SHORT else ""
        table.add({"merge": title, **losses(figures, tasks), "lambda": scales, **costs(figures), "README": readme})


def losses(figures: Sequence[dict[str, Any]], tasks: Sequence[str]) -> dict[str, str]:
    """Losses of a row on each text, their mean, and that on the base's own text, over seeds."""
    return {
        **{task: spread([row[task] for row in figures]) for task in tasks},
        "mean": spread([mean(row[task] for task in tasks) for row in figures]),
        "base's own text": spread([row["own"] for row in figures if "own" in row]),
    }


def costs(figures: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Seconds and memory of a row, from the least to the largest, and the number of seeds."""
    measured = [row for row in figures if "seconds" in row]
    return {
        "seconds": reach([row["seconds"] for row in measured], 0),
        "GB": reach([row["GB"] for row in measured], 1),
        "without mapped files": reach([row["GB allocated"] for row in measured if "GB allocated" in row], 1),
        "seeds": len(figures),
    }


def spread(values: Sequence[float], unit: str = "") -> str:
    """The mean, and half the range over seeds."""
    if not values:
        return ""
    form = ".1%" if unit == "%" else ".3f"
    half = (max(values) - min(values)) / 2
    return f"{mean(values):{form}}" + (f" ± {half:{form}}" if half >= 5e-4 else "")


def reach(values: Sequence[float], digits: int) -> str:
    """The least and the largest."""
    return " to ".join(dict.fromkeys(f"{value:.{digits}f}" for value in (min(values), max(values)))) if values else ""


LORAS: dict[str, tuple[object, ...]] = {
    "linear": ("--method", "linear"),
    "task_arithmetic, lambda 0.7": ("--method", "task_arithmetic", "-p", "lambda=0.7"),
    "ties, density 0.5": ("--method", "ties", "-p", "density=0.5"),
    "wudi": ("--method", "wudi"),
    "tsv": ("--method", "tsv"),
}


def loras(bench: Bench) -> None:
    """Two adapters of rank 8 into one of rank 12, and what a merge of full models gives in the same way."""
    tasks, base, out = ("de", "c"), bench.root / "base", bench.root / "merged-lora"
    table = Table("real-loras", KEPT, keep=["merge"])

    def merged_adapter(adapters: list[Path], *options: object) -> dict[str, Any]:
        step = run(BIN / "rotation-merge", "lora", *adapters, out, "--rank", 12, *options, "--force")
        return {**bench.judge(read(out), NAMES), **step}

    def merged_models(adapters: list[Path], delegate: str) -> dict[str, Any]:
        models = {f"{base}+{adapter}": dict[str, Any]() for adapter in adapters}
        step = by_recipe(recipe(base, models, {"delegate": delegate, **NOT_ALIGNED}), bench.root / "merged-loras")
        return {**bench.judge(read(bench.root / "merged-loras"), NAMES), **step}

    rows: dict[str, list[dict[str, Any]]] = {"base": [bench.judged("base")]}
    for seed in SEEDS:
        adapters = [bench.root / f"{task}-lora8-{seed}" for task in tasks]
        ways = {f"{title}, rank 12": partial(merged_adapter, adapters, *options) for title, options in LORAS.items()}
        ways |= {f"{delegate}, full models": partial(merged_models, adapters, delegate) for delegate in ("wudi", "tsv")}
        for task, adapter in zip(tasks, adapters, strict=True):
            rows.setdefault(f"{task} alone", []).append(bench.judged(adapter.name))
        for title, make in ways.items():
            if bench.due(f"lora-{seed} {title}", title):
                rows.setdefault(title, []).append(bench.once(f"lora-{seed} {title}", make))
    for title, figures in rows.items():
        table.add({"merge": title, **losses(figures, tasks), **costs(figures)})


def by_recipe(merge: dict[str, Any], out: Path) -> dict[str, Any]:
    """`mergekit-yaml` on a recipe."""
    file = out.with_suffix(".yml")
    file.write_text(yaml.safe_dump(merge))
    shutil.rmtree(out, ignore_errors=True)
    return run(BIN / "mergekit-yaml", file, out, "--quiet", "--random-seed", 0, *ON_DEVICE)


WAYS: dict[str, tuple[object, ...]] = {
    "weights": ("--carry", "weights", "--scale", "auto"),
    "refit": ("--carry", "refit"),
    "distil, 10 steps": ("--carry", "distil", "--steps", 10),
}


def carry(bench: Bench) -> None:
    """Fine-tunes of the base, and LoRAs, carried to the second base: recovered lift, net of controls."""
    table = Table("real-carry", KEPT, keep=["fine-tune", "carried by"])
    for task in NAMES[:-1]:
        for kind, title in (("", "all weights"), ("lora8-", "LoRA")):
            rows: dict[str, list[dict[str, Any]]] = {}
            for seed in SEEDS:
                name = f"{task}-{kind}{seed}"
                if bench.made(name) and bench.due(f"carry {name} plain addition", name):
                    for way, row in carried(bench, name, seed):
                        rows.setdefault(way, []).append(row)
            for way, figures in rows.items():
                table.add({"fine-tune": f"{task}, {title}", "carried by": way, **of_lift(figures)})


def of_lift(figures: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The cells of a row over seeds; those of the controls are of the first seed that has them."""
    controls = next((row for row in figures if row.get("random")), None)
    chance = controls["random"] if controls else {}
    return {
        "loss": spread([row["loss"] for row in figures]),
        "base's own text": spread([row["own"] for row in figures]),
        **{title: spread([row[title] for row in figures if title in row], "%") for title in SHARES},
        "random changes": f"{chance['mean']:.1%} ± {chance['standard error']:.1%}" if chance else "",
        "net of controls": f"{controls['net']:.1%}" if controls else "",
        "seconds": reach([row["seconds"] for row in figures if "seconds" in row], 0),
        "seeds": len(figures),
    }


SHARES = ("recovered lift", "of the way to the fine-tune", "of a fine-tune there")


def carried(bench: Bench, name: str, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of one fine-tune, with their losses as shares of others."""
    task, base = task_of(name), f"new-base-{seed}"
    new = bench.judged(base)
    tuned = bench.judged(name)[task]
    gain = bench.judged("base")[task] - tuned
    there = f"{task}-new-{seed}" if bench.made(f"{task}-new-{seed}") and "lora" not in name else None

    def shares(figures: dict[str, Any]) -> dict[str, Any]:
        gained = new[task] - figures[task]
        parts = dict(zip(SHARES, (gained / gain, gained / (new[task] - tuned)), strict=False))
        if there:
            parts[SHARES[2]] = gained / (new[task] - bench.judged(there)[task])
        return {**figures, "loss": figures[task], **parts}

    yield "on its own base", shares(bench.judged(name))
    yield "not at all: the new base", shares(new)
    if there is not None:
        yield "not at all: the new base, fine-tuned as long", shares(bench.judged(there))
    for way in ("plain addition", "wudi, scale 1"):
        figures = bench.once(f"carry {name} {way}", partial(added, bench, name, base, way))
        chance: dict[str, Any] = {}
        if bench.known(f"controls {name} {way}") or "controls" in bench.only:
            chance = bench.once(f"controls {name} {way}", partial(controls_of, bench, name, base, way))
        yield way, {**shares(figures), **chance}
    for way, options in WAYS.items():
        if bench.due(f"carry {name} {way}", way):
            figures = bench.once(f"carry {name} {way}", partial(by_command, bench, name, seed, options))
            taken = figures.get("taken")
            title = way if taken in (None, way.partition(",")[0]) else f"{way}; the command took {taken}"
            yield title, shares(figures)


def by_command(bench: Bench, name: str, seed: int, options: Iterable[object]) -> dict[str, Any]:
    """`rotation-merge carry`, the losses of what it wrote, and controls for the first seed."""
    task, base, out = task_of(name), f"new-base-{seed}", bench.root / "carried"
    shutil.rmtree(out, ignore_errors=True)
    bases = ("--from", bench.root / "base", "--to", bench.root / base)
    data = ("--data", bench.samples(task), "--samples", 32, "--force")
    step = run(BIN / "rotation-merge", "carry", bench.root / name, out, *bases, *data, *options, *ON_DEVICE)
    lift = json.loads((out / "rotation_merge.json").read_text()).get("lift") or {}
    written = on_base(bench.root / base, out)
    figures = {**bench.judge(written, (task, "own")), **step, "taken": lift.get("method")}
    if seed != SEEDS[0] or figures["taken"] == "none":
        return figures
    new = dict(read(bench.root / base).named_parameters())
    changes = {key: tensor.detach() - new[key].detach() for key, tensor in written.named_parameters()}
    return {**figures, **controls(bench, name, base, changes, figures[task])}


def added(bench: Bench, tuned: str, base: str, way: str) -> dict[str, Any]:
    """Losses with the fine-tune's change on the new base, as it stands, or merged with the new base's own change."""
    return bench.judge(changed(read(bench.root / base), changes_of(bench, tuned, base, way)), (task_of(tuned), "own"))


@torch.no_grad()
def changes_of(bench: Bench, tuned: str, base: str, way: str) -> dict[str, Tensor]:
    """The fine-tune's change, or what `carry` makes of it where it merges it with the new base's own change."""
    old, fine = read(bench.root / "base").state_dict(), read(bench.root / tuned).state_dict()
    new = dict(read(bench.root / base).named_parameters())  # a tied head once
    changes = {name: fine[name] - old[name] for name in new}
    if way.startswith("wudi"):
        for name in (name for name in new if name.endswith(("proj.weight", "embed_tokens.weight"))):  # a tied head
            of_base, values = (new[name] - old[name]).double(), {"ridge": BESIDE_RIDGE, "sides": "one"}
            changes[name] = WudiBeside().change([of_base, changes[name].double()], [1.0, 1.0], values) - of_base
    return changes


@torch.no_grad()
def changed(model: PreTrainedModel, changes: dict[str, Tensor]) -> PreTrainedModel:
    """The model with changes of its parameters added."""
    for name, tensor in model.named_parameters():
        tensor.copy_(tensor + changes[name])
    return model


def controls_of(bench: Bench, tuned: str, base: str, way: str) -> dict[str, Any]:
    """Controls of a change that `added` has measured."""
    reached = bench.journal.found[f"carry {tuned} {way}"][task_of(tuned)]
    return controls(bench, tuned, base, changes_of(bench, tuned, base, way), reached)


def controls(bench: Bench, tuned: str, base: str, changes: dict[str, Tensor], reached: float) -> dict[str, Any]:
    """Recovered lift of random changes with the same singular values, and the lift net of these or the negated change.

    Args:
        reached: the loss with the changes themselves.
    """
    task, draw = task_of(tuned), torch.Generator().manual_seed(0)
    start = bench.judged(base)[task]
    gain = bench.judged("base")[task] - bench.judged(tuned)[task]

    def lift(control: Callable[[Tensor], Tensor]) -> float:
        model = changed(read(bench.root / base), {name: control(change) for name, change in changes.items()})
        return float(start - bench.judge(model, (task,))[task]) / gain

    drawn = [lift(partial(random_change, draw=draw)) for _ in range(DRAWS)]
    chance = {"mean": mean(drawn), "standard error": stdev(drawn) / DRAWS**0.5}
    return {"random": chance, "net": (start - reached) / gain - max(chance["mean"], lift(torch.neg))}


def on_base(base: Path, out: Path) -> PreTrainedModel:
    if (out / "adapter_config.json").exists():
        from peft import PeftModel

        return PeftModel.from_pretrained(read(base), out).merge_and_unload().to(DEVICE)
    return read(out)


COMMANDS = {
    "de and fr, without data": (("de", "fr"), False),
    "de and fr, text of each": (("de", "fr"), True),
    "de, fr and c, text of each": (("de", "fr", "c"), True),
}


def command(bench: Bench) -> None:
    """The best merge, as a user asks for it; judged on text that nobody used."""
    table = Table("real-command", KEPT, keep=["pair"])
    for title, (tasks, with_data) in COMMANDS.items():
        figures = []
        for seed in SEEDS:
            key = f"command-{seed} {title}"
            if bench.due(key, f"{title}, seed {seed}"):
                figures.append(bench.once(key, partial(best_merge, bench, tasks, seed, with_data)))
        if not figures:
            continue
        judged = [row for row in figures if "own" in row]
        table.add(
            {
                "pair": title,
                "tasks, unseen text": spread([mean(row[task] for task in tasks) for row in judged]),
                "base's own text": spread([row["own"] for row in judged]),
                "minutes": reach([row["clock"] / 60 for row in figures], 1),
                "processor minutes": reach([row["seconds"] / 60 for row in figures], 1),
                "GB": reach([row["GB"] for row in figures], 1),
                "without mapped files": reach([row["GB allocated"] for row in figures if "GB allocated" in row], 1),
                "seeds": len(figures),
            }
        )


def best_merge(bench: Bench, tasks: Sequence[str], seed: int, with_data: bool) -> dict[str, Any]:
    models, out = [bench.root / f"{task}-{seed}" for task in tasks], bench.root / "best"
    shutil.rmtree(out, ignore_errors=True)
    data = [word for task in tasks for word in ("--data", bench.samples(task))] if with_data else []
    options = ("--base", bench.root / "base", "--budget", "15m", *data, *ON_DEVICE)
    step = run(BIN / "rotation-merge", "merge", *models, out, *options, may_fail=True)
    return {**(bench.judge(read(out), (*tasks, "own")) if out.exists() else {}), **step}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="folder of models.py")
    parser.add_argument("what", choices=PARTS)
    words = "titles of the rows to measure; the others show what an earlier run measured"
    parser.add_argument("--only", nargs="*", default=[], help=words)
    options = parser.parse_args()
    PARTS[options.what](Bench(options.root, options.only))


PARTS = {part.__name__: part for part in (merges, loras, carry, command)}

if __name__ == "__main__":
    main()
