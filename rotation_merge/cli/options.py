"""Options that several commands share: what to match, as a recipe says it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from rotation_merge.cli.paths import WORD
from rotation_merge.config import Config, Option
from rotation_merge.errors import RotationMergeError
from rotation_merge.matching.options import CHOICES, MATCH_ON, AlignConfig, by_stream

if TYPE_CHECKING:
    from rotation_merge.matching.match import Match
    from rotation_merge.workers.pieces import Over

HELP = {
    "attention": "Maps inside attention heads.",
    "heads": "Order of attention heads.",
    "ffn": "Order of FFN neurons and of experts.",
    "rescale": "Rescaling; sequential: after the rotation.",
    "shift_head": "Move an untied head's rows by one vector: logits change, probabilities do not.",
    "residual": "Group of the residual stream; or by stream, as decoder=rotation,encoder=permutation.",
}


class Groups(click.Choice):
    """A group, or groups by stream."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if by_stream(value) is not None else super().convert(value, param, ctx)


def config_options(
    config: type[Config], *names: str, types: Mapping[str, click.ParamType] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add an option for each of some fields of a config, as it describes them; the command hands their values to
    `config_values`.

    Args:
        types: of options that name what is read, by field.
    """
    known, types = config.options(), types or {}

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in reversed(names):
            option, default = known[name], getattr(config, name)
            shown: dict[str, Any] = {"type": types.get(name) or _type_of(option), "show_default": default is not None}
            words = option.help[0].upper() + option.help[1:]
            add_option = click.option(
                f"--{(option.key or name).replace('_', '-')}",
                name,
                default=default,
                help=f"{words}.",
                **({"is_flag": True} if option.kind is bool else shown),
            )
            function = add_option(function)
        return function

    return add


def _type_of(option: Option) -> click.ParamType:
    """The type of a command-line option."""
    if option.choices:
        return click.Choice(option.choices)
    if option.kind is int:
        return click.IntRange(min=int(option.low)) if math.isfinite(option.low) else click.INT
    return WORD


def config_values(config: type[Config], values: Mapping[str, Any]) -> dict[str, Any]:
    """What a command's options say to a config: those that are given, numbers as numbers."""
    known = config.options()
    said = {name: value for name, value in values.items() if name in known and value not in (None, "")}
    return {name: _number(value) if known[name].kind is float else value for name, value in said.items()}


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
    function = click.option(
        "--layers", type=WORD, default="all", show_default=True, help="Match only these, e.g. 0-5,11."
    )(function)
    for name, choices in reversed(CHOICES.items()):
        words = [str(choice).lower() for choice in choices]
        option = click.option(
            f"--{name.replace('_', '-')}",
            type=(Groups if name == "residual" else click.Choice)(words),
            default=words[0],
            show_default=True,
            help=HELP.get(name),
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
        help="What maps are chosen by; activations, on samples, run both models; both: streams start from these.",
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
        help="Share the work among the workers of a Ray cluster: HOST:PORT, auto (that of this machine), or local "
        "(started here). Workers read the models from storage that all see; needs rotation-merge[ray].",
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
        found = torch.device(name)
        torch.zeros(1, device=found).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise RotationMergeError(f"device '{name}' cannot be used", remedy="use --device cpu, or auto") from error
    return str(found)


def match_options(values: dict[str, Any]) -> AlignConfig:
    """The options out of a command's keyword arguments, which they are taken from."""
    chosen: dict[str, Any] = {}
    for name, choices in CHOICES.items():
        word = values.pop(name)
        chosen[name] = next((choice for choice in choices if str(choice).lower() == word), word)
    return AlignConfig(layers=values.pop("layers"), **chosen)
