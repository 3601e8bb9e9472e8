"""`rotation-merge push`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from rotation_merge.cli.paths import MODEL, WORD
from rotation_merge.cli.show import Answer, bytes_text, note, say, shown, table, verbose
from rotation_merge.errors import named

if TYPE_CHECKING:
    from rotation_merge.share.push import Draft, Item


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
@click.option(
    "--include",
    type=WORD,
    multiple=True,
    metavar="PATTERN",
    help="Publish other files, too (as 'plots/*').",
)
@click.option("--private", is_flag=True, help="Make a private repository.")
@click.option("--yes", is_flag=True, help="Publish; without it, show a summary (with -v all of it) and send nothing.")
@shown
def command(
    out: str,
    repo: str,
    names: tuple[str, ...],
    with_data: bool,
    include: tuple[str, ...],
    private: bool,
    yes: bool,
) -> Answer:
    """Publish OUT, which a merge, 'align' or 'carry' wrote, as ORG/NAME.

    Publishes weights, recipe, alignment files, report and card, so that 'hf download' and mergekit-yaml make the merge
    again. Statistics need --with-data; otherwise the card says how to measure them. Other files need --include. Models
    become org/name@revision, from the hub's cache; local
    paths need a name on the hub (--as).
    """
    from rotation_merge.share.names import check_repository
    from rotation_merge.share.push import CARD, RECIPE, UNKNOWN, draft, publish

    check_repository(repo)
    plan = draft(out, repo, names, with_data, include)
    if yes:
        commit = publish(plan, private)

        def published() -> None:
            say(f"Published: {repo}@{commit}", "green")
            say(f"Download it with 'hf download {repo} --revision {commit} --local-dir DIR'.")
            _say_unpublished(plan)

        return Answer({"repository": repo, "revision": commit, "left_out": plan.kept_back}, published)
    items = [*plan.first(), *plan.items(UNKNOWN)]
    texts = {item.place: item.text for item in items if item.place in (CARD, RECIPE)}
    facts = {"repository": repo, "files": {item.place: item.size for item in items}, "left_out": plan.kept_back}
    return Answer({**facts, "card": texts[CARD], "recipe": texts.get(RECIPE)}, lambda: _show(plan, items, texts))


def _show(plan: Draft, items: list[Item], texts: dict[str, str]) -> None:
    """Print what a dry run would publish."""
    from rotation_merge.share.contents import is_weights
    from rotation_merge.share.push import UNKNOWN

    say(f"Nothing was sent. --yes publishes to {plan.repo}; -v shows every file, the card and the recipe.")
    if verbose():
        rows = [(item.place, bytes_text(item.size), "rewritten" if item.changed else "") for item in items]
        table("Files to publish:", ("file", "size", ""), rows, (1,))
        for place, text in texts.items():
            say(f"\n--- {place}\n{text}")
        note(f"{UNKNOWN}: the commit of the files that the recipe reads.")
    else:
        weights = [item.place for item in items if is_weights(item.place)]
        say(f"Files to publish: {len(items)}, {bytes_text(sum(item.size for item in items))} in all.")
        say(f"  weights: {named(weights)}")
        say(f"  others: {named(item.place for item in items if item.place not in weights)}")
        say("Names on the hub:" if plan.names else "No model has another name on the hub.")
        for name, target in plan.names.items():
            say(f"  {name}: {target}")
    _say_unpublished(plan)


def _say_unpublished(plan: Draft) -> None:
    """Print what stays here."""
    from rotation_merge.share.contents import is_statistics

    statistics = [place for place in plan.kept_back if is_statistics(place)]
    if statistics:
        say(f"Statistics are left out: {named(statistics)}. --with-data publishes them, too.")
    if others := [place for place in plan.kept_back if place not in statistics]:
        say(f"Left out, because they are not part of a merge: {named(others)}. --include PATTERN publishes them, too.")
    if plan.unpublished:
        say("The recipe reads statistics that are not published. --with-data publishes them.")
        say("Otherwise others measure them first, by the commands in the card.")
