"""`rotation-merge verify`."""

from __future__ import annotations

from typing import Annotated, Any

import torch

from rotation_merge.cli.command import Model, cli_command
from rotation_merge.cli.paths import SAMPLES
from rotation_merge.cli.show import Answer
from rotation_merge.config import Count
from rotation_merge.errors import CheckpointError
from rotation_merge.run.data import read_samples
from rotation_merge.run.functions import kind_at
from rotation_merge.run.inputs import random_batch
from rotation_merge.run.proof import blank_model, difference, outputs_of
from rotation_merge.run.sample_kinds import SELF


@cli_command("rotation-merge verify org/donor ./aligned --float64")
def command(
    model_a: Model,
    model_b: Model,
    *,
    batches: Annotated[Count, "random batches to try"] = 4,
    seed: Annotated[int, "seed of the random inputs"] = 0,
    data: Annotated[str | None, SAMPLES, "samples to compare on, too: see 'rotation-merge barrier --help'"] = None,
    float64: Annotated[bool, "compute in double precision"] = False,
    tolerance: Annotated[
        float | None, "largest relative difference that passes. Not given: by model A's rounding"
    ] = None,
    probabilities: Annotated[bool, "compare the log-softmax of logits: see --shift-head of align"] = False,
) -> Answer:
    """Check that MODEL_A and MODEL_B compute the same function.

    Runs both on random inputs of the right kind (token ids, pixels, audio features), and on --data if given, and
    compares everything that they return by default. The largest difference is relative to the root mean square of
    MODEL_A's output. The limit is a multiple of the effect of rounding MODEL_A's own weights, to the coarser of the two
    storage types, or to float32. Models run one layer at a time. Exit code 0: the same; 1: not.
    """
    compute = torch.float64 if float64 else torch.float32
    if kind_at(model_b) is not kind_at(model_a):
        problem, remedy = f"is of another class than {model_a}", "compare models of one class and size"
        raise CheckpointError(problem, where=model_b, remedy=remedy)
    blank, generator = blank_model(model_a), torch.Generator().manual_seed(seed)
    inputs = [random_batch(blank, generator) for _ in range(batches)]
    if data is not None:
        inputs += read_samples(model_a, data, limit=32, module=None if data == SELF else blank).batches
    worst = difference(
        model_a,
        model_b,
        inputs,
        outputs_of(model_a, inputs, compute),
        dtype=compute,
        probabilities=probabilities,
        tolerance=tolerance,
        seed=seed,
    )
    verdict = f"the two models {'compute the same' if worst.passes else 'differ'}"
    figures = f"{worst.absolute:.3g}, {worst.relative:.3g} of the size of {worst.output}"
    lines = verdict, f"largest difference over {len(inputs)} batches: {figures}; {worst.allowed:.3g} is allowed"
    facts: dict[str, Any] = {"same": worst.passes, "tolerance": worst.allowed, "batches": len(inputs)}
    facts |= {"absolute": worst.absolute, "relative": worst.relative, "output": worst.output}
    return Answer(facts, lines, 0 if worst.passes else 1)
