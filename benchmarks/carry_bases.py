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
import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from corpora import documents, in_windows
from merging import load
from record import Table
from torch import Tensor
from torch.nn.functional import cross_entropy

import rotation_merge as rm
from rotation_merge.model.open import ModelLike, open_model
from rotation_merge.run.demo import NAMES, TEXTS
from rotation_merge.run.sources import self_written

WHOLE = rm.AlignConfig(heads="permutation", residual="rotation")
SHORT = {"C++": ("llama-0-cpp", "cpp"), "English": ("llama-0-english", "english"), "C": ("llama-0-c", "c")}
LONG = {"English, long": ("llama-0-english-long", "english"), "C, long": ("llama-0-c-long", "c")}
LENGTH, WINDOWS, RANK = 128, 80, 16
SAMPLES = 512
DRAWS = 10
"""Random changes that a carried one is compared with."""
EXACT = torch.float32
State = dict[str, Tensor]
Way = rm.TransferConfig | None
"""How a change is carried; None: it is added as it stands."""
Controls = tuple[Tensor, Tensor]
"""Losses of each sample with random changes, (draws, samples), and with the negated change."""


@dataclass(frozen=True)
class Task:
    """What a fine-tune learned.

    Attributes:
        tuned: the fine-tune.
        held_out, own: samples of it, and of what the new bases know by themselves.
        samples: what the change is solved from.
    """

    title: str
    tuned: Path
    held_out: Tensor
    own: Tensor
    samples: list[dict[str, Tensor]]


def windows(domain: str) -> Tensor:
    """Held-out text of a domain, token ids (windows, length)."""
    shipped = domain in NAMES
    text = (TEXTS / f"{domain}.txt").read_bytes() if shipped else b"".join(documents(domain)[1])
    return in_windows(text, LENGTH)[:WINDOWS]


def texts(checkpoints: Path, names: Mapping[str, tuple[str, str]]) -> Iterator[Task]:
    """Fine-tunes of Llama 0, and the text that each writes itself."""
    for title, (name, domain) in names.items():
        if (tuned := checkpoints / name).exists():
            ids = self_written(load(tuned), str(tuned), SAMPLES, LENGTH)
            samples = [{"input_ids": part} for part in ids.split(32)]
            yield Task(title, tuned, windows(domain), windows("python"), samples)


@torch.no_grad()
def losses(model: ModelLike, samples: Tensor) -> Tensor:
    """Mean loss of each sample, in nats, float64."""
    module, means = load(model), []
    for ids in samples.split(40):
        logits = module(input_ids=ids).logits[:, :-1]
        means.append(cross_entropy(logits.movedim(-1, 1), ids[:, 1:], reduction="none").double().mean(1))
    return torch.cat(means)


@dataclass(frozen=True)
class Bases:
    """The old base and a new one."""

    old: Path
    new: Path

    @cached_property
    def alignment(self) -> rm.Alignment:
        """Of the old base to the new one."""
        return rm.align(self.new, self.old, WHOLE)

    @cached_property
    def base(self) -> rm.View:
        """The new base."""
        return open_model(self.new)

    def carried(self, task: Task, way: Way) -> State:
        """The tensors of the new base with the change of a fine-tune."""
        if way is None:
            return dict(rm.Delta.between(self.old, task.tuned).moved(rm.Alignment({}), self.new).applied().to(EXACT))
        config = replace(way, alignment=self.alignment)
        result = rm.transfer(task.tuned, self.old, self.new, config, samples=task.samples)
        if isinstance(result, rm.View):
            return dict(result.to(EXACT))
        with tempfile.TemporaryDirectory() as folder:
            result.save_pretrained(folder)
            return dict(open_model(f"{self.new}+{folder}").to(EXACT))

    def losses(self, tensors: State, samples: Tensor) -> Tensor:
        """Of the new base with other tensors."""
        return losses((tensors, self.base.config), samples)

    def controls(self, carried: State, samples: Tensor) -> Controls:
        """Losses with random changes that have the carried one's singular values, and with the negated one."""
        start = {name: self.base[name].double() for name in carried}
        changes = {name: carried[name].double() - tensor for name, tensor in start.items()}
        changes = {name: change for name, change in changes.items() if bool(change.any())}
        draw = torch.Generator().manual_seed(0)

        def changed(control: State) -> Tensor:
            tensors = {name: (start[name] + change).float() for name, change in control.items()}
            return self.losses({**self.base, **tensors}, samples)

        drawn = [changed({name: random_change(change, draw) for name, change in changes.items()}) for _ in range(DRAWS)]
        return torch.stack(drawn), changed({name: -change for name, change in changes.items()})


def random_change(change: Tensor, draw: torch.Generator) -> Tensor:
    """A change of the same shape and singular values between random directions, float64; of a vector, of its length."""
    matrix = change.double().flatten(1) if change.ndim > 1 else change.double()[:, None]
    values = torch.linalg.svdvals(matrix)
    left, right = (
        torch.linalg.qr(torch.randn(size, len(values), generator=draw, dtype=torch.float64)).Q.to(change.device)
        for size in matrix.shape
    )
    return (left * values @ right.mT).reshape(change.shape)


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
    words = ["carry-bases", *sorted(args.asked, reverse=True), *(["controls"] if args.controls else [])]
    table, old = Table("-".join(words)), args.checkpoints / "llama-0"
    news = [args.checkpoints / f"llama-{number}" for number in (1, 2, 3)]
    pairs = [Bases(old, new) for new in news if new.exists()]
    for pair in pairs:
        pair.alignment  # noqa: B018 - so that no row's seconds have it
    for task in texts(args.checkpoints, LONG if long else SHORT):
        home = float((losses(old, task.held_out) - losses(task.tuned, task.held_out)).mean())
        for how, way in ways(long, "distil" in args.asked).items():
            began = time.process_time()
            carried = [pair.carried(task, way) for pair in pairs]
            seconds = (time.process_time() - began) / len(pairs)
            cells = row(task, home, pairs, carried, args.controls)
            table.add({"fine-tune": task.title, "how": how, **cells, "seconds": f"{seconds:.0f}"})


def row(task: Task, home: float, pairs: list[Bases], carried: list[State], controls: bool) -> dict[str, str]:
    """The cells of one way of carrying.

    Args:
        home: what fine-tuning gained at home.
        carried: each new base with the change.
    """

    def of_pairs(models: Sequence[Mapping[str, Tensor]], samples: Tensor) -> Tensor:
        return torch.stack([pair.losses(model, samples) for pair, model in zip(pairs, models, strict=True)])

    bases = [dict(pair.base) for pair in pairs]
    before, after = (of_pairs(models, task.held_out) for models in (bases, carried))
    known, lost = (float(of_pairs(models, task.own).mean()) for models in (bases, carried))
    shares = ((before - after).mean(1) / home).tolist()
    names = (pair.new.name.replace("llama-", "Llama ") for pair in pairs)
    cells = {base: f"{share:.0%}" for base, share in zip(names, shares, strict=True)}
    cells["mean"] = f"{sum(shares) / len(shares):.0%}"
    if controls:
        each = [pair.controls(model, task.held_out) for pair, model in zip(pairs, carried, strict=True)]
        cells |= control_cells(each, before, after, home)
    return {**cells, "own domain": f"{known:.3f} to {lost:.3f}"}


def control_cells(controls: list[Controls], before: Tensor, after: Tensor, home: float) -> dict[str, str]:
    """Shares of both controls, mean of the bases, and what the carried change has above the better of the two.

    Args:
        before, after: losses (bases, samples).
    """
    drawn, negated = (torch.stack(rows) for rows in zip(*controls, strict=True))
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
