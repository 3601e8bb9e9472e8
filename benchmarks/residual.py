"""Residual alignment between independently trained models, task vectors carried over, near fine-tunes, several models.

    python benchmarks/residual.py midpoints --checkpoints C --kind vit
    python benchmarks/residual.py midpoints --checkpoints C --kind llama --seeds 0 1 2
    python benchmarks/residual.py transport --checkpoints C --seeds 1 2
    python benchmarks/residual.py near --checkpoints C
    python benchmarks/residual.py means --checkpoints C

C holds what benchmarks/train_checkpoints.py wrote: vit-SEED, llama-SEED, llama-0-english, llama-0-c (and -long). ViTs
are measured by accuracy on 540 digits, Llamas by nats per byte of the texts that come with the package (`--windows` of
128 bytes). Distances are squared, relative to those of the models as they were trained; seconds are processor time of
matching. One row a variant: means over the pairs of seeds.
"""

from __future__ import annotations

import argparse
import dataclasses
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

from rotation_merge.architecture import Architecture, resolve
from rotation_merge.matching.alignment import Alignment, aligned_source
from rotation_merge.matching.match import match_model
from rotation_merge.matching.mean import match_to_mean
from rotation_merge.matching.options import AlignConfig
from rotation_merge.run import demo as data

LOCAL = AlignConfig(heads="permutation")
VARIANTS: dict[str, AlignConfig | None] = {
    "none": None,
    "local": LOCAL,
    "permutation": AlignConfig(heads="permutation", residual="permutation"),
    "signed permutation": AlignConfig(heads="permutation", residual="signed_permutation"),
    "rotation": AlignConfig(heads="permutation", residual="rotation"),
    "rotation, heads in their order": AlignConfig(residual="rotation"),
    "rotation, no rescaling": AlignConfig(heads="permutation", residual="rotation", scaling=False),
    "rotation, invertible heads": AlignConfig(heads="permutation", residual="rotation", attention="invertible"),
    "TransFusion": AlignConfig(heads="spectral", residual="permutation", scaling=False),
}
TITLES = {
    "none": "none",
    "local": "local spaces",
    "TransFusion": "TransFusion",
    **{name: f"residual {name}" for name in ("permutation", "signed permutation", "rotation")},
    **{name: name.replace("rotation,", "the same,") for name in VARIANTS if name.startswith("rotation,")},
}
DOMAINS = {"english": "English", "c": "C", "cpp": "C++"}

State = dict[str, Tensor]


@dataclass
class Model:
    """A trained checkpoint."""

    name: str
    state: State
    architecture: Architecture

    def folded(self, alignment: Alignment) -> State:
        return self.moved(Alignment({}, alignment.folded))

    def moved(self, alignment: Alignment, anchor: State | None = None) -> State:
        """As `align` writes it: with the anchor's biases where softmax cannot see them; without anchor its own."""
        moved = aligned_source(self.architecture, self.state, alignment, anchor)
        return {name: moved[name] for name in self.state}


def open_model(folder: Path, name: str) -> Model:
    state = {key: tensor.float() for key, tensor in load_file(folder / name / "model.safetensors").items()}
    config = AutoConfig.from_pretrained(folder / name)
    values = {**json.loads((folder / name / "config.json").read_text()), **config.to_dict()}
    return Model(name, state, resolve(values, list(state), name))


class Measure:
    """Loss (and accuracy) of a state dict."""

    def __init__(self, folder: Path, windows: int) -> None:
        self.folder, self.windows, self.known = folder, windows, dict[str, float]()

    @torch.no_grad()
    def loss(self, like: Model, state: State, domain: str = "python") -> tuple[float, float]:
        """Nats and accuracy."""
        config = AutoConfig.from_pretrained(self.folder / like.name)
        kind: Any = ViTForImageClassification if like.name.startswith("vit") else LlamaForCausalLM
        network = kind.from_pretrained(None, config=config, state_dict=dict(state), dtype=torch.float32).eval()
        if like.name.startswith("vit"):
            _, _, pixels, labels = data.digits()
            logits = network(pixel_values=pixels).logits
        else:
            tokens = text(domain)[: self.windows]
            logits, labels = network(input_ids=tokens).logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        right = float((logits.argmax(-1) == labels).float().mean())
        return float(torch.nn.functional.cross_entropy(logits, labels)), right

    def of(self, model: Model) -> float:
        """Loss of a model as it was trained, asked for once."""
        if model.name not in self.known:
            self.known[model.name] = self.loss(model, model.state)[0]
        return self.known[model.name]


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


def align(anchor: Model, donor: Model, options: AlignConfig | None) -> Alignment:
    if options is None:
        return Alignment({})
    return match_model(anchor.architecture, anchor.state, donor.state, options)


@dataclass
class Middle:
    """Half of each of two models: its worth, its barrier, the distance left, processor seconds of matching, passes."""

    loss: float
    accuracy: float
    barrier: float
    distance: float
    seconds: float
    passes: float = 0.0


def middle(measure: Measure, anchor: Model, donor: Model, options: AlignConfig | None) -> Middle:
    began = time.process_time()
    alignment = align(anchor, donor, options)
    seconds = time.process_time() - began
    ours, theirs = anchor.folded(alignment), donor.moved(alignment)
    loss, accuracy = measure.loss(anchor, between(ours, theirs))
    share = distance(ours, theirs) / distance(anchor.state, donor.state)
    ends = (measure.of(anchor) + measure.of(donor)) / 2
    return Middle(loss, accuracy, loss - ends, share, seconds, float(str(alignment.summary.get("passes", 0))))


def midpoints(arguments: argparse.Namespace, measure: Measure) -> None:
    """Half-half of every pair of seeds, under every variant."""
    models = [open_model(arguments.checkpoints, f"{arguments.kind}-{seed}") for seed in arguments.seeds]
    table, vit = Table(f"residual-{arguments.kind}"), arguments.kind == "vit"
    for name in arguments.variants:
        pairs = itertools.combinations(models, 2)
        found = [middle(measure, anchor, donor, VARIANTS[name]) for anchor, donor in pairs]
        mean = Middle(*(statistics.fmean(column) for column in zip(*map(dataclasses.astuple, found), strict=True)))
        if vit:
            values = [100 * one.accuracy for one in found]
            row = {"ViT": TITLES[name], "accuracy": f"{mean.accuracy:.1%}"}
            row["worst, best pair"] = f"{min(values):.1f}, {max(values):.1f}%"
        else:
            values = [one.loss for one in found]
            row = {"Llama": TITLES[name], "loss": f"{mean.loss:.3f}"}
            row["worst, best pair"] = f"{max(values):.3f}, {min(values):.3f}"
        row |= {"barrier": f"{mean.barrier:.2f}", "distance": f"{mean.distance:.2f}"}
        row["seconds"] = f"{mean.seconds:.1f}" if VARIANTS[name] else ""
        table.add(row | {"passes": f"{mean.passes:.1f}" if mean.passes else ""})


def gains(
    measure: Measure, new: Model, old: Model, tuned: dict[str, Model], options: AlignConfig | None, scales: list[float]
) -> dict[tuple[str, float], float]:
    """What fine-tunes of an old base are worth on a new one, by domain and scale: nats gained over the new base."""
    alignment, found = align(new, old, options), {}
    base, origin = new.folded(alignment), old.moved(alignment)
    for domain, fine in tuned.items():
        before, moved = measure.loss(new, base, domain)[0], fine.moved(alignment)
        for scale in scales:
            state = {key: base[key] + scale * (moved[key] - origin[key]) for key in base}
            found[domain, scale] = before - measure.loss(new, state, domain)[0]
    return found


def fine_tunes(folder: Path, domains: list[str], ending: str = "") -> dict[str, Model]:
    return {domain: open_model(folder, f"llama-0-{domain}{ending}") for domain in domains}


def transport(arguments: argparse.Namespace, measure: Measure) -> None:
    """Fine-tunes of llama-0 carried to the other seeds: gain over the new base in nats, mean (each)."""
    old, long = open_model(arguments.checkpoints, "llama-0"), arguments.long
    tuned = fine_tunes(arguments.checkpoints, arguments.domains, "-long" if long else "")
    found: dict[tuple[str, float], dict[str, str]] = {}
    for name in arguments.variants:
        each = [
            gains(
                measure,
                open_model(arguments.checkpoints, f"llama-{seed}"),
                old,
                tuned,
                VARIANTS[name],
                arguments.scales,
            )
            for seed in arguments.seeds
        ]
        for key in each[0]:
            values = [one[key] for one in each]
            cell = f"{statistics.fmean(values):.3f} ({', '.join(f'{value:.3f}' for value in values)})"
            found.setdefault(key, {})[TITLES[name] if VARIANTS[name] else "plain addition"] = cell
    table = Table("transport-long" if long else "transport")
    for (domain, scale), cells in found.items():
        table.add({"scale": f"{DOMAINS[domain]}, {scale:g}", **cells})


def near(arguments: argparse.Namespace, measure: Measure) -> None:
    """Two fine-tunes of one base, half-half: mean loss of the two domains."""
    found: dict[str, dict[str, str]] = {name: {"case": TITLES[name]} for name in arguments.variants}
    for ending in ("", "-long"):
        a, b = fine_tunes(arguments.checkpoints, ["english", "c"], ending).values()
        for name in arguments.variants:
            alignment = align(a, b, VARIANTS[name])
            state = between(a.folded(alignment), b.moved(alignment))
            losses = [measure.loss(a, state, domain)[0] for domain in ("english", "c")]
            found[name]["long" if ending else "short"] = f"{statistics.fmean(losses):.3f}"
    table = Table("near")
    for row in found.values():
        table.add(row)


def to_base(base: Model, others: list[Model], options: AlignConfig) -> list[Alignment]:
    return [align(base, other, options) for other in others]


def to_mean(base: Model, others: list[Model], options: AlignConfig) -> list[Alignment]:
    sources = {model.name: model.state for model in (base, *others)}
    found = match_to_mean(base.architecture, sources, base.name, options)
    return [found[model.name] for model in others]


def means(arguments: argparse.Namespace, measure: Measure) -> None:
    """Uniform averages of several ViTs: every one to the base, and all to their mean; every model is the base once."""
    options = VARIANTS["rotation"]
    assert options is not None
    models = [open_model(arguments.checkpoints, f"vit-{seed}") for seed in arguments.seeds]
    table = Table("means")
    for words, way in (("each to the base", to_base), ("all to their mean (`anchor: mean`)", to_mean)):
        cells = {"case": words}
        for count in range(2, len(models) + 1):
            found = []
            for turn in range(len(models)):
                base, *others = (models[(turn + i) % len(models)] for i in range(count))
                alignments = way(base, others, options)
                moved = [model.moved(alignment) for model, alignment in zip(others, alignments, strict=True)]
                found.append(measure.loss(base, between(base.folded(alignments[0]), *moved))[1])
            cells[str(count)] = f"{statistics.fmean(found):.1%}"
        table.add(cells)


TASKS = {task.__name__: task for task in (midpoints, transport, near, means)}


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--kind", choices=("vit", "llama"), default="vit")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["none", "local", "rotation"])
    parser.add_argument("--scales", type=float, nargs="+", default=[0.75, 1.0])
    parser.add_argument("--domains", nargs="+", choices=DOMAINS, default=["english", "c"])
    parser.add_argument("--windows", type=int, default=128)
    parser.add_argument("--long", action="store_true", help="carry the long fine-tunes")
    return parser


def quiet() -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def main() -> None:
    arguments = options().parse_args()
    quiet()
    TASKS[arguments.task](arguments, Measure(arguments.checkpoints, arguments.windows))


if __name__ == "__main__":
    main()
