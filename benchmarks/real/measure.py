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
import itertools
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
import yaml
from models import DEVICE, LENGTH, PIECES, few, in_halves, loss, split
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from carry_bases import DRAWS, random_change
from journal import Journal
from merging import BIN, STILL, process, recipe
from record import Table

from rotation_merge.averaging.sliced import SlicedMatrix
from rotation_merge.averaging.wudi import BESIDE_RIDGE, WudiBeside
from rotation_merge.model.open import open_model
from rotation_merge.run.sources import self_written

SEEDS = (0, 1)
"""Of the fine-tunes."""
SCALES = (0.4, 0.7, 1.0, 1.3)
ON_DEVICE = ("--device", DEVICE)
OWN_METHODS = ("wudi", "tsv", "iso", "regmean", "refit")
"""Which are delegates of our method."""
REFIT = {"method": "refit", "samples": 32, "weight": 1.0}
MERGES: dict[str, dict[str, Any]] = {
    "linear": {"method": "linear", "weight": 1.0},
    "task_arithmetic": {"method": "task_arithmetic", "weight": 1.0, "searched": True},
    "ties, density 0.5": {"method": "ties", "weight": 1.0, "density": 0.5, "searched": True},
    "task_arithmetic, calibrated": {"method": "task_arithmetic", "weight": 1.0, "calibrate": "svc"},
    "ties, density 0.5, calibrated": {"method": "ties", "weight": 1.0, "density": 0.5, "calibrate": "svc"},
    "dare_ties, density 0.5": {"method": "dare_ties", "weight": 1.0, "density": 0.5},
    "wudi": {"method": "wudi", "searched": True},
    "tsv": {"method": "tsv"},
    "tsv, calibrated": {"method": "tsv", "calibrate": "svc", "searched": True},
    "iso": {"method": "iso"},
    "regmean, own text": {"method": "regmean", "measured": "self", "weight": 1.0},
    "refit, own text": {**REFIT, "data": "self"},
    "refit, 32 texts": {**REFIT, "data": "file"},
    "refit from tsv, calibrated, 32 texts": {**REFIT, "data": "file", "start": "calibrated_tsv", "ridge": 30.0},
    "tsv, calibrated, polished, 64 texts": {"method": "tsv", "calibrate": "svc", "polished": "file"},
    "tsv, calibrated, polished, own text": {"method": "tsv", "calibrate": "svc", "polished": "self"},
}
"""By title: the merge method and its settings; `searched`: also at the best of SCALES; `polished`: then, on 64 texts of
each task."""
KEPT = "rows of several runs: what an earlier one measured is kept"
NAMES = ("de", "fr", "c", "python", "own")
OWN, BEST = "each fine-tune on its own text", ", best lambda"
NOT_OF_RECIPE = ("weight", "density", "data", "measured", "searched", "method", "polished")
FINE_TUNES = {
    "two": (("de-0", "fr-0"), ("de-1", "fr-1")),
    "three": (("de-0", "fr-0", "c-0"), ("de-1", "fr-1", "c-1")),
    "four": (("de-0", "fr-0", "c-0", "python-0"), ("de-1", "fr-1", "c-1", "python-1")),
    "equal": (("de-0", "de-1"),),
}
"""Fine-tunes that are merged, for each seed."""
Rows = Iterable[tuple[str, dict[str, Any]]]
"""Figures by the title of a row, of one seed."""


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
                torch.save(self_written(self.read("base"), str(self.root / "base"), PIECES, LENGTH), file)
            return list(torch.load(file))
        return few(split(name)[{"samples": 1, "held-out": 2}[part]], self.tokenizer, count)

    def samples(self, name: str) -> str:
        """A text file of the documents that methods may see."""
        file = self.root / "texts" / f"{name}.txt"
        if not file.exists():
            file.write_text("\n\n".join(text[:4000] for text in split(name)[1]))
        return str(file)

    def read(self, name: str, base: str = "base") -> PreTrainedModel:
        """A model, or an adapter on its base."""
        adapter = (self.root / name / "adapter_config.json").exists()
        reference = f"{self.root / base}+{self.root / name}" if adapter else str(self.root / name)
        return open_model(reference, any_base=True).to(torch.float32).to_module().to(DEVICE)

    def judge(self, model: PreTrainedModel, names: Iterable[str]) -> dict[str, float]:
        return {name: loss(model, self.pieces(name)) for name in names}

    def judged(self, name: str) -> dict[str, Any]:
        """The losses of one of the models."""
        return self.once(name, lambda: self.judge(self.read(name), NAMES))

    def due(self, key: str, *titles: str) -> bool:
        """Whether a row is asked for by one of its titles, or measured already."""
        return key in self.journal.found or not self.only or any(title in self.only for title in titles)

    def once(self, key: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What `make` measured, now or in an earlier run."""

        def measured() -> dict[str, Any]:
            figures = make()
            print(key, figures, flush=True)
            return figures

        return dict(self.journal.kept(key, measured))

    def made(self, name: str) -> bool:
        """Whether there is such a model, or an earlier run has judged it."""
        return (self.root / name).exists() or name in self.journal.found


def run(*words: object, may_fail: bool = False) -> dict[str, Any]:
    """One command as a process of its own: seconds, largest resident memory in GB, what it printed, its exit code."""
    cost = process(words, may_fail=may_fail)
    memory = {"GB": round(cost.peak / 2**30, 2), "GB allocated": round(cost.allocated / 2**30, 2)}
    seconds = {"seconds": round(cost.processor, 1), "clock": round(cost.wall, 1)}
    return {**seconds, **memory, "output": cost.output, "code": cost.code}


def merged(
    bench: Bench, names: Iterable[str], tasks: Sequence[str], settings: dict[str, Any], out: Path
) -> dict[str, float]:
    """The commands that merge by one method: their seconds and largest memory; the merge lies in `out`."""
    of_recipe = {key: value for key, value in settings.items() if key not in NOT_OF_RECIPE}
    method, data, measured = settings["method"], settings.get("data"), settings.get("measured")
    models = [bench.root / name for name in names]
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
    merge = recipe(bench.root / "base", entries, {"delegate": method, **STILL, **of_recipe})
    if not (method in OWN_METHODS or "calibrate" in settings):
        merge |= {"merge_method": method, "parameters": of_recipe}
    if method == "linear":
        del merge["base_model"]
    steps.append(by_recipe(merge, out))
    if source := settings.get("polished"):
        unpolished = out.with_name("unpolished")
        shutil.rmtree(unpolished, ignore_errors=True)
        out.rename(unpolished)
        data = ("--data", *(map(bench.samples, tasks) if source == "file" else [source]), "--samples", 64)
        steps.append(run(BIN / "rotation-merge", "polish", unpolished, out, "--teachers", *models, *data, *ON_DEVICE))
    most = {key: max(step[key] for step in steps) for key in ("GB", "GB allocated")}
    return {"seconds": sum(step["seconds"] for step in steps), **most}


@torch.no_grad()
def at_best_scale(bench: Bench, out: Path, tasks: Iterable[str]) -> dict[str, float]:
    """Losses of the model on the line from the base through the merge that loses least on samples of the tasks."""
    model, start = bench.read(out.name), bench.read("base").state_dict()
    ends = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    pieces = {task: bench.pieces(task, "samples", 4) for task in tasks}

    def at(scale: float) -> float:
        for name, tensor in model.state_dict().items():
            tensor.copy_(torch.lerp(start[name], ends[name], scale))
        return mean(loss(model, part) for part in pieces.values())

    best = min(SCALES, key=at)
    at(best)
    return {**bench.judge(model, NAMES), "lambda": best}


@torch.no_grad()
def together(bench: Bench, names: Iterable[str]) -> dict[str, float]:
    """Losses of the mean of the models' probabilities."""
    models, losses = [bench.read(name) for name in names], dict[str, float]()
    for text in NAMES:
        of_text = []
        for ids in (piece.to(DEVICE) for piece in bench.pieces(text)):
            with in_halves():
                logits = [model(ids[None]).logits[0, :-1].float() for model in models]
            chances = torch.stack(logits).softmax(-1).mean(0)
            of_text.append(float(-chances.gather(1, ids[1:, None]).log().mean()))
        losses[text] = mean(of_text)
    return losses


def task_of(model: str) -> str:
    return model.partition("-")[0]


def merges(bench: Bench) -> None:
    """A table for each number of tasks: means over the seeds, and half their range."""
    for size, groups in FINE_TUNES.items():
        table, tasks = Table(f"real-merges-{size}", KEPT, keep=["merge"]), [task_of(name) for name in groups[0]]
        each = [merges_of(bench, f"{size}-{seed}", names, tasks) for seed, names in enumerate(groups)]
        for title, figures in by_title(itertools.chain(*each)).items():
            if not bench.only or title.removesuffix(BEST) in bench.only:
                scales = ", ".join(f"{row['lambda']:g}" for row in figures if "lambda" in row)
                table.add(row(title, figures, tasks, **{"lambda": scales}))


def merges_of(bench: Bench, group: str, names: tuple[str, ...], tasks: Sequence[str]) -> Rows:
    """Rows of the fine-tunes of one seed, and of every merge of them."""
    if not all(map(bench.made, names)):
        return
    alone = {task: bench.judged(name) for task, name in zip(tasks, names, strict=True)}
    if group.endswith("-0"):
        yield "base", bench.judged("base")
    for task, figures in alone.items():
        yield f"tuned on {task} alone", figures
    yield OWN, {task: figures[task] for task, figures in alone.items()}
    yield "ensemble of the fine-tunes", bench.once(f"{group} ensemble", partial(together, bench, names))
    if group == "three-0" and bench.made("all-0"):
        yield "one model trained on all texts", bench.judged("all-0")
    out = bench.root / "merged"
    for title, settings in MERGES.items():
        key, product = f"{group} {title}", cache(partial(merged, bench, names, tasks, settings, out))
        if not bench.due(key, title):
            continue
        yield title, bench.once(key, lambda paid=product: {**paid(), **bench.judge(bench.read(out.name), NAMES)})
        if "searched" in settings:
            best = bench.once(key + BEST, lambda paid=product: {**paid(), **at_best_scale(bench, out, tasks)})
            yield title + BEST, best


def row(title: str, figures: Sequence[dict[str, Any]], tasks: Sequence[str], **cells: str) -> dict[str, Any]:
    """A merge: losses on each text, their mean, and that on the base's own text, over seeds, and what it took."""
    return {
        "merge": title,
        **{task: spread([row[task] for row in figures]) for task in tasks},
        "mean": spread([mean(row[task] for task in tasks) for row in figures]),
        "base's own text": spread([row["own"] for row in figures if "own" in row]),
        **cells,
        "seconds": reach([row["seconds"] for row in figures if "seconds" in row], 0),
        **memory(figures),
    }


def by_title(rows: Rows) -> dict[str, list[dict[str, Any]]]:
    """The figures of several seeds under each title."""
    figures: dict[str, list[dict[str, Any]]] = {}
    for title, of_seed in rows:
        figures.setdefault(title, []).append(of_seed)
    return figures


def memory(figures: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Memory of a row, from the least to the largest, and the number of seeds."""
    return {
        "GB": reach([row["GB"] for row in figures if "GB" in row], 1),
        "without mapped files": reach([row["GB allocated"] for row in figures if "GB allocated" in row], 1),
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


LORAS: dict[str, tuple[str, ...]] = {
    "linear": (),
    "task_arithmetic, lambda 0.7": ("-p", "lambda=0.7"),
    "ties, density 0.5": ("-p", "density=0.5"),
    "wudi": (),
    "tsv": (),
}
"""Parameters by title, which begins with the method."""


def loras(bench: Bench) -> None:
    """Two adapters of rank 8 into one of rank 12, and what a merge of full models gives in the same way."""
    tasks, base, out = ("de", "c"), bench.root / "base", bench.root / "merged-lora"
    table = Table("real-loras", KEPT, keep=["merge"])

    def merged_adapter(adapters: list[Path], title: str) -> dict[str, Any]:
        options = ("--rank", 12, "--method", title.partition(",")[0], *LORAS[title], "--force")
        step = run(BIN / "rotation-merge", "lora", *adapters, out, *options)
        return {**bench.judge(bench.read(out.name), NAMES), **step}

    def merged_models(adapters: list[Path], delegate: str) -> dict[str, Any]:
        models = {f"{base}+{adapter}": dict[str, Any]() for adapter in adapters}
        step = by_recipe(recipe(base, models, {"delegate": delegate, **STILL}), bench.root / "merged-loras")
        return {**bench.judge(bench.read("merged-loras"), NAMES), **step}

    def rows() -> Rows:
        yield "base", bench.judged("base")
        for seed in SEEDS:
            adapters = [bench.root / f"{task}-lora8-{seed}" for task in tasks]
            for task, adapter in zip(tasks, adapters, strict=True):
                yield f"{task} alone", bench.judged(adapter.name)
            ways = {f"{title}, rank 12": partial(merged_adapter, adapters, title) for title in LORAS}
            ways |= {f"{name}, full models": partial(merged_models, adapters, name) for name in ("wudi", "tsv")}
            for title, make in ways.items():
                if bench.due(f"lora-{seed} {title}", title):
                    yield title, bench.once(f"lora-{seed} {title}", make)

    for title, figures in by_title(rows()).items():
        table.add(row(title, figures, tasks))


def by_recipe(merge: dict[str, Any], out: Path) -> dict[str, Any]:
    """`mergekit-yaml` on a recipe."""
    file = out.with_suffix(".yml")
    file.write_text(yaml.safe_dump(merge))
    shutil.rmtree(out, ignore_errors=True)
    return run(BIN / "mergekit-yaml", file, out, "--quiet", "--random-seed", 0, *ON_DEVICE)


ADDED = ("plain addition", "wudi, scale 1")
WAYS: dict[str, tuple[object, ...]] = {
    "weights": ("--carry", "weights", "--scale", "auto"),
    "refit": ("--carry", "refit"),
    "distil, 10 steps": ("--carry", "distil", "--steps", 10),
}
SHARES = ("recovered lift", "of the way to the fine-tune", "of a fine-tune there")


def carry(bench: Bench) -> None:
    """Fine-tunes of the base, and LoRAs, carried to the second base: recovered lift, net of controls."""
    table = Table("real-carry", KEPT, keep=["fine-tune", "carried by"])
    for task in ("de", "fr", "c"):
        for kind, title in (("", "all weights"), ("lora8-", "LoRA")):
            names = {f"{task}-{kind}{seed}": seed for seed in SEEDS}
            each = [carried(bench, name, seed) for name, seed in names.items() if bench.made(name)]
            for way, figures in by_title(itertools.chain(*each)).items():
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


def carried(bench: Bench, name: str, seed: int) -> Rows:
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
    for way in (*ADDED, *WAYS):
        key = f"carry {name} {way}"
        if bench.due(key, name, way):
            figures = bench.once(key, partial(carried_by, bench, name, seed, way))
            taken = figures.get("taken")
            title = way if taken in (None, way.partition(",")[0]) else f"{way}; the command took {taken}"
            yield title, shares(figures)


def carried_by(bench: Bench, name: str, seed: int, way: str) -> dict[str, Any]:
    """Losses of the new base with the fine-tune's change, and controls for the first seed."""
    task, base, step = task_of(name), f"new-base-{seed}", dict[str, Any]()
    if way in ADDED:
        model = added(bench, name, base, way)
    else:
        step = by_command(bench, name, base, WAYS[way])
        model = bench.read("carried", base)
    figures = {**bench.judge(model, (task, "own")), **step}
    if seed == SEEDS[0] and step.get("taken") != "none":
        figures |= controls(bench, name, base, model, figures[task])
    return figures


def by_command(bench: Bench, name: str, base: str, options: Iterable[object]) -> dict[str, Any]:
    """`rotation-merge carry`, and the method that it took."""
    out = bench.root / "carried"
    shutil.rmtree(out, ignore_errors=True)
    bases = ("--from", bench.root / "base", "--to", bench.root / base)
    data = ("--data", bench.samples(task_of(name)), "--samples", 32, "--force")
    step = run(BIN / "rotation-merge", "carry", bench.root / name, out, *bases, *data, *options, *ON_DEVICE)
    lift = json.loads((out / "rotation_merge.json").read_text()).get("lift") or {}
    return {**step, "taken": lift.get("method")}


@torch.no_grad()
def added(bench: Bench, tuned: str, base: str, way: str) -> PreTrainedModel:
    """The new base with the fine-tune's change as it stands, or merged with the new base's own change by `wudi`."""
    old, fine = dict(bench.read("base").named_parameters()), dict(bench.read(tuned).named_parameters())
    model = bench.read(base)
    for name, new in model.named_parameters():
        change = fine[name] - old[name]
        if way.startswith("wudi") and name.endswith(("proj.weight", "embed_tokens.weight")):  # a tied head
            of_base, ridge = (new - old[name]).double(), {"ridge": BESIDE_RIDGE}
            changes = [SlicedMatrix.of(each) for each in (of_base, change.double())]
            change = WudiBeside().change(changes, [1.0, 1.0], ridge).whole() - of_base
        new.copy_(new + change)
    return model


@torch.no_grad()
def controls(bench: Bench, tuned: str, base: str, carried: PreTrainedModel, reached: float) -> dict[str, Any]:
    """Recovered lift of random changes with the same singular values, and the lift net of these or the negated change.

    Args:
        carried: the new base with the change itself.
        reached: the loss of it.
    """
    task, draw = task_of(tuned), torch.Generator().manual_seed(0)
    start = bench.judged(base)[task]
    gain = bench.judged("base")[task] - bench.judged(tuned)[task]
    changed = dict(carried.named_parameters())

    def lift(control: Callable[[Tensor], Tensor]) -> float:
        model = bench.read(base)
        for name, tensor in model.named_parameters():
            tensor.copy_(tensor + control(changed[name] - tensor))
        return float(start - bench.judge(model, (task,))[task]) / gain

    drawn = [lift(partial(random_change, draw=draw)) for _ in range(DRAWS)]
    chance = {"mean": mean(drawn), "standard error": stdev(drawn) / DRAWS**0.5}
    return {"random": chance, "net": (start - reached) / gain - max(chance["mean"], lift(torch.neg))}


COMMANDS = {
    "de and fr, without data": (("de", "fr"), False),
    "de and fr, text of each": (("de", "fr"), True),
    "de, fr and c, text of each": (("de", "fr", "c"), True),
}


def command(bench: Bench) -> None:
    """The best merge, as a user asks for it; judged on text that nobody used."""
    table = Table("real-command", KEPT, keep=["pair"])
    for title, (tasks, with_data) in COMMANDS.items():
        keys = {
            f"command-{seed} {title}": seed
            for seed in SEEDS
            if bench.due(f"command-{seed} {title}", f"{title}, seed {seed}")
        }
        figures = [bench.once(key, partial(best_merge, bench, tasks, seed, with_data)) for key, seed in keys.items()]
        judged = [row for row in figures if "own" in row]
        cells = {
            "tasks, unseen text": spread([mean(row[task] for task in tasks) for row in judged]),
            "base's own text": spread([row["own"] for row in judged]),
            "minutes": reach([row["clock"] / 60 for row in figures], 1),
            "processor minutes": reach([row["seconds"] / 60 for row in figures], 1),
        }
        if figures:
            table.add({"pair": title, **cells, **memory(figures)})


def best_merge(bench: Bench, tasks: Sequence[str], seed: int, with_data: bool) -> dict[str, Any]:
    models, out = [bench.root / f"{task}-{seed}" for task in tasks], bench.root / "best"
    shutil.rmtree(out, ignore_errors=True)
    data = [word for task in tasks for word in ("--data", bench.samples(task))] if with_data else []
    options = ("--base", bench.root / "base", "--budget", "15m", *data, *ON_DEVICE)
    step = run(BIN / "rotation-merge", "merge", *models, out, *options, may_fail=True)
    return {**(bench.judge(bench.read(out.name), (*tasks, "own")) if out.exists() else {}), **step}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="folder of models.py")
    parser.add_argument("what", choices=PARTS)
    parser.add_argument("--only", nargs="*", default=[], help="titles of rows to measure; others are of earlier runs")
    options = parser.parse_args()
    PARTS[options.what](Bench(options.root, options.only))


PARTS = {part.__name__: part for part in (merges, loras, carry, command)}

if __name__ == "__main__":
    main()
