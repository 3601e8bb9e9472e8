"""Residual alignment between independently trained models, task vectors carried over, near fine-tunes, several models.

    python benchmarks/residual.py midpoints --checkpoints C --kind vit --seeds 0 1 2 3 4 5
    python benchmarks/residual.py midpoints --checkpoints C --kind llama --seeds 0 1 2 3
    python benchmarks/residual.py transport --checkpoints C --seeds 1 2 3
    python benchmarks/residual.py near --checkpoints C
    python benchmarks/residual.py means --checkpoints C --seeds 0 1 2 3

C holds what benchmarks/train_checkpoints.py wrote: vit-SEED, llama-SEED, llama-0-english, llama-0-c (and -long). ViTs
are measured by accuracy on 540 digits, Llamas by nats per byte of the texts that come with the package (`--windows` of
128 bytes). Distances are squared, relative to those of the models as they were trained. One row a variant: means.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import logging
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from corpora import documents, excerpt
from record import Table
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, LlamaForCausalLM, ViTForImageClassification
from transformers.utils import logging as transformers_logging

from rotation_merge.architectures import Architecture, resolve
from rotation_merge.matching import model as matching
from rotation_merge.matching import stream
from rotation_merge.matching.mean import match_to_mean
from rotation_merge.matching.model import Alignment, aligned_tensors, match_model
from rotation_merge.matching.options import MatchOptions
from rotation_merge.matching.stream import Statistics
from rotation_merge.samples import demo as data

LOCAL = MatchOptions(heads="permutation")
VARIANTS: dict[str, MatchOptions | None] = {
    "none": None,
    "local": LOCAL,
    "permutation": MatchOptions(heads="permutation", residual="permutation"),
    "signed permutation": MatchOptions(heads="permutation", residual="signed_permutation"),
    "rotation": MatchOptions(heads="permutation", residual="rotation"),
    "rotation, heads in their order": MatchOptions(residual="rotation"),
    "rotation, no rescaling": MatchOptions(heads="permutation", residual="rotation", rescale=False),
    "rotation, invertible heads": MatchOptions(heads="permutation", residual="rotation", attention="invertible"),
    "TransFusion": MatchOptions(heads="spectral", residual="permutation", rescale=False),
}
WEIGHTINGS = {"by agreement": None, "as they stand": 0.0, "over root of norm": 0.5, "over norm": 1.0}
"""How tensors count in the streams' products; None: the package's own way, else over the anchor's norm to a power."""

State = dict[str, Tensor]


@dataclass
class Model:
    """A trained checkpoint."""

    name: str
    state: State
    architecture: Architecture

    def folded(self, alignment: Alignment) -> State:
        return dict(aligned_tensors(self.architecture, self.state, Alignment({}, alignment.folded)))

    def moved(self, alignment: Alignment) -> State:
        return dict(aligned_tensors(self.architecture, self.state, alignment))


def open_model(folder: Path, name: str) -> Model:
    state = {key: tensor.float() for key, tensor in load_file(folder / name / "model.safetensors").items()}
    config = AutoConfig.from_pretrained(folder / name)
    values = {**json.loads((folder / name / "config.json").read_text()), **config.to_dict()}
    return Model(name, state, resolve(values, list(state), name))


class Measure:
    """Loss (and accuracy) of a state dict."""

    def __init__(self, folder: Path, windows: int) -> None:
        self.folder, self.windows = folder, windows

    @torch.no_grad()
    def loss(self, like: Model, state: State, domain: str = "python") -> tuple[float, float]:
        """Nats and accuracy."""
        config = AutoConfig.from_pretrained(self.folder / like.name)
        kind: Any = ViTForImageClassification if like.name.startswith("vit") else LlamaForCausalLM
        network = kind.from_pretrained(None, config=config, state_dict=dict(state)).eval()
        if like.name.startswith("vit"):
            _, _, pixels, labels = data.digits()
            logits = network(pixel_values=pixels).logits
        else:
            tokens = text(domain)[: self.windows]
            logits, labels = network(input_ids=tokens).logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        right = float((logits.argmax(-1) == labels).float().mean())
        return float(torch.nn.functional.cross_entropy(logits, labels)), right


@functools.cache
def text(domain: str) -> Tensor:
    """Held-out windows of 128 bytes: the texts that come with the package, or pieces of another domain's files."""
    if domain in data.NAMES:
        return data.windows(domain)
    tokens = torch.frombuffer(bytearray(excerpt(documents(domain)[1])), dtype=torch.uint8).long()
    return tokens[: len(tokens) // 128 * 128].view(-1, 128)


def between(*states: State) -> State:
    return {name: sum(state[name] for state in states) / len(states) for name in states[0]}  # type: ignore[misc]


def distance(a: State, b: State) -> float:
    return sum(float((a[name] - b[name]).square().sum()) for name in a)


def align(anchor: Model, donor: Model, options: MatchOptions | None) -> Alignment:
    if options is None:
        return Alignment({})
    return match_model(anchor.architecture, anchor.state, donor.state, options)


def row(table: Table, what: str, **values: object) -> None:
    table.add(
        {"case": what} | {key: f"{value:.3f}" if isinstance(value, float) else value for key, value in values.items()}
    )


def pairs(seeds: list[int], both: bool) -> list[tuple[int, int]]:
    return list(itertools.permutations(seeds, 2) if both else itertools.combinations(seeds, 2))


def midpoints(arguments: argparse.Namespace, measure: Measure) -> None:
    """Half-half of every pair of seeds, under every variant."""
    models = {s: open_model(arguments.checkpoints, f"{arguments.kind}-{s}") for s in arguments.seeds}
    ends = {s: measure.loss(m, m.state) for s, m in models.items()}
    parents = Table(f"residual-{arguments.kind}-parents")
    for seed, (loss, accuracy) in ends.items():
        row(parents, f"{arguments.kind}-{seed}", loss=loss, accuracy=accuracy)
    table, each = Table(f"residual-{arguments.kind}"), Table(f"residual-{arguments.kind}-each")
    for name in arguments.variants:
        found = []
        for a, b in pairs(arguments.seeds, arguments.both):
            begin = time.perf_counter()
            alignment = align(models[a], models[b], VARIANTS[name])
            seconds = time.perf_counter() - begin
            ours, theirs = models[a].folded(alignment), models[b].moved(alignment)
            loss, accuracy = measure.loss(models[a], between(ours, theirs))
            share = distance(ours, theirs) / distance(models[a].state, models[b].state)
            found.append((accuracy, loss, loss - (ends[a][0] + ends[b][0]) / 2, share, seconds))
            if arguments.each:
                row(each, f"{name}, {a} and {b}", accuracy=accuracy, loss=loss, distance=share)
        middle = [statistics.fmean(column) for column in zip(*found, strict=True)]
        worst, best = (min, max) if arguments.kind == "vit" else (max, min)
        column = [values[0 if arguments.kind == "vit" else 1] for values in found]
        names = ("accuracy", "loss", "barrier", "distance", "seconds")
        row(table, name, **dict(zip(names, middle, strict=True)), worst=worst(column), best=best(column))


def transport(arguments: argparse.Namespace, measure: Measure) -> None:
    """Fine-tunes of llama-0 carried to the other seeds: gain over the new base in nats."""
    old = open_model(arguments.checkpoints, "llama-0")
    suffix = "-long" if arguments.long else ""
    tuned = {d: open_model(arguments.checkpoints, f"llama-0-{d}{suffix}") for d in arguments.domains}
    home, table = Table(f"transport-home{suffix}"), Table(f"transport{suffix}")
    for domain, fine in tuned.items():
        losses = [measure.loss(m, m.state, domain)[0] for m in (old, fine)]
        row(home, domain, gain=losses[0] - losses[1])
    for name in arguments.variants:
        gains: dict[tuple[str, float], list[float]] = {}
        for seed in arguments.seeds:
            new = open_model(arguments.checkpoints, f"llama-{seed}")
            alignment = align(new, old, VARIANTS[name])
            base, origin = new.folded(alignment), old.moved(alignment)
            for domain, fine in tuned.items():
                before = measure.loss(new, base, domain)[0]
                moved = fine.moved(alignment)
                for scale in arguments.scales:
                    state = {key: base[key] + scale * (moved[key] - origin[key]) for key in base}
                    gain = before - measure.loss(new, state, domain)[0]
                    gains.setdefault((domain, scale), []).append(gain)
        for (domain, scale), values in gains.items():
            each = " ".join(f"{value:.3f}" for value in values)
            row(table, f"{name}, {domain}, scale {scale}", gain=statistics.fmean(values), each=each)


def near(arguments: argparse.Namespace, measure: Measure) -> None:
    """Two fine-tunes of one base, half-half: mean loss of the two domains, and the maps' distance from the identity."""
    table = Table("near")
    for suffix in ("", "-long"):
        a, b = (open_model(arguments.checkpoints, f"llama-0-{d}{suffix}") for d in ("english", "c"))
        for name in arguments.variants:
            begin = time.perf_counter()
            alignment = align(a, b, VARIANTS[name])
            seconds = time.perf_counter() - begin
            state = between(a.folded(alignment), b.moved(alignment))
            losses = [measure.loss(a, state, domain)[0] for domain in ("english", "c")]
            far = [max(t.distances().values()) for t in alignment.transforms.values()]
            row(
                table,
                f"{'long' if suffix else 'short'}, {name}",
                loss=statistics.fmean(losses),
                moved=max(far, default=0.0),
                seconds=seconds,
            )


def means(arguments: argparse.Namespace, measure: Measure) -> None:
    """Uniform averages of several ViTs: every one to the base, and all to their mean; every model is the base once."""
    options = VARIANTS["rotation"]
    assert options is not None
    table = Table("means")
    for count in range(2, len(arguments.seeds) + 1):
        for way in ("to the base", "to the mean"):
            found = []
            for turn in range(len(arguments.seeds)):
                seeds = [arguments.seeds[(turn + i) % len(arguments.seeds)] for i in range(count)]
                models = {str(s): open_model(arguments.checkpoints, f"{arguments.kind}-{s}") for s in seeds}
                base = models[str(seeds[0])]
                others = {name: model for name, model in models.items() if model is not base}
                if way == "to the base":
                    alignments = {name: align(base, model, options) for name, model in others.items()}
                else:
                    sources = {name: model.state for name, model in models.items()}
                    alignments = match_to_mean(base.architecture, sources, str(seeds[0]), options)
                moved = [model.moved(alignments[name]) for name, model in others.items()]
                found.append(measure.loss(base, between(base.folded(alignments[str(seeds[1])]), *moved)))
            loss, accuracy = (statistics.fmean(column) for column in zip(*found, strict=True))
            row(table, f"{count} models, {way}", accuracy=accuracy, loss=loss)


def weigh(power: float | None) -> None:
    """Let tensors count in another way, for comparison: each divided by its anchor's norm to a power."""
    if power is None:
        return
    exponent = -power

    class Weighted(Statistics):
        """Sums of weighted squared distances instead of logarithms."""

        apart = whole = 0.0

        def _weight(self, entries: int, norm: float, other: float, lifted: float) -> float:
            if self.equal:
                return super()._weight(entries, norm, other, lifted)
            weight = norm**exponent
            self.apart, self.whole = self.apart + weight * lifted, self.whole + weight * norm
            return float(weight)

        @property
        def objective(self) -> float:
            return self.apart / self.whole if self.whole else super().objective

    matching.Statistics = Weighted  # type: ignore[misc]


TASKS = {task.__name__: task for task in (midpoints, transport, near, means)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--kind", choices=("vit", "llama"), default="vit")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["none", "local", "rotation"])
    parser.add_argument("--scales", type=float, nargs="+", default=[0.75, 1.0])
    parser.add_argument("--domains", nargs="+", choices=("english", "c", "cpp"), default=["english", "c"])
    parser.add_argument("--windows", type=int, default=128)
    parser.add_argument("--both", action="store_true", help="each of a pair is the anchor once")
    parser.add_argument("--each", action="store_true", help="a line for every pair")
    parser.add_argument("--long", action="store_true", help="carry the long fine-tunes")
    parser.add_argument("--weighting", choices=WEIGHTINGS, default="by agreement")
    parser.add_argument("--mean-row", action="store_true", help="count what all rows of an output head share, too")
    parser.add_argument("--passes", type=int, help="at most so many passes")
    parser.add_argument("--least-gain", type=float, help="stop when a pass gains less than this fraction")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    weigh(WEIGHTINGS[arguments.weighting])
    if arguments.mean_row:
        stream._logits_axis = lambda info: None
    matching.MOST_PASSES = arguments.passes or matching.MOST_PASSES
    matching.LEAST_GAIN = matching.LEAST_GAIN if arguments.least_gain is None else arguments.least_gain
    TASKS[arguments.task](arguments, Measure(arguments.checkpoints, arguments.windows))


if __name__ == "__main__":
    main()
