"""`rotation-merge methods`."""

from __future__ import annotations

from dataclasses import asdict

import click

from rotation_merge.cli.show import json_option, print_json, say, shown, table


@click.command(epilog="Example: rotation-merge methods --options")
@click.option("--options", "own", is_flag=True, help="List rotation_merge's own parameters too.")
@json_option
@shown
def command(own: bool, as_json: bool) -> int:
    """Merge methods that can be the delegate: what they take and need, and what aligning means for them."""
    from rotation_merge.recipe.delegates import delegates, options

    found = delegates()
    if as_json:
        print_json({"delegates": [asdict(d) for d in found], "options": [asdict(o) for o in options()]})
        return 0
    rows = [(d.name, d.models, d.base, ", ".join(d.required), ", ".join(d.optional)) for d in found]
    table("", ("delegate", "models", "base_model", "must be given", "may be given"), rows)
    if own:
        say("")
        rows = [(o.name, o.where, o.values, o.default, o.text) for o in options()]
        table("rotation_merge's own parameters", ("parameter", "stands", "values", "default", "meaning"), rows)
    return 0
