"""The command group: names, one-line descriptions and where each command lives."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from typing import Any

import click

from rotation_merge import __version__
from rotation_merge.cli.show import verbosity
from rotation_merge.errors import INTERRUPTED, nearest

COMMANDS = {
    "merge": "Find the best merge of models: try several, judge on held-out samples, write the winner with its recipe.",
    "check": "Check a recipe before it runs: all faults at once, and which preset fits.",
    "inspect": "Show a model, a recipe or a file: spaces, groups, memory, reports, methods.",
    "doctor": "Find out why a merge writes gibberish: causes with remedies, the likeliest first.",
    "align": "Show how far apart two models are, or rewrite one, with the same outputs, to line up with the other.",
    "barrier": "Measure the loss along the straight path between two models, aligned and not.",
    "evaluate": "Measure loss, accuracy, F1 and correlations of models on data.",
    "verify": "Test if two models compute the same function.",
    "measure": "Measure a model's statistics on samples, for the averages regmean and fisher.",
    "polish": "Train a merge for a few steps towards its parents' outputs, with or without data.",
    "lora": "Merge LoRA adapters into one adapter.",
    "carry": "Move a LoRA or a fine-tune to a new base.",
    "push": "Publish a merge on the hub, with recipe, alignment files, report and card; a dry run until --yes.",
    "demo": "Merge the checkpoints that come with the package, and show what alignment did.",
}
"""Commands by name; each lives in a module of the same name, as `command`."""

JSON = f"{__name__}.json"


class LazyGroup(click.Group):
    """Imports a command's module when the command is asked for, so that help and completion stay quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        try:
            command: click.Command = import_module(f"rotation_merge.cli.{cmd_name}").command
        except KeyboardInterrupt:  # libraries take seconds to come up, and click would end this with 1
            click.echo("Interrupted.", err=True)
            sys.exit(INTERRUPTED)
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Suggest the nearest name for an unknown command."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            raise click.UsageError(f"there is no command '{args[0]}'; {nearest(args[0], COMMANDS)}")
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[JSON] = "--json" in args
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Report wrong usage as JSON if --json was given."""
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            if not ctx.meta[JSON]:
                raise
            name = error.ctx.command_path if error.ctx is not None else ctx.command_path
            fault = {"what": error.format_message(), "where": None, "remedy": f"see '{name} --help'"}
            click.echo(json.dumps({"error": fault}, indent=1))
            sys.exit(error.exit_code)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


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
