"""`rotation-merge evaluate`."""

from __future__ import annotations

from typing import Annotated

import rotation_merge as rm
from rotation_merge.cli.command import Device, cli_command
from rotation_merge.cli.paths import MODEL, SAMPLES
from rotation_merge.cli.show import Answer, Table
from rotation_merge.run.config import EvaluateConfig
from rotation_merge.run.sample_kinds import KINDS


@cli_command(
    "rotation-merge evaluate ./merged org/anchor --data held-out.jsonl",
    "rotation-merge evaluate ./merged/heads/emotion --data emotion.jsonl --data other-domain.jsonl",
)
def command(
    models: Annotated[tuple[str, ...], MODEL],
    *,
    data: Annotated[tuple[str, ...], SAMPLES, f"one or more: {KINDS}"],
    config: EvaluateConfig,
    device: Device = "cpu",
    keep: Annotated[bool, "keep the figures in MODEL/evaluation.json, for its card"] = False,
) -> Answer:
    """Loss and accuracy, or correlations, of each of MODELS on each of the data, and their means.

    Classifiers and language models: loss in nats and accuracy. Heads with one output, and labels with a decimal point:
    squared error, Pearson's and Spearman's correlation. Sentence encoders: both correlations of similarities.
    `error` is the loss's standard error. Classes in another order than the first model's are reordered.
    """
    results = rm.evaluate([*models], data, config, device=device, keep=keep)
    return Answer(results, [Table(results)])
