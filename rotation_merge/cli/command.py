"""A command out of a function: its arguments and options from the annotations of parameters, or from a config's fields.

Parameters before `*` are arguments, those behind it options. A config becomes an option for each of its fields that
the command line has, or that its annotation lists. Any other parameter is annotated with its type, as fields of configs
are, and with a click type where it names what is read or written, its flags if not its name, its placeholder in
capitals, and its help. `force` is that of the outputs.
"""

from __future__ import annotations

import inspect
import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from rotation_merge.cli.paths import MODEL, SAMPLES, Writes, checked_outputs
from rotation_merge.cli.show import Answer, Progress, verbosity
from rotation_merge.config import Config, Dtype, Option
from rotation_merge.errors import RecipeError, RotationMergeError

LOG = logging.getLogger(__name__)

FIELDS = {"data": SAMPLES, "base": MODEL}
"""Click types of config fields that name inputs."""

Model = Annotated[str, MODEL]
Device = Annotated[str, "DEVICE", "device to compute on: auto, cpu, cuda or cuda:N"]
ShardSize = Annotated[str, "largest weight file, e.g. 500M"]
Storage = Annotated[Dtype | None, "storage of the weights. Not given: that of the input"]

Fill = Callable[[Mapping[str, Any]], Any]
"""The value of a function's parameter, from the values of arguments and options by name."""


class Value(click.ParamType):
    """A value that names no file, parsed and checked by its description."""

    def __init__(self, flag: str, described: Option) -> None:
        self.flag, self.described = flag, described
        self.name = {int: "integer", float: "float"}.get(described.kind, "text")

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        described = self.described
        if described.kind is tuple and isinstance(value, str):
            value = tuple(dict.fromkeys(word.strip() for word in value.split(",") if word.strip()))
        elif described.kind in (int, float):
            with suppress(ValueError):
                value = described.kind(value) if isinstance(value, str) else value
        else:
            value = next((choice for choice in described.choices if str(choice).lower() == value), value)
        try:
            described.check(self.flag, value)
        except RecipeError as error:
            raise click.UsageError(str(error), ctx) from error
        return value

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """The words that a value may be, for a shell that completes it."""
        return [CompletionItem(word) for word in self.described.literals if word.startswith(incomplete)]


def _parameter(parameter: inspect.Parameter, hint: Any) -> tuple[list[click.Parameter], Fill]:
    """The arguments and options that a parameter of a command's function is filled from."""
    plain, facts = (hint.__origin__, hint.__metadata__) if get_origin(hint) is Annotated else (hint, ())
    if parameter.name == "force":
        return [], itemgetter(parameter.name)
    if not (isinstance(plain, type) and issubclass(plain, Config)):
        return [_described(parameter, hint, plain, facts)], itemgetter(parameter.name)
    start = plain() if parameter.default is inspect.Parameter.empty else parameter.default
    listed = facts[0] if facts else plain.options()
    fields = {name: field for name, field in plain.options().items() if field.command and name in listed}
    options = [_option([name], field, getattr(start, name), FIELDS.get(name)) for name, field in fields.items()]
    return [*options], lambda values: replace(start, **{name: values[name] for name in fields})


def _described(parameter: inspect.Parameter, hint: Any, plain: Any, facts: Collection[Any]) -> click.Parameter:
    """The argument or option of a parameter that is no config."""
    words = [fact for fact in facts if isinstance(fact, str)]
    flags = [word for word in words if word.startswith("-")]
    kind = next((fact for fact in facts if isinstance(fact, click.ParamType)), None)
    repeated, required = get_origin(plain) is tuple, parameter.default is inspect.Parameter.empty
    more: dict[str, Any] = {"required": required, "metavar": next((word for word in words if word.isupper()), None)}
    if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
        return click.Argument([parameter.name], type=kind, nargs=-1 if repeated else 1, **more)
    help = next((word for word in words if word not in flags and not word.isupper()), "")
    described = Option(get_args(plain)[0] if repeated else hint, help)
    default = None if repeated or required else parameter.default
    return _option([*flags, parameter.name], described, default, kind, multiple=repeated, **more)


def _option(
    names: list[str], described: Option, default: Any, kind: click.ParamType | None = None, **more: Any
) -> click.Option:
    """An option with the help, the checks and the default that a description gives it.

    Args:
        names: of the parameter, behind its flags if they differ from it.
    """
    if len(names) == 1:
        names = [f"--{(described.key or names[0].rstrip('_')).replace('_', '-')}", *names]
    text, literals = described.text, described.literals
    help = f"{text}." if text.partition(":")[0] in described.choices else f"{text[:1].upper()}{text[1:]}."
    if described.kind is bool and not described.choices:
        return click.Option(names, is_flag=True, default=default, help=help)
    if described.kind is tuple:
        default, help = ",".join(default), f"{help[:-1]}, of {', '.join(described.choices)}."
    elif literals:
        more["metavar"] = f"[{'|'.join(literals)}{'' if described.choices else '|...'}]"
    start, kind = str(default).lower() if type(default) is bool else default, kind or Value(names[0], described)
    return click.Option(names, type=kind, default=start, show_default=default is not None, help=help, **more)


def flags_used(*names: str) -> list[str]:
    """Flags of those parameters of the running command that the user gave."""
    if (context := click.get_current_context(silent=True)) is None:
        return []  # called from Python
    flags = {str(parameter.name): parameter.opts[0] for parameter in context.command.params}
    return [flags[name] for name in names if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]


def refuse_idle(*rules: tuple[bool, Iterable[str], str, str]) -> None:
    """Refuse options that would do nothing.

    Args:
        rules: whether it holds, the parameters that have no effect then, the problem (`{}` is the flag), the remedy.

    Raises:
        RotationMergeError: names the first that was given.
    """
    for holds, names, problem, remedy in rules:
        if holds and (flags := flags_used(*names)):
            raise RotationMergeError(problem.format(flags[0]), remedy=remedy)


# --- words that are no values ----------------------------------------------------------------------------------------

COUNTED = re.compile(r"(sample|example|text|token|step|point)s?")
UNIT = re.compile(r"s(ecs?|econds?)?|m(ins?|inutes?)?|h(rs?|ours?)?|bytes?|[kmgt]?i?b|[kmgt]", re.IGNORECASE)


class Command(click.Command):
    """Refuses a unit that stands apart from its number: `--budget 6 minutes`, `--limit 64 samples`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        defaults = {flag: str(p.default) for p in self.params if isinstance(p.type, Value) for flag in p.opts}
        for flag, number, word in re.findall(r"(--[a-z-]+)[ =](\d+) (\S+)", " ".join(args)):
            with_unit = re.fullmatch(r"\d+([a-zA-Z])", defaults.get(flag, ""))
            if flag not in defaults or os.path.exists(word) or not (UNIT if with_unit else COUNTED).fullmatch(word):
                continue
            letter = "" if with_unit is None else word[0].lower() if with_unit[1].islower() else word[0].upper()
            value = f"{flag} {number}"
            raise click.UsageError(f"'{word}' behind '{value}' is not read as a unit; write {value}{letter}")
        return super().parse_args(ctx, args)


# --- commands --------------------------------------------------------------------------------------------------------


def cli_command(*examples: str, cls: type[Command] = Command) -> Callable[[Callable[..., Answer]], click.Command]:
    """Turn a function into a command that gives its answer; the docstring is the help.

    Without --force it overwrites nothing, with it never an input.
    """

    def decorated(function: Callable[..., Answer]) -> click.Command:
        hints, signature = get_type_hints(function, include_extras=True), inspect.signature(function).parameters
        filled = {name: _parameter(parameter, hints[name]) for name, parameter in signature.items()}
        params = [param for of_parameter, _ in filled.values() for param in of_parameter]
        outputs = [param.type for param in params if isinstance(param.type, Writes)]
        if outputs:
            help = "Overwrite an existing output, never an input."
            params.append(click.Option(["--force"], is_flag=True, help=help))
        more: dict[str, Any] = {"is_flag": True, "expose_value": False, "help": "Print machine-readable JSON."}
        fills = {name: fill for name, (_, fill) in filled.items()}
        call = partial(_answer, function, fills, any(kind.work for kind in outputs))
        epilog = f"Example{'s' * (len(examples) > 1)}: {'; '.join(examples)}"
        params += [click.Option(["--json", "as_json"], **more), verbosity(hidden=True)]
        return cls(None, callback=call, params=params, help=function.__doc__, epilog=epilog)

    return decorated


def _answer(function: Callable[..., Answer], fills: Mapping[str, Fill], resumes: bool, **values: Any) -> Answer:
    """Call a command's function, its outputs checked and locked, with a progress bar.

    Args:
        resumes: whether it continues an interrupted run.
    """
    if LOG.isEnabledFor(logging.INFO):
        from rotation_merge.record import versions

        LOG.info("%s", ", ".join(f"{name} {number}" for name, number in versions().items()))
    try:
        with checked_outputs(), closing(Progress()) as progress:
            from rotation_merge.workers import listening

            known = {"force": False, **values}
            with listening(progress):
                return function(**{name: fill(known) for name, fill in fills.items()})
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt("; run the same command to continue" * resumes) from error
