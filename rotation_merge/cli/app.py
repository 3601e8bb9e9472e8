"""The command group: names, one-line descriptions and where each command lives."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from importlib import import_module
from typing import Any, cast

import click

from rotation_merge import __version__
from rotation_merge.cli.show import JSON, Answer, note, silence_libraries, verbosity
from rotation_merge.errors import INTERRUPTED, RotationMergeError, nearest

LOG = logging.getLogger(__name__)

COMMANDS = {
    "merge": "Find the best merge of models: try several, judge on held-out samples, write the winner with its recipe.",
    "check": "Check a recipe before it runs: all faults at once, and which preset fits.",
    "inspect": "Show a model, a recipe or a file: spaces, groups, memory, reports, methods.",
    "doctor": "Find out why a merge writes gibberish: causes with remedies, the likeliest first.",
    "align": "Show how far apart two models are, or rewrite one, with the same outputs, to line up with the other.",
    "barrier": "Measure the loss along the straight path between two models, aligned and not.",
    "evaluate": "Measure loss, accuracy and correlations of models on data.",
    "verify": "Test if two models compute the same function.",
    "measure": "Measure a model's statistics on samples, for the averages regmean and fisher.",
    "polish": "Train a merge for a few steps towards its parents' outputs, with or without data.",
    "lora": "Merge LoRA adapters into one adapter.",
    "carry": "Move a LoRA or a fine-tune to a new base.",
    "push": "Publish a merge on the hub, with recipe, alignment files, report and card; a dry run until --yes.",
    "demo": "Merge the checkpoints that come with the package, and show what alignment did.",
}
"""Commands by name; each lives in a module of the same name, as `command`."""

BROKEN_PIPE = 141
"""Exit code of a process whose output nobody reads any more."""


class LazyGroup(click.Group):
    """Imports a command's module when the command is asked for, so that help and completion stay quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        known = cmd_name in COMMANDS
        return cast(click.Command, import_module(f"rotation_merge.cli.{cmd_name}").command) if known else None

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Suggest the nearest name for an unknown command."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            raise click.UsageError(f"there is no command '{args[0]}'; {nearest(args[0], COMMANDS)}")
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[JSON] = "--json" in args
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Print a command's answer, with --json as JSON, and end the process with its exit code.

        Errors become one line (or JSON) and 2; Ctrl-C ends with 130, a closed pipe with 141 and no message.
        """
        from rotation_merge.mergekit_plugin.console import one_line

        began, as_json = time.perf_counter(), ctx.meta[JSON]
        silence_libraries()
        try:
            with one_line():
                answer: Answer = super().invoke(ctx)
                text, code = answer.text(as_json), answer.code
            click.echo(text, nl=bool(text))
            sys.stdout.flush()
        except click.ClickException as error:
            if not as_json:
                raise
            click.echo(json.dumps({"error": _parts(error, ctx)}, indent=1))
            code = error.exit_code
        except KeyboardInterrupt as error:
            note(f"Interrupted{error}.")
            code = INTERRUPTED
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python complains once more when it closes its output
            code = BROKEN_PIPE
        LOG.info("done in %.1f s", time.perf_counter() - began)
        sys.exit(code)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _parts(error: click.ClickException, ctx: click.Context) -> dict[str, str | None]:
    """An error as JSON has it."""
    if isinstance(error, click.UsageError):
        name = error.ctx.command_path if error.ctx is not None else ctx.command_path
        return {"what": error.format_message(), "where": None, "remedy": f"see '{name} --help'"}
    cause = error.__context__
    parts = vars(cause) if isinstance(cause, RotationMergeError) else {"what": error.message}
    return {part: parts.get(part) for part in ("what", "where", "remedy")}


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    params=[verbosity()],
)
@click.version_option(__version__, "--version")
def app() -> None:
    """Line models up, with the same outputs, before mergekit averages them.

    Start with `merge`. To run a recipe of your own, use mergekit: `mergekit-yaml recipe.yml OUT` with `merge_method:
    rotation_merge` in it.

    Exit codes: 0 done, 1 a check failed, 2 bad usage or input.
    """
