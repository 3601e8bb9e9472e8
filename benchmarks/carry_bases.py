"""What arrives of three domains' fine-tunes at three new bases, by every way of carrying them.

    python benchmarks/carry_bases.py checkpoints          to benchmarks/results/carry-bases.json
    python benchmarks/carry_bases.py checkpoints long     long fine-tunes, to benchmarks/results/carry-bases-long.json
    python benchmarks/carry_bases.py checkpoints distil   50 steps, to benchmarks/results/carry-bases-distil.json
    python benchmarks/carry_bases.py checkpoints long distil
    python benchmarks/carry_bases.py checkpoints --only C      what was measured of the others is kept

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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from corpora import documents
from peft import LoraConfig, get_peft_model
from record import Table
from torch import Tensor

from rotation_merge.carrying import sampled as carrying
from rotation_merge.carrying.bases import open_bases
from rotation_merge.carrying.config import TransferConfig
from rotation_merge.carrying.transfer import transferred
from rotation_merge.matching.match import match_model
from rotation_merge.matching.match_on import OnSamples
from rotation_merge.matching.options import BOTH, AlignConfig
from rotation_merge.run import demo
from rotation_merge.run.data import Data
from rotation_merge.run.evaluate import evaluate
from rotation_merge.run.functions import load
from rotation_merge.run.written import self_written

WHOLE = AlignConfig(heads="permutation", residual="rotation")
NEW = ("llama-1", "llama-2", "llama-3")
SHORT = {"C++": ("llama-0-cpp", "cpp"), "English": ("llama-0-english", "english"), "C": ("llama-0-c", "c")}
LONG = {"English, long": ("llama-0-english-long", "english"), "C, long": ("llama-0-c-long", "c")}
LENGTH, WINDOWS, RANK = 128, 80, 16
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

KEPT = "several runs: what an earlier one had measured of other fine-tunes is kept"

Way = Callable[["Pair", str, str], dict[str, Tensor]]
"""Of a pair, a fine-tune and the file of its own text, the new base's tensors that change."""


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

    def carried(self, tuned: str, config: TransferConfig) -> dict[str, Tensor]:
        return transferred(tuned, self.old, self.new, config)[0]

    def losses(self, tensors: Mapping[str, Tensor], data: Data) -> tuple[float, float]:
        """On the fine-tune's domain, and on the base's own."""
        model = load(self.new)
        model.load_state_dict({**self.stored, **tensors})
        return loss(model, data), loss(model, windows("python"))


def distilled(rank: int, fresh: bool = False) -> Way:
    """Fifty steps from the refit on; `fresh`: from the new base as it is, an adapter's factors as peft draws them."""

    def carry(pair: Pair, tuned: str, text: str) -> dict[str, Tensor]:
        config = TransferConfig("distil", 1.0, steps=50, data=text, rank=rank, alignment=pair.weights, match=WHOLE)
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


def ways(long: bool, distil: bool) -> dict[str, Way]:
    """By name; what long fine-tunes changed is too much for the scales of short ones."""

    def by(way: str, scale: float | None, rank: int = 0) -> tuple[str, Way]:
        def carry(pair: Pair, tuned: str, text: str) -> dict[str, Tensor]:
            alignment = pair.both if way == "activations" else pair.weights
            return pair.carried(
                tuned, TransferConfig(way, scale or "auto", data=text, rank=rank, alignment=alignment, match=WHOLE)
            )

        words = [way, *([f"an adapter of rank {rank}"] if rank else [])]
        return ", ".join([*words, "scale by held-out samples" if scale is None else f"scale {scale:g}"]), carry

    if distil:
        return {
            "50 steps, all weights": distilled(0),
            "50 steps, an adapter of rank 16": distilled(RANK),
            "50 steps, an adapter of rank 16, from the new base": distilled(RANK, fresh=True),
        }
    if long:
        found = [by("weights", 0.1)]
        return dict([*found, *(by(way, None) for way in ("activations", "refit")), by("refit", None, RANK)])
    found = [by("weights", 0.75), by("activations", 0.75)]
    return dict([*found, by("refit", 1), by("refit", 1, RANK)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", type=Path)
    parser.add_argument("asked", nargs="*", metavar="long, distil", help="long fine-tunes; 50 steps of distilling")
    parser.add_argument("--only", help="one fine-tune; what was measured of the others is kept")
    args = parser.parse_args()
    if odd := set(args.asked) - {"long", "distil"}:
        parser.error(f"{odd.pop()}: long or distil")
    torch.set_num_threads(1)
    long = "long" in args.asked
    table = Table("-".join(["carry-bases", *sorted(args.asked, reverse=True)]), KEPT if args.only else "")
    if args.only:
        rows = json.loads(table.path.read_text(encoding="utf-8"))["rows"] if table.path.exists() else []
        table.rows += [row for row in rows if row["fine-tune"] != args.only]
    old = str(args.checkpoints / "llama-0")
    pairs = [Pair(old, str(args.checkpoints / name)) for name in NEW]
    for title, (name, domain) in (LONG if long else SHORT).items():
        if args.only not in (None, title):
            continue
        tuned, data = str(args.checkpoints / name), windows(domain)
        home = loss(load(old), data) - loss(load(tuned), data)
        before = [loss(load(pair.new), data) for pair in pairs]
        with tempfile.TemporaryDirectory() as scratch:
            text = f"{scratch}/own.jsonl"
            rows = self_written(load(tuned), tuned, 64, LENGTH).tolist()
            Path(text).write_text("\n".join(json.dumps({"input_ids": row}) for row in rows), encoding="utf-8")
            for way, carry in ways(long, "distil" in args.asked).items():
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
