"""The demo's merges, each from recipe to measured result."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rotation_merge.carrying.config import TransferConfig
from rotation_merge.carrying.transfer import carry
from rotation_merge.errors import RotationMergeError
from rotation_merge.matching.alignment import Alignment
from rotation_merge.matching.options import NOTHING, AlignConfig
from rotation_merge.mergekit_plugin.run_recipe import merge_recipe
from rotation_merge.record import REPORT_FILE
from rotation_merge.report.files import read_report
from rotation_merge.run import demo as data
from rotation_merge.run.data import read_samples
from rotation_merge.run.evaluate import evaluate
from rotation_merge.run.functions import load

LOCAL = {"heads": "permutation"}
WHOLE = {"heads": "permutation", "residual": "rotation"}
OFF = {"attention": "none", "ffn": "none", "scaling": "false"}
"""Plain averaging of models that mergekit's own linear would write incompletely: it drops most of a ViT's tensors."""
LEARNING_STEPS = 500
SCALE = 0.75
"""Of the task vector that is carried over; chosen before measuring."""
ADAPTER_SCALE = 0.5
"""Of the LoRA that is carried over."""


@dataclass
class Result:
    """One row of the demo's table; accuracies or losses in nats by name of the merge."""

    title: str
    measure: str
    parents: list[float]
    merges: dict[str, float]
    before: float = 0.0
    after: float = 0.0

    def row(self) -> list[str]:
        def text(value: float | None) -> str:
            return "" if value is None else f"{value:.1%}" if self.measure == "accuracy" else f"{value:.3f}"

        cells = [text(self.merges.get(name)) for name in ("plain", "local", "whole", "learned")]
        parents = " / ".join(text(value) for value in self.parents)
        return [self.title, self.measure, parents, *cells, f"{self.before:.3g}", f"{self.after:.3g}"]


def twin(place: Path) -> Result:
    """The headline, through the stock command: the twin computes the same, every space moved by a random element."""
    parent, rotated = data.CHECKPOINTS / "vit-0", place / "vit-0-twin"
    Alignment.random(parent, heads="permutation", residual="rotation").apply(parent).save_pretrained(rotated)
    return _halves("ViT and its rotated twin", place / "twin", parent, rotated, _digits, {"whole": WHOLE}, stock=True)


def vits(place: Path) -> Result:
    a, b = data.CHECKPOINTS / "vit-0", data.CHECKPOINTS / "vit-1"
    result = _halves("two ViTs, seeds 0 and 1", place / "vits", a, b, _digits, {"local": LOCAL, "whole": WHOLE})
    file, out = _learned(a, b, place / "vits" / "learned.safetensors"), place / "vits" / "learned"
    models: dict[str, dict[str, Any]] = {str(a): {"weight": 0.5}, str(b): {"weight": 0.5, "alignment": file}}
    _merge(_recipe(a, models, {"delegate": "linear"}), out)
    result.merges["learned"] = _digits(out)
    return result


def _learned(a: Path, b: Path, file: Path) -> str:
    """An alignment learned on the training images and their labels."""
    from rotation_merge.matching.fit import fit
    from rotation_merge.matching.options import FitConfig

    pixels, labels, _, _ = data.digits()
    batches = [{"pixel_values": x, "labels": y} for x, y in zip(pixels.split(64), labels.split(64), strict=True)]
    learned = fit(str(a), str(b), batches, options=FitConfig(steps=LEARNING_STEPS))
    learned.write([str(file)])
    return str(file)


def finetunes(place: Path) -> Result:
    a, b = data.CHECKPOINTS / "llama-0-english", data.CHECKPOINTS / "llama-0-c"
    return _halves("two fine-tunes of one Llama", place / "finetunes", a, b, _both, {"local": LOCAL})


def llamas(place: Path) -> Result:
    a, b = data.CHECKPOINTS / "llama-0", data.CHECKPOINTS / "llama-1"
    return _halves("two Llamas, seeds 0 and 1", place / "llamas", a, b, _python, {"local": LOCAL, "whole": WHOLE})


def transport(place: Path) -> Result:
    """base + SCALE (fine-tune - old base), with the difference unchanged or carried."""
    base, old, tuned = (data.CHECKPOINTS / name for name in ("llama-1", "llama-0", "llama-0-english"))
    parent = _english(base)
    result = Result(f"English fine-tune carried to Llama 1 (x {SCALE})", "loss (nats)", [parent], {})
    variants: dict[str, dict[str, Any] | None] = {"plain": None, "local": LOCAL, "whole": WHOLE}
    for name, options in variants.items():
        if options is None:
            text = _plain_addition(base, old, tuned)
        else:
            donor = {"finetuned_from": str(old), "weight": SCALE}
            text = _recipe(base, {str(tuned): donor}, {"delegate": "task_arithmetic", **options})
        out = place / "transport" / name
        _merge(text, out)
        result.merges[name] = _english(out)
        if name == "whole":
            _distances(result, out)
    return result


def adapter(place: Path) -> Result:
    """A new base with a LoRA of an old one, at ADAPTER_SCALE: unchanged, and carried."""
    base, old, lora = (data.CHECKPOINTS / name for name in ("llama-1", "llama-0", "llama-0-lora-english"))
    result = Result(f"LoRA for English carried to Llama 1 (x {ADAPTER_SCALE})", "loss (nats)", [_english(base)], {})
    groups = {
        "plain": NOTHING,
        "local": AlignConfig(heads="permutation"),
        "whole": AlignConfig(heads="permutation", residual="rotation"),
    }
    for name, options in groups.items():
        out = place / "adapter" / name
        carry({str(out): str(lora)}, str(old), str(base), TransferConfig(scale=ADAPTER_SCALE, match=options))
        result.merges[name] = _english(f"{base}+{out}")
        if name == "whole":
            _distances(result, out)
    return result


def _halves(
    title: str, place: Path, a: Path, b: Path, measure: Any, aligned: dict[str, dict[str, Any]], stock: bool = False
) -> Result:
    """Half a, half b: plainly, and aligned under each set of options."""
    kind = "accuracy" if measure is _digits else "loss (nats)"
    result = Result(title, kind, [measure(a), measure(b)], {})
    models = {str(a): {"weight": 0.5}, str(b): {"weight": 0.5}}
    plain = OFF if measure is _digits else None
    for name, options in {"plain": plain, **aligned}.items():
        out = place / name
        parameters = None if options is None else {"delegate": "linear", **options}
        _merge(_recipe(a, models, parameters), out, stock=stock and name != "plain")
        result.merges[name] = measure(out)
        if name != "plain":
            _distances(result, out)
    return result


def _distances(result: Result, out: Path) -> None:
    if (out / REPORT_FILE).exists():
        report = read_report(str(out / REPORT_FILE))
        result.before, result.after = report.relative_distances(report.donors()[0])


def _recipe(base: Path, models: dict[str, dict[str, Any]], parameters: dict[str, Any] | None) -> str:
    """A recipe as text; parameters None: mergekit's plain linear."""
    lines = [f"merge_method: {'linear' if parameters is None else 'rotation_merge'}"]
    if parameters is not None:
        lines.append(f"base_model: {base}")
    lines.append("models:")
    for model, settings in models.items():
        lines += [f"  - model: {model}", "    parameters:"] + [
            f"      {key}: {value}" for key, value in settings.items()
        ]
    if parameters:
        lines += ["parameters:"] + [f"  {key}: {value}" for key, value in parameters.items()]
    return "\n".join([*lines, "dtype: float32", ""])


def _plain_addition(base: Path, old: Path, tuned: Path) -> str:
    """base + SCALE tuned - SCALE old, by mergekit's linear without normalisation."""
    weights = {base: 1.0, tuned: SCALE, old: -SCALE}
    text = _recipe(base, {str(model): {"weight": weight} for model, weight in weights.items()}, None)
    return text.replace("dtype:", "parameters:\n  normalize: false\ndtype:")


def _merge(text: str, out: Path, stock: bool = False) -> None:
    """Merge in this process, or with `stock` by the mergekit-yaml command in a separate process."""
    out.parent.mkdir(parents=True, exist_ok=True)
    recipe = out.with_suffix(".yml")
    recipe.write_text(text, encoding="utf-8")
    command = shutil.which("mergekit-yaml", path=sysconfig.get_path("scripts")) or shutil.which("mergekit-yaml")
    if not stock or command is None:
        merge_recipe(text, str(out))
        return
    threads = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([command, str(recipe), str(out), "--quiet"], capture_output=True, text=True, env=threads)
    if done.returncode:
        raise RotationMergeError(f"mergekit-yaml failed: {done.stderr[-500:]}", where=str(recipe))


def _digits(path: Path) -> float:
    model = load(str(path))
    return evaluate(model, read_samples(str(path), "demo:digits", module=model))[1]


def _loss(path: Path | str, *names: str) -> float:
    model = load(str(path))
    losses = [evaluate(model, read_samples(str(path), f"demo:{name}", 160, module=model))[0] for name in names]
    return sum(losses) / len(losses)


def _python(path: Path) -> float:
    return _loss(path, "python")


def _english(path: Path | str) -> float:
    return _loss(path, "english")


def _both(path: Path) -> float:
    return _loss(path, "english", "c")
