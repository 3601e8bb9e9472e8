"""Configs one field away from those of the tiny models: the fields that a class reads, and each of them switched."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import transformers
from tiny_models import ALL, Case, make

FIRST = list({(case.family, case.class_name): case for case in reversed(ALL)}.values())[::-1]
"""One case for each class."""

ONE = list({case.family: case for case in reversed(ALL)}.values())[::-1]
"""One case for each family."""


def _is_config(node: ast.AST) -> bool:
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name.endswith("config")


@functools.cache
def read_fields(module: str) -> frozenset[str]:
    """Every entry of a config that a module of transformers reads, as `config.X`, or `getattr(config, "X", ...)`."""
    found = set()
    for node in ast.walk(ast.parse(inspect.getsource(sys.modules[module]))):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and _is_config(node.value):
            found.add(node.attr)
        is_getattr = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr"
        if is_getattr and _is_config(node.args[0]) and isinstance(node.args[1], ast.Constant):
            found.add(str(node.args[1].value))
    return frozenset(found)


def fields_of(class_name: str) -> frozenset[str]:
    """Those of the module that a class stands in, and of the modules of models that it is made of."""
    kind = getattr(transformers, class_name)
    return read_fields(kind.__module__)


def switched(case: Case) -> Iterator[tuple[str, Case]]:
    """The case with each switch of its config the other way round, and with other activations."""
    config = case.model_class.config_class(**case.config).to_dict()
    for name in sorted(fields_of(case.class_name)):
        value = config.get(name)
        if isinstance(value, bool):
            yield f"{name}={not value}", with_field(case, name, not value)
        elif name in ACTIVATIONS and isinstance(value, str):
            for other in ("relu", "relu2", "gelu"):
                yield f"{name}={other}", with_field(case, name, other)


ACTIVATIONS = ("hidden_act", "hidden_activation", "activation", "activation_function")


def with_field(case: Case, name: str, value: Any) -> Case:
    return replace(case, name=f"{case.name}, {name}={value}", config={**case.config, name: value})


def try_make(case: Case) -> Any | None:
    """The model, or None where transformers has none of this config."""
    try:
        return make(case)
    except (
        ValueError,
        TypeError,
        AttributeError,
        RuntimeError,
        KeyError,
        IndexError,
        AssertionError,
        NotImplementedError,
    ):
        return None


def state_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}
