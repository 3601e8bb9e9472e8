"""Peak memory and wall time of an aligned merge against mergekit's plain linear, on the same machine in the same run.

Two bf16 Llamas of 300M parameters (24 layers, width 1024, 16 heads, 4 KV heads) are written with random weights and
merged half and half by `mergekit-yaml`, each merge in a process of its own. The donor is a fine-tune of the anchor
(its weights plus 2% noise), a planted twin (the anchor moved by a random element of every local group), or an
independent model. Goals: peak memory at most 1.25 times plain linear; wall time at most 1.5 times for the fine-tune.

    python benchmarks/memory.py --repeats 3
    python benchmarks/memory.py --repeats 1 --donors fine-tune --residual rotation
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import yaml
from record import Table
from safetensors.torch import save_file
from transformers import LlamaConfig

from rotation_merge.architectures import Architecture, resolve
from rotation_merge.architectures.build import required
from rotation_merge.matching.gauge import random_gauge
from rotation_merge.matching.options import MatchOptions
from rotation_merge.matching.state import transform_state

OPTIONS = {"attention": "rotation", "heads": "permutation", "ffn": "permutation", "rescale": True}
RESIDUAL: dict[str, object] = {}
KINDS = ("fine-tune", "planted", "independent")


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
    named = architecture.named()
    for name in required(architecture):
        shape = [axis.size or 32000 for axis in named[name].axes]
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


def recipe(method: str, anchor: Path, other: Path) -> dict[str, object]:
    models = [{"model": str(path), "parameters": {"weight": 0.5}} for path in (anchor, other)]
    parameters = {"delegate": "linear", **OPTIONS, **RESIDUAL} if method == "rotation_merge" else {}
    return {
        "merge_method": method,
        "base_model": str(anchor),
        "models": models,
        "parameters": parameters,
        "dtype": "bfloat16",
    }


def run(method: str, anchor: Path, other: Path, folder: Path) -> tuple[float, float]:
    """Seconds and peak resident megabytes of one merge."""
    path = folder / f"{method}.yml"
    path.write_text(yaml.safe_dump(recipe(method, anchor, other)))
    command = [Path(sys.executable).with_name("mergekit-yaml"), path, folder / "out", "--quiet"]
    begin = time.perf_counter()
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit((folder / "log").read_text())
    return time.perf_counter() - begin, used.ru_maxrss / 1024


def compare(kind: str, repeats: int, layers: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config, architecture = llama(layers)
        state = random_state(architecture, 1)
        other = write(donor(kind, architecture, state), config, folder / "donor")
        anchor = write(state, config, folder / "anchor")
        del state
        results: dict[str, list[tuple[float, float]]] = {"linear": [], "rotation_merge": []}
        for _ in range(repeats):
            for method, values in results.items():
                values.append(run(method, anchor, other, folder))
    seconds = {m: statistics.median(v[0] for v in values) for m, values in results.items()}
    peak = {m: max(v[1] for v in values) for m, values in results.items()}
    return {
        "donor": kind,
        "plain linear": f"{seconds['linear']:.1f} s",
        "aligned": f"{seconds['rotation_merge']:.1f} s",
        "wall ratio": f"{seconds['rotation_merge'] / seconds['linear']:.2f}",
        "peak, plain linear": f"{peak['linear']:.0f} MB",
        "peak, aligned": f"{peak['rotation_merge']:.0f} MB",
        "memory ratio": f"{peak['rotation_merge'] / peak['linear']:.2f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--donors", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--residual", choices=("permutation", "signed_permutation", "rotation"))
    arguments = parser.parse_args()
    if arguments.residual:
        RESIDUAL.update(residual=arguments.residual, untie=arguments.residual == "rotation")
    table = Table("residual-memory" if arguments.residual else "memory")
    for kind in arguments.donors:
        table.add(compare(kind, arguments.repeats, arguments.layers))


if __name__ == "__main__":
    main()
