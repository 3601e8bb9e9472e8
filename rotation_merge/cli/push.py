"""`rotation-merge push`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from rotation_merge.cli.paths import MODEL, WORD
from rotation_merge.cli.show import Answer, bytes_text, note, say, shown, table, verbose
from rotation_merge.errors import named

if TYPE_CHECKING:
    from rotation_merge.share.push import Publication


@click.command(
    epilog="""Examples: rotation-merge push ./merged org/merged;
    rotation-merge push ./merged org/merged --as ./my-donor=org/my-donor --yes"""
)
@click.argument("out", type=MODEL)
@click.argument("repo", type=WORD, metavar="ORG/NAME")
@click.option(
    "--as",
    "names",
    type=WORD,
    multiple=True,
    metavar="LOCAL=ORG/NAME@REVISION",
    help="Name of a local model on the hub.",
)
@click.option("--with-data", is_flag=True, help="Publish samples and statistics that the recipe reads, too.")
@click.option("--include", type=WORD, multiple=True, metavar="PATTERN", help="Publish other files, too (as 'plots/*').")
@click.option("--private", is_flag=True, help="Make a private repository.")
@click.option("--yes", is_flag=True, help="Publish; without it, show a summary (with -v all of it) and send nothing.")
@shown
def command(
    out: str, repo: str, names: tuple[str, ...], with_data: bool, include: tuple[str, ...], private: bool, yes: bool
) -> Answer:
    """Publish OUT, which a merge, 'align' or 'carry' wrote, as ORG/NAME.

    Publishes weights, recipe, alignment files, report and card, so that 'hf download' and mergekit-yaml make the merge
    again. Statistics need --with-data; otherwise the card says how to measure them. Other files need --include. Models
    become org/name@revision, from the hub's cache; local
    paths need a name on the hub (--as).
    """
    from rotation_merge.share.push import push

    result = push(out, repo, names, with_data, include, private, yes)
    facts: dict[str, Any] = {"repository": repo, "left_out": result.plan.left_out}
    if result.revision is not None:
        facts |= {"revision": result.revision}
    else:
        facts |= {"files": result.sizes, "card": result.card, "recipe": result.recipe}
    return Answer(facts, lambda: _show(result))


def _show(result: Publication) -> None:
    """Print what was published or, in a dry run, would be; and what stays here."""
    plan, revision = result.plan, result.revision
    if revision is not None:
        say(f"Published: {plan.repo}@{revision}", "green")
        say(f"Download it with 'hf download {plan.repo} --revision {revision} --local-dir DIR'.")
    else:
        say(f"Nothing was sent. --yes publishes to {plan.repo}; -v shows every file, the card and the recipe.")
        (_show_all if verbose() else _summarise)(result)
    if plan.left_out:
        say(f"Left out: {named(plan.left_out)}. --include PATTERN publishes them, --with-data statistics.")
    if plan.unpublished:
        say("The recipe reads statistics that are not published. --with-data publishes them.")
        say("Otherwise others measure them first, by the commands in the card.")


def _show_all(result: Publication) -> None:
    from rotation_merge.share.push import CARD, RECIPE, UNKNOWN

    rows = [(place, bytes_text(size)) for place, size in result.sizes.items()]
    table("Files to publish:", ("file", "size"), rows, (1,))
    for place, text in ((RECIPE, result.recipe), (CARD, result.card)):
        if text is not None:
            say(f"\n--- {place}\n{text}")
    note(f"@{UNKNOWN} stands for the commit of the files that the recipe reads.")


def _summarise(result: Publication) -> None:
    from rotation_merge.share.contents import is_weights

    weights, names = list(filter(is_weights, result.sizes)), result.plan.names
    say(f"Files to publish: {len(result.sizes)}, {bytes_text(sum(result.sizes.values()))} in all.")
    say(f"  weights: {named(weights)}")
    say(f"  others: {named(place for place in result.sizes if place not in weights)}")
    say("Names on the hub:" if names else "No model has another name on the hub.")
    for name, target in names.items():
        say(f"  {name}: {target}")
