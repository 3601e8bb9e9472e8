"""Configs of refits, of adapter merges and of polishing, the source of their recipe keys, options and documentation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Final, Literal

from annotated_types import Ge, Gt, Le
from pydantic.dataclasses import dataclass

from rotation_merge.config import EACH, RECIPE, Config, Count, Length, NotNegative, Rate, option
from rotation_merge.errors import RecipeError, nearest, short

_CALIBRATION = ("calibrate", "alpha")
_STOCK = ("int8_mask", "normalize", "rescale", "lambda", "density", *_CALIBRATION)
_UNCALIBRATED = ("lambda", "others", "lengths")
_TASK_VECTORS = (*_UNCALIBRATED, *_CALIBRATION)
ADAPTER_PARAMETERS: dict[str, tuple[str, ...]] = {
    "linear": (),
    **dict.fromkeys(("breadcrumbs", "breadcrumbs_ties"), (*_STOCK, "gamma")),
    **dict.fromkeys(("dare_linear", "dare_ties"), _STOCK),
    **dict.fromkeys(("della", "della_linear"), (*_STOCK, "epsilon")),
    **dict.fromkeys(("task_arithmetic", "ties"), _STOCK),
    "wudi": (*_TASK_VECTORS, "ridge"),
    "tsv": _TASK_VECTORS,
    "iso": _UNCALIBRATED,
}
"""Parameters of methods that merge adapters: mergekit's that work on task vectors, and ours."""
ADAPTER_METHODS = tuple(ADAPTER_PARAMETERS)
AdapterMethod = Literal[ADAPTER_METHODS]  # type: ignore[valid-type]

AUTO: Final = "auto"
"""A rank that is chosen by the share of the squared norm that it keeps; a ridge by held-out samples."""


def check_adapter_parameters(method: str, names: Iterable[str]) -> None:
    """Refuse parameters that a method that merges adapters does not have.

    Raises:
        RecipeError: names the first, and the nearest one that the method has.
    """
    known = ADAPTER_PARAMETERS[method]
    for name in (name for name in names if name not in known):
        remedy = f"{nearest(name, known)}; it has {', '.join(known)}" if known else "leave it out"
        raise RecipeError(f"'{method}' has no parameter '{name}'", remedy=remedy)


RIDGE = 0.01
"""Of a refit, also where samples are too few to choose it."""

CALIBRATED = tuple(name for name in (*ADAPTER_METHODS, "ram", "sce") if name not in ("linear", "iso"))
"""Delegates whose merged change can be calibrated: it has singular vectors of its own, which behind `iso`, with all
singular values equal, any others might stand for."""


def numbers_for(weights: Any, count: int, of: str) -> list[float]:
    """Weights that a caller gave, one for each of `count` models.

    Args:
        of: what they are weights of, in the singular.

    Raises:
        RecipeError: they are no numbers, or too many or too few.
    """
    try:
        values = [float(weight) for weight in weights]
    except (TypeError, ValueError) as error:
        raise RecipeError(f"'weights' are {short(repr(weights))}", remedy=f"give one number for each {of}") from error
    if len(values) != count:
        raise RecipeError(f"{len(values)} weights for {count} {of}s", remedy=f"give one weight for each {of}")
    return values


@dataclass(frozen=True)
class CalibrationConfig(Config):
    """What is done to the merged change of each linear map."""

    calibrate: Literal["svc"] | None = option(
        None,
        "`svc`: merged changes have less of what the models' changes share; with all delegates of changes but `iso`",
        scope=RECIPE,
        delegates=CALIBRATED,
    )
    alpha: Annotated[float, Gt(0), Le(1)] = option(
        0.5,
        "least overlap with `calibrate`; smaller ones go further",
        scope=RECIPE,
        delegates=CALIBRATED,
    )


@dataclass(frozen=True)
class RefitConfig(Config):
    """Options of a refit."""

    ridge: NotNegative | Literal["auto"] = option(
        RIDGE,
        f"strength of the pull of each linear map towards its start. `{AUTO}`: the best on a quarter of the samples",
    )
    lambda_: float = option(1.0, "factor of the start's difference from `base_model`", key="lambda")
    targets: Literal["own", "mean"] | None = option(
        None,
        "target of each sample. `own`: the output of the model whose sample it is; `mean`: the mean of all models' "
        "outputs. Not given: `mean` if all models have the same `data`, else `own`",
        scope=RECIPE,
        delegates=("refit",),
    )
    start: Literal["average", "anchor", "task_arithmetic", "wudi", "tsv", "calibrated_tsv", "iso"] = option(
        "average",
        "weights before solving: the average, the anchor's, or a merge of the task vectors",
        scope=RECIPE,
        delegates=("refit",),
    )
    samples: Count = option(
        64,
        "number of samples of each model (default with `carry: distil`: 512)",
        scope=EACH,
        delegates=("refit",),
    )
    seed: int = option(0, "seed of the samples that models write")


@dataclass(frozen=True)
class AdapterMergeConfig(Config):
    """The size of a merged adapter."""

    rank: Count | Literal["auto"] | None = option(
        None, "rank of the result. Not given: the sum of the ranks, which loses nothing"
    )
    energy: Annotated[float, Gt(0), Le(1)] = option(0.99, f"share of each map's squared norm that rank `{AUTO}` keeps")
    seed: int = option(0, "seed of the entries that DARE drops")

    def check_energy(self) -> None:
        """Refuse an energy that no rank is chosen by.

        Raises:
            RecipeError: names the rank.
        """
        if self.energy != AdapterMergeConfig.energy and self.rank != AUTO:
            raise RecipeError(f"'energy' has no effect with rank {self.rank or 'not given'}", remedy="choose rank auto")


@dataclass(frozen=True)
class PolishConfig(Config):
    """Options of polishing."""

    samples: Length = option(64, "number of samples of each teacher")
    steps: Count = option(50, "optimiser steps")
    lora: Annotated[int, Ge(0)] = option(0, "train a LoRA of this rank; `0`: all weights")
    merge_lora: bool = option(False, "write the model with the LoRA merged in, instead of an adapter")
    learning_rate: Rate | None = option(None, "learning rate. Not given: chosen on held-out samples")
    length: Length = option(128, "tokens in a text")
    seed: int = option(0, "seed of all random numbers")
