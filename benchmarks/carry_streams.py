"""What arrives of fine-tunes at three new bases by weights: by one map of the stream, or by one for every layer, too.

    python benchmarks/carry_streams.py checkpoints        to benchmarks/results/carry-streams.json

Checkpoints, texts and figures are those of benchmarks/carry_bases.py; means of the three new bases. Which layers have a
map of their own is said by weights alone.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from carry_bases import LONG, NEW, SHORT, WHOLE, loss, windows
from record import Table

from rotation_merge.averaging.carry_scale import Scaled
from rotation_merge.checkpoints.bases import open_bases
from rotation_merge.matching.model import match_model
from rotation_merge.samples.functions import load

SCALES = (0.5, 0.75, 1.0, 1.25)


class Pair:
    """The old base and a new one, matched on weights."""

    def __init__(self, old: str, new: str) -> None:
        self.bases = open_bases(new, old)
        alignment = match_model(self.bases.architecture, *self.bases.sources, WHOLE)
        shared = self.bases.carrier(alignment)
        own = replace(shared, layers=self.bases.layer_streams(alignment))
        self.ways = {"the shared map": shared, "a map for every layer, too": own}
        self.own, self.new = loss(load(new), windows("python")), new

    def moved(self, way: str, tuned: str) -> Scaled:
        return Scaled(self.ways[way], self.bases.tuned(tuned), self.bases.new.reference.config())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", type=Path)
    folder = parser.parse_args().checkpoints
    torch.set_num_threads(1)
    table, old = Table("carry-streams"), str(folder / "llama-0")
    pairs = [Pair(old, str(folder / name)) for name in NEW]
    for title, (name, domain) in {**SHORT, **LONG}.items():
        data, tuned = windows(domain), str(folder / name)
        home = loss(load(old), data) - loss(load(tuned), data)
        before = [loss(load(pair.new), data) for pair in pairs]
        for way in pairs[0].ways:
            moved = [pair.moved(way, tuned) for pair in pairs]
            for scale in SCALES:
                models: list[Any] = [one.model(scale) for one in moved]
                shares = [(b - loss(m, data)) / home for b, m in zip(before, models, strict=True)]
                own = [loss(m, windows("python")) for m in models]
                table.add(
                    {
                        "fine-tune": title,
                        "by": way,
                        "scale": f"{scale:g}",
                        "share of the gain at home": f"{sum(shares) / len(shares):.1%}",
                        "own domain": f"{sum(p.own for p in pairs) / len(pairs):.3f} to {sum(own) / len(own):.3f}",
                    }
                )


if __name__ == "__main__":
    main()
