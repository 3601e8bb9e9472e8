"""`rotation-merge push`."""

from __future__ import annotations

import click

from rotation_merge.cli.show import bytes_text, json_option, note, print_json, say, shown, table


@click.command(
    epilog="""Examples: rotation-merge push ./merged org/merged;
    rotation-merge push ./merged org/merged --as ./my-donor=org/my-donor --yes"""
)
@click.argument("out")
@click.argument("repo", metavar="ORG/NAME")
@click.option(
    "--as", "names", multiple=True, metavar="LOCAL=ORG/NAME@REVISION", help="What a local model is called on the hub."
)
@click.option("--with-data", is_flag=True, help="Publish samples that the recipe reads, too.")
@click.option("--private", is_flag=True, help="A repository that only its owners see.")
@click.option("--yes", is_flag=True, help="Do it; without it every file and the card are shown, and nothing is sent.")
@json_option
@shown
def command(
    out: str, repo: str, names: tuple[str, ...], with_data: bool, private: bool, yes: bool, as_json: bool
) -> int:
    """Publish OUT, which a merge, 'align' or 'carry' wrote, as ORG/NAME.

    Recipe, alignment files, statistics, report and card travel with the weights, with a manifest of SHA-256 sums, so
    that 'rotation-merge pull' and mergekit-yaml make the merge again. Models become org/name@revision, as they were
    read out of the hub's cache; a path that means nothing elsewhere is refused until --as says what it is called.
    """
    from rotation_merge.checkpoints.hub import check_repository
    from rotation_merge.sharing.push import CARD, RECIPE, UNKNOWN, draft, publish

    check_repository(repo)
    plan = draft(out, repo, names, with_data)
    if yes:
        commit = publish(plan, private)
        if as_json:
            print_json({"repository": repo, "revision": commit})
        else:
            say(f"Published: {repo}@{commit}", "green")
            say(f"'rotation-merge pull {repo}@{commit} DIR' gets it.")
        return 0
    items = [*plan.first(), *plan.items(UNKNOWN)]
    texts = {item.place: item.text for item in items if item.place in (CARD, RECIPE)}
    if as_json:
        files = {item.place: item.size for item in items}
        print_json({"repository": repo, "files": files, "card": texts[CARD], "recipe": texts.get(RECIPE)})
        return 0
    rows = [(item.place, bytes_text(item.size), "written anew" if item.changed else "") for item in items]
    table(f"{repo} would hold:", ("file", "size", ""), rows, (1,))
    for place in (CARD, RECIPE):
        if place in texts:
            say(f"\n--- {place}\n{texts[place]}")
    note(f"Nothing was sent: add --yes. ({UNKNOWN}: the commit of the files that the recipe reads.)")
    return 0
