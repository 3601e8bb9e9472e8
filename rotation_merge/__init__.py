"""Align transformers by their symmetries, then merge them with mergekit.

Importing the package registers the merge method `rotation_merge` with mergekit (once) and is otherwise cheap: the
public names below are loaded with their modules when one is first used.
"""

from rotation_merge.mergekit_plugin.hooks import install

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from rotation_merge.api import align, average, barrier, evaluate, measure, merge, polish, refit, transfer
    from rotation_merge.averaging.config import AdapterMergeConfig, PolishConfig, RefitConfig
    from rotation_merge.averaging.lora import merge_adapters
    from rotation_merge.carrying.config import TransferConfig
    from rotation_merge.carrying.delta import Delta
    from rotation_merge.cli.check import check
    from rotation_merge.cli.demo import demo
    from rotation_merge.cli.doctor import doctor
    from rotation_merge.cli.inspect import inspect
    from rotation_merge.cli.push import push
    from rotation_merge.cli.verify import verify
    from rotation_merge.errors import RotationMergeError
    from rotation_merge.matching.alignment import Alignment
    from rotation_merge.matching.fit import fit
    from rotation_merge.matching.options import AlignConfig, FitConfig
    from rotation_merge.model.view import View
    from rotation_merge.run.config import BarrierConfig, EvaluateConfig, MeasureConfig
    from rotation_merge.run.statistics import Statistics
    from rotation_merge.search.config import MergeConfig

__version__ = "0.1.0"

__all__ = [
    "AdapterMergeConfig",
    "AlignConfig",
    "Alignment",
    "BarrierConfig",
    "Delta",
    "EvaluateConfig",
    "FitConfig",
    "MeasureConfig",
    "MergeConfig",
    "PolishConfig",
    "RefitConfig",
    "RotationMergeError",
    "Statistics",
    "TransferConfig",
    "View",
    "align",
    "average",
    "barrier",
    "check",
    "demo",
    "doctor",
    "evaluate",
    "fit",
    "inspect",
    "measure",
    "merge",
    "merge_adapters",
    "polish",
    "push",
    "refit",
    "transfer",
    "verify",
]

COMMANDS = ("check", "demo", "doctor", "inspect", "push", "verify")
"""Functions that give what the command of the same name prints."""


def __getattr__(name: str) -> "Any":
    if name in __all__:
        from importlib import import_module

        home = f"rotation_merge.cli.{name}" if name in COMMANDS else "rotation_merge.api"
        return getattr(import_module(home), name)
    raise AttributeError(f"module 'rotation_merge' has no attribute '{name}'")


def __dir__() -> "list[str]":
    return sorted([*globals(), *__all__])


install()
