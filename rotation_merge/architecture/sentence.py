"""Modules of sentence-transformers behind an encoder: pooling, dense maps, normalisation.

The pooled vector is an output, as the embedding is, unless a dense map reads it: then a map of the stream is undone
there. Pooling by a mean, by the first or the last token is linear and goes along with any map of features; by the
maximum, with permutations alone. Norm gains are not folded into dense maps, so that streams move by signed permutations
at most.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rotation_merge.architecture.schema import ArchitectureSpec
from rotation_merge.errors import ArchitectureError

KEY = "sentence_modules"
"""Entry of a config that lists the modules, as `model.sentence` reads them."""

MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
"""Ways of pooling, in the order in which sentence-transformers puts their results side by side."""


def dense(modules: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [module for module in modules if module["type"] == "Dense"]


def modes(modules: list[dict[str, Any]]) -> list[str]:
    """The ways in which a model pools."""
    return next((list(module["modes"]) for module in modules if module["type"] == "Pooling"), [])


def with_modules(spec: ArchitectureSpec, config: Mapping[str, Any]) -> ArchitectureSpec:
    """A family's file, extended by the dense modules behind a model with this config.

    Raises:
        ArchitectureError: modules of unknown kinds, or no stream that is pooled.
    """
    modules = config[KEY]
    if not dense(modules):
        return spec
    stream = "encoder" if "encoder" in spec.streams else next(iter(spec.streams))
    name = next((name for name in spec.modules if "encoder" in name), next(iter(spec.modules)))
    pooled = modes(modules)
    content = spec.model_dump(exclude_none=True)
    module = content["modules"][name]
    spaces, after = module.setdefault("spaces", {}), module.setdefault("after", {}).setdefault("linear", {})
    read: Any = f"{stream}.read"
    read = read if len(pooled) == 1 else {"split": [read] * len(pooled)}
    maps = dense(modules)
    for number, entry in enumerate(maps):
        last, inner = number == len(maps) - 1, f"sentence_{number}"
        rows = "fixed" if last else f"{inner}.in"
        after[f"{entry['path']}.linear"] = [rows, read]
        read = f"{inner}.out"
        if not last:
            spaces[inner] = {"kind": "ffn", "size": entry["out"], "activation": "'gelu'", "scale": "'fixed'"}
    content["streams"][stream]["limit"] = "'permutation'" if "max" in pooled else "'signed_permutation'"
    content["bare"] = []
    try:
        return ArchitectureSpec.model_validate(content)
    except ValueError as error:
        raise ArchitectureError(f"its dense modules do not fit ({error})", remedy="leave them out") from error
