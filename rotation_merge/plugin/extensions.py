"""How each of mergekit's modules is extended. Merges by other methods are left exactly as they are."""

from __future__ import annotations

import difflib
import functools
import re
from types import ModuleType
from typing import Any

from rotation_merge.plugin.console import one_line

METHOD = "rotation_merge"


def _once(target: Any) -> bool:
    """False if `target` has been extended before."""
    if getattr(target, "_rotation_merge", False):
        return False
    target._rotation_merge = True
    return True


def _resembles(name: object) -> bool:
    """Whether `name` is our method's name, perhaps misspelt."""
    return isinstance(name, str) and bool(difflib.get_close_matches(name.lower(), [METHOD], cutoff=0.8))


def extend_registry(module: ModuleType) -> None:
    """Register the merge method."""
    if METHOD not in module._METHODS:
        from rotation_merge.plugin.method import RotationMergeMethod

        module.register(RotationMergeMethod())


def extend_config(module: ModuleType) -> None:
    """Check top-level keys, which mergekit would ignore, where the recipe is ours."""
    configuration = module.MergeConfiguration
    if not _once(module):
        return
    validate = configuration.model_validate.__func__

    @functools.wraps(validate)
    def model_validate(cls: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(obj, dict) and (METHOD in obj.values() or _resembles(obj.get("merge_method"))):
            from rotation_merge.plugin.recipe import check_keys, restore_paths

            with one_line():
                check_keys(obj)
                return validate(cls, restore_paths(obj), *args, **kwargs)
        return validate(cls, obj, *args, **kwargs)

    configuration.model_validate = classmethod(model_validate)


def extend_architecture(module: ModuleType) -> None:
    """Give our own architecture definitions to our own merges."""
    if not _once(module):
        return
    stock = module.get_architecture_info

    @functools.wraps(stock)
    def get_architecture_info(config: Any, options: Any) -> Any:
        if config.merge_method != METHOD:
            return stock(config, options)
        from rotation_merge.plugin.definitions import architecture_info

        return architecture_info(config, options)

    module.get_architecture_info = get_architecture_info


def extend_plan(module: ModuleType) -> None:
    """Let `MergePlanner(...)` build our planner for our recipes."""
    planner = module.MergePlanner
    if not _once(module):
        return

    def new(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is planner and config.merge_method == METHOD:
            from rotation_merge.plugin.planner import RotationMergePlanner

            return object.__new__(RotationMergePlanner)
        return object.__new__(cls)

    planner.__new__ = new


def extend_merge(module: ModuleType) -> None:
    """Check our recipes before anything is read, and write their output whole or not at all."""
    if not _once(module):
        return
    stock = module.run_merge

    @functools.wraps(stock)
    def run_merge(merge_config: Any, out_path: str, options: Any, config_source: str | None = None) -> None:
        if merge_config.merge_method != METHOD:
            stock(merge_config, out_path, options, config_source)
            return
        from rotation_merge.plugin.merge import run

        with one_line():
            run(stock, merge_config, out_path, options, config_source)

    module.run_merge = run_merge


def extend_command(module: ModuleType) -> None:
    """Make a command say in one line what is wrong with a recipe of ours, from its YAML syntax on."""
    command = module.main
    stock = command.callback
    if not _once(module):
        return

    @functools.wraps(stock)
    def callback(*args: Any, **kwargs: Any) -> Any:
        if not _is_ours(kwargs.get("config_file") or kwargs.get("config_path")):
            return stock(*args, **kwargs)
        with one_line():
            return stock(*args, **kwargs)

    command.callback = callback


def _is_ours(path: object) -> bool:
    """Whether the recipe in this file names our method, as far as can be told before it has been parsed."""
    try:
        with open(str(path), "rb") as file:
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return False
    return METHOD in text or any(map(_resembles, re.findall(r"merge_method:\s*['\"]?([\w-]+)", text)))
