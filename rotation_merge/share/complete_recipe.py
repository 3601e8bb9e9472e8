"""A recipe with the files that were found beside the models named explicitly."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from rotation_merge.errors import RotationMergeError
from rotation_merge.mergekit_plugin.recipe.parameter_scopes import reference

STATISTICS = "statistics of "
"""Prefix of a report's entries on the data of statistics."""

Edit = tuple[int, int, str]
"""Start and end in the text, and the replacement."""


def completed(recipe: str, used: Sequence[Mapping[str, Any]]) -> str:
    """The recipe with `statistics: FILE` under each model with statistics beside it.

    Args:
        used: the report's entries on data; with `file` if the recipe did not name it.

    Raises:
        RotationMergeError: the recipe has no place for one.
    """
    files = {str(x["of"]).removeprefix(STATISTICS): str(x["file"]) for x in used if x.get("file")}
    if not files:
        return recipe
    edits: dict[int, Edit] = {}
    placed = set()
    for root in yaml.compose_all(recipe, Loader=yaml.SafeLoader):
        for name, entry in _entries(root):
            if name not in files:
                continue
            edit = _edit(recipe, entry, files[name])
            if edits.setdefault(edit[0], edit) == edit:  # an alias stands for the parameters of two models
                placed.add(name)
    for name in files:
        if name not in placed:
            problem = f"the recipe has no entry that could name its statistics '{files[name]}'"
            raise RotationMergeError(problem, where=name, remedy="write 'statistics: FILE' under its own parameters")
    for start, end, text in sorted(edits.values(), reverse=True):
        recipe = f"{recipe[:start]}{text}{recipe[end:]}"
    return recipe


def _entries(node: yaml.Node | None) -> Iterator[tuple[str, yaml.MappingNode]]:
    """The keys that name a model next to its parameters, if written as one word."""
    if isinstance(node, yaml.MappingNode):
        model_node = next((v for k, v in node.value if k.value == "model" and isinstance(v, yaml.ScalarNode)), None)
        if model_node is not None and (model := reference(model_node.value)) is not None:
            yield str(model), node
        for _, value in node.value:
            yield from _entries(value)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _entries(item)


def _edit(text: str, entry: yaml.MappingNode, file: str) -> Edit:
    """The edit that adds a file to an entry's parameters."""
    line = f"statistics: {json.dumps(file, ensure_ascii=False)}"
    parameters = next((value for key, value in entry.value if key.value == "parameters"), None)
    if parameters is None:
        return _before(entry, f"parameters: {{{line}}}")
    if isinstance(parameters, yaml.MappingNode) and parameters.value:
        return _before(parameters, line)
    start, end = parameters.start_mark.index, parameters.end_mark.index  # nothing, or an empty mapping
    return start, end, f"{'' if text[start - 1 : start].isspace() else ' '}{{{line}}}"


def _before(node: yaml.MappingNode, line: str) -> Edit:
    """A line before the first key of a mapping."""
    first = node.value[0][0].start_mark
    end = ", " if node.flow_style else "\n" + " " * first.column
    return first.index, first.index, f"{line}{end}"
