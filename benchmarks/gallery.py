"""Six merges of the checkpoints that come with the package: recipe, command, loss on the way, figures, verdict.

Writes docs/gallery.md and its pictures, and benchmarks/results/gallery.json; two minutes on two cores.

    python benchmarks/gallery.py && python benchmarks/record.py
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from merging import STILL, command, recipe, run_recipe
from record import ROOT, Table
from shipped import CHECKPOINTS

import rotation_merge as rm

PAGE, PICTURES = ROOT / "docs" / "gallery.md", ROOT / "docs" / "pictures"
FAR = {"delegate": "linear", "preset": "far"}
REFIT = {"delegate": "refit", "heads": "permutation", "residual": "rotation", "targets": "mean"}
READING = rm.EvaluateConfig(limit=32, batch_size=16)
POINTS = 5
GREY, BLUE, ORANGE = "#858c94", "#3d85c6", "#d97d1a"


@dataclass(frozen=True)
class Case:
    """One merge.

    Attributes:
        models: the anchor first; `C/` stands for the folder of the shipped checkpoints.
        of_model: parameters of single models beside an even weight.
        data: what the models are measured on.
        against: models that the merge is to beat; none: every one of them.
    """

    name: str
    title: str
    words: str
    models: tuple[str, ...]
    parameters: dict[str, Any]
    data: tuple[str, ...]
    of_model: dict[str, dict[str, Any]] = field(default_factory=dict)
    against: tuple[str, ...] = ()

    def text(self, plain: bool = False) -> str:
        """The recipe, or that of the plain average."""
        share = round(1 / len(self.models), 3)
        models = {name: {"weight": share, **({} if plain else self.of_model.get(name, {}))} for name in self.models}
        parameters = {"delegate": "linear", **STILL} if plain else self.parameters
        return yaml.safe_dump(recipe(self.models[0], models, parameters), sort_keys=False, width=120)


ENGLISH, C = "C/llama-0-english", "C/llama-0-c"
LLAMAS, VITS = ("C/llama-0", "C/llama-1"), ("C/vit-0", "C/vit-1")
NEAR = {"delegate": "linear", "preset": "near"}
CASES = (
    Case(
        "near",
        "Two fine-tunes of one base",
        "One was tuned on English, the other on C. They share their coordinates, so there is next to nothing to align. "
        "Their average keeps more of the base's Python than either fine-tune.",
        (ENGLISH, C),
        NEAR,
        ("demo:python",),
    ),
    Case(
        "base",
        "A fine-tune and its base",
        "The base plus half of the change that taught English: most of the gain for little of the cost.",
        ("C/llama-0", ENGLISH),
        NEAR,
        ("demo:python", "demo:english"),
    ),
    Case(
        "carried",
        "A fine-tune's change, carried to another base",
        "The change that taught one base English is moved to another base, and half of it is added.",
        ("C/llama-1", ENGLISH),
        FAR,
        ("demo:english",),
        {ENGLISH: {"weight": 0.5, "finetuned_from": "C/llama-0"}},
        ("C/llama-1",),
    ),
    Case(
        "refit",
        "Two ViTs trained independently, refitted",
        "The layers are solved on synthetic images to do what the two models do. Much of what the average loses comes "
        "back, without data.",
        VITS,
        {**REFIT, "data": "synthetic", "samples": 256},
        ("demo:digits",),
    ),
    Case(
        "llamas",
        "Two Llamas trained independently, by their weights alone",
        "Alignment lowers the barrier. The rest of it costs more than the second model is worth.",
        LLAMAS,
        FAR,
        ("demo:python",),
    ),
    Case(
        "vits",
        "The two ViTs, by their weights alone",
        "The same pair without samples.",
        VITS,
        FAR,
        ("demo:digits",),
    ),
)


def here(name: str) -> str:
    return name.replace("C/", f"{CHECKPOINTS}/")


def figures(model: str, case: Case) -> tuple[float, float]:
    """Mean loss and accuracy over a case's data."""
    found = [rm.evaluate(model, data, READING) for data in case.data]
    return fmean(one["loss"] for one in found), fmean(one["accuracy"] for one in found)


def show(case: Case, table: Table, scratch: Path) -> None:
    file = scratch / f"{case.name}.yml"
    file.write_text(here(case.text()))
    run_recipe(here(case.text()), scratch / "merged")
    run_recipe(here(case.text(plain=True)), scratch / "plain")
    found = {name: figures(here(name), case) for name in case.models}
    plain, merged = (figures(str(scratch / name), case) for name in ("plain", "merged"))
    against = case.against or case.models
    best = min(against, key=lambda name: found[name][0])
    named = best.removeprefix("C/")
    better = f"better than {'every model' if not case.against else named} alone"
    verdict = better if merged[0] < found[best][0] else f"do not merge: {named} alone is better"
    rows = [*((name.removeprefix("C/"), *found[name], "") for name in case.models), ("plain average", *plain, "")]
    for name, loss, right, words in (*rows, ("this recipe", *merged, verdict)):
        row = {"case": case.name, "model": name, "loss": f"{loss:.3f}", "accuracy": f"{right:.1%}", "verdict": words}
        table.add(row)
    reading = ("--limit", READING.limit, "--batch-size", READING.batch_size, "--points", POINTS)
    barrier = json.loads(command("barrier", file, "--data", case.data[-1], *reading, "--json"))[0]
    picture(barrier, PICTURES / f"gallery-{case.name}.svg")


def picture(barrier: dict[str, Any], path: Path) -> None:
    """The loss on the straight path, plain and aligned, as a small SVG for light and dark pages."""
    values = [loss for curve in barrier["curves"] for loss in curve["loss"]]
    low, high = min(values), max(max(values), min(values) + 1e-3)

    def at(t: float, loss: float) -> str:
        return f"{50 + 380 * t:.1f},{160 - 130 * (loss - low) / (high - low):.1f}"

    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 450 200" role="img" font-family="system-ui, sans-serif" '
        f'font-size="12" fill="{GREY}"><title>Loss on the path, plain and aligned, on {barrier["data"]}</title>',
        f'<text x="44" y="34" text-anchor="end">{high:.2f}</text>',
        f'<text x="44" y="164" text-anchor="end">{low:.2f}</text>',
        '<text x="50" y="180">anchor</text><text x="430" y="180" text-anchor="end">donor</text>',
    ]
    for curve, colour, x in zip(barrier["curves"], (ORANGE, BLUE), (170, 260), strict=True):
        points = " ".join(at(t, loss) for t, loss in zip(curve["t"], curve["loss"], strict=True))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{x}" y="196" fill="{colour}">{curve["name"]}</text>')
    path.write_text("\n".join([*parts, "</svg>\n"]), encoding="utf-8")


HEAD = """# Gallery

Six merges of the checkpoints that come with the package (`C/` stands for `rotation_merge/run/checkpoints/`), made,
drawn and measured by `python benchmarks/gallery.py`. Losses are in nats, means over the named data. Two of the merges
are better than each model alone; for three, the table says not to merge. `rotation-merge merge` finds this out and
writes nothing then.
"""

SECTION = """
## {title}

{words}

```yaml title="{name}.yml"
{recipe}```

```bash
rotation-merge barrier {name}.yml --data {data} --points {points}
mergekit-yaml {name}.yml merged-{name}
```

![Loss on the path](pictures/gallery-{name}.svg)

On {named}:

<!-- figures: gallery | model, loss, accuracy, verdict | case={name} -->
<!-- end -->
"""


def page() -> str:
    parts = [HEAD]
    for case in CASES:
        named = ", ".join(f"`{name}`" for name in case.data)
        facts = {"title": case.title, "words": case.words, "name": case.name, "points": POINTS, "named": named}
        parts.append(SECTION.format(**facts, recipe=case.text(), data=case.data[-1]))
    return "".join(parts)


def main() -> None:
    table = Table("gallery")
    PAGE.write_text(page(), encoding="utf-8")
    with tempfile.TemporaryDirectory() as scratch:
        for case in CASES:
            show(case, table, Path(scratch))


if __name__ == "__main__":
    main()
