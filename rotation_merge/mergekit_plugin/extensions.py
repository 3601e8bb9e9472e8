"""Extensions of mergekit's modules; merges by other methods can read GGUF, and keep all results of several GPUs.

A recipe of ours begins with a look at whether all of mergekit could be extended (`check_host`).
"""

from __future__ import annotations

import functools
import os
from typing import Any

from mergekit.common import ModelReference

from rotation_merge.errors import RecipeError
from rotation_merge.mergekit_plugin import METHOD
from rotation_merge.mergekit_plugin.console import one_line
from rotation_merge.mergekit_plugin.document import Document, is_ours, may_be, walk
from rotation_merge.mergekit_plugin.host import check_host

CHECK = "ROTATION_MERGE_CHECK"
"""Environment variable that, set to 1, has merges by mergekit's own methods looked at when they are written."""


class Methods(dict[str, Any]):
    """mergekit's methods by name, ours among them only when they are asked for by name.

    `registered_methods()` lists methods that merge single tensors; ours know more of the models and cannot.
    """

    def __missing__(self, name: str) -> Any:
        from rotation_merge.mergekit_plugin.delegates import OWN, RotationMergeMethod

        return RotationMergeMethod() if name == METHOD else OWN[name]


def extend_registry(module: Any) -> None:
    """Let recipes name our merge methods."""
    module._METHODS = Methods(module._METHODS)


def extend_config(module: Any) -> None:
    """Refuse keys that mergekit would ignore, where the recipe is ours."""
    configuration = module.MergeConfiguration
    validate = configuration.model_validate.__func__

    @functools.wraps(validate)
    def model_validate(cls: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_ours(obj):
            return validate(cls, obj, *args, **kwargs)
        check_host()
        from rotation_merge.mergekit_plugin.rules import check_structure

        document = Document(_with_paths(obj))
        check_structure(document)
        document.raise_first()
        return document.config

    configuration.model_validate = classmethod(model_validate)


def _with_paths(value: Any, below_parameters: bool = False) -> Any:
    """Undo mergekit-multi's change of parameters: a model reference written as a mapping becomes a path again.

    (It replaces every string equal to the name of a merge, also where only a string may stand.)
    """
    if isinstance(value, dict):
        if below_parameters and set(value) == set(ModelReference.model_fields):
            return value["model"]["path"]
        return {key: _with_paths(item, below_parameters or key == "parameters") for key, item in value.items()}
    return [_with_paths(item, below_parameters) for item in value] if isinstance(value, list) else value


def extend_merge(module: Any) -> None:
    """Run our recipes, and those of mergekit's methods with models in GGUF.

    A compiled recipe brings its architecture along. mergekit's executor for several GPUs counts as done once its queue
    of results is empty, too: it would stop when the devices are done, and leave results there.
    """
    stock, architecture, executor = module.run_merge, module.get_architecture_info, module.MultiGPUExecutor

    def get_architecture_info(config: Any, options: Any) -> Any:
        return getattr(config, "_architecture", None) or architecture(config, options)

    def collecting_executor(*args: Any, **options: Any) -> Any:
        devices = executor(*args, **options)
        devices_are_done = devices.done_event.is_set
        devices.done_event.is_set = lambda: devices_are_done() and devices.task_completion_queue.empty()
        return devices

    @functools.wraps(stock)
    def run_merge(merge_config: Any, out_path: str, options: Any, config_source: str | None = None) -> None:
        if is_ours({"merge_method": merge_config.merge_method}, misspelt=False):
            check_host()
            from rotation_merge.mergekit_plugin.run import run

            return run(stock, merge_config, out_path, options, config_source)
        from rotation_merge.model.gguf import is_gguf

        if any(is_gguf(part.model.path) for _, part in walk(merge_config) if isinstance(part, ModelReference)):
            with one_line():
                from rotation_merge.mergekit_plugin.loader import decoded

                with decoded(merge_config, options) as config:
                    stock(config, out_path, options, config_source or merge_config.to_yaml())
        else:
            stock(merge_config, out_path, options, config_source)
        if os.environ.get(CHECK) == "1":
            from rotation_merge.mergekit_plugin.run import say_defects

            say_defects(merge_config, out_path, options)

    module.run_merge, module.MultiGPUExecutor = run_merge, collecting_executor
    module.get_architecture_info = get_architecture_info


def extend_command(module: Any) -> None:
    """Make a command report in one line: a recipe that cannot be read, and all errors of ours."""
    command = module.main
    stock = command.callback

    @functools.wraps(stock)
    def callback(*args: Any, **kwargs: Any) -> Any:
        path, out = str(kwargs.get("config_file") or kwargs.get("config_path")), str(kwargs.get("out_path"))
        if kwargs.get("verbosity", 0) > 1:
            return stock(*args, **kwargs)
        with one_line():
            if os.path.isfile(out) and not os.path.isfile(path):
                remedy = "give the recipe first, then the directory to write"
                raise RecipeError(f"is no recipe, but {out} is a file", where=path, remedy=remedy)
            with open(path, encoding="utf-8", errors="replace") as file:
                text = file.read()
        if not may_be(text, is_ours):
            return stock(*args, **kwargs)
        with one_line():
            check_host()
            if module.__name__ != "mergekit.scripts.merge_raw_pytorch":
                from rotation_merge.mergekit_plugin.recipe import check_file

                check_file(path, text)
            return stock(*args, **kwargs)

    command.callback = callback
