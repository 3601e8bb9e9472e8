"""`rotation-merge architectures`."""

from __future__ import annotations

import click

from rotation_merge.architectures import families
from rotation_merge.cli.show import json_option, print_json, shown, table


@click.command(epilog="Example: rotation-merge architectures --classes")
@click.option("--classes", is_flag=True, help="List the classes of transformers instead of the titles.")
@json_option
@shown
def command(classes: bool, as_json: bool) -> int:
    """Supported architectures: families, their classes, and what limits their groups."""
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
