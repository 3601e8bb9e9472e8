"""Align transformers by their symmetries, then merge them with mergekit.

Importing the package registers the merge method `rotation_merge` with mergekit (once) and is otherwise cheap: the
public names below are loaded when they are first used.
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

_PUBLIC = {
    "Alignment": "rotation_merge.matching.alignment",
    "FitConfig": "rotation_merge.matching.options",
    "AdapterMergeConfig": "rotation_merge.averaging.config",
    "AlignConfig": "rotation_merge.matching.options",
    "BarrierConfig": "rotation_merge.run.evaluate",
    "EvaluateConfig": "rotation_merge.run.evaluate",
    "MeasureConfig": "rotation_merge.run.measure",
    "MergeConfig": "rotation_merge.search.config",
    "PolishConfig": "rotation_merge.averaging.polish",
    "RefitConfig": "rotation_merge.averaging.config",
    "RotationMergeError": "rotation_merge.errors",
    "Statistics": "rotation_merge.run.statistics",
    "Delta": "rotation_merge.carrying.delta",
    "TransferConfig": "rotation_merge.carrying.config",
    "View": "rotation_merge.model.view",
    "align": "rotation_merge.api",
    "average": "rotation_merge.api",
    "barrier": "rotation_merge.api",
    "evaluate": "rotation_merge.api",
    "measure": "rotation_merge.api",
    "merge": "rotation_merge.api",
    "polish": "rotation_merge.api",
    "refit": "rotation_merge.api",
    "fit": "rotation_merge.matching.fit",
    "merge_adapters": "rotation_merge.averaging.lora",
    "transfer": "rotation_merge.api",
}

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
    if name in _PUBLIC:
        from importlib import import_module

        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'rotation_merge' has no attribute '{name}'")


def __dir__() -> "list[str]":
    return sorted([*globals(), *__all__])


install()
