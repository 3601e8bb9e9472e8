"""`rotation-merge pull`."""

from __future__ import annotations

import click

from rotation_merge.cli.options import writes
from rotation_merge.cli.show import json_option, note, print_json, say, shown


@click.command(epilog="Example: rotation-merge pull org/merged@4c1b2a ./merged")
@click.argument("repo", metavar="ORG/NAME[@REVISION]")
@click.argument("folder", metavar="DIR")
@click.option("--no-weights", is_flag=True, help="Leave out the merged weights: what is needed to make them again.")
@json_option
@shown
@writes(folders="folder")
def command(repo: str, folder: str, no_weights: bool, as_json: bool) -> int:
    """Download what 'rotation-merge push' published, into DIR, whole or not at all.

    Every file is compared with the manifest's SHA-256 sums, and so are the alignment files and statistics that the
    recipe names, which wait in the hub's cache. 'mergekit-yaml DIR/recipe.yml OTHER' makes the merge again, and
    'rotation-merge verify DIR OTHER' compares the two.
    """
    from rotation_merge.checkpoints.hub import check_repository
    from rotation_merge.sharing.pull import pull

    name, _, revision = repo.partition("@")
    check_repository(name)
    watch = (lambda _: None) if as_json else (lambda place: note(f"{place} ..."))
    found = pull(name, revision or None, folder, not no_weights, watch)
    if as_json:
        print_json({"folder": folder, "repository": found.repo, "files": list(found.files), "versions": found.versions})
        return 0
    say(f"{len(found.files)} files of {found.repo} checked; written to {folder}.", "green")
    if "recipe.yml" in found.files:
        again = f"'mergekit-yaml {folder}/recipe.yml OTHER' makes it again"
        say(f"{again}; 'rotation-merge verify {folder} OTHER' compares.")
    return 0
