"""`rotation-merge verify`."""

from __future__ import annotations

from typing import Annotated, Any

from rotation_merge.cli.command import Model, cli_command
from rotation_merge.cli.paths import SAMPLES
from rotation_merge.cli.show import Answer
from rotation_merge.config import Count
from rotation_merge.errors import CheckpointError
from rotation_merge.run.sample_kinds import SELF


def verify(
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
    import torch

    from rotation_merge.run.data import read_samples
    from rotation_merge.run.functions import read_config
    from rotation_merge.run.proof import allowed_difference, blank_model, largest_difference, outputs_of, random_batch

    compute = torch.float64 if float64 else torch.float32
    model_a, model_b = map(str, (model_a, model_b))
    kind_b, kind_a = (read_config(model).get("architectures") for model in (model_b, model_a))
    if kind_b != kind_a:
        problem, remedy = f"is of another class than {model_a}", "compare models of one class and size"
        raise CheckpointError(problem, where=model_b, remedy=remedy)
    blank, generator = blank_model(model_a), torch.Generator().manual_seed(seed)
    inputs = [random_batch(blank, generator) for _ in range(batches)]
    if data is not None:
        inputs += read_samples(model_a, data, limit=32, module=None if data == SELF else blank).batches
    expected = outputs_of(model_a, inputs, compute)
    if tolerance is None:
        tolerance = allowed_difference(model_a, model_b, inputs, expected, compute, probabilities, seed)
    results = outputs_of(model_b, inputs, compute, like=model_a)
    absolute, relative, output = largest_difference(expected, results, (model_a, model_b), probabilities)
    same = relative <= tolerance
    figures = f"{absolute:.3g}, {relative:.3g} of the size of {output}; {tolerance:.3g} is allowed"
    lines = (
        f"the two models {'compute the same' if same else 'differ'}",
        f"largest difference over {len(inputs)} batches: {figures}",
    )
    facts: dict[str, Any] = {"same": same, "tolerance": tolerance, "batches": len(inputs)}
    return Answer({**facts, "absolute": absolute, "relative": relative, "output": output}, lines, 0 if same else 1)


command = cli_command("rotation-merge verify org/donor ./aligned --float64")(verify)
