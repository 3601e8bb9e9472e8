"""`rotation-merge pull`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from rotation_merge.cli.paths import NEW_FOLDER, WORD, writes
from rotation_merge.cli.show import json_option, note, print_json, say, shown

if TYPE_CHECKING:
    from rotation_merge.share.remeasure import Measurement


@click.command(epilog="Example: rotation-merge pull org/merged@4c1b2a ./merged")
@click.argument("repo", type=WORD, metavar="ORG/NAME[@REVISION]")
@click.argument("folder", type=NEW_FOLDER, metavar="DIR")
@click.option("--include", type=WORD, multiple=True, metavar="PATTERN", help="Take other files, too (as 'plots/*').")
@click.option(
    "--no-weights", is_flag=True, help="Leave out the merged weights; recipe and inputs suffice to make them again."
)
@json_option
@shown
@writes
def command(repo: str, folder: str, include: tuple[str, ...], no_weights: bool, as_json: bool) -> int:
    """Download what 'rotation-merge push' published, into DIR, completely or not at all.

    Takes only what belongs to a merge: weights, config, tokenizer, recipe, alignment files, statistics, report and
    card. Refuses a recipe that names paths outside its folder. With --force the weights and config of a model in DIR
    are replaced; its other files stay.

    Every file is compared with the manifest's SHA-256 sums, alignment files and statistics of the recipe included. If
    statistics are not published, the commands that measure them are printed. 'mergekit-yaml DIR/recipe.yml OTHER'
    makes the merge again, and 'rotation-merge verify DIR OTHER' compares the two.
    """
    from rotation_merge.model.hub import check_repository
    from rotation_merge.share.pull import pull

    name, _, revision = repo.partition("@")
    check_repository(name)
    watch = (lambda _: None) if as_json else (lambda place: note(f"{place} ..."))
    pulled = pull(name, revision or None, folder, not no_weights, watch, include)
    if as_json:
        statistics = [{**entry.to_dict(), "command": entry.command} for entry in pulled.statistics]
        facts = {"files": list(pulled.files), "versions": pulled.versions, "statistics": statistics}
        print_json({"folder": folder, "repository": pulled.repo, **facts})
        return 0
    say(f"{len(pulled.files)} files of {pulled.repo} checked; written to {folder}.", "green")
    if "recipe.yml" in pulled.files and pulled.statistics:
        _say_measurements(folder, pulled.statistics)
    elif "recipe.yml" in pulled.files:
        again = f"'mergekit-yaml {folder}/recipe.yml OTHER' makes it again"
        say(f"{again}; 'rotation-merge verify {folder} OTHER' compares.")
    return 0


def _say_measurements(folder: str, statistics: Sequence[Measurement]) -> None:
    """Print the commands that measure unpublished statistics of a recipe."""
    say(f"Its recipe averages by statistics that are not published. To make it again, measure them first, in {folder}:")
    for entry in statistics:
        say(f"  {entry.command}")
    for data, mark in dict.fromkeys(
        (entry.data, entry.data_hash) for entry in statistics if entry.needs_unpublished_file
    ):
        say(f"{data} is not published, either: ask who published the merge (hash of its samples: {mark}).")
    say("Then, there: 'mergekit-yaml recipe.yml OTHER', and 'rotation-merge verify . OTHER' compares.")
