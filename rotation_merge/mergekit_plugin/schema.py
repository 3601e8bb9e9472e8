"""What is wrong with a recipe before mergekit and torch are imported: misspelt keys, folders that do not exist.

The keys are read from mergekit's source.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path as File
from typing import Any, NamedTuple

from rotation_merge.errors import CheckpointError, RecipeError, nearest
from rotation_merge.mergekit_plugin.document import (
    Document,
    Fault,
    Finding,
    Path,
    aligns,
    may_be,
    raise_first,
    recipes_in,
    walk,
)
from rotation_merge.mergekit_plugin.keys import BY_NAME
from rotation_merge.model.hub import check_path

FILES = ("config.py", "tokenizer/config.py")
"""Files of mergekit with the classes of recipes."""


class Key(NamedTuple):
    """A key of a class: the classes of its values, and whether these stand in a mapping under free names."""

    kinds: frozenset[str]
    named: bool


@cache
def classes() -> dict[str, dict[str, Key]]:
    """The keys of each of mergekit's classes of recipes."""
    spec = find_spec("mergekit")
    folders = (spec.submodule_search_locations if spec else None) or []
    statements = [
        node for folder in folders for name in FILES for node in ast.parse(File(folder, name).read_text()).body
    ]
    aliases = {
        node.target.id: node.value
        for node in statements
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None
    }
    bodies = {node.name: node.body for node in statements if isinstance(node, ast.ClassDef)}

    def names_in(annotation: ast.AST) -> Iterator[str]:
        for name in (node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)):
            yield name
            yield from names_in(aliases[name]) if name in aliases else ()

    def keys_of(body: list[ast.stmt]) -> dict[str, Key]:
        fields = {
            node.target.id: set(names_in(node.annotation))
            for node in body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }
        return {name: Key(frozenset(names & bodies.keys()), "Dict" in names) for name, names in fields.items()}

    return {name: keys_of(body) for name, body in bodies.items()}


@cache
def every_key(kind: str = "MergeConfiguration") -> frozenset[str]:
    """The keys of a class, and of all classes of its values."""
    inner = (every_key(value) for key in classes()[kind].values() for value in key.kinds)
    return frozenset(classes()[kind]).union(*inner)


def unknown_keys(value: Any, kinds: Collection[str] = ("MergeConfiguration",), path: Path = ()) -> Iterator[Finding]:
    """Every key of a recipe, or of a part of one that is of some classes, that mergekit does not know."""
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from unknown_keys(item, kinds, (*path, number))
    known = {name: key for kind in kinds for name, key in classes()[kind].items()}
    for name, item in value.items() if isinstance(value, dict) and known else ():
        place = (*path, name)
        if name not in known:
            belongs = "it belongs under 'parameters'" if not path and name in BY_NAME else ""
            yield place, f"there is no key '{name}' here", belongs or nearest(str(name), every_key())
        elif known[name].named and isinstance(item, dict):
            for inner, entry in item.items():
                yield from unknown_keys(entry, known[name].kinds, (*place, inner))
        else:
            yield from unknown_keys(item, known[name].kinds, place)


def refuse_early(arguments: Sequence[str]) -> None:
    """End a command of mergekit with one line where a recipe of ours is not YAML, or has a misspelt word."""
    path = next((word for word in arguments if word.endswith((".yml", ".yaml")) and os.path.isfile(word)), None)
    if path is None or any(word.startswith(("-v", "--verb")) for word in arguments):
        return
    try:
        text = File(path).read_text(encoding="utf-8")
        if may_be(text, aligns):
            recipes = recipes_in(path, text, aligns)
            early_faults(recipes)
            raise_first(path, recipes)
    except RecipeError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(2)
    except Exception:  # whatever it is: the command itself says it
        return


def early_faults(parsed: Sequence[Document]) -> list[Fault]:
    """Collect misspelt keys, and models that are neither here nor on the hub; gives all faults of the documents."""
    recipes = [document for document in parsed if isinstance(document.value, dict)]
    merges = [document.value.get("name") for document in recipes]
    for document in recipes:
        content = {key: value for key, value in document.value.items() if key != "name"}  # of mergekit-multi
        document.collect(finding for finding in unknown_keys(content) if "did you mean" in finding[2])
        for path, name in walk(content):
            of_model = isinstance(name, str) and path[-1:] in (("model",), ("base_model",)) and not {"+", "@"} & {*name}
            if of_model and name not in merges:
                try:
                    check_path(name)
                except CheckpointError as error:
                    document.raised(path, error)
    return [fault for document in parsed for fault in document.faults]
