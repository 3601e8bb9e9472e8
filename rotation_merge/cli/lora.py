"""`rotation-merge lora`."""

from __future__ import annotations

from typing import Annotated

import rotation_merge as rm
from rotation_merge.averaging.config import AdapterMergeConfig, AdapterMethod, check_adapter_parameters, numbers_for
from rotation_merge.cli.command import cli_command
from rotation_merge.cli.paths import ADAPTER_INPUT, NEW_ADAPTER
from rotation_merge.cli.show import Answer, Table
from rotation_merge.errors import RecipeError


@cli_command("rotation-merge lora ./german ./french ./merged --method tsv --rank 16")
def command(
    adapters: Annotated[tuple[str, ...], ADAPTER_INPUT, "A B [C ...]"],
    out: Annotated[str, NEW_ADAPTER],
    *,
    method: Annotated[AdapterMethod, "--method", "-m", "method that merges the changes"] = "linear",
    weights: Annotated[str | None, "W,W,...", "weight of each adapter; all 1 if not given"] = None,
    parameter: Annotated[
        tuple[str, ...], "--parameter", "-p", "NAME=VALUE", "parameter of the method, as in a recipe"
    ] = (),
    config: AdapterMergeConfig,
    force: bool,
) -> Answer:
    """Merge LoRA adapters of one base into one adapter, without the base.

    An adapter is a folder in peft's format, or a .safetensors file in kohya's or diffusers'; OUT has the format of the
    first. The methods are linear (weighted mean), mergekit's task_arithmetic, ties, dare_ties, dare_linear, breadcrumbs
    and della, and wudi, tsv and iso. The result equals the change of the merged full models, up to its rank. The table
    has the part of each adapter that remains in the result.

    With --force adapters that name different bases are merged, too.
    """
    parameters = dict(word.partition("=")[::2] for word in parameter)
    if malformed := [word for word in parameter if "=" not in word]:
        raise RecipeError(f"--parameter is '{malformed[0]}'", remedy="give NAME=VALUE")
    check_adapter_parameters(method, parameters)
    config.check_energy()
    numbers = None if weights is None else numbers_for(_numbers(weights), len(adapters), "adapter")
    merged = rm.merge_adapters(adapters, method, numbers, config, parameters=parameters, same_base=not force)
    merged.save(out, force)
    shares, maps = dict(zip(adapters, merged.shares(), strict=True)), merged.maps
    columns = zip(*(each.shares for each in maps.values()), strict=True)
    least = [min(share for share in column if share is not None) for column in columns]
    rows = [
        {"adapter": name, "mean": f"{shares[name]:.1%}", "least": f"{low:.1%}"}
        for name, low in zip(shares, least, strict=True)
    ]
    rank = max(each.rank for each in maps.values())
    lines: list[str | Table] = [
        Table(rows, "How much of each adapter the merge keeps"),
        f"{len(maps)} maps merged by {method}; rank {rank} at most keeps at least {merged.energy:.1%} of each.",
        *merged.notes,
        f"Written to {out}.",
    ]
    facts = {"out": out, "shares": shares, "notes": merged.notes}
    return Answer({**facts, "maps": {module: vars(each) for module, each in maps.items()}}, lines)


def _numbers(text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError as error:
        raise RecipeError(f"--weights is '{text}'", remedy="give numbers with commas between") from error
