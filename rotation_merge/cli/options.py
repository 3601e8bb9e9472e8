"""Options that several commands share: what to match, as a recipe says it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from rotation_merge.cli.paths import WORD
from rotation_merge.config import Config, Option
from rotation_merge.errors import RotationMergeError
from rotation_merge.matching.options import CHOICES, MATCH_ON, AlignConfig, by_stream

if TYPE_CHECKING:
    from rotation_merge.matching.match import Match
    from rotation_merge.workers.pieces import Over

C = TypeVar("C", bound=Config)


class Groups(click.Choice):
    """A group, or groups by stream."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if by_stream(value) is not None else super().convert(value, param, ctx)


def config_options(
    config: type[Config], *names: str, types: Mapping[str, click.ParamType] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add an option for every field of a config that the command line has, or for these; the command hands its values
    to `config_of`, or to `config_values`.

    Args:
        types: of options that name what is read, by field.
    """
    types = types or {}

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        for name, described in reversed(config.options().items()):
            if described.command and (not names or name in names):
                function = _option(name, described, getattr(config, name), types.get(name))(function)
        return function

    return add


def _option(
    name: str, described: Option, default: Any, kind: click.ParamType | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    flag = f"--{(described.key or name).replace('_', '-')}"
    text = sentence(described.help, described.choices)
    if described.kind is bool:
        return click.option(flag, name, is_flag=True, help=text)
    more: dict[str, Any] = {"help": text, "show_default": default is not None}
    if described.kind is tuple:
        more["help"] = sentence(f"{described.help}, of {', '.join(described.choices)}")
        return click.option(flag, name, type=WORD, default=",".join(default), **more)
    low, high = (end if math.isfinite(end) else None for end in (described.low, described.high))
    if kind is not None or described.words:
        more["type"] = kind or WORD
    elif described.choices:
        more["type"] = click.Choice(list(described.choices))
    elif described.kind is int and low is None and high is None:
        more["type"] = int
    elif described.kind is int:
        more["type"] = click.IntRange(None if low is None else int(low), None if high is None else int(high))
    elif described.kind is float:
        more["type"] = click.FloatRange(low, high, min_open=described.above)
    else:
        more["type"] = WORD
    return click.option(flag, name, default=default, **more)


def sentence(words: str, choices: Collection[Any] = ()) -> str:
    """The help of an option; one that begins with a value keeps the value as it is written."""
    return f"{words}." if words.partition(":")[0] in choices else f"{words[:1].upper()}{words[1:]}."


def config_of(config: type[C], values: dict[str, Any], **more: Any) -> C:
    """A config out of a command's keyword arguments, which its fields are taken from.

    Raises:
        RecipeError: a list of words holds one that is not known.
    """
    chosen = dict(more)
    for name, described in config.options().items():
        if name in values:
            value = values.pop(name)
            if described.kind is tuple and isinstance(value, str):
                value = tuple(dict.fromkeys(word.strip() for word in value.split(",") if word.strip()))
            chosen[name] = value
    return config(**chosen)


def config_values(config: type[Config], values: Mapping[str, Any]) -> dict[str, Any]:
    """What a command's options say to a config: those that are given, numbers as numbers."""
    known = config.options()
    options = {name: value for name, value in values.items() if name in known and value not in (None, "")}
    return {name: _number(value) if known[name].kind is float else value for name, value in options.items()}


def _number(text: str) -> float | str:
    """The number that a text is, or the text."""
    try:
        return float(text)
    except ValueError:
        return text


def matching_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --attention, --heads, --ffn, --rescale, --residual, --shift-head, --layers and --untie."""
    function = click.option("--untie", is_flag=True, help="Give a tied head its own tensor (for --residual rotation).")(
        function
    )
    function = _option("layers", AlignConfig.described("layers"), AlignConfig.layers)(function)
    for name, choices in reversed(CHOICES.items()):
        words = [str(choice).lower() for choice in choices]
        text = AlignConfig.described(name).help
        option = click.option(
            f"--{name.replace('_', '-')}",
            type=(Groups if name == "residual" else click.Choice)(words),
            default=words[0],
            show_default=True,
            help=sentence(text),
        )
        function = option(function)
    return function


def match_on_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --match-on; the command hands its value to `matcher`."""
    return click.option(
        "--match-on",
        type=click.Choice(MATCH_ON),
        default="weights",
        show_default=True,
        help="What chooses the maps: weights, activations of both models on samples, or both.",
    )(function)


def matcher(
    match_on: str, anchor: str, donor: str, data: str, samples: int, seed: int, device: str, over: Over | None = None
) -> Match:
    """What --match-on stands for: how the donor's maps to the anchor are found; on weights, who does it."""
    if match_on == "weights":
        from rotation_merge.matching.match import match_model

        return match_model if over is None else functools.partial(match_model, over=over)
    if over is not None and over.apart:
        raise RotationMergeError("--ray shares matching on weights", remedy="leave out --match-on, or --ray")
    from rotation_merge.matching.match_on import OnSamples

    return OnSamples(match_on, anchor, donor, data, samples, seed, device)


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


def ray_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --ray; the command hands its value to `spread.cluster.spread`."""
    return click.option(
        "--ray",
        type=WORD,
        metavar="ADDRESS",
        help="Share the work among the workers of a Ray cluster: HOST:PORT, auto (this machine's), or local "
        "(a temporary one). All workers must see the models under the same path; needs rotation-merge[ray].",
    )(function)


def devices(name: str, ray: str | None) -> tuple[str, str]:
    """What --device means for this process, and for Ray's workers, which do the work where there are any.

    Raises:
        RotationMergeError: it is not there, or is none.
    """
    if ray is None:
        return usable_device(name), "cpu"
    if name not in ("auto", "cpu", "cuda"):
        raise RotationMergeError(f"Ray's workers choose among their devices, not '{name}'", remedy="use --device cuda")
    return "cpu", name


def usable_device(name: str) -> str:
    """The device that --device means; auto: the first GPU, where there is one.

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


def match_options(values: dict[str, Any]) -> AlignConfig:
    """The options out of a command's keyword arguments, which they are taken from."""
    chosen: dict[str, Any] = {}
    for name, choices in CHOICES.items():
        word = values.pop(name)
        chosen[name] = next((choice for choice in choices if str(choice).lower() == word), word)
    return AlignConfig(layers=values.pop("layers"), **chosen)
