"""Peak memory and wall time of an aligned merge against mergekit's plain linear, on the same machine in the same run.

Two bf16 Llamas of 300M parameters (24 layers, width 1024, 16 heads, 4 KV heads) are written with random weights and
merged half and half by `mergekit-yaml`, each merge in a process of its own. The donor is a fine-tune of the anchor
(its weights plus 2% noise), a planted twin (the anchor moved by a random element of every local group), or an
independent model. Goals: peak memory at most 1.25 times plain linear; wall time at most 1.5 times for the fine-tune.

    python benchmarks/memory.py --repeats 2
    python benchmarks/memory.py --residual

With `--residual`, one merge each of the fine-tune: plain, with local spaces, and with larger and larger stream groups.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from record import Table
from safetensors.torch import save_file
from transformers import LlamaConfig

from rotation_merge.architectures import Architecture, resolve
from rotation_merge.matching.gauge import random_gauge
from rotation_merge.matching.options import MatchOptions
from rotation_merge.matching.state import transform_state

OPTIONS: dict[str, object] = {"attention": "rotation", "heads": "permutation", "ffn": "permutation", "rescale": True}
STREAMS: dict[str, dict[str, object]] = {
    "mergekit's linear": {},
    "local spaces": OPTIONS,
    "and residual signed permutation": {**OPTIONS, "residual": "signed_permutation"},
    "and residual rotation (`untie: true`)": {**OPTIONS, "residual": "rotation", "untie": True},
}
KINDS = {
    "fine-tune": "fine-tune of the anchor (2% noise)",
    "planted": "planted twin",
    "independent": "independent model (one repeat)",
}


def llama(layers: int) -> tuple[LlamaConfig, Architecture]:
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )
    names = [f"model.{n}" for n in ("embed_tokens.weight", "norm.weight")]
    parts = ("input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    parts += tuple(f"self_attn.{p}_proj" for p in "qkvo")
    names += [f"model.layers.{i}.{part}.weight" for i in range(layers) for part in parts]
    return config, resolve(config.to_dict(), names, "benchmark")


def random_state(architecture: Architecture, seed: int) -> dict[str, torch.Tensor]:
    """Weights of the size that training gives them; norm gains near one."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, tensor in architecture.named().items():
        if tensor.optional:
            continue
        shape = [axis.size or 32000 for axis in tensor.axes]
        noise = torch.randn(shape, generator=generator)
        state[name] = (1 + 0.1 * noise if len(shape) == 1 else 0.02 * noise).bfloat16()
    return state


def donor(kind: str, architecture: Architecture, anchor: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    if kind == "independent":
        return random_state(architecture, 8)
    if kind == "planted":
        gauge = random_gauge(architecture, MatchOptions(**OPTIONS), generator)
        return transform_state(architecture, anchor, gauge)
    return {
        name: (t.float() + 0.02 * t.float().std() * torch.randn(t.shape, generator=generator)).bfloat16()
        for name, t in anchor.items()
    }


def write(state: dict[str, torch.Tensor], config: LlamaConfig, where: Path) -> Path:
    where.mkdir(parents=True)
    config.save_pretrained(where)
    save_file(state, where / "model.safetensors", {"format": "pt"})
    return where


def recipe(options: Mapping[str, object], anchor: Path, other: Path) -> dict[str, object]:
    """Half and half; no options: by mergekit's own linear."""
    models = [{"model": str(path), "parameters": {"weight": 0.5}} for path in (anchor, other)]
    return {
        "merge_method": "rotation_merge" if options else "linear",
        "base_model": str(anchor),
        "models": models,
        "parameters": {"delegate": "linear", **options} if options else {},
        "dtype": "bfloat16",
    }


@dataclass(frozen=True)
class Cost:
    """Seconds on the wall, seconds of processor time, and peak resident megabytes of one merge."""

    wall: float
    processor: float
    peak: float


def run(options: Mapping[str, object], anchor: Path, other: Path, folder: Path) -> Cost:
    """One merge in a process of its own, on one thread."""
    path = folder / "recipe.yml"
    path.write_text(yaml.safe_dump(recipe(options, anchor, other)))
    command = [Path(sys.executable).with_name("mergekit-yaml"), path, folder / "out", "--quiet"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    begin = time.perf_counter()
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log, env=environment)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit((folder / "log").read_text())
    return Cost(time.perf_counter() - begin, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)


@contextmanager
def written(kind: str, layers: int) -> Iterator[tuple[Path, Path, Path]]:
    """Anchor, donor, and the folder that they are in."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config, architecture = llama(layers)
        state = random_state(architecture, 1)
        other = write(donor(kind, architecture, state), config, folder / "donor")
        yield write(state, config, folder / "anchor"), other, folder


def compare(kind: str, repeats: int, layers: int) -> dict[str, object]:
    found: list[tuple[Cost, Cost]] = []
    with written(kind, layers) as places:
        for _ in range(1 if kind == "independent" else repeats):
            found.append((run({}, *places), run(OPTIONS, *places)))
    plain, aligned = zip(*found, strict=True)
    wall, processor = (
        [statistics.median(getattr(cost, clock) for cost in side) for side in (plain, aligned)]
        for clock in ("wall", "processor")
    )
    peak = [max(cost.peak for cost in side) for side in (plain, aligned)]
    return {
        "donor": KINDS[kind],
        "plain linear": f"{wall[0]:.1f} s",
        "aligned": f"{wall[1]:.1f} s",
        "wall ratio": f"{wall[1] / wall[0]:.2f}",
        "processor ratio": f"{processor[1] / processor[0]:.2f}",
        "peak, plain linear": f"{peak[0]:.0f} MB",
        "peak, aligned": f"{peak[1]:.0f} MB",
        "memory ratio": f"{peak[1] / peak[0]:.2f}",
    }


def streams(layers: int) -> None:
    table = Table("residual-memory")
    with written("fine-tune", layers) as places:
        for case, options in STREAMS.items():
            cost = run(options, *places)
            cells = {"seconds": f"{cost.wall:.1f}", "processor": f"{cost.processor:.1f}", "peak MB": f"{cost.peak:.0f}"}
            table.add({"case": case, **cells})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--donors", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--residual", action="store_true")
    arguments = parser.parse_args()
    if arguments.residual:
        return streams(arguments.layers)
    table = Table("memory")
    for kind in arguments.donors:
        table.add(compare(kind, arguments.repeats, arguments.layers))


if __name__ == "__main__":
    main()
