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
from functools import cached_property
from pathlib import Path

import torch
from corpora import documents, in_windows
from random_changes import DRAWS, random_change
from record import Table
from shipped import NAMES, Batches, load, next_token
from shipped import windows as shipped_windows
from torch import Tensor
from torch.nn.functional import cross_entropy

import rotation_merge as rm
from rotation_merge.model.open import open_model
from rotation_merge.model.tensors import as_tensors
from rotation_merge.model.view import View
from rotation_merge.run.sources import self_written

WHOLE = rm.AlignConfig(heads="permutation", residual="rotation")
SHORT = {"C++": ("llama-0-cpp", "cpp"), "English": ("llama-0-english", "english"), "C": ("llama-0-c", "c")}
LONG = {"English, long": ("llama-0-english-long", "english"), "C, long": ("llama-0-c-long", "c")}
LENGTH, WINDOWS, RANK = 128, 80, 16
SAMPLES = 512
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
        samples: the file of what the change is solved from.
    """

    title: str
    tuned: Path
    held_out: Batches
    own: Batches
    samples: str


def windows(domain: str) -> Batches:
    """Held-out text of a domain."""
    tokens = shipped_windows(domain) if domain in NAMES else in_windows(b"".join(documents(domain)[1]), LENGTH)
    return next_token(tokens[:WINDOWS], 40)


def texts(checkpoints: Path, names: Mapping[str, tuple[str, str]], scratch: Path) -> Iterator[Task]:
    """Fine-tunes of Llama 0, and the text that each writes itself."""
    for title, (name, domain) in names.items():
        if (tuned := checkpoints / name).exists():
            file = scratch / f"{name}.jsonl"
            rows = self_written(load(tuned), str(tuned), SAMPLES, LENGTH).tolist()
            file.write_text("\n".join(json.dumps({"input_ids": row}) for row in rows), encoding="utf-8")
            yield Task(title, tuned, windows(domain), windows("python"), str(file))


def with_tensors(view: View, tensors: Mapping[str, Tensor]) -> View:
    """A model with other tensors, in memory."""
    return replace(view, tensors=as_tensors(tensors), at=None)


@torch.no_grad()
def losses(model: View | Path, batches: Batches) -> Tensor:
    """Mean loss of each sample, in nats, float64."""
    module, means = open_model(model).to(torch.float32).to_module(), []
    for ids in (batch["input_ids"] for batch in batches):
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
    def base(self) -> View:
        """The new base."""
        return open_model(self.new)

    def carried(self, task: Task, way: Way) -> View:
        """The new base with the change of a fine-tune."""
        if way is None:
            return rm.Delta.between(self.old, task.tuned).moved(rm.Alignment({}), self.new).applied().to(torch.float32)
        result = rm.transfer(task.tuned, self.old, self.new, replace(way, data=task.samples, alignment=self.alignment))
        return result.to(torch.float32) if isinstance(result, View) else open_model(self._written(result))

    def _written(self, adapter: rm.Adapter) -> str:
        """The new base and an adapter, as a model is named."""
        folder = tempfile.mkdtemp(prefix="carried-")
        adapter.save_pretrained(folder)
        return f"{self.new}+{folder}"

    def controls(self, carried: View, batches: Batches) -> Controls:
        """Losses with random changes that have the carried one's singular values, and with the negated one."""
        start = {name: self.base[name].double() for name in carried}
        changes = {name: carried[name].double() - tensor for name, tensor in start.items()}
        changes = {name: change for name, change in changes.items() if bool(change.any())}
        draw = torch.Generator().manual_seed(0)

        def changed(control: Mapping[str, Tensor]) -> Tensor:
            tensors = {name: (start[name] + change).float() for name, change in control.items()}
            return losses(with_tensors(self.base, {**self.base, **tensors}), batches)

        drawn = [changed({name: random_change(change, draw) for name, change in changes.items()}) for _ in range(DRAWS)]
        return torch.stack(drawn), changed({name: -change for name, change in changes.items()})


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
    with tempfile.TemporaryDirectory() as scratch:
        for task in texts(args.checkpoints, LONG if long else SHORT, Path(scratch)):
            home = float((losses(old, task.held_out) - losses(task.tuned, task.held_out)).mean())
            for how, way in ways(long, "distil" in args.asked).items():
                began = time.process_time()
                carried = [with_tensors(view, dict(view)) for view in (pair.carried(task, way) for pair in pairs)]
                seconds = (time.process_time() - began) / len(pairs)
                cells = row(task, home, pairs, carried, args.controls)
                table.add({"fine-tune": task.title, "how": how, **cells, "seconds": f"{seconds:.0f}"})


def row(task: Task, home: float, pairs: list[Bases], carried: list[View], controls: bool) -> dict[str, str]:
    """The cells of one way of carrying.

    Args:
        home: what fine-tuning gained at home.
        carried: each new base with the change.
    """
    before, after = (
        torch.stack([losses(model, task.held_out) for model in models])
        for models in ([pair.base for pair in pairs], carried)
    )
    shares = ((before - after).mean(1) / home).tolist()
    known, lost = (
        sum(float(losses(model, task.own).mean()) for model in models) / len(pairs)
        for models in ([pair.base for pair in pairs], carried)
    )
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
