"""Configs of refits and adapter merges, the source of their recipe keys, options and documentation."""

from __future__ import annotations

from dataclasses import dataclass

from rotation_merge.config import EACH, FOLDER, RECIPE, Config, option

AUTO = "auto"
"""A rank that is chosen by the share of the squared norm that it keeps."""


@dataclass(frozen=True)
class RefitConfig(Config):
    """Options of a refit."""

    ridge: float = option(0.01, "strength of the pull of each linear map towards its start", low=0)
    lambda_: float = option(1.0, "factor of the start's difference from `base_model`", key="lambda")
    targets: str | None = option(
        None,
        "target of each sample. `own`: the output of the model whose sample it is; `mean`: the mean of all models' "
        "outputs. Not given: `mean` if all models have the same `data`, else `own`",
        str,
        choices=("own", "mean"),
        scope=RECIPE,
        delegates=("refit",),
    )
    start: str = option(
        "average",
        "weights before solving: the average, the anchor's, or a merge of the task vectors",
        choices=("average", "anchor", "task_arithmetic", "wudi", "tsv", "iso"),
        scope=RECIPE,
        delegates=("refit",),
    )
    spill: str | None = option(
        None,
        "folder for hidden states. Not given: in memory",
        FOLDER,
        scope=RECIPE,
        delegates=("refit",),
    )
    samples: int = option(
        64,
        "number of samples of each model (default with `carry: distil`: 512)",
        low=1,
        scope=EACH,
        delegates=("refit",),
    )
    seed: int = option(0, "seed of the samples that models write")


@dataclass(frozen=True)
class AdapterMergeConfig(Config):
    """The size of a merged adapter."""

    rank: int | str | None = option(
        None, "rank of the result. Not given: the sum of the ranks, which loses nothing", int, low=1, words=(AUTO,)
    )
    energy: float = option(
        0.99, f"share of each map's squared norm that rank `{AUTO}` keeps", low=0, high=1, above=True
    )
    seed: int = option(0, "seed of the entries that DARE drops")
