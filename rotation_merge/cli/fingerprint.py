"""`rotation-merge fingerprint`."""

from __future__ import annotations

import os

import click

from rotation_merge.cli.show import json_option, print_json, say, shown


@click.command(epilog="Examples: rotation-merge fingerprint org/model; rotation-merge fingerprint maps.safetensors")
@click.argument("what", metavar="MODEL | FILE")
@json_option
@shown
def command(what: str, as_json: bool) -> int:
    """The fingerprint of MODEL's config and weights, or those of the models that FILE was made for.

    FILE is an alignment or statistics file. Reports, cards and files name models by these; for other weights a file is
    refused. A fingerprint tells weights apart; it is no protection against forgery.
    """
    if os.path.isfile(what):
        from rotation_merge.cli.show_file import described

        found = described(what)["fingerprints"]
    else:
        from rotation_merge.averaging.record import checkpoint_of

        model = checkpoint_of(what)
        found = {str(model.reference): model.fingerprint}
    if as_json:
        print_json(found)
        return 0
    for name, mark in found.items():
        say(f"{mark}  {name}")
    return 0
