"""Time and memory of matching, against a straight implementation of the ICML 2025 paper's algorithm (straight.py).

    python benchmarks/matching.py                          # small: seconds
    python benchmarks/matching.py --shape llama-300m
    python benchmarks/matching.py --shape llama-8b --dtype bfloat16
    python benchmarks/matching.py --shape bert-base --relation near planted far

A donor is the anchor with noise (`near`: a fine-tune), the same after a random element of every group (`planted`), or
drawn anew (`far`). One layer is matched; both implementations see the same tensors, in a process of their own with one
thread; seconds are processor time, those of the parts wall time. Added memory is what the peak of that process grows by
over holding both layers.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from typing import Any

import straight
import torch
from record import Table
from shapes import SHAPES, rows
from torch import Tensor

from rotation_merge.architecture.build import build
from rotation_merge.architecture.model import Architecture, Block
from rotation_merge.architecture.registry import shipped
from rotation_merge.matching.block import BlockMatch, match_block
from rotation_merge.matching.gauge import random_gauge
from rotation_merge.matching.options import AlignConfig
from rotation_merge.model.apply import transform_tensor

ROLES = {
    "llama": {
        "q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o", "up_proj": "up", "gate_proj": "gate",
        "down_proj": "down",
    },
    "bert": {
        "self.query": "q", "self.key": "k", "self.value": "v", "attention.output.dense": "o",
        "intermediate.dense": "up", "output.dense": "down",
    },
}  # fmt: skip


def layer(family: str, hidden: int, ffn: int, heads: int, kv_heads: int) -> tuple[Architecture, Block]:
    """The architecture of one layer of this shape."""
    config = {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": 1,
        "hidden_act": "gelu",
        "architectures": shipped()[family].classes[:1],
    }
    architecture = build(shipped()[family], config, shipped()[family].bases[0], [])
    return architecture, architecture.layers("default")[0]


def random_tensors(block: Block, seed: int) -> dict[str, Tensor]:
    """Tensors of a layer."""
    generator = torch.Generator().manual_seed(seed)
    result = {}
    for info in block.tensors:
        sizes = [axis.size for axis in info.axes]
        if None in sizes or (info.optional and block.tensor("self_attn.q_proj.weight")):
            continue
        result[info.key] = rows(tuple(size or 1 for size in sizes), generator)
    return {key: 0.02 * x for key, x in result.items() if not ("llama" in block.name and key.endswith("bias"))}


def donor_of(
    architecture: Architecture,
    block: Block,
    anchor: dict[str, Tensor],
    relation: str,
    noise: float,
    options: AlignConfig,
) -> dict[str, Tensor]:
    """A donor that stands in this relation to the anchor."""
    if relation == "far":
        return random_tensors(block, 1)
    generator = torch.Generator().manual_seed(2)
    donor = {}
    for key, x in anchor.items():
        e = torch.randn(x.shape, generator=generator)
        donor[key] = e.mul_(noise * x.norm() / e.norm()).add_(x)
    if relation == "planted":
        gauge = random_gauge(architecture, options, generator)
        infos = {info.key: info for info in block.tensors}
        donor = {key: transform_tensor(x, infos[key], gauge) for key, x in donor.items()}
    return donor


def straight_tensors(family: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The layer as straight.py wants it: weights by role, heads or neurons first."""
    found = {}
    for key, x in tensors.items():
        for ending, role in ROLES[family].items():
            if key.endswith(f"{ending}.weight"):
                found[role] = x.T.contiguous() if role in ("o", "down") else x
                break
    return found


def run(args: dict[str, Any]) -> dict[str, Any]:
    """One measurement, in a process of its own."""
    torch.set_num_threads(args["threads"])
    family, *sizes = args["sizes"]
    architecture, block = layer(family, *sizes)
    options = AlignConfig(heads="none" if args["heads"] == "straight" else args["heads"])
    anchor = random_tensors(block, 0)
    donor = donor_of(architecture, block, anchor, args["relation"], args["noise"], options)
    dtype = getattr(torch, args["dtype"])
    anchor, donor = ({key: x.to(dtype) for key, x in side.items()} for side in (anchor, donor))
    size = sum(x.numel() for x in anchor.values()) * 4 / 2**20
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if args["heads"] == "straight":
        sides = [straight_tensors(family, side) for side in (anchor, donor)]
        seconds, _ = timed(lambda: straight.match_layer(*sides, sizes[2], sizes[3], family == "llama"), args["repeats"])
        return {"seconds": seconds, "memory": peak_since(before), "size": size, "after": None}
    seconds, match = timed(lambda: match_block(block, anchor, donor, options), args["repeats"])
    total = [sum(getattr(r, name) for r in match.records) for name in ("before", "after", "anchor")]
    return {
        "seconds": seconds,
        "memory": peak_since(before),
        "size": size,
        "parts": {record.kind: record.seconds for record in match.records},
        "gap": max((record.gap or 0.0) for record in match.records),
        "after": (total[0] / total[2], total[1] / total[2]),
    }


def timed(work: Any, repeats: int) -> tuple[float, BlockMatch]:
    """The least processor time of some repetitions, and what the last returned."""
    seconds = []
    for _ in range(repeats):
        begin = time.process_time()
        result = work()
        seconds.append(time.process_time() - begin)
    return min(seconds), result


def peak_since(before: int) -> float:
    """MiB by which the process's peak has grown."""
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main() -> None:
    """Run the measurements that the command line asks for and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-tiny")
    parser.add_argument(
        "--sizes", type=int, nargs=4, metavar=("HIDDEN", "FFN", "HEADS", "KV"), help="instead of the shape's"
    )
    parser.add_argument("--relation", choices=("near", "planted", "far"), nargs="+", default=["near"])
    parser.add_argument("--noise", type=float, default=0.05)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--heads", choices=("none", "permutation", "spectral"), nargs="+", default=["none", "permutation"]
    )
    parser.add_argument("--no-straight", action="store_true", help="leave the straight implementation out")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    sizes = [shape.family, *(args.sizes or (shape.hidden, shape.ffn, shape.heads, shape.kv_heads))]
    table = Table(f"matching-{args.shape.removeprefix('llama-').removesuffix('-base')}")
    context = multiprocessing.get_context("spawn")
    for relation in args.relation:
        reference = None
        for heads in [] if args.no_straight else ["straight"]:
            reference = measure(table, context, args, sizes, relation, heads, None)
        for heads in args.heads:
            measure(table, context, args, sizes, relation, heads, reference)


def measure(
    table: Table,
    context: Any,
    args: argparse.Namespace,
    sizes: list[Any],
    relation: str,
    heads: str,
    reference: float | None,
) -> float:
    """Run one measurement and add its row."""
    job = {"sizes": sizes, "relation": relation, "heads": heads, "noise": args.noise, "dtype": args.dtype}
    job |= {"threads": args.threads, "repeats": 1 if heads == "straight" else args.repeats}
    with context.Pool(1) as pool:
        found = pool.apply(run, (job,))
    faster = f"{reference / found['seconds']:.1f}" if reference else ""
    parts = ", ".join(f"{kind} {seconds:.3f}" for kind, seconds in found.get("parts", {}).items())
    distances = "{:.5f}, {:.5f}".format(*found["after"]) if found["after"] else ""
    what = heads if heads == "straight" else f"heads: {heads}"
    table.add(
        {
            "shape": f"{args.shape} {args.dtype}",
            "donor": relation,
            "what": what,
            "seconds": f"{found['seconds']:.3f}",
            "times faster": faster,
            "parts": parts,
            "added MiB (layer)": f"{found['memory']:.0f} ({found['size']:.0f})",
            "distance², before, after": distances,
        }
    )
    return found["seconds"]


if __name__ == "__main__":
    main()
