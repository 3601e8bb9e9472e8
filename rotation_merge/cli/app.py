"""The command group: names, one-line descriptions and where each command lives."""

from __future__ import annotations

import json
import logging
import sys
from importlib import import_module
from typing import Any

import click

from rotation_merge import __version__
from rotation_merge.errors import INTERRUPTED, nearest

COMMANDS = {
    "check": "Check a recipe before it is run: all faults at once, and which preset fits.",
    "inspect": "A model or a recipe: spaces, groups, expected cost; a tensor, a file, a report; what there is.",
    "align": "Write a donor in an anchor's coordinates, as a normal checkpoint.",
    "lora": "Merge LoRA adapters into one adapter.",
    "carry": "Carry a LoRA to a new base, without training.",
    "verify": "Do two models compute the same function?",
    "compare": "How far apart are two models, space by space, before and after alignment?",
    "barrier": "Loss along the straight path between two models, aligned and not.",
    "merge": "Find the best merge of models: try, judge on held-out samples, write it with its recipe.",
    "gguf": "Write a model as one GGUF file, for llama.cpp.",
    "doctor": "Why is this merge gibberish? Causes with their remedies, the likeliest first.",
    "polish": "Train a merge for a few steps towards its parents' answers, with or without data.",
    "fit": "Learn an alignment on data: next to no barrier between independent models.",
    "evaluate": "Loss, accuracy, F1 and correlations of models on data.",
    "measure": "Run a model over samples and write the statistics that regmean, fisher and kfac average by.",
    "push": "Publish a merge on the hub, with recipe, alignment files, report and sums; a dry run until --yes.",
    "pull": "Download what push published, checked file by file.",
    "demo": "Merge the checkpoints that come with the package and print what alignment did.",
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
            command = import_module(f"rotation_merge.cli.{cmd_name}").command
        except KeyboardInterrupt:  # libraries take seconds to come up, and click would end this with 1
            click.echo("Interrupted.", err=True)
            sys.exit(INTERRUPTED)
        assert isinstance(command, click.Command)
        if not any(parameter.name == "verbose" for parameter in command.params):
            say_more = click.Option(
                ["-v", "--verbose"],
                count=True,
                expose_value=False,
                hidden=True,
                callback=lambda *arguments: configure_logging(arguments[2]),
            )
            command.params.append(say_more)
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
        """Also report wrong usage as JSON if --json was given."""
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


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, "--version")
@click.option("-v", "--verbose", count=True, help="Print decisions; twice: everything, with tracebacks.")
def app(verbose: int) -> None:
    """Align transformers by their symmetries before mergekit merges them.

    Merging itself is mergekit's: `mergekit-yaml recipe.yml OUT` with `merge_method: rotation_merge`. These commands
    look at recipes and models before and after.

    Exit codes: 0 done, 1 a check failed, 2 bad usage or input.
    """
    logging.basicConfig(level=logging.WARNING)
    configure_logging(verbose)


def configure_logging(verbose: int) -> None:
    """Log with -v, before or after the command: once for this package, twice for every library."""
    if verbose:
        logging.getLogger("rotation_merge").setLevel(logging.INFO if verbose == 1 else logging.DEBUG)
    if verbose > 1:
        logging.getLogger().setLevel(logging.DEBUG)
