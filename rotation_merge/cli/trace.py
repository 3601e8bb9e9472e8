"""`rotation-merge trace`."""

from __future__ import annotations

from dataclasses import asdict

import click

from rotation_merge.cli.show import json_option, print_json, say, shown, table


@click.command(epilog="Example: rotation-merge trace recipe.yml model.layers.0.mlp.up_proj.weight")
@click.argument("source", metavar="RECIPE | DIR")
@click.argument("tensor")
@json_option
@shown
def command(source: str, tensor: str, as_json: bool) -> int:
    """What happens to TENSOR in a merge: its spaces, its transforms, its distances, what the delegate is given.

    A recipe is planned, and run as far as this tensor needs it; nothing is written. Of a merged model's directory, its
    report tells what was done to the tensor's spaces, and its recipe is run where the models are still at hand.
    """
    from rotation_merge.checking.trace import trace

    found = trace(source, tensor)
    if as_json:
        print_json(asdict(found))
        return 0
    table(tensor, ("axis", "lives in"), [(i, words) for i, words in enumerate(found.axes)])
    rows = [
        (
            row.donor,
            row.space,
            row.group,
            *(f"{value / (row.anchor_norm or 1.0):.4g}" for value in (row.distance_before, row.distance_after)),
            ", ".join(f"{part} {value:.2g}" for part, value in row.from_identity.items()),
        )
        for row in found.rows
    ]
    if rows:
        headers = ("donor", "space", "moved by", "distance", "aligned", "map: distance from the identity")
        table("", headers, rows, numbers=(3, 4))
    else:
        say("Nothing moved it.")
    if found.given:
        shown_rows = [
            (given.model, _number(given.before), _number(given.after), _words(given.parameters))
            for given in found.given
        ]
        table("", ("given to the delegate", "distance", "aligned", "parameters"), shown_rows, numbers=(1, 2))
    parameters = _words(found.parameters)
    say(f"Delegate: {found.delegate}" + (f" ({parameters})" if parameters else "") + ".")
    if found.note:
        say(found.note)
    return 0


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _words(parameters: dict[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in parameters.items())
