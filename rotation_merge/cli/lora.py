"""`rotation-merge lora`."""

from __future__ import annotations

from typing import Any

import click

from rotation_merge.averaging.config import AdapterMergeConfig
from rotation_merge.cli.options import config_of, config_options
from rotation_merge.cli.paths import ADAPTERS_AND_OUT, WORD, writes
from rotation_merge.cli.show import Answer, say, shown, table
from rotation_merge.errors import RecipeError


@click.command(epilog="Example: rotation-merge lora ./german ./french ./merged --method tsv --rank 16")
@click.argument("adapters", type=ADAPTERS_AND_OUT, nargs=-1, required=True, metavar="A B [C ...] OUT")
@click.option("--method", "-m", default="linear", show_default=True, type=WORD, help="Method that merges the changes.")
@click.option("--weights", type=WORD, metavar="W,W,...", help="Weight of each adapter; all 1 if not given.")
@click.option(
    "--parameter", "-p", type=WORD, multiple=True, metavar="NAME=VALUE", help="Parameter of the method, as in a recipe."
)
@config_options(AdapterMergeConfig)
@shown
@writes
def command(
    adapters: tuple[str, ...], method: str, weights: str | None, parameter: tuple[str, ...], **values: Any
) -> Answer:
    """Merge LoRA adapters of one base into one adapter, without the base.

    An adapter is a folder in peft's format, or a .safetensors file in kohya's or diffusers'; OUT has the format of the
    first. The methods are linear (weighted mean), mergekit's task_arithmetic, ties, dare_ties, dare_linear, breadcrumbs
    and della, and wudi, tsv and iso. The result equals the change of the merged full models, up to its rank. The table
    has the part of each adapter that remains in the result.

    With --force adapters that name different bases are merged, too.
    """
    from rotation_merge.averaging.lora import merge_adapters

    *sources, out = adapters
    force = bool(click.get_current_context().params.get("force"))
    merged = merge_adapters(
        sources,
        method,
        None if weights is None else _numbers(weights),
        config_of(AdapterMergeConfig, values),
        parameters=dict(map(_pair, parameter)),
        same_base=not force,
    )
    merged.save(out, force)
    shares, ranks = merged.shares(), [merged_map.rank for merged_map in merged.maps.values()]
    maps = {module: vars(merged_map) for module, merged_map in merged.maps.items()}
    data = {"out": out, "shares": dict(zip(sources, shares, strict=True)), "maps": maps}

    def show() -> None:
        rows = []
        for index, (source, share) in enumerate(zip(sources, shares, strict=True)):
            present = ((each.shares[index], module) for module, each in merged.maps.items())
            least, module = min((energy, module) for energy, module in present if energy is not None)
            rows.append((source, f"{share:.1%}", f"{least:.1%}", module))
        table("How much of each adapter the merge keeps", ("adapter", "mean", "least", "in"), rows, numbers=(1, 2))
        span = str(min(ranks)) if min(ranks) == max(ranks) else f"{min(ranks)} to {max(ranks)}"
        sentence = f"the rank keeps at least {merged.energy:.1%} of each map"
        say(f"{len(ranks)} maps merged by {method}, rank {span}; {sentence}.")
        say(f"Written to {out}.")

    return Answer(data, show)


def _numbers(text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError as error:
        raise RecipeError(f"--weights is '{text}'", remedy="give numbers with commas between") from error


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise RecipeError(f"--parameter is '{text}'", remedy="give NAME=VALUE")
    return name, value
