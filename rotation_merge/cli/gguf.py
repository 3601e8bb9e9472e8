"""`rotation-merge gguf`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from rotation_merge.cli.paths import MODEL, NEW_GGUF, writes
from rotation_merge.cli.show import Progress, json_option, note, print_json, say, shown
from rotation_merge.errors import RotationMergeError

TYPES = ("f16", "q8_0")


def gguf_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --gguf and --gguf-type; the command hands their values to `check_gguf` and `write_gguf`."""
    function = click.option(
        "--gguf-type",
        type=click.Choice(TYPES),
        default=TYPES[0],
        show_default=True,
        help="Type of the weights in --gguf.",
    )(function)
    return click.option("--gguf", type=NEW_GGUF, metavar="FILE.gguf", help="Also write OUT as a GGUF, for llama.cpp.")(
        function
    )


def check_gguf(model: str, kind: str) -> None:
    """Refuse a model that cannot be written as a GGUF, before any work is done.

    Raises:
        RotationMergeError: says why, and which tool can.
    """
    from rotation_merge.model.checkpoint import open_model
    from rotation_merge.model.gguf.writer import plan_gguf

    plan_gguf(open_model(model), kind)


def write_gguf(model: str, out: str, kind: str) -> list[str]:
    """Write a model as a GGUF; returns notes for the user."""
    from rotation_merge.model.checkpoint import open_model
    from rotation_merge.model.gguf.writer import plan_gguf

    progress = Progress()
    plan = plan_gguf(open_model(model), kind)
    plan.write(out, progress)
    progress.close()
    return list(plan.notes)


@click.command(epilog="Example: rotation-merge gguf ./merged merged-Q8_0.gguf --type q8_0")
@click.argument("model", type=MODEL)
@click.argument("out", type=NEW_GGUF, metavar="OUT.gguf")
@click.option(
    "--type", "kind", type=click.Choice(TYPES), default=TYPES[0], show_default=True, help="Type of the weights."
)
@json_option
@shown
@writes
def command(model: str, out: str, kind: str, as_json: bool) -> int:
    """Write MODEL as one GGUF file, for llama.cpp and programs built on it.

    Supports Llama, Mistral, Mixtral, Qwen2, Qwen3 and their MoE, Gemma 2 and 3, Phi-3, OLMo2, StarCoder2, Falcon and
    GPT-2, with their tokenizers. Vectors, routers and positions stay float32. If GGUF cannot hold a part of the model,
    the error names that part. OUT.gguf is complete or absent.
    """
    if not out.lower().endswith(".gguf"):
        raise RotationMergeError("is not a GGUF file name", where=out, remedy="let it end in .gguf")
    if not as_json:
        note("loading libraries ...")
    notes = write_gguf(model, out, kind)
    if as_json:
        print_json({"model": model, "out": out, "type": kind, "notes": notes})
        return 0
    for line in notes:
        say(line)
    say(f"Written to {out}.", "green")
    return 0
