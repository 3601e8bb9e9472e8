"""A stranger's walk: one command for each of four pairs of models, and what comes of it.

    OMP_NUM_THREADS=1 python benchmarks/walk.py --checkpoints /where/train_checkpoints/wrote

Each pair is handed to `rotation-merge merge A B OUT --budget 10m` in a process of its own, with a file of samples where
the stranger has one: text, a table, arrays of images. The shipped checkpoints serve for fine-tunes that lie near and
for independent models, far fine-tunes are those of `--checkpoints`. About three minutes of processor time.
"""

from __future__ import annotations

import argparse
import csv
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from journal import clock
from merging import command
from record import Table
from shipped import CHECKPOINTS, TEXTS, digits

BUDGET = "10m"


@dataclass(frozen=True)
class Pair:
    """Two models and what a stranger has beside them.

    Attributes:
        words: how they lie to each other.
        has: what kind of samples there are.
        data: files, one for both or one for each.
    """

    words: str
    has: str
    models: tuple[Path, Path]
    data: tuple[Path, ...] = ()


def pairs(folder: Path, trained: Path) -> list[Pair]:
    """The four; samples that are made for them lie in `folder`."""
    texts = tuple(TEXTS / f"{name}.txt" for name in ("english", "c", "python"))
    tables = tuple(table_of(text, folder / f"{text.stem}.csv") for text in texts)
    vits = (CHECKPOINTS / "vit-0", CHECKPOINTS / "vit-1")
    tuned = (CHECKPOINTS / "llama-0-english", CHECKPOINTS / "llama-0-c")
    far = (trained / "llama-0-english-long", trained / "llama-0-c-long")
    return [
        Pair("near fine-tunes of one base", "text of each", tuned, texts[:2]),
        Pair("far fine-tunes of one base", "tables of text of each", far, tables[:2]),
        Pair("independent ViTs, one skill", "labelled images", vits, (images(folder / "digits.npz"),)),
        Pair(
            "independent Llamas, different skills",
            "text of each",
            (CHECKPOINTS / "llama-1", CHECKPOINTS / "llama-0-english"),
            (texts[2], texts[0]),
        ),
    ]


def table_of(text: Path, path: Path) -> Path:
    """A text as a table, a paragraph a row."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["text"])
        writer.writerows([part] for part in text.read_text(encoding="utf-8").split("\n\n") if part.strip())
    return path


def images(path: Path) -> Path:
    """Digits that the ViTs were not trained on."""
    _, _, pixels, labels = digits()
    np.savez(path, pixel_values=pixels.numpy(), labels=labels.numpy())
    return path


def walked(pair: Pair, out: Path) -> dict[str, Any]:
    """What the command says, and its processor seconds."""
    given = [word for file in pair.data for word in ("--data", file)]
    began = clock()
    found = json.loads(command("merge", *pair.models, out, *given, "--budget", BUDGET, "--json", ends=(0, 1)))
    return {**found, "took": clock() - began}


def row(pair: Pair, found: dict[str, Any]) -> dict[str, str]:
    def shown(figures: dict[str, Any]) -> str:
        right = figures["accuracy"]
        return f"{figures['score']:.3f}" + ("" if right is None else f", {right:.1%}")

    winner, parent = found["tried"][0]["name"], Path(found["best_parent"]).name
    return {
        "pair": pair.words,
        "has": pair.has,
        "judged by": found["unit"],
        "parents": " / ".join(shown(figures) for figures in found["parents"].values()),
        "ensemble": shown(found["ensemble"]),
        "plain": shown(found["plain"]),
        "best merge": shown(found["best"]),
        "which": winner,
        "verdict": "written: better than each alone" if found["worth_it"] else f"nothing written: use {parent}",
        "tried": str(len(found["tried"])),
        "processor time": f"{found['took']:.0f} s",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"))
    checkpoints = parser.parse_args().checkpoints
    with tempfile.TemporaryDirectory(prefix="walk-") as name:
        folder, table = Path(name), Table("walk")
        for number, pair in enumerate(pairs(folder, checkpoints)):
            table.add(row(pair, walked(pair, folder / f"out-{number}")))


if __name__ == "__main__":
    main()
