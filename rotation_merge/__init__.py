"""Align transformers by their symmetries, then merge them with mergekit.

Importing the package registers the merge method `rotation_merge` with mergekit (once) and is otherwise cheap: the
public names below are those of `rotation_merge.api`, which is loaded when one is first used.
"""

from rotation_merge.mergekit_plugin.hooks import install

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from rotation_merge.api import align, average, barrier, evaluate, measure, merge, polish, refit, transfer
    from rotation_merge.averaging.config import AdapterMergeConfig, RefitConfig
    from rotation_merge.averaging.lora import merge_adapters
    from rotation_merge.averaging.polish import PolishConfig
    from rotation_merge.carrying.config import TransferConfig
    from rotation_merge.carrying.delta import Delta
    from rotation_merge.errors import RotationMergeError
    from rotation_merge.matching.alignment import Alignment
    from rotation_merge.matching.fit import fit
    from rotation_merge.matching.options import AlignConfig, FitConfig
    from rotation_merge.model.view import View
    from rotation_merge.run.evaluate import BarrierConfig, EvaluateConfig
    from rotation_merge.run.measure import MeasureConfig
    from rotation_merge.run.statistics import Statistics
    from rotation_merge.search.config import MergeConfig

__version__ = "0.1.0"

__all__ = [
    "Alignment",
    "FitConfig",
    "AdapterMergeConfig",
    "AlignConfig",
    "BarrierConfig",
    "EvaluateConfig",
    "MeasureConfig",
    "MergeConfig",
    "PolishConfig",
    "RefitConfig",
    "RotationMergeError",
    "Statistics",
    "Delta",
    "TransferConfig",
    "View",
    "align",
    "average",
    "barrier",
    "evaluate",
    "measure",
    "merge",
    "polish",
    "refit",
    "fit",
    "merge_adapters",
    "transfer",
]


def __getattr__(name: str) -> "Any":
    if name in __all__:
        from importlib import import_module

        return getattr(import_module("rotation_merge.api"), name)
    raise AttributeError(f"module 'rotation_merge' has no attribute '{name}'")


def __dir__() -> "list[str]":
    return sorted([*globals(), *__all__])


install()
