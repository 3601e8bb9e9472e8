"""Averaging with statistics, on the checkpoints that come with the package; minutes on one core.

    python benchmarks/averaging.py digits        the rows of the ICML 2025 paper's table 2, on two digit ViTs
    python benchmarks/averaging.py finetunes     two short fine-tunes of one Llama, on text that they write themselves
    python benchmarks/averaging.py shipped       the two fine-tunes of a Llama that come with the package, by their base
    python benchmarks/averaging.py lora          four adapters of one Llama, as one model and as one adapter
    python benchmarks/averaging.py changes checkpoints      delegates of task vectors, by `lambda`, for every seed there
    python benchmarks/averaging.py refits checkpoints       options of refits of the same models
    python benchmarks/averaging.py unequal checkpoints      the same models, one change three times as long

digits: accuracy on 540 held-out digits, halves of two ViTs of other seeds; statistics and activations on `--images`
training images without labels. Fisher after matching is measured anew on the donor that `align` wrote, as in the paper.
shipped: nats per byte on the second halves of the two texts, and of the base's own (python), which shows what is
forgotten; refits see the first 64 windows of each text, and the next 21 judge them.
changes: nats per byte of 64 windows of each of the two texts that llama-S-c and llama-S-english were tuned on, of each
at its best `lambda`, and on 32 texts that llama-S wrote itself; `rotation-merge merge` searches in the same way.
lora: nats per byte of 48 windows of held-out files of four domains, of four adapters of rank 8 of llama-0 (150 steps
each), merged as full models and into one adapter of rank 16: what the base's mean loss falls by, at the best `lambda`.
finetunes: nats per byte on the second halves of two texts, whose first halves they were tuned on (8 x 128 a step).
"""

from __future__ import annotations

import argparse
import copy
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
import yaml
from click.testing import CliRunner
from corpora import documents
from mergekit.scripts.run_yaml import main as mergekit_yaml
from peft import LoraConfig, PeftModel, get_peft_model
from record import Table
from torch import Tensor
from transformers import LlamaForCausalLM

from rotation_merge.cli.app import app
from rotation_merge.mergekit_plugin.adapter_merge import merge_adapters
from rotation_merge.run.data import Data, read_batches
from rotation_merge.run.demo import CHECKPOINTS, digits, text
from rotation_merge.run.demo import windows as demo_windows
from rotation_merge.run.evaluate import evaluate
from rotation_merge.run.functions import load
from rotation_merge.run.generated_samples import self_written

MATCHINGS: dict[str, dict[str, Any]] = {
    "none": {"attention": "none", "ffn": "none", "scaling": False},
    "heads, neurons": {"heads": "permutation"},
    "residual rotation": {"heads": "permutation", "residual": "rotation"},
}
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
REFITS: dict[str, dict[str, Any]] = {
    "wudi": {"delegate": "wudi"},
    "refit": {},
    "gram_norm: norm": {"gram_norm": "norm"},
    "norms: solve": {"norms": "solve"},
    "all of FeatCal's": {"gram_norm": "norm", "norms": "solve", "alpha": 0.3, "lambda": 2.0, "ridge": 0.05},
    "start: wudi, gram_norm: norm": {"start": "wudi", "gram_norm": "norm"},
}
"""Options of refits from 32 windows of each text; and where the last one starts."""
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
    "K-FAC": {"delegate": "kfac"},
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
    "refit, alpha 0.3": {"delegate": "refit", "alpha": 0.3},
    "refit, lambda 2": {"delegate": "refit", "lambda": 2.0},
    "refit from wudi": {"delegate": "refit", "start": "wudi"},
    "refit from wudi, ridge 0.1": {"delegate": "refit", "start": "wudi", "ridge": 0.1},
    "refit from wudi, ridge 0.3": {"delegate": "refit", "start": "wudi", "ridge": 0.3},
    "refit from wudi, alpha 0.3": {"delegate": "refit", "start": "wudi", "alpha": 0.3},
}


def call(*arguments: object) -> str:
    """One of our commands; its output."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if done.exit_code:
        raise SystemExit(done.output)
    return done.stdout


def merge(anchor: Path, donor: Path, out: Path, parameters: dict[str, Any], statistics: str = "") -> tuple[Any, float]:
    """Two models half and half: the merged model, and seconds."""
    of = {anchor: anchor.name, donor: donor.name}
    named = {p: {"statistics": str(out.parent / f"{name}{statistics}.safetensors")} for p, name in of.items()}
    own = parameters.get("delegate") in ("fisher", "regmean", "kfac")
    models = [
        {"model": str(path), "parameters": {"weight": 0.5, **(named[path] if own else {})}} for path in (anchor, donor)
    ]
    return merged(anchor, models, out, parameters)


def merged(base: Path, models: list[dict[str, Any]], out: Path, parameters: dict[str, Any]) -> tuple[Any, float]:
    """Any models: the merged one, and seconds."""
    recipe = {
        "merge_method": "rotation_merge",
        "base_model": str(base),
        "models": models,
        "parameters": parameters,
        "dtype": "float32",
    }
    file = out.parent / "recipe.yml"
    file.write_text(yaml.safe_dump(recipe))
    began = time.perf_counter()
    done = CliRunner().invoke(mergekit_yaml, [str(file), str(out), "--quiet", "--random-seed", "0"])
    if done.exit_code:
        raise SystemExit(done.output)
    return load(str(out)), time.perf_counter() - began


def run_digits(images: int) -> None:
    anchor, donor = CHECKPOINTS / "vit-0", CHECKPOINTS / "vit-1"
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        training = work / "training.npz"
        np.savez(training, pixel_values=digits()[0][:images].numpy())
        aligned = work / "aligned"
        call("align", anchor, donor, aligned, "--heads", "permutation")
        for path in (anchor, donor, aligned):
            out = work / f"{path.name}.safetensors"
            call("measure", path, "--data", training, "--kinds", "gram,kfac,fisher", "--out", out)
        table = Table("averaging-digits")
        for name, method in METHODS.items():
            row = {"average": name}
            for matching, options in MATCHINGS.items():
                row[matching] = digits_cell(anchor, donor, aligned, work, training, method, matching, options)
            table.add(row)


def digits_cell(
    anchor: Path,
    donor: Path,
    aligned: Path,
    work: Path,
    training: Path,
    method: dict[str, Any],
    matching: str,
    options: dict[str, Any],
) -> str:
    parameters = {**method, **options}
    if parameters.pop("data", None):
        parameters["data"] = str(training)
    if method["delegate"] == "fisher" and "residual" in options:
        return "cannot be carried"
    anew = method["delegate"] == "fisher" and matching != "none"
    if anew:
        donor, parameters = aligned, {**parameters, **MATCHINGS["none"], "heads": "none"}
    model, _ = merge(anchor, donor, work / "merged", parameters)
    return f"{evaluate(model, read_batches('demo:digits', str(work / 'merged'), model))[1]:.1%}"


def run_finetunes(steps: int, samples: int) -> None:
    halves = {name: windows(name) for name in ("c", "english")}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for seed, (name, (training, _)) in enumerate(halves.items()):
            tune(training, steps, seed).save_pretrained(work / name)
            for file in ("tokenizer.json", "tokenizer_config.json"):
                (work / name / file).write_bytes((CHECKPOINTS / "llama-0" / file).read_bytes())
        for name in halves:
            out = work / f"{name}.safetensors"
            kinds = ("--kinds", "gram,kfac,fisher", "--samples", samples)
            call("measure", work / name, "--data", "self", *kinds, "--out", out)
        table = Table("averaging-finetunes")
        base = load(str(CHECKPOINTS / "llama-0"))
        table.add(figures("what they were tuned from", base, halves, 0.0))
        for name in halves:
            table.add(figures(f"tuned on {name}", load(str(work / name)), halves, 0.0))
        for title, method in list(METHODS.items())[:4]:
            model, took = merge(work / "c", work / "english", work / "merged", {**method, **MATCHINGS["none"]})
            table.add(figures(title, model, halves, took))


def run_shipped() -> None:
    base, texts = CHECKPOINTS / "llama-0", ("c", "english")
    halves = {name: windows(name) for name in (*texts, "python")}
    table = Table("averaging-shipped")
    for suffix in ("", *(f"-{name}" for name in texts)):
        table.add(figures(f"llama-0{suffix}", load(f"{base}{suffix}"), halves, 0.0, texts))
    for title, method in SHIPPED.items():
        refit = method["delegate"] == "refit"
        models = [
            {"model": f"{base}-{name}", "parameters": {"weight": 1.0, **({"data": f"demo:{name}"} if refit else {})}}
            for name in texts
        ]
        if method["delegate"] in ("linear", "refit"):
            models.insert(0, {"model": str(base), "parameters": {"weight": 0.0}})
        with tempfile.TemporaryDirectory() as folder:
            model, took = merged(base, models, Path(folder, "merged"), {**method, **MATCHINGS["none"]})
            table.add(figures(title, model, halves, took, texts))


def run_changes(folder: Path) -> None:
    table = Table("averaging-changes")
    domains = ("c", "english")
    held = {name: demo_windows(name)[:64] for name in domains}
    for base in sorted(path for path in folder.glob("llama-?") if (folder / f"{path.name}-c").exists()):
        tuned = [folder / f"{base.name}-{name}" for name in domains]
        start = load(str(base))
        own = self_written(start, str(base), 32, 128, 1)

        def nats(model: Any, own: Tensor = own) -> tuple[float, float]:
            losses = [evaluate(model, next_token(ids))[0] for ids in (*held.values(), own)]
            return sum(losses[:-1]) / len(held), losses[-1]

        def row(title: str, model: Any, base: Path = base, **more: str) -> None:
            loss, on_base = nats(model)
            columns = {"texts": f"{loss:.3f}", "base's own text": f"{on_base:.3f}", "at lambda 1": "", "lambda": ""}
            table.add({"seed": base.name[-1], "merge": title, **columns, "seconds": "", **more})

        row("base", start)
        for path in tuned:
            row(f"tuned on {path.name.split('-')[-1]}", load(str(path)))
        row("linear", changed(base, tuned, "linear", {"weight": 0.5})[0])
        for title, settings in CHANGES.items():
            model, took = changed(base, tuned, title.partition(",")[0], {"weight": 1.0, **settings})
            ends = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            losses = {}
            for scale in SCALES:
                losses[scale] = nats(scaled(model, start, ends, scale))[0]
            best = min(losses, key=lambda scale: losses[scale])
            more = {"at lambda 1": f"{losses[1.0]:.3f}", "lambda": f"{best:g}", "seconds": f"{took:.1f}"}
            row(title, scaled(model, start, ends, best), **more)


def run_lora() -> None:
    base, table = CHECKPOINTS / "llama-0", Table("averaging-lora")
    with tempfile.TemporaryDirectory() as folder:
        adapters, held = [], {}
        for seed, domain in enumerate(LORA_DOMAINS):
            training, held_out = (byte_windows(part) for part in documents(domain))
            held[domain] = held_out[torch.randperm(len(held_out), generator=torch.Generator().manual_seed(0))[:48]]
            adapters.append(Path(folder, domain))
            tune_lora(base, training, seed).save_pretrained(adapters[-1])

        def loss(model: Any) -> float:
            return fmean(evaluate(model.eval(), next_token(ids))[0] for ids in held.values())

        def gain(model: Any) -> tuple[float, float]:
            """The most that the base's loss falls by on the line through a merge, and where."""
            ends = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            return max((start - loss(scaled(model, plain, ends, scale)), scale) for scale in LORA_SCALES)

        plain = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
        start = loss(plain)
        for name, settings in LORA_METHODS.items():
            models = [{"model": f"{base}+{path}", "parameters": {"weight": 1.0}} for path in adapters]
            model, took = merged(
                base, models, Path(folder, "merged"), {"delegate": name, **MATCHINGS["none"], **settings}
            )
            whole, scale = gain(model)
            table.add({"merge": name, "into": "a full model", "mean rank": "", **row(whole, scale, whole, took)})
            for title, options in LORA_RANKS.items():
                began, out = time.perf_counter(), Path(folder, f"merged-{name}")
                result = merge_adapters([str(path) for path in adapters], name, parameters=settings, **options)
                result.save(str(out))
                seconds = time.perf_counter() - began
                small = PeftModel.from_pretrained(copy.deepcopy(plain), out).merge_and_unload()
                rank = fmean(part.rank for part in result.maps.values())
                into = {"merge": name, "into": f"an adapter, {title}", "mean rank": f"{rank:.1f}"}
                table.add({**into, **row(*gain(small), whole, seconds)})
                shutil.rmtree(out)


def row(gained: float, scale: float, whole: float, seconds: float) -> dict[str, str]:
    """The gain of a merge, and its share of the full model's."""
    share = f"{gained / whole:.1%}"
    return {"gain": f"{gained:.4f}", "share": share, "lambda": f"{scale:g}", "seconds": f"{seconds:.1f}"}


def byte_windows(documents: list[bytes]) -> Tensor:
    """All documents in windows of 128 bytes, (windows, 128)."""
    ids = torch.frombuffer(bytearray(b"\n".join(documents)), dtype=torch.uint8).long()
    return ids[: len(ids) // 128 * 128].view(-1, 128)


def tune_lora(base: Path, training: Tensor, seed: int) -> Any:
    """A LoRA of rank 8 on all linear maps of the layers."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, config)
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0)
    for _ in range(150):
        batch = training[torch.randint(len(training), (8,))]
        model(input_ids=batch, labels=batch).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    return model


def run_refits(folder: Path) -> None:
    table, domains = Table("averaging-refits"), ("c", "english")
    held = {name: demo_windows(name)[64:128] for name in domains}
    for base in sorted(path for path in folder.glob("llama-?") if (folder / f"{path.name}-c").exists()):
        for title, options in REFITS.items():
            samples = {} if "delegate" in options else {"delegate": "refit", "samples": 32}
            models = [{"model": str(base), "parameters": {"weight": 0.0}}]
            for name in domains:
                data = {"data": f"demo:{name}"} if samples else {}
                models.append({"model": f"{base}-{name}", "parameters": {"weight": 1.0, **data}})
            parameters = {**samples, **MATCHINGS["none"], **options}
            with tempfile.TemporaryDirectory() as scratch:
                model, took = merged(base, models, Path(scratch, "merged"), parameters)
            losses = {name: evaluate(model, next_token(ids))[0] for name, ids in held.items()}
            cells = {name: f"{loss:.3f}" for name, loss in losses.items()}
            mean = f"{fmean(losses.values()):.3f}"
            table.add({"seed": base.name[-1], "refit": title, **cells, "mean": mean, "seconds": f"{took:.1f}"})


def run_unequal(folder: Path) -> None:
    table, domains = Table("averaging-unequal"), ("c", "english")
    held = {name: demo_windows(name)[:64] for name in domains}
    for base in sorted(path for path in folder.glob("llama-?") if (folder / f"{path.name}-c").exists()):
        start = load(str(base))
        with tempfile.TemporaryDirectory() as scratch:
            for longer in domains:
                model, paths = load(f"{base}-{longer}"), []
                scaled(model, start, {name: x.clone() for name, x in model.state_dict().items()}, 3.0)
                model.save_pretrained(Path(scratch, longer))
                paths = [Path(scratch, longer), *(Path(f"{base}-{name}") for name in domains if name != longer)]
                for title, settings in UNEQUAL.items():
                    weight = 0.5 if title == "linear" else 1.0
                    merge, _ = changed(base, paths, title.partition(",")[0], {"weight": weight, **settings})
                    loss = fmean(evaluate(merge, next_token(ids))[0] for ids in held.values())
                    table.add({"seed": base.name[-1], "longer": longer, "merge": title, "texts": f"{loss:.3f}"})


def changed(base: Path, tuned: list[Path], delegate: str, parameters: dict[str, Any]) -> tuple[Any, float]:
    """The fine-tunes merged by one delegate, nothing aligned, and the seconds that it took."""
    anchor = tuned[0] if delegate == "linear" else base
    with tempfile.TemporaryDirectory() as folder:
        models = [{"model": str(path)} for path in tuned]
        return merged(anchor, models, Path(folder, "merged"), {"delegate": delegate, **MATCHINGS["none"], **parameters})


@torch.no_grad()
def scaled(model: Any, base: Any, ends: dict[str, Tensor], scale: float) -> Any:
    """The model on the line from the base through the merge whose tensors are `ends`."""
    starts = base.state_dict()
    for name, tensor in model.state_dict().items():
        tensor.copy_(torch.lerp(starts[name], ends[name], scale))
    return model


def next_token(ids: Tensor) -> Data:
    return Data([{"input_ids": part, "labels": part} for part in ids.split(32)], "next token", len(ids))


def windows(name: str) -> tuple[Tensor, Tensor]:
    """The first and the second half of a text, in windows of 128 bytes."""
    whole = text(name)
    cut = len(whole) // 256 * 128
    return tuple(part[: len(part) // 128 * 128].view(-1, 128) for part in (whole[:cut], whole[cut:]))  # type: ignore[return-value]


def tune(training: Tensor, steps: int, seed: int) -> Any:
    """llama-0 after a few steps on a text."""
    model = copy.deepcopy(load(str(CHECKPOINTS / "llama-0"))).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
    draw = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        batch = training[torch.randint(len(training), (8,), generator=draw)]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
    return model.eval()


def figures(
    title: str, model: Any, halves: dict[str, tuple[Tensor, Tensor]], took: float, of: Sequence[str] = ()
) -> dict[str, str]:
    """Losses on the second halves, and the mean over all or some of them."""
    losses = {}
    for name, (_, held) in halves.items():
        losses[name] = evaluate(model, next_token(held))[0]
    mean = sum(losses[name] for name in of or losses) / len(of or losses)
    cells = {name: f"{loss:.3f}" for name, loss in losses.items()}
    return {"model": title, **cells, "mean": f"{mean:.3f}", "seconds": f"{took:.1f}" if took else ""}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["digits", "finetunes", "shipped", "lora", "changes", "refits", "unequal"])
    parser.add_argument("checkpoints", type=Path, nargs="?", default=CHECKPOINTS, help="folder of changes")
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--samples", type=int, default=64)
    given = parser.parse_args()
    torch.manual_seed(0)
    if given.what == "digits":
        run_digits(given.images)
    elif given.what == "shipped":
        run_shipped()
    elif given.what == "unequal":
        run_unequal(given.checkpoints)
    elif given.what == "refits":
        run_refits(given.checkpoints)
    elif given.what == "lora":
        run_lora()
    elif given.what == "changes":
        run_changes(given.checkpoints)
    else:
        run_finetunes(given.steps, given.samples)


if __name__ == "__main__":
    main()
