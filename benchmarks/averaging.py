"""Averaging with statistics, on the checkpoints that come with the package; minutes on one core.

    python benchmarks/averaging.py digits        the rows of the ICML 2025 paper's table 2, on two digit ViTs
    python benchmarks/averaging.py shipped       the two fine-tunes of a Llama that come with the package, by their base
    python benchmarks/averaging.py lora          four adapters of one Llama, as one model and as one adapter
    python benchmarks/averaging.py changes checkpoints      delegates of task vectors, by `lambda`, for every seed there
    python benchmarks/averaging.py unequal checkpoints      the same models, one change three times as long

digits: accuracy on 540 held-out digits, halves of two ViTs of other seeds; statistics and activations on 200 training
images without labels. Fisher after matching is measured anew on the donor that `align` wrote, as in the paper.
shipped: nats per byte on the second halves of the two texts, and of the base's own (python), which shows what is
forgotten; refits see the first 64 windows of each text, and the next 21 judge them.
changes: nats per byte of 64 windows of each of the two texts that llama-S-c and llama-S-english were tuned on, of each
at its best `lambda`, and on 32 texts that llama-S wrote itself; `rotation-merge merge` searches in the same way.
lora: nats per byte of 48 windows of held-out files of four domains, of four adapters of rank 8 of llama-0 (150 steps
each), merged as full models and into one adapter of rank 16: what the base's mean loss falls by, at the best `lambda`.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from corpora import documents, in_windows
from merging import STILL, WHOLE, Models, halves, merge
from peft import LoraConfig, PeftModel, get_peft_model
from record import Table
from shipped import CHECKPOINTS, digits, load, next_token, text, windows
from torch import Tensor

import rotation_merge as rm
from rotation_merge.run.generated_samples import self_written

MATCHINGS: dict[str, dict[str, Any]] = {
    "none": STILL,
    "heads, neurons": {"heads": "permutation"},
    "residual rotation": WHOLE,
}
DOMAINS = ("c", "english")
CHANGES: dict[str, dict[str, Any]] = {
    "task_arithmetic": {},
    "ties, density 0.5": {"density": 0.5},
    "dare_ties, density 0.5": {"density": 0.5},
    "wudi": {},
    "wudi, sides: both": {"sides": "both"},
    "tsv": {},
    "tsv, others: sum": {"others": "sum"},
    "iso": {},
}
"""Delegates of task vectors, a name before the comma, and their settings."""
UNEQUAL: dict[str, dict[str, Any]] = {
    "linear": {},
    "task_arithmetic, lambda 0.5": {"lambda": 0.5},
    "ties": {"density": 0.5},
    "wudi": {},
    "wudi, lengths: keep": {"lengths": "keep"},
    "tsv": {},
    "tsv, lengths: keep": {"lengths": "keep"},
    "iso": {},
    "iso, lengths: keep": {"lengths": "keep"},
}
LORA_DOMAINS = ("c", "english", "cpp", "torch")
LORA_SCALES = (0.25, 0.35, 0.42, 0.5, 0.7, 1.0)
LORA_RANKS: dict[str, dict[str, Any]] = {
    "rank 16": {"rank": 16},
    "90% of the energy": {"rank": "auto", "energy": 0.9},
}
LORA_METHODS: dict[str, dict[str, Any]] = {
    "task_arithmetic": {},
    "ties": {"density": 0.5},
    "wudi": {},
    "tsv": {},
    "iso": {},
}
SCALES = (0.5, 0.6, 0.7, 0.85, 1.0, 1.2, 1.4)
METHODS: dict[str, dict[str, Any]] = {
    "Simple": {"delegate": "linear"},
    "Fisher": {"delegate": "fisher"},
    "RegMean": {"delegate": "regmean"},
    "OT-WTS-EMD": {"delegate": "ot_fusion", "plan": "hard"},
    "OT-WTS": {"delegate": "ot_fusion"},
    "OT-ACTS-EMD": {"delegate": "ot_fusion", "plan": "hard", "data": True},
    "OT-ACTS": {"delegate": "ot_fusion", "data": True},
}
SHIPPED: dict[str, dict[str, Any]] = {
    "linear": {"delegate": "linear"},
    "task arithmetic, lambda 0.7": {"delegate": "task_arithmetic", "lambda": 0.7},
    "task arithmetic, lambda 1": {"delegate": "task_arithmetic"},
    "TIES, density 0.5, lambda 1": {"delegate": "ties", "density": 0.5},
    "wudi": {"delegate": "wudi"},
    "wudi, lambda 0.8": {"delegate": "wudi", "lambda": 0.8},
    "tsv": {"delegate": "tsv"},
    "iso": {"delegate": "iso"},
    "refit": {"delegate": "refit"},
    "refit, lambda 2": {"delegate": "refit", "lambda": 2.0},
    "refit from wudi": {"delegate": "refit", "start": "wudi"},
    "refit from wudi, ridge 0.1": {"delegate": "refit", "start": "wudi", "ridge": 0.1},
    "refit from wudi, ridge 0.3": {"delegate": "refit", "start": "wudi", "ridge": 0.3},
}


def merged(base: Path, models: Models, out: Path, parameters: Mapping[str, Any]) -> tuple[Path, float]:
    """A merge, and its seconds."""
    began = time.perf_counter()
    merge(base, models, out, parameters)
    return out, time.perf_counter() - began


def with_statistics(*paths: Path) -> Models:
    """Models that count equally, their statistics in files beside them."""
    return {path: {**values, "statistics": f"{path}.safetensors"} for path, values in halves(*paths).items()}


def run_digits(_: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        training = work / "training.npz"
        np.savez(training, pixel_values=digits()[0][:200].numpy())
        anchor, donor = (Path(shutil.copytree(CHECKPOINTS / name, work / name)) for name in ("vit-0", "vit-1"))
        aligned = work / "aligned"
        rm.align(anchor, donor, heads="permutation").apply(donor).save_pretrained(aligned)
        for path in (anchor, donor, aligned):
            measured = rm.measure(path, str(training), rm.MeasureConfig(("gram", "fisher")))
            measured.save(f"{path}.safetensors")
        table = Table("averaging-digits")
        for name, method in METHODS.items():
            row = {"average": name}
            for matching, options in MATCHINGS.items():
                anew = method["delegate"] == "fisher" and matching != "none"  # measured after matching
                if anew and options == WHOLE:
                    row[matching] = "cannot be carried"
                elif anew:
                    row[matching] = digits_cell(anchor, aligned, training, method, STILL)
                else:
                    row[matching] = digits_cell(anchor, donor, training, method, options)
            table.add(row)


def digits_cell(anchor: Path, donor: Path, training: Path, method: dict[str, Any], options: dict[str, Any]) -> str:
    parameters = {**method, **options}
    if parameters.pop("data", None):
        parameters["data"] = str(training)
    measured = method["delegate"] in ("fisher", "regmean")
    models = with_statistics(anchor, donor) if measured else halves(anchor, donor)
    out = merge(anchor, models, anchor.parent / "merged", parameters)
    return f"{rm.evaluate(out, 'demo:digits')['accuracy']:.1%}"


def run_shipped(_: Path) -> None:
    base = CHECKPOINTS / "llama-0"
    held = {name: second_half(name) for name in (*DOMAINS, "python")}
    table = Table("averaging-shipped")
    for suffix in ("", *(f"-{name}" for name in DOMAINS)):
        table.add(figures(f"llama-0{suffix}", f"{base}{suffix}", held))
    for title, method in SHIPPED.items():
        data = {name: {"data": f"demo:{name}"} if method["delegate"] == "refit" else {} for name in DOMAINS}
        models = {f"{base}-{name}": {"weight": 1.0, **data[name]} for name in DOMAINS}
        if method["delegate"] in ("linear", "refit"):
            models = {base: {"weight": 0.0}, **models}
        with tempfile.TemporaryDirectory() as folder:
            out, took = merged(base, models, Path(folder, "merged"), {**method, **STILL})
            table.add(figures(title, out, held, took))


def figures(title: str, model: Any, held: Mapping[str, Tensor], took: float = 0.0) -> dict[str, str]:
    """Losses on held-out text, and the mean over the domains of the fine-tunes."""
    losses = {name: nats(model, ids) for name, ids in held.items()}
    cells = {name: f"{loss:.3f}" for name, loss in losses.items()}
    mean = fmean(losses[name] for name in DOMAINS)
    return {"model": title, **cells, "mean": f"{mean:.3f}", "seconds": f"{took:.1f}" if took else ""}


def nats(model: Any, *held: Tensor) -> float:
    return fmean(rm.evaluate(model, next_token(ids))["loss"] for ids in held)


def tuned_bases(folder: Path) -> Iterator[tuple[Path, list[Path]]]:
    """Bases that have fine-tunes on both domains, with these."""
    for base in sorted(folder.glob("llama-?")):
        if (folder / f"{base.name}-c").exists():
            yield base, [folder / f"{base.name}-{name}" for name in DOMAINS]


def run_changes(folder: Path) -> None:
    table = Table("averaging-changes")
    held = [windows(name)[:64] for name in DOMAINS]
    for base, tuned in tuned_bases(folder):
        start = load(base)
        own = self_written(start, str(base), 32, 128, 1)

        def row(title: str, model: Any, base: Path = base, own: Tensor = own, **more: str) -> None:
            columns = {"texts": f"{nats(model, *held):.3f}", "base's own text": f"{nats(model, own):.3f}"}
            empty = {"at lambda 1": "", "lambda": "", "seconds": ""}
            table.add({"seed": base.name[-1], "merge": title, **columns, **empty, **more})

        row("base", start)
        for path in tuned:
            row(f"tuned on {path.name.split('-')[-1]}", path)
        row("linear", changed(base, tuned, "linear", {"weight": 0.5})[0])
        for title, settings in CHANGES.items():
            model, took = changed(base, tuned, title.partition(",")[0], {"weight": 1.0, **settings})
            line = on_line(start, model)
            losses = {scale: nats(line(scale), *held) for scale in SCALES}
            best = min(losses, key=lambda scale: losses[scale])
            more = {"at lambda 1": f"{losses[1.0]:.3f}", "lambda": f"{best:g}", "seconds": f"{took:.1f}"}
            row(title, line(best), **more)


def run_lora(_: Path) -> None:
    base, table = CHECKPOINTS / "llama-0", Table("averaging-lora")
    plain = load(base)
    with tempfile.TemporaryDirectory() as folder:
        adapters, held = [], []
        for seed, domain in enumerate(LORA_DOMAINS):
            training, held_out = (in_windows(b"\n".join(part)) for part in documents(domain))
            held.append(held_out[torch.randperm(len(held_out), generator=torch.Generator().manual_seed(0))[:48]])
            adapters.append(Path(folder, domain))
            tune_lora(training, seed).save_pretrained(adapters[-1])
        start = nats(plain, *held)

        def gain(model: Any) -> tuple[float, float]:
            """The most that the base's loss falls by on the line through a merge, and where."""
            line = on_line(plain, model)
            return max((start - nats(line(scale), *held), scale) for scale in LORA_SCALES)

        for name, settings in LORA_METHODS.items():
            models = {f"{base}+{path}": {"weight": 1.0} for path in adapters}
            out, took = merged(base, models, Path(folder, "merged"), {"delegate": name, **STILL, **settings})
            whole, scale = gain(load(out))
            table.add({"merge": name, "into": "a full model", "mean rank": "", **row(whole, scale, whole, took)})
            for title, options in LORA_RANKS.items():
                began, out = time.perf_counter(), Path(folder, f"merged-{name}")
                result = rm.merge_adapters([str(path) for path in adapters], name, parameters=settings, **options)
                result.save(str(out))
                seconds = time.perf_counter() - began
                small = PeftModel.from_pretrained(load(base), out).merge_and_unload()
                rank = fmean(part.rank for part in result.maps.values())
                into = {"merge": name, "into": f"an adapter, {title}", "mean rank": f"{rank:.1f}"}
                table.add({**into, **row(*gain(small), whole, seconds)})
                shutil.rmtree(out)


def row(gained: float, scale: float, whole: float, seconds: float) -> dict[str, str]:
    """The gain of a merge, and its share of the full model's."""
    share = f"{gained / whole:.1%}"
    return {"gain": f"{gained:.4f}", "share": share, "lambda": f"{scale:g}", "seconds": f"{seconds:.1f}"}


def tune_lora(training: Tensor, seed: int) -> Any:
    """A LoRA of rank 8 on all linear maps of the layers of llama-0."""
    torch.manual_seed(seed)
    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(load(CHECKPOINTS / "llama-0"), config)
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0)
    for _ in range(150):
        batch = training[torch.randint(len(training), (8,))]
        model(input_ids=batch, labels=batch).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    return model


def run_unequal(folder: Path) -> None:
    table = Table("averaging-unequal")
    held = [windows(name)[:64] for name in DOMAINS]
    for base, tuned in tuned_bases(folder):
        for longer in tuned:
            with tempfile.TemporaryDirectory() as scratch:
                on_line(load(base), load(longer))(3.0).save_pretrained(Path(scratch, longer.name))
                paths = [Path(scratch, longer.name), *(path for path in tuned if path != longer)]
                for title, settings in UNEQUAL.items():
                    weight = 0.5 if title == "linear" else 1.0
                    model, _ = changed(base, paths, title.partition(",")[0], {"weight": weight, **settings})
                    cells = {"longer": longer.name.split("-")[-1], "merge": title, "texts": f"{nats(model, *held):.3f}"}
                    table.add({"seed": base.name[-1], **cells})


def changed(base: Path, tuned: list[Path], delegate: str, parameters: dict[str, Any]) -> tuple[Any, float]:
    """The fine-tunes merged by one delegate, nothing aligned, and the seconds that it took."""
    anchor = tuned[0] if delegate == "linear" else base
    with tempfile.TemporaryDirectory() as folder:
        parameters = {"delegate": delegate, **STILL, **parameters}
        out, took = merged(anchor, {path: {} for path in tuned}, Path(folder, "merged"), parameters)
        return load(out), took


def on_line(base: Any, end: Any) -> Callable[[float], rm.View]:
    """The models on the line from a base through another model, by place."""
    change = rm.Delta.between(base, end)
    return lambda scale: change.scaled(scale).applied()


def second_half(name: str) -> Tensor:
    """Of a text, in windows of 128 bytes."""
    whole = text(name)
    rest = whole[len(whole) // 256 * 128 :]
    return rest[: len(rest) // 128 * 128].view(-1, 128)


WORKS = {
    work.__name__.removeprefix("run_"): work for work in (run_digits, run_shipped, run_lora, run_changes, run_unequal)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=WORKS)
    parser.add_argument("checkpoints", type=Path, nargs="?", default=CHECKPOINTS, help="folder of changes")
    given = parser.parse_args()
    torch.manual_seed(0)
    WORKS[given.what](given.checkpoints)


if __name__ == "__main__":
    main()
