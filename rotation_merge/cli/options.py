"""Options that several commands share: what to match, as a recipe says it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from rotation_merge.matching.options import CHOICES, MatchOptions

HELP = {
    "attention": "Maps inside attention heads.",
    "heads": "Order of attention heads.",
    "ffn": "Order of FFN neurons and of experts.",
    "rescale": "Rescaling; sequential: after the rotation.",
    "residual": "Group of the residual stream.",
}


def matching_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --attention, --heads, --ffn, --rescale, --residual, --layers and --untie."""
    function = click.option("--untie", is_flag=True, help="Give a tied head its own tensor (for --residual rotation).")(
        function
    )
    function = click.option("--layers", default="all", show_default=True, help="Match only these, e.g. 0-5,11.")(
        function
    )
    for name, choices in reversed(CHOICES.items()):
        words = [str(choice).lower() for choice in choices]
        option = click.option(
            f"--{name}", type=click.Choice(words), default=words[0], show_default=True, help=HELP.get(name)
        )
        function = option(function)
    return function


def match_options(values: dict[str, Any]) -> MatchOptions:
    """The options out of a command's keyword arguments, which they are taken from."""
    chosen: dict[str, Any] = {}
    for name, choices in CHOICES.items():
        word = values.pop(name)
        chosen[name] = next(choice for choice in choices if str(choice).lower() == word)
    return MatchOptions(layers=values.pop("layers"), **chosen)
