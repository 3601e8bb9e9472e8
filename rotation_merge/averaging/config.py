"""Configs of refits and adapter merges, the source of their recipe keys, options and documentation."""

from __future__ import annotations

from dataclasses import dataclass

from rotation_merge.config import EACH, FOLDER, RECIPE, Config, option

AUTO = "auto"
"""A rank that is chosen by what it keeps."""


@dataclass(frozen=True)
class RefitConfig(Config):
    """Options of a refit."""

    ridge: float = option(0.01, "strength of the pull of each map towards its start", low=0)
    alpha: float = option(1.0, "share of targets from the models' own inputs, not the merge's", low=0, high=1)
    lambda_: float = option(1.0, "factor of the start's difference to base_model", key="lambda")
    gram_norm: str = option(
        "none", "norm: the Gram of each model's samples is divided by its norm", choices=("none", "norm")
    )
    norms: str = option(
        "keep", "solve: gains and shifts of norms are solved too, channel by channel", choices=("keep", "solve")
    )
    targets: str | None = option(
        None,
        "own: each sample's target is its own model's output; mean: the mean of all outputs",
        str,
        choices=("own", "mean"),
        scope=RECIPE,
        delegates=("refit",),
        detail="`own`: each model answers its own samples. `mean`: all models answer all samples.",
    )
    start: str = option(
        "average",
        "start of the maps before they are solved",
        choices=("average", "anchor", "task_arithmetic", "wudi", "tsv", "iso"),
        scope=RECIPE,
        delegates=("refit",),
        detail="Weights before solving: the average, the anchor's, or a merge of the task vectors.",
    )
    spill: str | None = option(
        None,
        "folder for hidden states; None: in memory",
        FOLDER,
        scope=RECIPE,
        delegates=("refit",),
        detail="Folder for hidden states, instead of memory.",
    )
    samples: int = option(
        64,
        "number of samples of each model, if a source is named",
        low=1,
        scope=EACH,
        delegates=("refit",),
        detail="Number of samples.",
    )
    seed: int = option(0, "seed of written samples")


@dataclass(frozen=True)
class AdapterMergeConfig(Config):
    """The size of a merged adapter."""

    rank: int | str | None = option(
        None, "rank of the result; not given: the sum of the ranks, which loses nothing", int, low=1, words=(AUTO,)
    )
    energy: float = option(0.99, f"share of each map's squared norm that rank {AUTO} keeps", low=0, high=1, above=True)
    seed: int = option(0, "seed of the entries that DARE drops")
