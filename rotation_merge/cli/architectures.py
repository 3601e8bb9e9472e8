"""`rotation-merge architectures`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from rotation_merge.architectures import families
from rotation_merge.cli.show import json_option, print_json, shown, table


@click.command(epilog="Example: rotation-merge architectures --classes")
@click.option("--classes", is_flag=True, help="List the classes of transformers instead of the titles.")
@click.option("--draft", metavar="MODEL", help="Draft an architecture file from a checkpoint's names and shapes.")
@click.option("--prove", metavar="FILE", type=click.Path(exists=True, dir_okay=False), help="Try an architecture file.")
@click.option(
    "--config",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False),
    help="With --prove: keys of a tiny model's config, as JSON.",
)
@json_option
@shown
def command(classes: bool, draft: str | None, prove: str | None, config: str | None, as_json: bool) -> int:
    """Supported architectures: families, their classes, and what limits their groups; files for further ones."""
    if draft is not None:
        return _draft(draft)
    if prove is not None:
        return _prove(prove, config, as_json)
    found = families()
    if as_json:
        print_json(
            {
                name: {"title": spec.title, "classes": spec.classes, "bare": spec.bare, "limits": spec.limits}
                for name, spec in found.items()
            }
        )
        return 0
    rows = [(name, ", ".join(spec.classes) if classes else spec.title) for name, spec in found.items()]
    table("", ("family", "classes" if classes else "models"), rows)
    return 0


def _draft(model: str) -> int:
    """Print a draft; what is to be checked in it goes to stderr."""
    from rotation_merge.checking.draft import draft_of

    content, doubts = draft_of(model)
    click.echo(json.dumps(content, indent=2))
    for doubt in doubts:
        click.echo(doubt, err=True)
    return 0


def _prove(path: str, config: str | None, as_json: bool) -> int:
    from rotation_merge.checking.proof import hints, prove

    found = prove(Path(path), json.loads(Path(config).read_text(encoding="utf-8")) if config else None)
    if as_json:
        print_json([finding.__dict__ for finding in found])
    else:
        words = [
            (f.what, "refused" if f.difference is None else f"{f.difference:.1e}", _verdict(f.holds)) for f in found
        ]
        table("", ("trial", "largest difference", ""), words)
    for hint in hints(found):
        click.echo(f"hint: {hint}", err=True)
    return 0 if all(finding.holds for finding in found) else 1


def _verdict(holds: bool) -> str:
    return "as it has to be" if holds else "WRONG"
