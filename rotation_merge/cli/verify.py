"""`rotation-merge verify`."""

from __future__ import annotations

from typing import Any

import click
import torch

from rotation_merge.cli.show import json_option, print_json, say, shown
from rotation_merge.errors import CheckpointError
from rotation_merge.samples.functions import Batch, load, outputs, random_batch, stored_dtype

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Largest difference, in units of the outputs' root mean square, by the dtype the weights were rounded to."""


@click.command(epilog="Example: rotation-merge verify org/donor ./aligned --float64")
@click.argument("model_a")
@click.argument("model_b")
@click.option("--batches", default=4, show_default=True, type=click.IntRange(min=1), help="Random batches to try.")
@click.option("--seed", default=0, show_default=True, help="Seed of the random inputs.")
@click.option("--data", metavar="DATA", help="Real inputs too: see 'rotation-merge barrier --help'.")
@click.option("--float64", "double", is_flag=True, help="Compute in double precision.")
@click.option(
    "--tolerance", type=float, help="Largest relative difference that passes; by the weights' dtype if not given."
)
@json_option
@shown
def command(
    model_a: str,
    model_b: str,
    batches: int,
    seed: int,
    data: str | None,
    double: bool,
    tolerance: float | None,
    as_json: bool,
) -> int:
    """Do MODEL_A and MODEL_B compute the same function?

    Both are run on random inputs of the right kind (token ids, pixels, audio features) and on --data where given. The
    largest difference is relative to the root mean square of MODEL_A's outputs. Weights rounded to bfloat16 differ by
    that rounding, so the tolerance follows the stored dtype. Exit code 0: the same; 1: not.
    """
    compute = torch.float64 if double else torch.float32
    a, b = load(model_a, compute), load(model_b, compute)
    generator = torch.Generator().manual_seed(seed)
    inputs = [random_batch(a, generator) for _ in range(batches)]
    if data is not None:
        from rotation_merge.samples.data import read_batches

        inputs += read_batches(data, model_a, a, limit=32).batches
    worst = largest_difference(a, b, inputs, (model_a, model_b))
    coarsest = max(map(stored_dtype, (model_a, model_b)), key=lambda d: TOLERANCE.get(d, 0.0))
    allowed = tolerance if tolerance is not None else TOLERANCE.get(coarsest, 1e-4)
    same = worst["relative"] <= allowed
    if as_json:
        print_json({"same": same, "tolerance": allowed, "batches": len(inputs), **worst})
    else:
        size = f"{worst['absolute']:.3g}, {worst['relative']:.3g} of the outputs' size"
        stored = str(coarsest).removeprefix("torch.")
        say(f"largest difference over {len(inputs)} batches: {size}, in {worst['output']}")
        say(f"allowed: {allowed:.3g} of the outputs' size" + (f" (weights in {stored})" if tolerance is None else ""))
        say("the two models compute the same" if same else "the two models differ", "green" if same else "red")
    return 0 if same else 1


def largest_difference(a: Any, b: Any, inputs: list[Batch], names: tuple[str, str]) -> dict[str, Any]:
    """The largest difference between two models' outputs.

    Raises:
        CheckpointError: their outputs have other names or shapes.
    """
    worst: dict[str, Any] = {"absolute": 0.0, "relative": 0.0, "output": "all outputs"}
    for batch in inputs:
        first, second = outputs(a, batch), outputs(b, batch)
        for name, x in first.items():
            y = second.get(name)
            if y is None or y.shape != x.shape:
                given = "nothing" if y is None else str(list(y.shape))
                raise CheckpointError(
                    f"output '{name}' is {given}, that of {names[0]} is {list(x.shape)}",
                    where=names[1],
                    remedy="only models of one class and size can be compared",
                )
            difference = float((x - y).abs().max())
            relative = difference / (float(x.square().mean().sqrt()) or 1.0)
            if not difference <= worst["absolute"]:
                worst = {"absolute": difference, "relative": relative, "output": name}
            if difference != difference:
                return {"absolute": float("inf"), "relative": float("inf"), "output": f"{name} (NaN)"}
    return worst
