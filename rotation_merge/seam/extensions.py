"""How each of mergekit's modules is extended. Merges by other methods are left exactly as they are."""

from __future__ import annotations

import functools
import re
from typing import Any

from rotation_merge.recipe.names import METHOD
from rotation_merge.seam.console import one_line


def _once(target: Any) -> bool:
    """False if `target` has been extended before."""
    if getattr(target, "_rotation_merge", False):
        return False
    target._rotation_merge = True
    return True


def _mentions(obj: object) -> bool:
    """A cheap test, so that other methods' recipes cost nothing: something at the top resembles our method's name."""
    return isinstance(obj, dict) and any(isinstance(v, str) and "rotation" in v.lower() for v in obj.values())


def extend_registry(module: Any) -> None:
    """Let the merge method be found by its name."""
    from rotation_merge.seam.method import Methods

    if not isinstance(module._METHODS, Methods):
        module._METHODS = Methods(module._METHODS)


def extend_config(module: Any) -> None:
    """Check top-level keys, which mergekit would ignore, where the recipe is ours."""
    configuration = module.MergeConfiguration
    if not _once(module):
        return
    validate = configuration.model_validate.__func__

    @functools.wraps(validate)
    def model_validate(cls: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        if _mentions(obj):
            from rotation_merge.recipe import strict
            from rotation_merge.recipe.reading import restore_paths

            if strict.is_ours(obj):
                with one_line():
                    document = restore_paths(obj)
                    strict.check_document(document)
                    return validate(cls, document, *args, **kwargs)
        return validate(cls, obj, *args, **kwargs)

    configuration.model_validate = classmethod(model_validate)


def extend_architecture(module: Any) -> None:
    """Give our own architecture definitions to our own merges."""
    if not _once(module):
        return
    stock = module.get_architecture_info

    @functools.wraps(stock)
    def get_architecture_info(config: Any, options: Any) -> Any:
        if config.merge_method != METHOD:
            return stock(config, options)
        from rotation_merge.seam.definitions import architecture_info

        return architecture_info(config, options)

    module.get_architecture_info = get_architecture_info


def extend_plan(module: Any) -> None:
    """Let `MergePlanner(...)` build our planner for our recipes."""
    planner = module.MergePlanner
    if not _once(module):
        return

    def new(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is planner and config.merge_method == METHOD:
            from rotation_merge.planning.planner import RotationMergePlanner

            return object.__new__(RotationMergePlanner)
        return object.__new__(cls)

    planner.__new__ = new


def extend_merge(module: Any) -> None:
    """Check our recipes before anything is read, and write their output whole or not at all."""
    if not _once(module):
        return
    stock = module.run_merge

    @functools.wraps(stock)
    def run_merge(merge_config: Any, out_path: str, options: Any, config_source: str | None = None) -> None:
        if merge_config.merge_method != METHOD:
            stock(merge_config, out_path, options, config_source)
            return
        from rotation_merge.seam.merge import run

        with one_line():
            run(stock, merge_config, out_path, options, config_source)

    module.run_merge = run_merge


def extend_command(module: Any) -> None:
    """Make a command say in one line what is wrong with a recipe of ours, from its YAML syntax on."""
    command = module.main
    stock = command.callback
    if not _once(module):
        return

    @functools.wraps(stock)
    def callback(*args: Any, **kwargs: Any) -> Any:
        path = str(kwargs.get("config_file") or kwargs.get("config_path"))
        if kwargs.get("verbosity", 0) > 1 or not _is_ours(path):
            return stock(*args, **kwargs)
        from rotation_merge.recipe import strict

        with one_line():
            if module.__name__ != "mergekit.scripts.merge_raw_pytorch":
                strict.check_file(path)
            return stock(*args, **kwargs)

    command.callback = callback


def _is_ours(path: str) -> bool:
    """Whether the recipe in this file names our method, as far as can be told before it has been parsed."""
    try:
        with open(path, "rb") as file:
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return False
    return METHOD in text or re.search(r"merge_method:\s*['\"]?\w*rotation", text) is not None


def extend_genome(module: Any) -> None:
    """Let mergekit-evolve search over the weights of aligned models."""
    module.METHOD_PARAM_MAPS.setdefault(METHOD, ["weight"])
