"""What arrives of three domains' fine-tunes at three new bases, by every way of carrying them.

    python benchmarks/carry_bases.py checkpoints --controls    to benchmarks/results/carry-bases-controls.json
    python benchmarks/carry_bases.py checkpoints distil --controls    50 steps
    python benchmarks/carry_bases.py checkpoints long     long fine-tunes, to benchmarks/results/carry-bases-long.json

The checkpoints are those of benchmarks/train_checkpoints.py: Llama 0's fine-tunes go to Llamas 1, 2 and 3, which were
trained from other seeds; those that are not there are left out. Samples are 512 sequences that the fine-tune wrote
itself. Shares are of the gain that fine-tuning gave at home, on 80 windows of held-out text; `own domain`: loss on
Python, the bases' own, mean of the bases, before and after; seconds are of the processor, mean of the bases, without
the time that matching took.

Controls are changes of the same scale at the same bases: ten random ones, whose maps have the same singular values, and
the negated one. What is net of them is the share above that of the better control; its standard error is that of the
mean over held-out samples of the paired difference, with that of the ten draws. What the gain at home is known to
within is not in it.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from corpora import documents
from random_changes import DRAWS, random_change
from record import Table
from shipped import NAMES, load
from shipped import windows as shipped_windows
from torch import Tensor
from torch.nn.functional import cross_entropy

import rotation_merge as rm
from rotation_merge.architecture import Architecture
from rotation_merge.carrying.bases import Bases, Transfer
from rotation_merge.carrying.transfer import carried
from rotation_merge.model.forms import named_as
from rotation_merge.model.tensors import TensorSource
from rotation_merge.run.data import Data
from rotation_merge.run.functions import architecture_of
from rotation_merge.run.sources import self_written

WHOLE = rm.AlignConfig(heads="permutation", residual="rotation")
SHORT = {"C++": ("llama-0-cpp", "cpp"), "English": ("llama-0-english", "english"), "C": ("llama-0-c", "c")}
LONG = {"English, long": ("llama-0-english-long", "english"), "C, long": ("llama-0-c-long", "c")}
LENGTH, WINDOWS, RANK = 128, 80, 16
SAMPLES = 512
Way = rm.TransferConfig | None
"""How a change is carried; None: it is added as it stands."""


@dataclass(frozen=True)
class Task:
    """What a fine-tune learned.

    Attributes:
        tuned: the fine-tune.
        data, own: held-out samples of it, and of what the new bases know by themselves.
        samples: the file of what the change is solved from.
    """

    title: str
    tuned: str
    data: Data
    own: Data
    samples: str


def windows(domain: str) -> Data:
    """Held-out text of a domain."""
    if domain in NAMES:
        tokens = shipped_windows(domain)[:WINDOWS]
    else:
        held_out = torch.frombuffer(bytearray(b"".join(documents(domain)[1])), dtype=torch.uint8).long()
        tokens = held_out[: WINDOWS * LENGTH].view(WINDOWS, LENGTH)
    return Data([{"input_ids": part, "labels": part} for part in tokens.split(40)], "next token", WINDOWS)


def texts(checkpoints: Path, names: Mapping[str, tuple[str, str]], scratch: Path) -> Iterator[Task]:
    """Fine-tunes of Llama 0, and the text that each writes itself."""
    for title, (name, domain) in names.items():
        if (checkpoints / name).exists():
            tuned, file = str(checkpoints / name), scratch / f"{name}.jsonl"
            rows = self_written(load(tuned), tuned, SAMPLES, LENGTH).tolist()
            file.write_text("\n".join(json.dumps({"input_ids": row}) for row in rows), encoding="utf-8")
            yield Task(title, tuned, windows(domain), windows("python"), str(file))


@torch.no_grad()
def losses(model: Any, data: Data) -> Tensor:
    """Mean loss of each sample, in nats, float64."""
    means = []
    for batch in data.batches:
        labels = batch["labels"]
        logits = model(**{name: tensor for name, tensor in batch.items() if name != "labels"}).logits
        if logits.ndim > labels.ndim + 1 or labels.ndim > 1:
            logits, labels = logits[:, :-1], labels[:, 1:]
        each = cross_entropy(logits.movedim(-1, 1), labels, reduction="none")
        means.append(each.double().reshape(len(labels), -1).mean(1))
    return torch.cat(means)


def loss(model: Any, data: Data) -> float:
    return float(losses(model, data).mean())


def tensors_of(source: TensorSource, architecture: Architecture) -> dict[str, Tensor]:
    """All tensors of a checkpoint, by its names, in float32."""
    return {name: source[name].float() for info in architecture.tensors() for name in info.names if name in source}


class Pair:
    """The old base and a new one, matched."""

    def __init__(self, old: str, new: str) -> None:
        self.old, self.new, self.bases = old, new, Bases.of(new, old)
        self.model = load(new)
        self.stored = tensors_of(self.bases.sources[0], self.bases.architecture)
        self.alignment = rm.align(new, old, WHOLE)

    def carried(self, tuned: str, text: str, way: Way) -> dict[str, Tensor]:
        """The new base's tensors that change.

        Args:
            text: a file of what the fine-tune learned.
        """
        if way is None:
            sources = self.bases.sources[1], self.bases.tuned(tuned)
            old, fine = (tensors_of(source, self.bases.architecture) for source in sources)
            return {name: self.stored[name] + fine[name] - tensor for name, tensor in old.items()}
        config = replace(way, data=text, alignment=self.alignment)
        job = Transfer.of(tuned, self.old, self.new, config, dtype="float32", untie=True)
        return dict(carried(job).blocks())

    def losses(self, tensors: Mapping[str, Tensor], data: Data) -> Tensor:
        """Of each sample, with some of the new base's tensors, by their names in the checkpoint, replaced."""
        named = named_as(architecture_of(self.model), {**self.stored, **tensors}, self.bases.architecture)
        self.model.load_state_dict({name: named[name] for name in self.model.state_dict()})
        return losses(self.model, data)

    def changed(self, changes: Mapping[str, Tensor], data: Data) -> Tensor:
        return self.losses({name: self.stored[name].double() + change for name, change in changes.items()}, data)

    def controls(self, tensors: Mapping[str, Tensor], data: Data) -> tuple[Tensor, Tensor]:
        """Losses of each sample with random changes, (draws, samples), and with the negated change."""
        changes = {name: tensor.double() - self.stored[name].double() for name, tensor in tensors.items()}
        changes = {name: change for name, change in changes.items() if bool(change.any())}
        draw = torch.Generator().manual_seed(0)
        drawn = [self.changed({n: random_change(c, draw) for n, c in changes.items()}, data) for _ in range(DRAWS)]
        return torch.stack(drawn), self.changed({name: -change for name, change in changes.items()}, data)


def ways(long: bool, distil: bool) -> dict[str, Way]:
    """By words; what long fine-tunes changed is too much for the scales of short ones."""

    def by(method: str, scale: float | None, rank: int = 0) -> dict[str, Way]:
        words = [method, *([f"an adapter of rank {rank}"] if rank else [])]
        words.append("scale by held-out samples" if scale is None else f"scale {scale:g}")
        return {", ".join(words): rm.TransferConfig(method, scale or "auto", samples=SAMPLES, rank=rank, match=WHOLE)}

    if distil:
        return {"50 steps, all weights": rm.TransferConfig("distil", 1.0, samples=SAMPLES, match=WHOLE)}
    if long:
        return {**by("weights", 0.1), **by("refit", None), **by("refit", None, RANK)}
    return {"plain addition": None, **by("weights", 0.75), **by("refit", 1), **by("refit", None)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", type=Path)
    parser.add_argument("asked", nargs="*", metavar="long, distil", help="long fine-tunes; 50 steps")
    parser.add_argument("--controls", action="store_true", help="random changes and the negated one beside each")
    args = parser.parse_args()
    if odd := set(args.asked) - {"long", "distil"}:
        parser.error(f"{odd.pop()}: long or distil")
    torch.set_num_threads(1)
    long = "long" in args.asked
    table = Table(
        "-".join(["carry-bases", *sorted(args.asked, reverse=True), *(["controls"] if args.controls else [])])
    )
    old = str(args.checkpoints / "llama-0")
    news = [args.checkpoints / f"llama-{number}" for number in (1, 2, 3)]
    pairs = [Pair(old, str(new)) for new in news if new.exists()]
    with tempfile.TemporaryDirectory() as name:
        scratch, names = Path(name), LONG if long else SHORT
        for task in texts(args.checkpoints, names, scratch):
            home = loss(load(old), task.data) - loss(load(task.tuned), task.data)
            for words, way in ways(long, "distil" in args.asked).items():
                began = time.process_time()
                carried = [pair.carried(task.tuned, task.samples, way) for pair in pairs]
                seconds = (time.process_time() - began) / len(pairs)
                table.add(row(task, words, home, pairs, carried, seconds, args.controls))


def row(
    task: Task,
    way: str,
    home: float,
    pairs: list[Pair],
    carried: list[dict[str, Tensor]],
    seconds: float,
    controls: bool,
) -> dict[str, str]:
    """The cells of one way of carrying.

    Args:
        home: what fine-tuning gained at home.
        carried: at each pair, the new base's tensors that change.
    """
    results = list(zip(pairs, carried, strict=True))
    before, after = (
        torch.stack([pair.losses(tensors, task.data) for pair, tensors in ends])
        for ends in ([(pair, {}) for pair in pairs], results)
    )
    shares = ((before - after).mean(1) / home).tolist()
    own = [[float(pair.losses(tensors, task.own).mean()) for tensors in (both, {})] for pair, both in results]
    lost, known = (sum(column) / len(pairs) for column in zip(*own, strict=True))
    names = (Path(pair.new).name.replace("llama-", "Llama ") for pair in pairs)
    each = dict(zip(names, shares, strict=True))
    return {
        "fine-tune": task.title,
        "how": way,
        **{base: f"{share:.0%}" for base, share in each.items()},
        "mean": f"{sum(shares) / len(shares):.0%}",
        **(control_cells(results, task.data, before, after, home) if controls else {}),
        "own domain": f"{known:.3f} to {lost:.3f}",
        "seconds": f"{seconds:.0f}",
    }


def control_cells(
    results: list[tuple[Pair, dict[str, Tensor]]], data: Data, before: Tensor, after: Tensor, home: float
) -> dict[str, str]:
    """Shares of both controls, mean of the bases, and what the carried change has above the better of the two.

    Args:
        before, after: losses (bases, samples).
    """
    drawn, negated = (torch.stack(rows) for rows in zip(*(p.controls(t, data) for p, t in results), strict=True))
    random = (before[:, None] - drawn).mean((0, 2)) / home  # of each draw
    opposite = float((before - negated).mean()) / home
    of_draws = float(random.std()) / math.sqrt(DRAWS)
    better = drawn.mean(1) if float(random.mean()) >= opposite else negated
    paired = (better - after).mean(0) / home
    of_samples = float(paired.std()) / math.sqrt(len(paired))
    error = math.hypot(of_samples, of_draws if better is not negated else 0.0)
    return {
        "random changes": f"{float(random.mean()):.1%} ± {of_draws:.1%}",
        "negated": f"{opposite:.1%}",
        "net of controls": f"{float(paired.mean()):.1%} ± {error:.1%}",
    }


if __name__ == "__main__":
    main()
