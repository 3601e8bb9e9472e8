"""`rotation-merge evaluate`."""

from __future__ import annotations

from typing import Any

import click

from rotation_merge.cli.options import config_of, config_options, data_option, device_option, usable_device
from rotation_merge.cli.paths import MODEL
from rotation_merge.cli.show import Answer, shown, table
from rotation_merge.run.evaluate import EvaluateConfig, keep_figures, score

TITLES = {"accuracy": "accuracy", "pearson": "Pearson", "spearman": "Spearman"}


@click.command(
    epilog="""Examples: rotation-merge evaluate ./merged org/anchor --data held-out.jsonl;
    rotation-merge evaluate ./merged/heads/emotion --data emotion.jsonl --data other-domain.jsonl"""
)
@click.argument("models", type=MODEL, nargs=-1, required=True)
@data_option("One or more: {}.", "sources", multiple=True, required=True)
@config_options(EvaluateConfig)
@device_option(" to compute on")
@click.option("--keep", is_flag=True, help="Keep the figures in MODEL/evaluation.json, for its card.")
@shown
def command(models: tuple[str, ...], sources: tuple[str, ...], device: str, keep: bool, **values: Any) -> Answer:
    """Loss and accuracy, or correlations, of each of MODELS on each of the data.

    Classifiers and language models: loss in nats and accuracy. Heads with one output, and labels with a decimal point:
    squared error, Pearson's and Spearman's correlation. Sentence encoders: both correlations of similarities.
    Classes in another order than the first model's are reordered.
    """
    from rotation_merge.run.data import read_samples
    from rotation_merge.run.functions import load

    config, device = config_of(EvaluateConfig, values), usable_device(device)
    table_rows: list[dict[str, Any]] = []
    for name in models:
        model = load(name, like=models[0]).to(device)
        for source in sources:
            data = read_samples(name, source, config.limit, config.batch_size, config.length, module=model)
            scores = score(model, data)
            facts = {"model": name, "data": source, "task": data.task, "examples": data.examples}
            table_rows.append({**facts, "loss": scores.loss, **scores.figures})
            if keep:
                keep_figures(name, "pixel_values" in data.batches[0], facts, {"loss": scores.loss, **scores.figures})
    return Answer(table_rows, lambda: _show(table_rows))


def _show(table_rows: list[dict[str, Any]]) -> None:
    figures = [figure for figure in TITLES if any(figure in row for row in table_rows)]
    rows = [
        [row["model"], row["data"], row["examples"], f"{row['loss']:.4f}"]
        + [f"{row[figure]:.4f}" if figure in row else "" for figure in figures]
        for row in table_rows
    ]
    headers = ["model", "data", "examples", "loss", *(TITLES[figure] for figure in figures)]
    table("", headers, rows, numbers=range(2, len(headers)))
