"""Options that several commands share, made from the configs."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from rotation_merge.cli.paths import SAMPLE_SOURCE, WORD, Word
from rotation_merge.config import DTYPES, Config, Option
from rotation_merge.errors import RecipeError, RotationMergeError
from rotation_merge.run.sample_kinds import KINDS

C = TypeVar("C", bound=Config)
THREADS = "threads"
"""The value of --backend that needs nothing else."""


class Described(Word):
    """The value type of an option, parsed and checked by its description in the config."""

    def __init__(self, flag: str, described: Option) -> None:
        self.flag, self.described = flag, described

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        described = self.described
        if described.kind is tuple and isinstance(value, str):
            value = tuple(dict.fromkeys(word.strip() for word in value.split(",") if word.strip()))
        elif described.kind in (int, float) and isinstance(value, str):
            value = _number(value, described.kind)
        else:
            value = next((choice for choice in described.choices if str(choice).lower() == value), value)
        try:
            described.check(self.flag, value)
        except RecipeError as error:
            raise click.UsageError(str(error), ctx) from error
        return value

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(word) for word in self.described.literals if word.startswith(incomplete)]


def _number(text: str, kind: Any) -> float | str:
    """The number of a kind that a text is, or the text."""
    try:
        number: float = kind(text)
        return number
    except ValueError:
        return text


def config_options(
    config: type[Config],
    *names: str,
    types: Mapping[str, click.ParamType] | None = None,
    defaults: Config | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add command-line options for fields of a config; the command passes their values to `config_of`.

    By default for all fields that the command line has.

    Args:
        types: click types of options that name inputs, by field.
        defaults: values of options that are not given; None: those of the config.
    """
    types = types or {}

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        for name, described in reversed(config.options().items()):
            if described.command and (not names or name in names):
                function = _option(name, described, getattr(defaults or config, name), types.get(name))(function)
        return function

    return add


def _option(
    name: str, described: Option, default: Any, kind: click.ParamType | None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    flag = f"--{(described.key or name).replace('_', '-')}"
    text = sentence(described.text, described.choices)
    if described.kind is bool and not described.choices:
        return click.option(flag, name, is_flag=True, help=text)
    more: dict[str, Any] = {"help": text, "show_default": default is not None}
    low, high = (end if math.isfinite(end) else None for end in (described.low, described.high))
    if kind is not None:
        more["type"] = kind
    elif described.kind is int and not described.words and low is None and high is None:
        more["type"] = int
    elif described.kind is int and not described.words:
        more["type"] = click.IntRange(None if low is None else int(low), None if high is None else int(high))
    elif described.kind is float and not described.words:
        more["type"] = click.FloatRange(low, high, min_open=described.above)
    else:
        more["type"] = Described(flag, described)
        if described.literals and described.kind is not tuple:
            more["metavar"] = f"[{'|'.join(described.literals)}{'' if described.choices else '|...'}]"
    if described.kind is tuple:
        default, more["help"] = ",".join(default), sentence(f"{described.text}, of {', '.join(described.choices)}")
    return click.option(flag, name, default=str(default).lower() if type(default) is bool else default, **more)


def sentence(words: str, choices: Collection[Any] = ()) -> str:
    """The help of an option as a sentence; a leading value keeps its spelling."""
    return f"{words}." if words.partition(":")[0] in choices else f"{words[:1].upper()}{words[1:]}."


def given(context: click.Context, *names: str) -> list[str]:
    """Flags of those parameters that the user gave."""
    flags = {str(parameter.name): parameter.opts[0] for parameter in context.command.params}
    return [flags[name] for name in names if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]


def config_of(config: type[C], values: dict[str, Any], **more: Any) -> C:
    """A config out of a command's keyword arguments, which its fields are taken from."""
    return config(**{name: values.pop(name) for name in config.options() if name in values}, **more)


def matching_options(function: Callable[..., Any], defaults: Config | None = None) -> Callable[..., Any]:
    """Add the options of `AlignConfig`, and --untie; the command hands its values to `config_of`."""
    from rotation_merge.matching.options import AlignConfig, MatchConfig

    return config_options(AlignConfig, defaults=defaults)(config_options(MatchConfig, "untie")(function))


def data_option(text: str, name: str = "data", **more: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add --data, which names samples; `{}` in the text stands for their kinds."""
    return click.option("--data", name, type=SAMPLE_SOURCE, help=text.format(KINDS), **more)


def device_option(text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add --device; the command hands its value to `usable_device`."""
    return click.option(
        "--device",
        type=WORD,
        default="cpu",
        show_default=True,
        metavar="DEVICE",
        help=f"auto, cpu, cuda or cuda:N{text}.",
    )


def storage_options(usual: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add --shard-size and --dtype of the weights that are written.

    Args:
        usual: whose dtype counts if none is given.
    """

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        help = f"Storage of the weights; {usual} if not given."
        function = click.option("--dtype", type=click.Choice(DTYPES), help=help)(function)
        help = "Largest weight file, e.g. 500M."
        return click.option("--shard-size", type=WORD, default="5B", show_default=True, help=help)(function)

    return add


def backend_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --backend; the command hands its value to `workers.on_backend`."""
    return click.option(
        "--backend",
        type=click.Choice((THREADS, "ray", "dask")),
        default=THREADS,
        show_default=True,
        help="Who computes the blocks: threads of this process, or workers of the Ray or Dask cluster that RAY_ADDRESS "
        "or DASK_SCHEDULER_ADDRESS names (otherwise one on this machine). All must see the models under the same "
        "path; needs rotation-merge[ray] or [dask].",
    )(function)


def devices(name: str, backend: str) -> tuple[str, str]:
    """Devices for this process and for the workers of a backend, from --device.

    Raises:
        RotationMergeError: it is not there, or is none.
    """
    if backend == THREADS:
        return usable_device(name), "cpu"
    if name not in ("cpu", "cuda"):
        problem = f"--backend {backend} does not take --device {name}: each worker chooses its own"
        raise RotationMergeError(problem, remedy="use --device cuda")
    return "cpu", name


def usable_device(name: str) -> str:
    """The device named by --device; auto: the first GPU, if there is one.

    Raises:
        RotationMergeError: it is not there, or is none.
    """
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch_device = torch.device(name)
        torch.zeros(1, device=torch_device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise RotationMergeError(f"device '{name}' cannot be used", remedy="use --device cpu, or auto") from error
    return str(torch_device)
