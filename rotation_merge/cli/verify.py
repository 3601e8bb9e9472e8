"""`rotation-merge verify`."""

from __future__ import annotations

import click
import torch

from rotation_merge.cli.options import data_option
from rotation_merge.cli.paths import MODEL
from rotation_merge.cli.show import Answer, say, shown
from rotation_merge.errors import CheckpointError
from rotation_merge.run.functions import kind_at
from rotation_merge.run.inputs import random_batch
from rotation_merge.run.proof import ROUNDINGS, ModelOutputs, difference


@click.command(epilog="Example: rotation-merge verify org/donor ./aligned --float64")
@click.argument("model_a", type=MODEL)
@click.argument("model_b", type=MODEL)
@click.option("--batches", default=4, show_default=True, type=click.IntRange(min=1), help="Random batches to try.")
@click.option("--seed", default=0, show_default=True, help="Seed of the random inputs.")
@data_option("Samples to compare on, too: see 'rotation-merge barrier --help'.", metavar="DATA")
@click.option("--float64", "double", is_flag=True, help="Compute in double precision.")
@click.option(
    "--tolerance", type=float, help="Largest relative difference that passes; by the model's own rounding if not given."
)
@click.option("--probabilities", is_flag=True, help="Compare the log-softmax of logits: see --shift-head of align.")
@shown
def command(
    model_a: str,
    model_b: str,
    batches: int,
    seed: int,
    data: str | None,
    double: bool,
    tolerance: float | None,
    probabilities: bool,
) -> Answer:
    """Check that MODEL_A and MODEL_B compute the same function.

    Runs both on random inputs of the right kind (token ids, pixels, audio features), and on --data if given, and
    compares everything that they return by default. The largest difference is relative to the root mean square of
    MODEL_A's output. The limit is a multiple of the effect of rounding MODEL_A's own weights, to the coarser of the two
    storage types, or to float32. Models above 500 million weights run one layer at a time. Exit code 0: the same;
    1: not.
    """
    compute = torch.float64 if double else torch.float32
    a, b = ModelOutputs(model_a, compute), ModelOutputs(model_b, compute, like=model_a)
    if (kind := kind_at(model_b)) is not kind_at(model_a):
        raise CheckpointError(
            f"is a {kind.__name__}, {model_a} a {kind_at(model_a).__name__}",
            where=model_b,
            remedy="only models of one class and size can be compared",
        )
    generator = torch.Generator().manual_seed(seed)
    inputs = [random_batch(a.model, generator) for _ in range(batches)]
    if data is not None:
        from rotation_merge.run.data import read_samples
        from rotation_merge.run.sample_kinds import SELF

        if data == SELF and a.is_large:
            problem = "is too large to be held in memory, so it cannot write text"
            raise CheckpointError(problem, where=model_a, remedy="give --data a file")
        inputs += read_samples(model_a, data, limit=32, module=a.model).batches
    worst = difference(a, a.on(inputs), b, inputs, probabilities=probabilities, tolerance=tolerance, seed=seed)
    same = worst.passes

    def show() -> None:
        size = f"{worst.absolute:.3g}, {worst.relative:.3g} of the outputs' size"
        named = str(worst.dtype).removeprefix("torch.")
        why = f" ({ROUNDINGS:g} times the effect of rounding to {named})" if tolerance is None else ""
        say("the two models compute the same" if same else "the two models differ", "green" if same else "red")
        say(f"largest difference over {len(inputs)} batches: {size}, in {worst.output}")
        say(f"allowed: {worst.allowed:.3g} of the outputs' size{why}")

    facts = {"same": same, "tolerance": worst.allowed, "batches": len(inputs)}
    facts |= {name: getattr(worst, name) for name in ("absolute", "relative", "output")}
    return Answer(facts, show, 0 if same else 1)
