"""Sentence-transformers folders: the modules after the transformer, read as tensors of the model, and written.

A dense module `2_Dense` is read as tensors `2_Dense.linear.weight` and `2_Dense.linear.bias` of the checkpoint, so that
alignment, merge and carrying treat it as any other part of the model.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from safetensors.torch import save_file
from torch import Tensor

from rotation_merge.architecture.sentence import MODES, dense
from rotation_merge.errors import CheckpointError, short
from rotation_merge.model.contents import DOWNLOAD, WEIGHT_FILES, read_json, reason

FILE = "modules.json"
BESIDE = (FILE, "config_sentence_transformers.json", "sentence_bert_config.json")
"""Files in a folder's root with settings of its modules: prompts, lengths, similarity."""

KINDS = ("Transformer", "Pooling", "Dense", "Normalize", "Dropout")
"""Modules that are known, by class."""


def read_modules(folder: str) -> list[dict[str, Any]]:
    """The modules after the transformer, in order; empty for a plain model.

    Each module has its `type` and `path`; pooling its `modes`, a dense map its sizes `in` and `out` and its activation.

    Raises:
        CheckpointError: a module is of an unknown kind, or damaged.
    """
    place = os.path.join(folder, FILE)
    if not os.path.isfile(place):
        return []
    try:
        entries = TypeAdapter(list[dict[str, Any]]).validate_json(Path(place).read_bytes())
    except (OSError, ValueError) as error:
        problem = f"holds no list of modules ({short(reason(error))})"
        raise CheckpointError(problem, where=place, remedy=DOWNLOAD) from error
    modules = []
    for entry in entries:
        kind, path = str(entry.get("type", "")).rsplit(".", 1)[-1], str(entry.get("path", ""))
        outside = os.path.isabs(path) or ".." in path.replace("\\", "/").split("/")
        if kind not in KINDS or outside or (kind == "Transformer" and path):
            problem = f"its module '{kind}' is not known, outside of the folder, or a transformer not in it ('{path}')"
            raise CheckpointError(problem, where=place, remedy=f"known are {', '.join(KINDS)}")
        if kind == "Transformer":
            continue
        modules.append({"type": kind, "path": path, **_settings(folder, kind, path)})
    return modules


def _settings(folder: str, kind: str, path: str) -> dict[str, Any]:
    if kind not in ("Pooling", "Dense"):
        return {}
    settings_path = os.path.join(folder, path, "config.json")
    config = read_json(settings_path)
    try:
        if kind == "Dense":
            act = str(config.get("activation_function") or "Identity").rsplit(".", 1)[-1]
            sizes = {"in": int(config["in_features"]), "out": int(config["out_features"])}
            return {**sizes, "activation": act, "bias": bool(config.get("bias", True))}
        named = config.get("pooling_mode")
        modes = [named] if isinstance(named, str) else list(named or [])
        flags = {m: [config.get(f"pooling_mode_{m}{end}") for end in ("", "_token", "_tokens")] for m in MODES}
        chosen = [mode for mode in MODES if any(flags[mode]) or mode.removesuffix("_tokens") in modes]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"lacks {error}", where=settings_path, remedy=DOWNLOAD) from error
    prompt = {} if config.get("include_prompt", True) else {"include_prompt": False}
    return {"modes": chosen or ["mean"], **prompt}


def reading(folder: str) -> tuple[str, int | None]:
    """The default prompt of a sentence-transformers folder, and its maximal number of tokens.

    Raises:
        CheckpointError: the settings are damaged, or name a prompt that is not there.
    """
    settings_path, lengths = (os.path.join(folder, name) for name in BESIDE[1:])
    settings = read_json(settings_path) if os.path.isfile(settings_path) else {}
    prompts, name = settings.get("prompts") or {}, settings.get("default_prompt_name")
    if not isinstance(prompts, dict) or (name is not None and name not in [*prompts]):
        problem = f"its default_prompt_name is '{name}', which is not among its prompts"
        raise CheckpointError(problem, where=settings_path, remedy="correct the file")
    most = read_json(lengths).get("max_seq_length") if os.path.isfile(lengths) else None
    prompt = str(prompts[name]) if name is not None else ""
    if prompt and any(module.get("include_prompt") is False for module in read_modules(folder)):
        problem = f"its pooling excludes the prompt '{prompt}', which is not supported"
        raise CheckpointError(
            problem, where=folder, remedy="take default_prompt_name out, and put prompts into the data"
        )
    return prompt, most if isinstance(most, int) and most > 0 else None


def module_files(folder: str, modules: list[dict[str, Any]]) -> dict[str, str]:
    """Weight files of the dense modules, from the folder, and what their tensors' names begin with in the model.

    Raises:
        CheckpointError: a module has none.
    """
    files = {}
    for path in (module["path"] for module in dense(modules)):
        names = [name for name in WEIGHT_FILES if os.path.isfile(os.path.join(folder, path, name))]
        if not names:
            place = os.path.join(folder, path)
            raise CheckpointError("its weights are missing", where=place, remedy=DOWNLOAD)
        files[f"{path}/{names[0]}"] = f"{path}."
    return files


def in_module(name: str, modules: list[dict[str, Any]]) -> bool:
    """Whether a tensor is one of a dense module, not of the transformer."""
    return any(name.startswith(f"{module['path']}.") for module in dense(modules))


def write_modules(source: str, out: str, tensors: Mapping[str, Tensor]) -> None:
    """Write the modules after a transformer: settings as in `source`, dense maps as given.

    Args:
        tensors: of the dense modules, as the whole model names them; none: as in `source`.
    """
    modules = read_modules(source)
    for name in BESIDE:
        if modules and os.path.isfile(os.path.join(source, name)):
            shutil.copyfile(os.path.join(source, name), os.path.join(out, name))
    for path in dict.fromkeys(module["path"] for module in modules):
        weights = {n.removeprefix(f"{path}."): t.contiguous() for n, t in tensors.items() if n.startswith(f"{path}.")}
        replaced = shutil.ignore_patterns(*(WEIGHT_FILES if weights else ()))
        if os.path.isdir(origin := os.path.join(source, path)):
            shutil.copytree(origin, Path(out, path), ignore=replaced, copy_function=shutil.copyfile, dirs_exist_ok=True)
        if weights:
            save_file(weights, Path(out, path, WEIGHT_FILES[0]), {"format": "pt"})
