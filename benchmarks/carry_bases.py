"""What arrives of three domains' fine-tunes at three new bases, by every way of carrying them.

    python benchmarks/carry_bases.py checkpoints          without controls, to benchmarks/results/carry-bases.json
    python benchmarks/carry_bases.py checkpoints long     long fine-tunes, to benchmarks/results/carry-bases-long.json
    python benchmarks/carry_bases.py checkpoints distil   50 steps, to benchmarks/results/carry-bases-distil.json
    python benchmarks/carry_bases.py checkpoints long distil
    python benchmarks/carry_bases.py checkpoints --only C      what was measured of the others is kept
    python benchmarks/carry_bases.py checkpoints --controls    beside controls, to carry-bases-controls.json
    python benchmarks/carry_bases.py checkpoints distil --controls
    python benchmarks/carry_bases.py checkpoints digits --controls    a classifier: ViT 0 tuned on mirrored digits

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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from corpora import documents
from peft import LoraConfig, get_peft_model
from record import Table
from torch import Tensor
from torch.nn.functional import cross_entropy
from train_checkpoints import fit, save, warm_cosine
from train_checkpoints import load as untrained

from rotation_merge.architecture import Architecture
from rotation_merge.carrying import sampled as carrying
from rotation_merge.carrying.bases import open_bases
from rotation_merge.carrying.config import PLAIN, TransferConfig
from rotation_merge.carrying.judge import DRAWS, random_change
from rotation_merge.carrying.transfer import transferred
from rotation_merge.matching.match import match_model
from rotation_merge.matching.match_on import SampleMatcher
from rotation_merge.matching.options import BOTH, AlignConfig
from rotation_merge.model.source import TensorSource
from rotation_merge.model.sources import TranslatedSource
from rotation_merge.run import demo
from rotation_merge.run.data import Data
from rotation_merge.run.functions import architecture_of, load
from rotation_merge.run.generated_samples import self_written

WHOLE = AlignConfig(heads="permutation", residual="rotation")
SHORT = {"C++": ("llama-0-cpp", "cpp"), "English": ("llama-0-english", "english"), "C": ("llama-0-c", "c")}
LONG = {"English, long": ("llama-0-english-long", "english"), "C, long": ("llama-0-c-long", "c")}
LENGTH, WINDOWS, RANK = 128, 80, 16
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

IMAGES = "demo:digits"
KEPT = "several runs: what an earlier one had measured of other fine-tunes is kept"

SAMPLES = 512

Way = Callable[["Pair", str, str], dict[str, Tensor]]
"""Of a pair, a fine-tune and the file of its own text, the new base's tensors that change."""


@dataclass(frozen=True)
class Task:
    """What a fine-tune learned.

    Attributes:
        tuned: the fine-tune.
        data, own: held-out samples of it, and of what the new bases know by themselves.
        samples: writes what the change is solved from to a file.
    """

    title: str
    tuned: str
    data: Data
    own: Data
    samples: Callable[[Path], str]


def windows(domain: str) -> Data:
    """Held-out text of a domain."""
    if domain in demo.NAMES:
        tokens = demo.windows(domain)[:WINDOWS]
    else:
        held_out = torch.frombuffer(bytearray(b"".join(documents(domain)[1])), dtype=torch.uint8).long()
        tokens = held_out[: WINDOWS * LENGTH].view(WINDOWS, LENGTH)
    return Data([{"input_ids": part, "labels": part} for part in tokens.split(40)], "next token", WINDOWS)


def texts(checkpoints: Path, names: Mapping[str, tuple[str, str]]) -> Iterator[Task]:
    """Fine-tunes of Llama 0, and the text that each writes itself."""
    for title, (name, domain) in names.items():
        if not (checkpoints / name).exists():
            continue
        tuned = str(checkpoints / name)

        def written(folder: Path, tuned: str = tuned) -> str:
            rows = self_written(load(tuned), tuned, SAMPLES, LENGTH).tolist()
            lines = "\n".join(json.dumps({"input_ids": row}) for row in rows)
            (folder / "own.jsonl").write_text(lines, encoding="utf-8")
            return str(folder / "own.jsonl")

        yield Task(title, tuned, windows(domain), windows("python"), written)


def images(checkpoints: Path) -> Iterator[Task]:
    """ViT 0 tuned on mirrored digits, for a hundred steps, from training images that it is given."""
    pixels, labels, unseen, answers = demo.digits()
    mirrored, tuned = pixels.flip(-1), checkpoints / "vit-0-mirrored"
    if not tuned.exists():
        model, draw = untrained(checkpoints / "vit-0"), torch.Generator().manual_seed(0)
        picked = (torch.randperm(len(pixels), generator=draw)[:64] for _ in range(100))
        batches = ({"pixel_values": mirrored[rows], "labels": labels[rows]} for rows in picked)
        fit(model, batches, 100, warm_cosine(100, 10, 0.05), lr=1e-3, weight_decay=0.05)
        save(model, tuned)

    def given(folder: Path) -> str:
        np.savez(folder / "images.npz", pixel_values=mirrored[:SAMPLES].numpy(), labels=labels[:SAMPLES].numpy())
        return str(folder / "images.npz")

    test, own = (
        Data([{"pixel_values": shown, "labels": answers}], "class", len(answers)) for shown in (unseen.flip(-1), unseen)
    )
    yield Task("mirrored digits", str(tuned), test, own, given)


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
    """The old base and a new one, matched on weights and on both."""

    def __init__(self, old: str, new: str, samples: str) -> None:
        self.old, self.new, self.bases = old, new, open_bases(new, old)
        self.model = load(new)
        first, second = self.bases.sources
        self.stored = tensors_of(first, self.bases.architecture)
        given = self.bases.architecture, first, second, WHOLE, None
        self.weights, self.both = match_model(*given), SampleMatcher(BOTH, new, old, samples)(*given)

    def carried(self, tuned: str, config: TransferConfig) -> dict[str, Tensor]:
        return transferred(tuned, self.old, self.new, config)[0]

    def losses(self, tensors: Mapping[str, Tensor], data: Data) -> Tensor:
        """Of each sample, with some of the new base's tensors, by their names in the checkpoint, replaced."""
        named = TranslatedSource({**self.stored, **tensors}, self.bases.architecture, architecture_of(self.model))
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


def added(pair: Pair, tuned: str, _: str) -> dict[str, Tensor]:
    """The change as it stands."""
    sources = pair.bases.sources[1], pair.bases.tuned(tuned)
    old, fine = (tensors_of(source, pair.bases.architecture) for source in sources)
    return {name: pair.stored[name] + fine[name] - tensor for name, tensor in old.items()}


def distilled(rank: int, fresh: bool = False) -> Way:
    """Fifty steps from the refit on; `fresh`: from the new base as it is, an adapter's factors as peft draws them."""

    def carry(pair: Pair, tuned: str, text: str) -> dict[str, Tensor]:
        options = {"data": text, "samples": SAMPLES, "rank": rank, "alignment": pair.weights, "match": WHOLE}
        config = TransferConfig("distil", 1.0, steps=50, **options)
        with from_the_new_base() if fresh else nullcontext():
            return pair.carried(tuned, config)

    return carry


@contextmanager
def from_the_new_base() -> Iterator[None]:
    """Training begins at what the new base is, not at the refit."""

    def drawn(model: Any, _: Any) -> Any:
        torch.manual_seed(0)
        wanted = LoraConfig(r=RANK, lora_alpha=RANK, use_rslora=True, target_modules=LINEAR)
        return get_peft_model(model, wanted).eval()

    with (
        patch.object(carrying.SampledTransfer, "_refitted", lambda *_: {}),
        patch.object(carrying, "adapter_of", lambda *_: (None, {})),
        patch.object(carrying, "adapter_in_training", drawn),
    ):
        yield


def ways(long: bool, distil: bool, controls: bool) -> dict[str, Way]:
    """By name; what long fine-tunes changed is too much for the scales of short ones."""

    def by(way: str, scale: float | None, rank: int = 0) -> tuple[str, Way]:
        def carry(pair: Pair, tuned: str, text: str) -> dict[str, Tensor]:
            alignment = pair.both if way == "activations" else pair.weights
            options = {"data": text, "samples": SAMPLES, "rank": rank, "alignment": alignment, "match": WHOLE}
            return pair.carried(tuned, TransferConfig(way, scale or "auto", **options))

        words = [way, *([f"an adapter of rank {rank}"] if rank else [])]
        return ", ".join([*words, "scale by held-out samples" if scale is None else f"scale {scale:g}"]), carry

    if distil and controls:
        return {"50 steps, all weights": distilled(0)}
    if distil:
        return {
            "50 steps, all weights": distilled(0),
            "50 steps, an adapter of rank 16": distilled(RANK),
            "50 steps, an adapter of rank 16, from the new base": distilled(RANK, fresh=True),
        }
    if long:
        return dict([by("weights", 0.1), *(by(way, None) for way in ("activations", "refit")), by("refit", None, RANK)])
    short = dict([by("weights", 0.75), by("activations", 0.75), by("refit", 1)])
    short |= dict([by("refit", None)])
    return {PLAIN: added, **short} if controls else {**short, **dict([by("refit", 1, RANK)])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", type=Path)
    parser.add_argument("asked", nargs="*", metavar="long, distil, digits", help="long fine-tunes; 50 steps; ViTs")
    parser.add_argument("--only", help="one fine-tune; what was measured of the others is kept")
    parser.add_argument("--controls", action="store_true", help="random changes and the negated one beside each")
    args = parser.parse_args()
    if odd := set(args.asked) - {"long", "distil", "digits"}:
        parser.error(f"{odd.pop()}: long, distil or digits")
    torch.set_num_threads(1)
    long, digits = "long" in args.asked, "digits" in args.asked
    name = ["carry-bases", *sorted(args.asked, reverse=True), *(["controls"] if args.controls else [])]
    table = Table("-".join(name), KEPT, keep=["fine-tune", "how"]) if args.only else Table("-".join(name))
    kind = "vit" if digits else "llama"
    old = str(args.checkpoints / f"{kind}-0")
    numbers = [n for n in (1, 2, 3) if (args.checkpoints / f"{kind}-{n}").exists()]
    pairs = [Pair(old, str(args.checkpoints / f"{kind}-{n}"), IMAGES if digits else "self") for n in numbers]
    for task in images(args.checkpoints) if digits else texts(args.checkpoints, LONG if long else SHORT):
        if args.only not in (None, task.title):
            continue
        with tempfile.TemporaryDirectory() as scratch:
            text, home = task.samples(Path(scratch)), loss(load(old), task.data) - loss(load(task.tuned), task.data)
            for way, carry in ways(long, "distil" in args.asked, args.controls).items():
                began = time.process_time()
                carried = [carry(pair, task.tuned, text) for pair in pairs]
                seconds = (time.process_time() - began) / len(pairs)
                table.add(row(task, way, home, pairs, carried, seconds, args.controls))


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
    names = (Path(pair.new).name.replace("llama-", "Llama ").replace("vit-", "ViT ") for pair in pairs)
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
