"""`rotation-merge push`."""

from __future__ import annotations

import logging
from typing import Annotated, Any

from rich.filesize import decimal

from rotation_merge.cli.command import Model, cli_command
from rotation_merge.cli.show import Answer, Table
from rotation_merge.errors import named
from rotation_merge.record import REPORT_FILE

LOG = logging.getLogger(__name__)


def push(
    out: Model,
    repo: Annotated[str, "ORG/NAME"],
    *,
    as_: Annotated[tuple[str, ...], "LOCAL=ORG/NAME@REVISION", "name of a local model on the hub"] = (),
    with_data: Annotated[bool, "publish samples and statistics that the recipe reads, too"] = False,
    include: Annotated[tuple[str, ...], "PATTERN", "publish other files, too (as 'plots/*')"] = (),
    private: Annotated[bool, "make a private repository"] = False,
    yes: Annotated[bool, "publish; without it, show a summary (with -v all of it) and send nothing"] = False,
) -> Answer:
    """Publish OUT, which a merge, 'align' or 'carry' wrote, as ORG/NAME.

    Publishes weights, recipe, alignment files, report and card, so that 'hf download' and mergekit-yaml make the merge
    again. Statistics need --with-data; otherwise the card says how to measure them. Other files need --include. Models
    become org/name@revision, from the hub's cache; local paths need a name on the hub (--as).
    """
    from rotation_merge.share.push import push as publish

    result = publish(out, repo, as_, with_data, include, private, yes)
    facts = dict[str, Any](repository=repo, left_out=result.left_out)
    if result.revision is not None:
        facts["revision"] = result.revision
        lines: list[str | Table] = [
            f"Published: {repo}@{result.revision}",
            f"Download it with 'hf download {repo} --revision {result.revision} --local-dir DIR'.",
        ]
    else:
        facts |= {"files": result.sizes, "card": result.texts["README.md"], "recipe": result.texts.get("recipe.yml")}
        lines = _dry_run(result)
    if result.left_out:
        lines.append(f"Left out: {named(result.left_out)}. --include PATTERN publishes them, --with-data statistics.")
    if result.unpublished:
        lines.append("The recipe reads statistics that are not published; the card says how to measure them.")
    return Answer(facts, lines)


command = cli_command(
    "rotation-merge push ./merged org/merged",
    "rotation-merge push ./merged org/merged --as ./my-donor=org/my-donor --yes",
)(push)


def _dry_run(result: Any) -> list[str | Table]:
    """What would be published: with -v every file, the card and the recipe."""
    from rotation_merge.share.contents import is_weights

    sizes = result.sizes
    first = f"Nothing was sent. --yes publishes to {result.repo}; -v shows every file, the card and the recipe."
    if LOG.isEnabledFor(logging.INFO):
        rows = [{"file": place, "size": decimal(size)} for place, size in sizes.items()]
        texts = [f"\n--- {place}\n{text}" for place, text in result.texts.items() if place != REPORT_FILE]
        unknown = "@main stands for the commit of the files that the recipe reads."
        return [first, Table(rows, "Files to publish:"), *texts, unknown]
    names = (f"{name} as {target}" for name, target in result.names.items())
    weights = [place for place in sizes if is_weights(place)]
    shown = ", ".join(place for place in sizes if place not in weights)
    total = f"{len(sizes)} files, {decimal(sum(sizes.values()))}: {shown}; weights: {named(weights)}"
    return [first, total, f"Names on the hub: {', '.join(names) or 'none'}."]
