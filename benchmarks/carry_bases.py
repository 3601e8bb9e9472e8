"""What arrives of three domains' fine-tunes at three new bases, by every way of carrying them but distilling.

    python benchmarks/carry_bases.py checkpoints          to benchmarks/results/carry-bases.json
    python benchmarks/carry_bases.py checkpoints long     long fine-tunes, to benchmarks/results/carry-bases-long.json

The checkpoints are those of benchmarks/train_checkpoints.py: Llama 0's fine-tunes go to Llamas 1, 2 and 3, which were
trained from other seeds. Samples are 64 sequences that the fine-tune wrote itself. Shares are of the gain that
fine-tuning gave at home, on 80 windows of held-out text; `own domain`: loss on Python, the bases' own, mean of the
three, before and after; seconds are of the processor, mean of the three, without the time that matching took.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from corpora import documents
from record import Table
from torch import Tensor

from rotation_merge.averaging.carry_in_merge import carried_tensors
from rotation_merge.averaging.carry_samples import Samples
from rotation_merge.averaging.carry_scale import Scaled
from rotation_merge.averaging.match_on import OnSamples
from rotation_merge.checkpoints.bases import open_bases
from rotation_merge.checkpoints.carried import Settings
from rotation_merge.matching.model import Alignment, match_model
from rotation_merge.matching.options import BOTH, MatchOptions
from rotation_merge.samples import demo
from rotation_merge.samples.data import Data
from rotation_merge.samples.evaluate import evaluate
from rotation_merge.samples.functions import load
from rotation_merge.samples.written import self_written

WHOLE = MatchOptions(heads="permutation", residual="rotation")
NEW = ("llama-1", "llama-2", "llama-3")
SHORT = {"C++": ("llama-0-cpp", "cpp"), "English": ("llama-0-english", "english"), "C": ("llama-0-c", "c")}
LONG = {"English, long": ("llama-0-english-long", "english"), "C, long": ("llama-0-c-long", "c")}
LENGTH, WINDOWS = 128, 80


def windows(domain: str) -> Data:
    """Held-out text of a domain."""
    if domain in demo.NAMES:
        found = demo.windows(domain)[:WINDOWS]
    else:
        held_out = torch.frombuffer(bytearray(b"".join(documents(domain)[1])), dtype=torch.uint8).long()
        found = held_out[: WINDOWS * LENGTH].view(WINDOWS, LENGTH)
    return Data([{"input_ids": part, "labels": part} for part in found.split(40)], "next token", WINDOWS)


def loss(model: Any, data: Data) -> float:
    return evaluate(model, data)[0]


class Pair:
    """The old base and a new one, matched on weights and on both."""

    def __init__(self, old: str, new: str) -> None:
        self.old, self.new, self.bases = old, new, open_bases(new, old)
        model = load(new)
        self.own, self.stored = loss(model, windows("python")), model.state_dict()
        first, second = self.bases.sources
        given = self.bases.architecture, first, second, WHOLE, None
        self.weights, self.both = match_model(*given), OnSamples(BOTH, new, old)(*given)

    def settings(self, alignment: Alignment, rank: int = 0) -> Settings:
        return Settings(WHOLE, lora=rank, matcher=lambda *_: alignment)

    def moved(self, tuned: str, scale: float) -> dict[str, Tensor]:
        """By weights alone."""
        carrier = self.bases.carrier(self.weights)
        model = Scaled(carrier, self.bases.tuned(tuned), self.bases.new.reference.config()).model(scale)
        return dict(model.state_dict())

    def carried(self, tuned: str, samples: Samples, alignment: Alignment, rank: int = 0) -> dict[str, Tensor]:
        found, _, _ = carried_tensors(tuned, self.old, self.new, self.settings(alignment, rank), samples)
        return found

    def losses(self, tensors: Mapping[str, Tensor], data: Data) -> tuple[float, float]:
        """On the fine-tune's domain, and on the base's own."""
        model = load(self.new)
        model.load_state_dict({**self.stored, **tensors})
        return loss(model, data), loss(model, windows("python"))


def ways(long: bool) -> dict[str, Callable[[Pair, str, str], dict[str, Tensor]]]:
    """Ways to carry: of a pair, a fine-tune and the file of its own text, the new base's tensors that change."""
    scale = 0.25 if long else 0.75

    def by(way: str, scale: float, rank: int = 0) -> Callable[[Pair, str, str], dict[str, Tensor]]:
        def carry(pair: Pair, tuned: str, text: str) -> dict[str, Tensor]:
            alignment = pair.both if way == "activations" else pair.weights
            return pair.carried(tuned, Samples(text, scale=scale, way=way), alignment, rank)

        return carry

    return {
        f"weights, scale {scale}": lambda pair, tuned, _: pair.moved(tuned, scale),
        f"activations, scale {scale}": by("activations", scale),
        "signs, scale 0.25": by("signs", 0.25),
        "refit, scale 1": by("refit", 1.0),
        "refit, an adapter of rank 16, scale 1": by("refit", 1.0, 16),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", type=Path)
    parser.add_argument("length", nargs="?", choices=["short", "long"], default="short")
    args = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("carry-bases-long" if args.length == "long" else "carry-bases")
    old = str(args.checkpoints / "llama-0")
    pairs = [Pair(old, str(args.checkpoints / name)) for name in NEW]
    for title, (name, domain) in (LONG if args.length == "long" else SHORT).items():
        tuned, data = str(args.checkpoints / name), windows(domain)
        home = loss(load(old), data) - loss(load(tuned), data)
        before = [loss(load(pair.new), data) for pair in pairs]
        with tempfile.TemporaryDirectory() as scratch:
            text = f"{scratch}/own.jsonl"
            rows = self_written(load(tuned), tuned, 64, LENGTH).tolist()
            Path(text).write_text("\n".join(json.dumps({"input_ids": row}) for row in rows), encoding="utf-8")
            for way, carry in ways(args.length == "long").items():
                began, found = time.process_time(), []
                for pair in pairs:
                    found.append(carry(pair, tuned, text))
                seconds = (time.process_time() - began) / len(pairs)
                table.add(
                    row(
                        title,
                        way,
                        home,
                        before,
                        pairs,
                        [p.losses(f, data) for p, f in zip(pairs, found, strict=True)],
                        seconds,
                    )
                )


def row(
    title: str,
    way: str,
    home: float,
    before: list[float],
    pairs: list[Pair],
    found: list[tuple[float, float]],
    seconds: float,
) -> dict[str, str]:
    shares = [(first - after) / home for first, (after, _) in zip(before, found, strict=True)]
    own = sum(pair.own for pair in pairs) / len(pairs), sum(after for _, after in found) / len(found)
    each = {f"Llama {number}": f"{share:.0%}" for number, share in enumerate(shares, 1)}
    return {
        "fine-tune": title,
        "how": way,
        **each,
        "mean": f"{sum(shares) / len(shares):.0%}",
        "own domain": f"{own[0]:.3f} to {own[1]:.3f}",
        "seconds": f"{seconds:.0f}",
    }


if __name__ == "__main__":
    main()
