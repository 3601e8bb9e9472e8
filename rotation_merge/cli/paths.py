"""Click types of parameters that name what a command reads or writes; its outputs are checked before it runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import click

from rotation_merge.errors import RecipeError, RotationMergeError, nearest_path
from rotation_merge.files import FILE, FOLDER, MATCHING_UNFINISHED, UNFINISHED, WORD, WORK, Output, check_output, locked
from rotation_merge.model.hub import check_adapter, check_file, check_local, check_path, is_hub_name
from rotation_merge.run.sample_kinds import check_source

ADAPTER = "adapter"
"""A folder, or a file if its name ends in `.safetensors`."""


@dataclass(eq=False)
class Reads(click.ParamType):
    """Something that is read: a path, or a name on the hub.

    Attributes:
        name: placeholder in the help.
        recipe: whether it may be a recipe, with all that it reads.
        named: whether the value is NAME or NAME=FILE, with commas between.
        refuse: raises an error for a value that is neither here nor on the hub, before torch is imported.
    """

    name: str
    recipe: bool = False
    named: bool = False
    refuse: Callable[[str], None] = lambda _: None

    def check(self, values: Sequence[str]) -> None:
        """Refuse values that are neither here nor on the hub.

        Raises:
            RotationMergeError: names the first.
        """
        for value in values if self.recipe else self._parts(values):
            self.refuse(value)

    def inputs(self, values: Sequence[str]) -> list[str]:
        """The names of what a parameter's values read."""
        if self.recipe and len(values) == 1 and is_document(values[0]):
            from rotation_merge.mergekit_plugin.document import read_recipe
            from rotation_merge.mergekit_plugin.recipe import inputs_in

            with suppress(RecipeError):
                return [values[0], *inputs_in(read_recipe(values[0]))]
        return [value for value in self._parts(values) if not (self.name == "data" and WORD.fullmatch(value))]

    def _parts(self, values: Sequence[str]) -> list[str]:
        """The single names in a parameter's values."""
        if self.named:
            values = [part.partition("=")[2].strip() for value in values for part in value.split(",")]
        return [value for value in values if value]


@dataclass(eq=False)
class Writes(click.ParamType):
    """Something that is written.

    Attributes:
        kind: FILE, FOLDER or ADAPTER.
        name: placeholder in the help.
        work: suffixes of its name for folders of unfinished work, from which an interrupted command continues.
        within: name of the file that is written in the folder that is named, which must exist.
        wrote: says of an existing file whether this option wrote it, so that it may be replaced.
        beside: whether it may lie in a folder that is read.
        resumed: whether an existing folder beside which there is unfinished work may be replaced.
    """

    kind: str
    name: str
    work: Sequence[str] = ()
    within: str = ""
    wrote: Callable[[str], bool] = lambda _: False
    beside: bool = False
    resumed: bool = False

    def outputs(self, value: str) -> list[Output]:
        """The outputs that a parameter names.

        Raises:
            RotationMergeError: the folder that must exist does not, or the name is empty.
        """
        if (self.within or not value) and not os.path.isdir(value):
            raise RotationMergeError("no such directory", where=value, remedy=nearest_path(value))
        path = os.path.join(value, self.within) if self.within else value.rstrip(os.sep) or os.sep
        kind = (FILE if path.endswith(".safetensors") else FOLDER) if self.kind == ADAPTER else self.kind
        written = Output(path, kind, self.wrote, self.beside, "write somewhere else, or --force")
        return [written, *(Output(f"{path}{ending}", WORK, beside=self.beside) for ending in self.work)]


def _check_model(name: str) -> None:
    """Refuse a model that is neither here nor on the hub, or whose adapter is not."""
    for part in [name] if os.path.exists(name) else name.split("+"):
        check_path(part.partition("@")[0])


def _check_model_or_recipe(name: str) -> None:
    """`_check_model`, unless the name is that of a recipe."""
    if not name.endswith((".yml", ".yaml")):
        _check_model(name)


def _check_patient(name: str) -> None:
    """Refuse what doctor cannot examine; of a name of the hub it decides itself, whose base may have an adapter."""
    if not is_hub_name(name.partition("@")[0]):
        check_local(name)


def is_document(path: str) -> bool:
    """Whether a path is a file that is no model: a recipe, or a file of ours."""
    return os.path.isfile(path) and not path.lower().endswith(".gguf")


@contextmanager
def checked_outputs(outputs: Sequence[Output] | None = None) -> Iterator[None]:
    """Check and lock outputs of the running command; None: those that its parameters name.

    Raises:
        RotationMergeError: one is an input, exists already (without --force), or is being written by another run.
    """
    context = click.get_current_context()
    values: dict[str, Any] = {name: value for name, value in context.params.items() if value is not None}
    named = [(param.type, values[str(param.name)]) for param in context.command.params if str(param.name) in values]
    checked, force = [*(outputs or ())], bool(values.get("force"))
    for kind, value in named if outputs is None else ():
        if isinstance(kind, Reads):
            kind.check((value,) if isinstance(value, str) else value)
        elif isinstance(kind, Writes):
            checked += kind.outputs(value)
            force = force or (kind.resumed and os.path.isdir(f"{checked[0].path}{UNFINISHED}"))
    inputs = list[str]()
    for kind, value in named if checked else ():
        if isinstance(kind, Reads):
            inputs += kind.inputs((value,) if isinstance(value, str) else value)
    for output in checked:
        check_output(output, inputs, force)
    with locked(*(output.path for output in checked if output.kind in (FILE, FOLDER))):
        yield


def _is_statistics(path: str) -> bool:
    """Whether a file holds statistics that `measure` wrote."""
    from rotation_merge.run.statistics import FORMAT, has_format

    return has_format(path, FORMAT)


MODEL, INPUT_FILE = Reads("model", refuse=_check_model), Reads("file", refuse=check_file)
SAMPLES, ADAPTER_INPUT = Reads("data", refuse=check_source), Reads("adapter", refuse=check_adapter)
PARENT, PATIENT = Reads("model"), Reads("model", recipe=True, refuse=_check_patient)
MODELS_OR_RECIPE = Reads("model", recipe=True, refuse=_check_model_or_recipe)
NAMED_ALIGNMENTS = Reads("names", named=True, refuse=check_file)
BOTH = (UNFINISHED, MATCHING_UNFINISHED)
NEW_FOLDER, NEW_ADAPTER, NEW_MODEL = Writes(FOLDER, "dir"), Writes(ADAPTER, "out"), Writes(FOLDER, "out", work=BOTH)
NEW_ALIGNMENT = Writes(FILE, "file", work=BOTH)
NEW_MERGE = Writes(FOLDER, "out", work=(*BOTH, "-samples"), resumed=True)
STATISTICS = Writes(FILE, "file", work=(UNFINISHED,), wrote=_is_statistics, beside=True)
