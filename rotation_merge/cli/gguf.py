"""`rotation-merge gguf`."""

from __future__ import annotations

import os
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


def check_gguf(model: str, out: str, kind: str, *models: str) -> None:
    """Refuse a file that cannot be written, or a model that cannot be one, before any work is done.

    Args:
        models: those that are read beside it.

    Raises:
        RotationMergeError: says why, and which tool can.
    """
    from rotation_merge.model.gguf.writer import plan_gguf
    from rotation_merge.model.open import open_model

    _check_place(out, model, *models)
    plan_gguf(open_model(model), kind)


def _check_place(out: str, *models: str) -> None:
    """Refuse another name than a GGUF's, and a folder that is named as the model in it and would hold two then."""
    from rotation_merge.model.gguf.file import ENDING, has_ending
    from rotation_merge.model.gguf.place import is_gguf

    if not has_ending(out):
        raise RotationMergeError("is not a GGUF file name", where=out, remedy=f"let it end in {ENDING}")
    folder = os.path.dirname(os.path.realpath(out))
    if any(os.path.realpath(model) == folder and is_gguf(model) for model in models):
        problem = f"{folder} would hold two models, and is named as one"
        raise RotationMergeError(problem, where=out, remedy="write somewhere else, or name the file in the folder")


def write_gguf(model: str, out: str, kind: str) -> list[str]:
    """Write a model as a GGUF; returns notes for the user."""
    from rotation_merge.model.gguf.writer import plan_gguf
    from rotation_merge.model.open import open_model

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
    if not as_json:
        note("loading libraries ...")
    _check_place(out, model)
    notes = write_gguf(model, out, kind)
    if as_json:
        print_json({"model": model, "out": out, "type": kind, "notes": notes})
        return 0
    for line in notes:
        say(line)
    say(f"Written to {out}.", "green")
    return 0
