"""Click types of options and arguments: inputs, outputs and words; and --force.

Every option that takes text has one of these types, so that all inputs and outputs of a command are known before it
runs.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from rotation_merge.errors import RecipeError, RotationMergeError, nearest_path
from rotation_merge.files import (
    DATA,
    FILE,
    FOLDER,
    MATCHING_UNFINISHED,
    UNFINISHED,
    WORK,
    Input,
    Output,
    check_output,
    locked,
)

FORCE = "write somewhere else, or --force"


def is_document(path: str) -> bool:
    """Whether a path is a file that is no model: a recipe, or a file of ours."""
    return os.path.isfile(path) and not path.lower().endswith(".gguf")


class Word(click.types.StringParamType):
    """Text that names no file."""


class Reads(click.types.StringParamType):
    """Text that names something that is read.

    Args:
        kind: noun for it.
        named: whether it is NAME or NAME=FILE, with commas between.
        recipe: whether it may be a recipe, with all that it reads.
    """

    def __init__(self, kind: str, named: bool = False, recipe: bool = False) -> None:
        self.kind, self.named, self.recipe = kind, named, recipe

    def inputs(self, values: Sequence[str]) -> list[Input]:
        """Return the inputs that one parameter names."""
        if self.recipe and len(values) == 1 and is_document(values[0]):
            from rotation_merge.mergekit_plugin.recipe import inputs_in

            return [Input(values[0], "recipe"), *inputs_in(values[0])]
        if self.named:
            values = [part.partition("=")[2].strip() for value in values for part in value.split(",")]
        return [Input(value, self.kind) for value in values if value]


class Writes(click.types.StringParamType):
    """Text that names something that is written.

    Args:
        kind: FILE or FOLDER; an adapter is a file if its name ends in `.safetensors`.
        work: suffix of its name for the folder of unfinished work.
        within: the name of the file that is written in the folder that is named, which must exist.
        wrote: says of a file that is there whether this option wrote it.
        beside: whether it may lie in a folder that is read.
    """

    def __init__(
        self,
        kind: str = FILE,
        work: Sequence[str] = (),
        within: str = "",
        wrote: Callable[[str], bool] = lambda _: False,
        beside: bool = False,
    ) -> None:
        self.kind, self.work, self.within, self.wrote, self.beside = kind, work, within, wrote, beside

    def outputs(self, value: str) -> list[Output]:
        """Return the outputs that one parameter names.

        Raises:
            RotationMergeError: the folder that must exist does not.
        """
        if self.within and not os.path.isdir(value):
            remedy = nearest_path(value, "name the merged model's directory")
            raise RotationMergeError("no such directory", where=value, remedy=remedy)
        path = os.path.join(value, self.within) if self.within else value.rstrip(os.sep) or os.sep
        kind = FILE if self.kind == ADAPTER and path.endswith(".safetensors") else self.kind
        written = Output(path, FOLDER if kind == ADAPTER else kind, self.wrote, self.beside)
        return [written, *(Output(f"{path}{ending}", WORK, beside=self.beside) for ending in self.work)]


class ReadsModelsAndWrites(click.types.StringParamType):
    """Models, and behind them what is written."""

    def __init__(self, writes: Writes) -> None:
        self.writes = writes

    def inputs(self, values: Sequence[str]) -> list[Input]:
        return MODEL.inputs(values[:-1])

    def outputs(self, value: Sequence[str]) -> list[Output]:
        return self.writes.outputs(value[-1])


def inputs_of(context: click.Context) -> list[Input]:
    """All inputs of a command."""
    return [
        read
        for parameter, value in _values(context)
        if hasattr(parameter.type, "inputs")
        for read in parameter.type.inputs((value,) if isinstance(value, str) else value)
    ]


def outputs_of(context: click.Context) -> list[Output]:
    """All outputs of a command."""
    return [
        written
        for parameter, value in _values(context)
        if hasattr(parameter.type, "outputs")
        for written in parameter.type.outputs(value)
    ]


def _values(context: click.Context) -> Iterator[tuple[click.Parameter, Any]]:
    """The parameters of a command that were used, with their values."""
    for parameter in context.command.params:
        if value := context.params.get(parameter.name or ""):
            yield parameter, value


def writes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --force; without it a command overwrites nothing, with it never an input."""

    @functools.wraps(function)
    def wrapped(*args: Any, force: bool, **kwargs: Any) -> Any:
        with hold_outputs(outputs_of(click.get_current_context())):
            return function(*args, **kwargs)

    return click.option("--force", is_flag=True, help="Overwrite an existing output, never an input.")(wrapped)


@contextmanager
def hold_outputs(outputs: Sequence[Output], force: bool = False) -> Iterator[None]:
    """Hold outputs of the command that runs, once nothing speaks against writing them.

    Args:
        force: whether existing outputs may be replaced without --force.

    Raises:
        RotationMergeError: one is an input, is there already, or is being written by another run.
    """
    context = click.get_current_context()
    inputs = inputs_of(context)
    for output in outputs:
        check_output(output, inputs, force or bool(context.params.get("force")), FORCE)
    with locked(*(output.path for output in outputs if output.kind in (FILE, FOLDER))):
        yield


def _is_statistics(path: str) -> bool:
    """Whether a file holds statistics that `measure` wrote."""
    from rotation_merge.run.statistics import FORMAT, has_format

    return has_format(path, FORMAT)


def read_recipe(recipe: Path) -> str:
    """A recipe's text.

    Raises:
        RecipeError: the file cannot be read as text.
    """
    if recipe.suffix.lower() == ".gguf":
        raise RecipeError("is a model, not a recipe", where=str(recipe), remedy=f"rotation-merge inspect {recipe}")
    try:
        return recipe.read_text(encoding="utf-8")
    except IsADirectoryError as error:
        raise RecipeError("is a directory", where=str(recipe), remedy="name the YAML file") from error
    except FileNotFoundError as error:
        remedy = nearest_path(str(recipe), of=os.path.isfile)
        raise RecipeError("no such file", where=str(recipe), remedy=remedy) from error
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot be read ({error})", where=str(recipe), remedy="it must be UTF-8 text") from error


ADAPTER = "adapter"
WORD, MODEL, ALIGNMENT, SAMPLE_SOURCE = Word(), Reads("model"), Reads("alignment"), Reads(DATA)
MODELS_OR_RECIPE, NAMED_ALIGNMENTS = Reads("model", recipe=True), Reads("alignment", named=True)
NEW_FOLDER = Writes(FOLDER)
STATISTICS = Writes(FILE, work=(UNFINISHED,), wrote=_is_statistics, beside=True)
NEW_ALIGNMENT = Writes(FILE, work=(UNFINISHED, MATCHING_UNFINISHED))
NEW_MODEL = Writes(FOLDER, work=(UNFINISHED, MATCHING_UNFINISHED))
ADAPTERS_AND_OUT = ReadsModelsAndWrites(Writes(ADAPTER))
MODELS_AND_OUT = ReadsModelsAndWrites(Writes(FOLDER, work=(UNFINISHED, MATCHING_UNFINISHED, "-samples")))
