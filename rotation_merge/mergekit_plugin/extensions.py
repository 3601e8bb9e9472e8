"""Extensions of mergekit's modules; merges by other methods are unchanged.

A recipe of ours begins with a look at whether all of mergekit could be extended (`check_host`).
"""

from __future__ import annotations

import functools
import os
import re
from contextlib import ExitStack, nullcontext
from typing import Any

from rotation_merge.errors import RecipeError
from rotation_merge.mergekit_plugin import state
from rotation_merge.mergekit_plugin.console import one_line
from rotation_merge.mergekit_plugin.document import METHOD, is_ours, ours_in, read_from
from rotation_merge.mergekit_plugin.host import check_host


def _once(target: Any) -> bool:
    """False if `target` has been extended before."""
    if getattr(target, "_rotation_merge", False):
        return False
    target._rotation_merge = True
    return True


def _mentions(obj: object) -> bool:
    """A cheap test, so that other methods' recipes cost nothing: a method that mergekit lacks, or a word like ours."""
    if not isinstance(obj, dict):
        return False
    words = [word for word in obj.values() if isinstance(word, str)]
    return _unknown(obj.get("merge_method")) or any("rotation" in word.lower() for word in words)


def _unknown(method: object) -> bool:
    """Whether mergekit itself has no method of this name."""
    from mergekit.merge_methods import registry

    return isinstance(method, str) and method not in getattr(registry, "_METHODS", (method,))


def _is_ours(config: Any) -> bool:
    """Whether a configuration is for us: our method, or an average of our own."""
    method = config.merge_method
    return method == METHOD or (_unknown(method) and is_ours({"merge_method": method}, misspelt=False))


def extend_common(module: Any) -> None:
    """Make every merge able to read GGUF models, and adapters on them.

    A GGUF is decoded into a folder, which mergekit reads as any other; adapters on it are merged a tensor at a time.
    """
    reference = module.ModelReference
    config, local_path, lazy_loader = reference.config, reference.local_path, reference.lazy_loader
    merged = reference.merged
    if not _once(module):
        return

    @functools.wraps(merged)
    def of_merged(self: Any, *args: Any, **kwargs: Any) -> Any:
        return merged(self, *args, **kwargs) if _in_folder(self) is self else self

    @functools.wraps(config)
    def of_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        return config(_in_folder(self), *args, **kwargs)

    @functools.wraps(local_path)
    def of_path(self: Any, cache_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        return local_path(_in_folder(self, cache_dir), cache_dir, *args, **kwargs)

    @functools.wraps(lazy_loader)
    def of_loader(self: Any, cache_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        folder = _in_folder(self, cache_dir)
        if folder is self:
            return lazy_loader(self, cache_dir, *args, **kwargs)
        if self.lora is None:
            return lazy_loader(folder, cache_dir, *args, **kwargs)
        from mergekit.options import MergeOptions

        from rotation_merge.mergekit_plugin.loader import ViewLoader
        from rotation_merge.model.open import open_model

        with one_line():
            return ViewLoader(open_model(self, options=MergeOptions(transformers_cache=cache_dir), any_base=True))

    reference.config, reference.local_path, reference.lazy_loader = of_config, of_path, of_loader
    reference.merged = of_merged


def _in_folder(reference: Any, cache: str | None = None) -> Any:
    """The folder made from a GGUF model, without its adapter; any other model unchanged."""
    from rotation_merge.model.folder import fetched
    from rotation_merge.model.gguf import is_gguf

    model = reference.model
    if not is_gguf(model.path):
        return reference
    with one_line():
        folder = fetched(model, cache)
    return reference.model_copy(update={"model": type(model)(path=folder), "lora": None})


def extend_tokenizers(module: Any) -> None:
    """Make mergekit able to combine tokenizers of GGUF models, and of models that stand for others in our merges."""
    stock = module.build_tokenizer
    if not _once(module):
        return

    @functools.wraps(stock)
    def build_tokenizer(base_model: Any, referenced_models: Any, *, tokenizer_source: Any, **kwargs: Any) -> Any:
        models = [model for model in (base_model, *referenced_models) if model is not None]
        folders = {model: _in_folder(getattr(model, "original", model)) for model in models}
        if isinstance(tokenizer_source, module.ModelReference):
            tokenizer_source = _in_folder(tokenizer_source)
        base, referenced = folders.get(base_model), [folders[model] for model in referenced_models]
        info = stock(base, referenced, tokenizer_source=tokenizer_source, **kwargs)
        for by_model in (info.permutations, info.original_vocabs):
            if by_model is not None:
                known = {model: by_model[folder] for model, folder in folders.items() if folder in by_model}
                by_model.clear()
                by_model.update(known)
        return info

    module.build_tokenizer = build_tokenizer


def extend_registry(module: Any) -> None:
    """Register the merge method by its name, and our own delegates inside our merges."""
    from rotation_merge.mergekit_plugin.method import Methods

    if not isinstance(module._METHODS, Methods):
        module._METHODS = Methods(module._METHODS)


def extend_config(module: Any) -> None:
    """Check top-level keys, which mergekit would ignore, where the recipe is ours."""
    configuration = module.MergeConfiguration
    validate = configuration.model_validate.__func__
    if not _once(module):
        return

    @functools.wraps(validate)
    def model_validate(cls: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        if _mentions(obj) and is_ours(obj):
            with one_line():
                check_host()
                from rotation_merge.mergekit_plugin.recipe import check_document, restore_paths

                document = restore_paths(obj)
                check_document(document)
                return validate(cls, document, *args, **kwargs)
        return validate(cls, obj, *args, **kwargs)

    configuration.model_validate = classmethod(model_validate)


def extend_architecture(module: Any) -> None:
    """Give our merges the architecture of their output."""
    stock = module.get_architecture_info
    if not _once(module):
        return

    @functools.wraps(stock)
    def get_architecture_info(config: Any, options: Any) -> Any:
        known = getattr(config, "_architecture", None)
        if known is None and _is_ours(config):
            with one_line():
                problem = "a recipe of rotation_merge is planned by mergekit's run_merge alone"
                raise RecipeError(problem, remedy="call run_merge")
        return known or stock(config, options)

    module.get_architecture_info = get_architecture_info


def extend_merge(module: Any) -> None:
    """Check our recipes before any reading, and write their output atomically; give every merge a GGUF's tokenizer."""
    stock, donor_model = module.run_merge, module._get_donor_model
    if not _once(module):
        return

    @functools.wraps(donor_model)
    def get_donor_model(*args: Any, **kwargs: Any) -> Any:
        donor, folder = donor_model(*args, **kwargs)
        return _in_folder(donor), folder

    @functools.wraps(stock)
    def run_merge(merge_config: Any, out_path: str, options: Any, config_source: str | None = None) -> None:
        if not _is_ours(merge_config):
            stock(merge_config, out_path, options, config_source)
            if os.environ.get(state.CHECK) == "1":
                from rotation_merge.mergekit_plugin.output_check import say_defects

                say_defects(merge_config, out_path, options)
            return
        with one_line():
            check_host()
            from rotation_merge.mergekit_plugin.run import run

            run(stock, merge_config, out_path, options, config_source)

    module.run_merge, module._get_donor_model = run_merge, get_donor_model


def extend_command(module: Any) -> None:
    """Make a command report errors of our recipes, YAML syntax included, in one line."""
    command = module.main
    stock = command.callback
    if not _once(module):
        return

    @functools.wraps(stock)
    def callback(*args: Any, **kwargs: Any) -> Any:
        path = str(kwargs.get("config_file") or kwargs.get("config_path"))
        if not (ours := _ours_in(path)):
            _check_order(path, str(kwargs.get("out_path")))
            return stock(*args, **kwargs)
        with ExitStack() as checked:
            checked.enter_context(read_from(path))
            if kwargs.get("verbosity", 0) > 1:
                return stock(*args, **kwargs)
            with one_line():
                check_host()
                if module.__name__ != "mergekit.scripts.merge_raw_pytorch":
                    from rotation_merge.mergekit_plugin.recipe import checked_file

                    checked.enter_context(checked_file(path))
            with one_line() if all(ours) else nullcontext():
                return stock(*args, **kwargs)

    command.callback = callback


def _check_order(recipe: str, out: str) -> None:
    """Refuse a recipe of ours that stands in the place of the directory to write."""
    if not os.path.isfile(recipe) and os.path.isfile(out) and _ours_in(out):
        with one_line():
            remedy = "give the recipe first, then the directory to write"
            raise RecipeError(f"is no recipe, but {out} is one", where=recipe, remedy=remedy)


def _ours_in(path: str) -> list[bool]:
    """Whether each recipe in this file names our method; empty if none does.

    Where the file is no YAML, its text decides: a line that gives our method's name, or nearly that, as the method.
    """
    try:
        with open(path, "rb") as file:
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    methods = re.findall(r"""^["']?merge_method["']?\s*:\s*["']?([\w-]+)""", text, re.M)
    if "rotation" not in text.lower() and not any(map(_unknown, methods)):
        return []
    try:
        matches = ours_in(text)
    except RecipeError:
        matches = [re.search(rf"^\w+:\s*['\"]?{METHOD}\b|^merge_method:\s*['\"]?\w*rotation", text, re.M) is not None]
    return matches if any(matches) else []
