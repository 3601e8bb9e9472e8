"""What was chosen in matching residual streams, against other choices: how tensors count, and when passes stop.

    python benchmarks/choices.py --checkpoints C [--tables weighting least-gain]

C holds what benchmarks/train_checkpoints.py wrote. Each row is matched anew under one other choice: half-half of every
pair of four ViTs and of three Llamas, and fine-tunes of llama-0 carried to the other two at scale 1; all under a
rotation of the stream, means.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from record import Table
from residual import DOMAINS, VARIANTS, Measure, fine_tunes, gains, middle, open_model, quiet

from rotation_merge.architectures import Architecture
from rotation_merge.groups import SpaceTransform
from rotation_merge.matching import both, passes
from rotation_merge.matching import measured as measuring
from rotation_merge.matching.measured import Measured
from rotation_merge.matching.stream import Statistics

WEIGHTINGS = {"as they stand": 0.0, "each over the root of its norm": 0.5, "each over its norm": 1.0}
"""How tensors count in the streams' products, but for the default: over the anchor's norm to a power."""
LEAST = {"3%": 0.03, "1%": 0.01, "0.1%": 0.001}

OPTIONS = VARIANTS["rotation"]


def weighted(power: float) -> type[Statistics]:
    """Statistics in which each tensor counts over a power of its anchor's squared norm; sums, not logarithms."""

    class Weighted(Statistics):
        apart = whole = 0.0

        @classmethod
        def of(cls, architecture: Architecture, blocks: Iterable[Statistics]) -> Statistics:
            found = list(blocks)
            total = super().of(architecture, found)
            for name in ("apart", "whole"):
                setattr(total, name, sum(getattr(one, name) for one in found))
            return total

        def _weight(self, tensor: Measured, lifted: float) -> float:
            if self.equal:
                return super()._weight(tensor, lifted)
            weight = tensor.norm**-power
            self.apart, self.whole = self.apart + weight * lifted, self.whole + weight * tensor.norm
            return weight

        def bound(self, transforms: Mapping[str, SpaceTransform]) -> float:
            return (self.apart - 2 * (self._overlapping(transforms) - self._overlap)) / self.whole

        @property
        def objective(self) -> float:
            return self.apart / self.whole if self.whole else super().objective

    return Weighted


@contextmanager
def chosen(power: float | None = None, least: float = passes.LEAST_GAIN, mean_row: bool = False) -> Iterator[None]:
    """Other choices in matching; None: tensors count by agreement."""
    axis = (lambda info: None) if mean_row else measuring._logits_axis
    counting = Statistics if power is None else weighted(power)
    with (
        patch.object(both, "Statistics", counting),
        patch.object(passes, "Statistics", counting),
        patch.object(passes, "LEAST_GAIN", least),
        patch.object(measuring, "_logits_axis", axis),
    ):
        yield


def measured(folder: Path, measure: Measure) -> dict[str, str]:
    """The cells of a row, under what is chosen now."""
    vits, llamas = ([open_model(folder, f"{kind}-{i}") for i in range(n)] for kind, n in (("vit", 4), ("llama", 3)))
    halves = [[middle(measure, a, b, OPTIONS) for a, b in itertools.combinations(kind, 2)] for kind in (vits, llamas)]
    tuned = fine_tunes(folder, list(DOMAINS))
    carried = [gains(measure, new, llamas[0], tuned, OPTIONS, [1.0]) for new in llamas[1:]]
    return {
        "ViT accuracy": f"{statistics.fmean(one.accuracy for one in halves[0]):.1%}",
        "Llama barrier": f"{statistics.fmean(one.barrier for one in halves[1]):.3f}",
        **{words: f"{statistics.fmean(one[name, 1.0] for one in carried):.3f}" for name, words in DOMAINS.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--tables", nargs="+", choices=["weighting", "least-gain"], default=["weighting", "least-gain"])
    arguments = parser.parse_args()
    folder = arguments.checkpoints
    quiet()
    measure = Measure(folder, 128)
    usual = measured(folder, measure)
    if "weighting" in arguments.tables:
        by_weight(folder, measure, usual)
    if "least-gain" in arguments.tables:
        by_gain(folder, measure, usual)


def by_weight(folder: Path, measure: Measure, usual: dict[str, str]) -> None:
    """How tensors count."""
    table, first = Table("weighting"), "tensors weighted"
    table.add({first: "by agreement (default)", **usual})
    for words, power in WEIGHTINGS.items():
        with chosen(power):
            table.add({first: words, **measured(folder, measure)})
    with chosen(mean_row=True):
        table.add({first: "by agreement, heads with their mean row", **measured(folder, measure)})


def by_gain(folder: Path, measure: Measure, usual: dict[str, str]) -> None:
    """When passes stop."""
    table, first = Table("least-gain"), "passes stop where the next is to gain less than"
    table.add({first: f"{passes.LEAST_GAIN:.1%} (default)", **usual})
    for words, least in LEAST.items():
        with chosen(least=least):
            table.add({first: words, **measured(folder, measure)})


if __name__ == "__main__":
    main()
